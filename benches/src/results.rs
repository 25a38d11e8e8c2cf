//! What was measured, as it is written to a file and read again. `docs/performance.md` describes the fields.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sd_backend::{Device, MemoryKind, Usage};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the format: a reader takes this one only.
pub const SCHEMA: u32 = 1;

/// One run of the harness.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What was built.
    pub build: Build,
    /// What it ran on.
    pub machine: Machine,
    /// Where the figures come from, if not from one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// What was measured, in that order.
    pub cases: Vec<Case>,
    /// What others took for the same, in the same run.
    #[serde(default)]
    pub peers: Vec<Peer>,
    /// What was left out, and why.
    #[serde(default)]
    pub skipped: Vec<String>,
}

/// How the program was built.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Build {
    /// Version of the workspace.
    pub version: String,
    /// What `git describe --always --dirty` said, where `cargo xtask bench` built it.
    pub revision: Option<String>,
    /// `release` or `debug`.
    pub profile: String,
    /// Operating system and architecture.
    pub target: String,
    /// Features that concern ggml.
    pub features: Vec<String>,
}

/// What the program ran on.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Machine {
    /// The processor.
    pub processor: String,
    /// Threads that computed on it.
    pub threads: usize,
    /// Name of the device.
    pub device: String,
    /// What the device says of itself.
    pub description: String,
}

/// One measurement.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Case {
    /// Name of the group.
    pub group: String,
    /// Name within the group; the same parameters have the same name.
    pub name: String,
    /// What the name says, to be read by programs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, Value>,
    /// Seconds of one run.
    pub seconds: Seconds,
    /// The median of processor time over all threads, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor_seconds: Option<f64>,
    /// The most bytes that the ledger held on the device, by kind, and `total` of them at once.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub peak_bytes: BTreeMap<String, u64>,
    /// What does not depend on the clock: `nodes`, `segments`, `weight_bytes` that were moved.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counts: BTreeMap<String, u64>,
}

/// Seconds of runs after those to warm up.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq)]
pub struct Seconds {
    /// The middle one.
    pub median: f64,
    /// The fastest.
    pub low: f64,
    /// The slowest.
    pub high: f64,
    /// How many there were.
    pub runs: usize,
}

/// What another program took for one of the cases.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Peer {
    /// Its name.
    pub program: String,
    /// Group of the case.
    pub group: String,
    /// Name of the case.
    pub name: String,
    /// Type that it computed in, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// Seconds of one run, the median.
    pub seconds: f64,
    /// The same of processor time over all threads, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor_seconds: Option<f64>,
    /// The most bytes that it says it held; none where it does not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Relative error (Euclidean norm) of our result against its.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
}

impl Results {
    /// Nothing yet, of this build on `device`.
    ///
    /// # Errors
    /// Where there is no processor to ask.
    pub fn new(device: Device, threads: usize) -> Result<Results> {
        let is_on = [
            ("native", cfg!(feature = "native")),
            ("cuda", cfg!(feature = "cuda")),
            ("dynamic-backends", cfg!(feature = "dynamic-backends")),
            ("metal", cfg!(feature = "metal")),
            ("openmp", cfg!(feature = "openmp")),
            ("rpc", cfg!(feature = "rpc")),
            ("system", cfg!(feature = "system")),
            ("vulkan", cfg!(feature = "vulkan")),
        ];
        let features = is_on.into_iter().filter(|(_, is_on)| *is_on);
        Ok(Results {
            schema: SCHEMA,
            build: Build {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                revision: option_env!("SD_BENCH_REVISION").map(str::to_owned),
                profile: match cfg!(debug_assertions) {
                    true => "debug",
                    false => "release",
                }
                .to_owned(),
                target: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
                features: features.map(|(name, _)| name.to_owned()).collect(),
            },
            machine: Machine {
                processor: Device::cpu()?.description(),
                threads,
                device: device.to_string(),
                description: device.description(),
            },
            note: None,
            cases: Vec::new(),
            peers: Vec::new(),
            skipped: Vec::new(),
        })
    }

    /// Reads a file.
    ///
    /// # Errors
    /// A file that cannot be read, is no such file, or has another [`SCHEMA`].
    pub fn read(path: &Path) -> Result<Results> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let value: Value =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let schema = &value["schema"];
        ensure!(
            schema == SCHEMA,
            "{} has schema {schema}; this program reads {SCHEMA}",
            path.display()
        );
        serde_json::from_value(value).with_context(|| path.display().to_string())
    }

    /// Writes a file.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// The case of that group and name.
    pub fn case(&self, group: &str, name: &str) -> Option<&Case> {
        let mut cases = self.cases.iter();
        cases.find(|case| case.group == group && case.name == name)
    }
}

impl Case {
    /// A case without memory or counts.
    pub fn new(group: &str, name: impl Into<String>, seconds: Seconds) -> Case {
        Case {
            group: group.to_owned(),
            name: name.into(),
            parameters: BTreeMap::new(),
            seconds,
            processor_seconds: None,
            peak_bytes: BTreeMap::new(),
            counts: BTreeMap::new(),
        }
    }

    /// With one parameter more.
    #[must_use]
    pub fn parameter(mut self, key: &str, value: impl Into<Value>) -> Case {
        self.parameters.insert(key.to_owned(), value.into());
        self
    }

    /// With one count more.
    #[must_use]
    pub fn count(mut self, key: &str, count: u64) -> Case {
        self.counts.insert(key.to_owned(), count);
        self
    }

    /// With what a ledger held at most.
    #[must_use]
    pub fn peak(mut self, most: &Usage) -> Case {
        let kinds = [
            ("weights", MemoryKind::Weights),
            ("cache", MemoryKind::Cache),
            ("compute", MemoryKind::Compute),
            ("staging", MemoryKind::Staging),
            ("mapping", MemoryKind::Mapping),
        ];
        let held = kinds.into_iter().map(|(name, kind)| (name, most.of(kind)));
        for (name, bytes) in held.chain([("total", most.total())]) {
            if bytes > 0 {
                self.peak_bytes.insert(name.to_owned(), bytes);
            }
        }
        self
    }
}

impl Seconds {
    /// Median and spread of runs; `None` without any.
    pub fn of(runs: &[f64]) -> Option<Seconds> {
        let (low, high) = (
            runs.iter().copied().min_by(f64::total_cmp)?,
            runs.iter().copied().max_by(f64::total_cmp)?,
        );
        Some(Seconds {
            median: median(runs),
            low,
            high,
            runs: runs.len(),
        })
    }
}

/// The middle one (the upper of two), or 0 without any.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
