//! LoRAs: files that add products of two small matrices to the matrices of a model.
//!
//! The factors become tensors of the model's own checkpoint, under names of their own, and the additions are computed beside the
//! products with the matrices: whatever type those have and wherever they live, it is done the same way.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use sd_backend::DType;
use sd_graph::{Adapter, Adapters, Checkpoint, Rows, Selection, convert};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::families::Known;

/// What became of a LoRA.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoraReport {
    /// The file.
    pub path: PathBuf,
    /// How many times it is added.
    pub strength: f32,
    /// Matrices of the model that it adds to.
    pub weights: usize,
    /// Modules in the file that the model does not have.
    pub unmatched: Vec<String>,
    /// Modules that cannot be added as they are, and why.
    pub misshapen: Vec<(String, String)>,
    /// Tensors that are no factors of products: other kinds of additions, which are left out.
    pub unsupported: Vec<String>,
}

impl LoraReport {
    /// Whether everything in the file is used.
    pub fn is_complete(&self) -> bool {
        self.unmatched.is_empty() && self.misshapen.is_empty() && self.unsupported.is_empty()
    }
}

impl std::fmt::Display for LoraReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        /// Names beyond these are counted, not listed.
        const LISTED: usize = 6;
        write!(
            f,
            "{}: adds to {} weights",
            self.path.display(),
            self.weights
        )?;
        let mut list = |what: &str, items: Vec<String>| {
            if items.is_empty() {
                return Ok(());
            }
            let shown: Vec<String> = items.iter().take(LISTED).cloned().collect();
            write!(f, "; {} {what}: {}", items.len(), shown.join(", "))?;
            match items.len() > LISTED {
                true => write!(f, " and {} more", items.len() - LISTED),
                false => Ok(()),
            }
        };
        let shown = |name: &String| name.escape_debug().to_string();
        list(
            "modules that the model does not have",
            self.unmatched.iter().map(shown).collect(),
        )?;
        let misshapen = self.misshapen.iter();
        let misshapen = misshapen.map(|(name, why)| format!("{} ({why})", shown(name)));
        list("that do not fit", misshapen.collect())?;
        list(
            "tensors of kinds that are not supported",
            self.unsupported.iter().map(shown).collect(),
        )
    }
}

/// A model's tensors together with the factors of its LoRAs.
#[derive(Debug)]
#[non_exhaustive]
pub struct Adapted {
    /// All tensors; those of the factors have names that no weight has.
    pub checkpoint: Checkpoint,
    /// What adds to what, for [`Declarations::adapt`](sd_graph::Declarations::adapt).
    pub adapters: Adapters,
    /// What became of each LoRA.
    pub reports: Vec<LoraReport>,
}

/// How many heads the rows of queries, keys and values are of, given the model's tensors and the name of such a matrix; `None` for
/// another matrix.
pub(crate) type HeadsOf = fn(&Checkpoint, &str) -> Option<usize>;

/// Finds what each of `loras` adds to the part `known`, whose tensors under the model's names are `base`. Where there is `by_head`, PEFT's
/// own files, with the names of one matrix for queries, keys and values, have their rows head by head.
///
/// # Errors
/// [`Error::Lora`] for a file of which nothing fits, and for a strength that is no number; files that cannot be read.
pub(crate) fn adapt(
    base: &Checkpoint,
    known: &Known,
    loras: &[(PathBuf, f32)],
    by_head: Option<HeadsOf>,
) -> Result<Adapted> {
    let mut selection = Selection::new(base);
    selection.add_all(base)?;
    let mut adapters = Adapters::default();
    let mut reports = Vec::with_capacity(loras.len());
    let targets = Targets::of(base, known);
    for (number, (path, strength)) in loras.iter().enumerate() {
        if !strength.is_finite() {
            return Err(Error::Lora {
                path: path.clone(),
                reason: format!("a strength of {strength}: it must be a number"),
            });
        }
        let mut file = LoraFile::open(path)?;
        let mut report = LoraReport {
            path: path.clone(),
            strength: *strength,
            weights: 0,
            unmatched: Vec::new(),
            misshapen: Vec::new(),
            unsupported: std::mem::take(&mut file.unsupported),
        };
        for (module, factors) in &file.modules {
            let Some(weights) = targets.find(module) else {
                report.unmatched.push(module.clone());
                continue;
            };
            match file.additions(base, weights, module, factors) {
                Err(why) => report.misshapen.push((module.clone(), why)),
                Ok(additions) => {
                    for (index, addition) in additions.into_iter().enumerate() {
                        let name = |factor: &str| {
                            format!("lora.{number}.{}.{factor}.{index}", addition.weight)
                        };
                        let (down, up) = (name("down"), name("up"));
                        selection.add(&*down, &file.checkpoint, addition.down, Rows::ALL)?;
                        let heads = by_head.filter(|_| file.is_peft && addition.rows != Rows::ALL);
                        let heads = heads.and_then(|heads_of| heads_of(base, addition.weight));
                        let (factor, rows) = (addition.up, addition.rows);
                        match heads {
                            Some(heads) => {
                                selection.add_grouped(
                                    &*up,
                                    &file.checkpoint,
                                    factor,
                                    heads,
                                    rows,
                                )?;
                            }
                            None => selection.add(&*up, &file.checkpoint, factor, rows)?,
                        }
                        let adapter = Adapter {
                            down,
                            up,
                            rank: addition.rank,
                            scale: strength * addition.scale,
                        };
                        adapters.add(addition.weight, adapter);
                        report.weights += 1;
                    }
                }
            }
        }
        if report.weights == 0 {
            return Err(Error::Lora {
                path: path.clone(),
                reason: nothing(&report, &file.checkpoint),
            });
        }
        reports.push(report);
    }
    Ok(Adapted {
        checkpoint: selection.finish()?,
        adapters,
        reports,
    })
}

/// Why a file adds nothing.
fn nothing(report: &LoraReport, file: &Checkpoint) -> String {
    let modules = report.unmatched.len() + report.misshapen.len();
    if modules == 0 && report.unsupported.is_empty() {
        let name = file.tensors().next().map_or("no tensors", |(name, _)| name);
        return format!(
            "this is no LoRA: looked for tensors called *.lora_A.weight or *.lora_down.weight; found {}",
            name.escape_debug()
        );
    }
    format!("nothing of this LoRA fits the model: {report}")
}

/// Where LoRAs can add, by the names of modules with `_` for `.`, as some files have them.
struct Targets(HashMap<String, Vec<(String, Rows)>>);

/// What stands before the names of modules, with `_` for `.`. Several may stand there.
const PREFIXES: [&str; 7] = [
    "base_model_model_",
    "model_diffusion_model_",
    "diffusion_model_",
    "transformer_",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
];

impl Targets {
    fn of(base: &Checkpoint, known: &Known) -> Targets {
        let flat = |weight: &str| {
            weight
                .strip_suffix(".weight")
                .map(|module| module.replace('.', "_"))
        };
        let mut targets = HashMap::new();
        for (name, _) in base.tensors() {
            if let Some(module) = flat(name) {
                targets.insert(module, vec![(name.to_owned(), Rows::ALL)]);
            }
            // Names of other files than this one: what one of them keeps together, a LoRA made for it adds to together.
            for naming in known.namings {
                for stored in naming.in_file(name) {
                    if let Some(module) = flat(&stored) {
                        targets.insert(module, naming.in_model(&stored));
                    }
                }
            }
        }
        Targets(targets)
    }

    /// The matrices that a module stands for, and the rows of each in its `up` factor.
    fn find(&self, module: &str) -> Option<&[(String, Rows)]> {
        let flat = module.replace('.', "_");
        let mut rest = flat.as_str();
        loop {
            if let Some(found) = self.0.get(rest) {
                return Some(found);
            }
            rest = PREFIXES
                .iter()
                .find_map(|prefix| rest.strip_prefix(prefix))?;
        }
    }
}

/// The two factors of one module, by the names of their tensors.
#[derive(Debug, Default)]
struct Factors {
    down: Option<String>,
    up: Option<String>,
    alpha: Option<String>,
}

/// What is added to one matrix.
struct Addition<'f> {
    weight: &'f str,
    down: &'f str,
    up: &'f str,
    /// Rows of `up`.
    rows: Rows,
    rank: usize,
    scale: f32,
}

/// A file of factors.
struct LoraFile {
    checkpoint: Checkpoint,
    modules: BTreeMap<String, Factors>,
    unsupported: Vec<String>,
    settings: Option<Settings>,
    /// Whether names have an adapter's name within, as in PEFT's own files.
    is_peft: bool,
}

/// What a tensor is to its module.
enum Kind {
    Down,
    Up,
    Alpha,
}

impl LoraFile {
    fn open(path: &Path) -> Result<LoraFile> {
        let checkpoint = Checkpoint::open(path)?;
        let mut modules: BTreeMap<String, Factors> = BTreeMap::new();
        let mut unsupported = Vec::new();
        for (name, _) in checkpoint.tensors() {
            let Some((module, kind)) = parsed(name) else {
                unsupported.push(name.to_owned());
                continue;
            };
            let factors = modules.entry(module.to_owned()).or_default();
            let place = match kind {
                Kind::Down => &mut factors.down,
                Kind::Up => &mut factors.up,
                Kind::Alpha => &mut factors.alpha,
            };
            if place.replace(name.to_owned()).is_some() {
                return Err(Error::Lora {
                    path: path.to_owned(),
                    reason: format!(
                        "two tensors are the same factor of {}",
                        module.escape_debug()
                    ),
                });
            }
        }
        let settings = Settings::of(&checkpoint);
        let is_of_peft =
            |name: &str| name.contains(".lora_A.") && !name.ends_with(".lora_A.weight");
        let is_peft = checkpoint.tensors().any(|(name, _)| is_of_peft(name));
        Ok(LoraFile {
            checkpoint,
            modules,
            unsupported,
            settings,
            is_peft,
        })
    }

    /// What a module adds to each of `weights`, or why it cannot.
    fn additions<'f>(
        &'f self,
        base: &Checkpoint,
        weights: &'f [(String, Rows)],
        module: &str,
        factors: &'f Factors,
    ) -> Result<Vec<Addition<'f>>, String> {
        let (Some(down), Some(up)) = (&factors.down, &factors.up) else {
            return Err("one of its two factors is missing".to_owned());
        };
        let matrix = |checkpoint: &Checkpoint, name: &str| {
            let sides = checkpoint.get(name).map_or(&[][..], |info| &info.shape);
            match sides {
                &[rows, columns, ref rest @ ..] if rest.iter().all(|&side| side == 1) => {
                    Ok([rows, columns])
                }
                _ => Err(format!("{sides:?} is no matrix")),
            }
        };
        let [rank, input] = matrix(&self.checkpoint, down)?;
        let [output, columns] = matrix(&self.checkpoint, up)?;
        if rank != columns || rank == 0 {
            return Err(format!("factors of ranks {rank} and {columns}"));
        }
        let alpha = match &factors.alpha {
            Some(alpha) => Some(self.number(alpha)?),
            None => None,
        };
        let scale = match (alpha, &self.settings) {
            (Some(alpha), _) => alpha / rank as f32,
            (None, Some(settings)) => settings.scale(module, rank),
            (None, None) => 1.0,
        };
        if !scale.is_finite() {
            return Err(format!("a scale of {scale}"));
        }
        let each = |(weight, rows): &'f (String, Rows)| {
            let wanted = matrix(base, weight)?;
            let found = [output / rows.of, input];
            if found != wanted || !output.is_multiple_of(rows.of) {
                return Err(format!("{found:?} for a matrix of {wanted:?}"));
            }
            Ok(Addition {
                weight,
                down,
                up,
                rows: *rows,
                rank,
                scale,
            })
        };
        weights.iter().map(each).collect()
    }

    /// The only value of a tensor.
    fn number(&self, name: &str) -> Result<f32, String> {
        let info = self
            .checkpoint
            .get(name)
            .filter(|info| info.elements() == 1);
        let info = info.ok_or_else(|| format!("{name} is no single number"))?;
        let mut stored = vec![0; info.bytes as usize];
        let mut value = [0; 4];
        self.checkpoint
            .read(name, &mut stored)
            .map_err(|error| error.to_string())?;
        convert(&stored, info.stored, DType::F32, &mut value).map_err(|error| error.to_string())?;
        Ok(f32::from_le_bytes(value))
    }
}

/// The module that a tensor belongs to, and what it is to it.
fn parsed(name: &str) -> Option<(&str, Kind)> {
    const ENDINGS: [(&str, Kind); 7] = [
        (".lora_down.weight", Kind::Down),
        (".lora_up.weight", Kind::Up),
        (".lora.down.weight", Kind::Down),
        (".lora.up.weight", Kind::Up),
        (".lora_A.weight", Kind::Down),
        (".lora_B.weight", Kind::Up),
        (".alpha", Kind::Alpha),
    ];
    for (ending, kind) in ENDINGS {
        if let Some(module) = name.strip_suffix(ending) {
            return Some((module, kind));
        }
    }
    // PEFT's own files have the adapter's name there: `.lora_A.default.weight`.
    let (before, adapter) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let is_name = !adapter.is_empty();
    let down = before
        .strip_suffix(".lora_A")
        .map(|module| (module, Kind::Down));
    let up = before
        .strip_suffix(".lora_B")
        .map(|module| (module, Kind::Up));
    down.or(up).filter(|_| is_name)
}

/// What diffusers writes into a file's metadata about its factors: where it is, it says what files of others say by `alpha`.
struct Settings {
    alpha: Option<f32>,
    by_module: BTreeMap<String, f32>,
    /// Whether scales go by the root of the rank.
    is_by_root: bool,
}

impl Settings {
    fn of(checkpoint: &Checkpoint) -> Option<Settings> {
        let text = checkpoint.metadata().get("lora_adapter_metadata")?;
        let value: Value = serde_json::from_str(text).ok()?;
        let field = |name: &str| {
            let named = [format!("transformer.{name}"), name.to_owned()];
            named.iter().find_map(|key| value.get(key))
        };
        let number = |value: &Value| value.as_f64().map(|number| number as f32);
        let patterns = field("alpha_pattern").and_then(Value::as_object);
        Some(Settings {
            alpha: field("lora_alpha").and_then(number),
            by_module: (patterns.into_iter().flatten())
                .filter_map(|(module, alpha)| Some((module.clone(), number(alpha)?)))
                .collect(),
            is_by_root: field("use_rslora")
                .and_then(Value::as_bool)
                .unwrap_or(false),
        })
    }

    fn scale(&self, module: &str, rank: usize) -> f32 {
        let is_it = |name: &str| {
            let before = module.strip_suffix(name);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let mut patterns = self.by_module.iter();
        let own = patterns
            .find(|(name, _)| is_it(name))
            .map(|(_, alpha)| *alpha);
        let rank = rank as f32;
        let divisor = if self.is_by_root { rank.sqrt() } else { rank };
        own.or(self.alpha).map_or(1.0, |alpha| alpha / divisor)
    }
}
