//! Which models are known by their weights alone: what their parts are called in files, and what shapes say of them.

use sd_backend::Component;
use sd_graph::{Checkpoint, LoadOptions, Param};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::naming::Naming;
use crate::{minimax_h3, qwen_image_2_1, qwen3_vl, wan_vae};

/// A part of a model that files can hold.
#[derive(Debug)]
pub(crate) struct Known {
    /// The model's name.
    pub(crate) family: &'static str,
    pub(crate) component: Component,
    /// What its configuration stands under in the metadata of a file.
    pub(crate) key: &'static str,
    /// The class that its configuration names, where older files have it under [`VAE_KEY`].
    pub(crate) shared_key_class: Option<&'static str>,
    /// What GGUF files call it.
    pub(crate) architecture: &'static str,
    /// How files may call its tensors; the first that fits is taken.
    pub(crate) namings: &'static [Naming],
    /// Its configuration, as the reference's `config.json` has it, from a checkpoint with the model's names.
    pub(crate) config: fn(&Checkpoint) -> Result<Value, String>,
    /// Declares everything that loading it declares, of a checkpoint with the model's names and by its configuration.
    pub(crate) declare: fn(&Checkpoint, LoadOptions, Value) -> Result<Vec<Param>>,
}

/// All of them.
static KNOWN: [&Known; 6] = [
    &qwen_image_2_1::TRANSFORMER,
    &minimax_h3::TRANSFORMER,
    &qwen3_vl::TEXT_ENCODER,
    &wan_vae::VAE,
    &minimax_h3::video_vae::VIDEO_VAE,
    &minimax_h3::sound_vae::VAE,
];

/// A part of a model that was found in a file.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) known: &'static Known,
    pub(crate) naming: &'static Naming,
    /// What its tensors' names begin with.
    pub(crate) prefix: String,
}

impl Found {
    /// Its tensors, under the model's names.
    ///
    /// # Errors
    /// As for [`Naming::select`].
    pub(crate) fn select(&self, checkpoint: &Checkpoint) -> Result<Checkpoint> {
        self.naming.select(checkpoint, &self.prefix)
    }
}

/// The parts of models that `checkpoint` holds.
pub(crate) fn parts_in(checkpoint: &Checkpoint) -> Vec<Found> {
    let mut found = Vec::new();
    for known in KNOWN {
        let mut namings = known.namings.iter();
        found.extend(namings.find_map(|naming| {
            let prefix = naming.prefixes_in(checkpoint).pop_first()?;
            Some(Found {
                known,
                naming,
                prefix,
            })
        }));
    }
    found
}

/// The part of `known` in `checkpoint`.
///
/// # Errors
/// [`Error::UnknownFile`], which says what was looked for and what was found.
pub(crate) fn part_in(checkpoint: &Checkpoint, known: &'static Known) -> Result<Found> {
    refuse_scaled(checkpoint)?;
    let found = parts_in(checkpoint);
    let others = found.iter().map(|other| other.known);
    let others: Vec<String> = others.map(|known| known.title()).collect();
    let mut found = found.into_iter();
    found
        .find(|found| std::ptr::eq(found.known, known))
        .ok_or_else(|| unknown(checkpoint, &[known], &others))
}

/// The key of metadata under which files that were converted from a folder keep the `config.json` of the VAE of pictures.
pub(crate) const VAE_KEY: &str = "sd.config.vae";

/// The configuration of the part `known`, whose tensors are `part`, as the reference's `config.json` has it: as the metadata says,
/// or else as follows from the tensors.
///
/// # Errors
/// What is missing or impossible.
pub(crate) fn config_of(known: &Known, part: &Checkpoint) -> Result<Value, String> {
    match told_config(known, part) {
        Some(told) => told,
        None => (known.config)(part),
    }
}

/// The configuration that the metadata of a file has of the part `known`, if any.
fn told_config(known: &Known, part: &Checkpoint) -> Option<Result<Value, String>> {
    let metadata = part.metadata();
    if let Some(text) = metadata.get(known.key) {
        let key = known.key;
        let parsed = serde_json::from_str(text);
        return Some(parsed.map_err(|error| format!("{key} in its metadata: {error}")));
    }
    // The VAEs of clips once used the key of the VAE of pictures; which of them that was its class says.
    let class = known.shared_key_class?;
    let shared: Value = serde_json::from_str(metadata.get(VAE_KEY)?).ok()?;
    (shared.get("_class_name")? == class).then_some(Ok(shared))
}

/// Weights whose scales are tensors of their own: without them every number is wrong by a factor.
fn refuse_scaled(checkpoint: &Checkpoint) -> Result<()> {
    const ENDINGS: [&str; 4] = [
        ".scale_weight",
        ".weight_scale",
        ".comfy_quant",
        "scaled_fp8",
    ];
    let mut names = checkpoint.tensors().map(|(name, _)| name);
    let is_scale = |name: &str| ENDINGS.iter().any(|ending| name.ends_with(ending));
    match names.find(|name| is_scale(name)) {
        None => Ok(()),
        Some(name) => Err(Error::UnsupportedWeights {
            path: checkpoint.path().to_owned(),
            tensor: name.to_owned(),
        }),
    }
}

impl Known {
    fn title(&self) -> String {
        format!("{} ({})", self.component, self.family)
    }
}

/// A file in which none of `wanted` was found.
fn unknown(checkpoint: &Checkpoint, wanted: &[&'static Known], others: &[String]) -> Error {
    const SHOWN: usize = 4;
    let looked_for: Vec<String> = (wanted.iter())
        .map(|known| {
            let mut marks: Vec<&str> = (known.namings.iter())
                .filter_map(|naming| naming.marks.first().copied())
                .collect();
            marks.sort_unstable();
            marks.dedup();
            format!("{}: {}", known.title(), marks.join(" or "))
        })
        .collect();
    let mut found: Vec<String> = others.iter().map(|other| format!("a {other}")).collect();
    if found.is_empty() {
        let names = checkpoint.tensors().map(|(name, _)| name);
        found = names
            .take(SHOWN)
            .map(|name| name.escape_debug().to_string())
            .collect();
    }
    if others.is_empty() && checkpoint.len() > SHOWN {
        found.push(format!("{} more", checkpoint.len() - SHOWN));
    }
    Error::UnknownFile {
        path: checkpoint.path().to_owned(),
        looked_for: looked_for.join("; "),
        found: match found.is_empty() {
            true => "no tensors".to_owned(),
            false => found.join(", "),
        },
    }
}

/// A part of a model that a file of weights was recognised as.
#[derive(Debug)]
pub struct Identified(Found);

impl Identified {
    /// The model: `Qwen-Image 2.1`.
    pub fn family(&self) -> &'static str {
        self.0.known.family
    }

    /// Which part of it.
    pub fn component(&self) -> Component {
        self.0.known.component
    }

    /// How its tensors are named: `as in diffusers`.
    pub fn naming(&self) -> &'static str {
        self.0.naming.title
    }

    /// What their names begin with.
    pub fn prefix(&self) -> &str {
        &self.0.prefix
    }

    /// Its tensors in the file, under the reference's names, and what the file keeps as one apart. A VAE keeps its file's names
    /// behind the prefix.
    ///
    /// # Errors
    /// Two tensors with one name, or rows that are no equal parts.
    pub fn select(&self, checkpoint: &Checkpoint) -> Result<Checkpoint> {
        self.0.select(checkpoint)
    }

    /// Whether the file says in its metadata what the part is like, so that nothing of [`Identified::config`] is taken from names,
    /// shapes and the published model.
    pub fn is_told(&self, checkpoint: &Checkpoint) -> bool {
        told_config(self.0.known, checkpoint).is_some()
    }

    /// The configuration that follows from names, shapes and metadata, with the fields of the reference's `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] with what is missing or impossible.
    pub fn config(&self, checkpoint: &Checkpoint) -> Result<Value> {
        let part = self.select(checkpoint)?;
        config_of(self.0.known, &part).map_err(|reason| Error::Config {
            path: checkpoint.path().to_owned(),
            reason,
        })
    }
}

/// What parts of models a file holds, by the names of its tensors; none if it is not known. Nothing but the list of tensors is
/// looked at.
pub fn identify(checkpoint: &Checkpoint) -> Vec<Identified> {
    parts_in(checkpoint).into_iter().map(Identified).collect()
}
