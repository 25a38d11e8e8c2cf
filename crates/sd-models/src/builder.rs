//! Between a folder and a loaded model: choosing a device and memory, planning, loading.

use std::path::PathBuf;

use sd_backend::{Backend, BackendOptions, DType, Device, Ledger, MemoryBudgets};
use sd_graph::{Cancel, LoadOptions, Progress, Reporter};

use crate::config::read_json;
use crate::error::{Error, Result};
use crate::pipeline::Pipeline;
use crate::qwen_image_2_1::{QwenImage21, StageEstimates};
use crate::request::{Defaults, rounded};

/// A model that was opened and checked but not yet loaded.
#[derive(Debug)]
pub struct PipelineBuilder {
    pub(crate) folder: PathBuf,
    pub(crate) device: String,
    pub(crate) backend: BackendOptions,
    pub(crate) load: LoadOptions,
}

/// What a picture needs, found without loading anything.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Name of the device.
    pub device: String,
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Bytes of weights by part.
    pub weights: Vec<(&'static str, u64)>,
    /// What each stage computes in, beside the weights.
    pub stages: StageEstimates,
    /// Bytes of the smallest budget that does: all weights and the stage that needs most.
    pub smallest: u64,
    /// Bytes that may be taken now, if anything is known.
    pub available: Option<u64>,
}

impl MemoryPlan {
    /// Whether it fits now.
    pub fn fits(&self) -> bool {
        self.available
            .is_none_or(|available| self.smallest <= available)
    }
}

impl PipelineBuilder {
    /// Chooses a device, in the words of [`Device::select`]. `auto` if not called.
    pub fn device(mut self, selector: &str) -> Self {
        selector.clone_into(&mut self.device);
        self
    }

    /// Threads that compute on the processor; as many as the machine runs at once if not called.
    pub fn threads(mut self, threads: usize) -> Self {
        self.backend = self.backend.threads(threads);
        self
    }

    /// Grants memory: a number of bytes, all that is free but some, or (if not called) what is free. Replaces an account
    /// set by [`PipelineBuilder::ledger`].
    pub fn memory_budget(mut self, budgets: MemoryBudgets) -> Self {
        self.backend = self.backend.ledger(&Ledger::new(budgets));
        self
    }

    /// Uses an account of memory that other pipelines of this process share.
    pub fn ledger(mut self, ledger: &Ledger) -> Self {
        self.backend = self.backend.ledger(ledger);
        self
    }

    /// Converts floating-point weights on loading: F32 for the reference's own numbers, F16 for less memory.
    pub fn convert_to(mut self, dtype: DType) -> Self {
        self.load = self.load.convert_to(dtype);
        self
    }

    /// What the model needs for one picture of the given size (the model's default if none) and a prompt of `tokens`
    /// tokens. Nothing is loaded.
    ///
    /// # Errors
    /// [`Error::Size`], and everything that can be wrong with files.
    pub fn plan(&self, size: Option<(usize, usize)>, tokens: usize) -> Result<MemoryPlan> {
        let backend = Backend::new(Device::select(&self.device)?, &self.backend)?;
        let defaults = self.defaults()?;
        let model = QwenImage21::open(&self.folder, &self.load)?;
        let (width, height) = rounded(size.unwrap_or((defaults.width, defaults.height)))?;
        let scale = model.scale_factor();
        let stages = model.estimate(&backend, tokens.max(1), (height / scale, width / scale))?;
        Ok(MemoryPlan {
            device: backend.device().name(),
            width,
            height,
            weights: model.weight_bytes_by_part().to_vec(),
            stages,
            smallest: model.weight_bytes() + stages.peak_bytes(),
            available: backend.ledger().report(backend.device()).available,
        })
    }

    /// The author's recommendations, if the folder has any.
    fn defaults(&self) -> Result<Defaults> {
        let path = self.folder.join("sd-defaults.json");
        if path.is_file() {
            read_json(&path)
        } else {
            Ok(Defaults::default())
        }
    }

    /// Loads the weights.
    ///
    /// # Errors
    /// Everything that can be wrong with files, and memory that runs out.
    pub fn load(self) -> Result<Pipeline> {
        self.load_with(&Cancel::new(), &mut |_: &Progress| {})
    }

    /// Loads the weights, telling of progress; `cancel` stops loading, and later everything else too.
    ///
    /// # Errors
    /// Everything that can be wrong with files, memory that runs out, or the run was cancelled.
    pub fn load_with(self, cancel: &Cancel, progress: &mut dyn Reporter) -> Result<Pipeline> {
        let backend = Backend::new(Device::select(&self.device)?, &self.backend)?;
        let defaults = self.defaults()?;
        let mut model = QwenImage21::open(&self.folder, &self.load)?;
        progress.report(&Progress::Stage("load"));
        let loaded = model
            .load(&backend, cancel, progress)
            .map_err(|error| match error {
                Error::Engine(sd_graph::Error::Backend(
                    source @ sd_backend::Error::OutOfMemory { .. },
                )) => {
                    let smallest = smallest_budget(&model, &backend, defaults);
                    smallest.map_or(Error::from(source.clone()), |smallest| {
                        Error::TooLittleMemory { source, smallest }
                    })
                }
                other => other,
            })?;
        Ok(Pipeline {
            model,
            backend,
            defaults,
            loaded,
            cancel: cancel.clone(),
        })
    }
}

/// Bytes of all weights and the stage that needs most, for a picture of the default size and a prompt of common length.
fn smallest_budget(model: &QwenImage21, backend: &Backend, defaults: Defaults) -> Option<u64> {
    const COMMON_PROMPT: usize = 64;
    let scale = model.scale_factor();
    let stages = model
        .estimate(
            backend,
            COMMON_PROMPT,
            (defaults.height / scale, defaults.width / scale),
        )
        .ok()?;
    Some(model.weight_bytes() + stages.peak_bytes())
}
