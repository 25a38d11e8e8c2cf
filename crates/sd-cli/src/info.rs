//! `sd info`: what a checkpoint is.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use sd_backend::Bytes;
use sd_graph::Checkpoint;
use sd_models::{ModelIndex, VideoPipeline};
use serde::Serialize;

use crate::args::Info;
use crate::error::Error;
use crate::json;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    path: String,
    /// Class of the pipeline, for a model folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<String>,
    /// Whether `sd generate` or `sd video` can use it, for a model folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    supported: Option<bool>,
    parameters: u64,
    bytes: u64,
    /// What a file was recognised as.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<Part>,
    components: Vec<Component>,
}

/// A part of a model in a file.
#[derive(Debug, Serialize)]
struct Part {
    family: &'static str,
    component: &'static str,
    /// How its tensors are named.
    naming: &'static str,
    /// What their names begin with.
    prefix: String,
    /// What follows from names, shapes and metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    config: Option<serde_json::Value>,
    /// Whether all of that stands in the metadata. Of what names and shapes do not tell, it is the published model's otherwise.
    config_is_told: bool,
    /// Why nothing does.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// One set of weights.
#[derive(Debug, Serialize)]
struct Component {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<String>,
    files: usize,
    parameters: u64,
    bytes: u64,
    /// Number of tensors of each element type.
    types: BTreeMap<String, usize>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    /// Only for a single file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tensors: Vec<Tensor>,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    #[serde(rename = "type")]
    stored: String,
    shape: Vec<usize>,
    bytes: u64,
}

pub(crate) fn run(arguments: &Info) -> Result<(), Error> {
    let path = &arguments.model;
    let report = if ModelIndex::is_in(path) {
        folder(path)?
    } else {
        single(path)?
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        json::print(&mut out, &report)?;
    } else {
        print(&mut out, &report)?;
    }
    Ok(())
}

/// A model folder: each part that its index names, or each folder in it where that names none, that has weights.
fn folder(path: &Path) -> Result<Report, Error> {
    let index = ModelIndex::read(path)?;
    let named = index.components();
    let mut parts: Vec<(String, Option<String>)> = named
        .map(|(name, class)| (name.to_owned(), Some(class.to_owned())))
        .collect();
    if parts.is_empty() {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.path().is_dir());
        parts = folders
            .filter_map(|folder| Some((folder.file_name().into_string().ok()?, None)))
            .collect();
        parts.sort();
    }
    let mut components = Vec::new();
    for (name, class) in parts {
        let part = path.join(&name);
        let has_weights = std::fs::read_dir(&part).is_ok_and(|entries| {
            entries
                .flatten()
                .any(|entry| is_weights(&entry.file_name().to_string_lossy()))
        });
        if has_weights {
            let mut component = component(&Checkpoint::open(&part)?, &name, false);
            component.class = class;
            components.push(component);
        }
    }
    let supported = Some(index.is_supported() || VideoPipeline::open(path).is_ok());
    Ok(summed(
        path,
        Some(index.class_name().to_owned()),
        supported,
        components,
    ))
}

/// Whether a file of this name is one of weights, or the index of some. Hidden files do not count.
fn is_weights(name: &str) -> bool {
    !name.starts_with('.') && (name.contains(".safetensors") || name.ends_with(".gguf"))
}

/// A single file, or a folder of shards.
fn single(path: &Path) -> Result<Report, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let name = path.file_name().map_or_else(
        || path.display().to_string(),
        |name| name.to_string_lossy().into_owned(),
    );
    let mut report = summed(path, None, None, vec![component(&checkpoint, &name, true)]);
    let parts = sd_models::identify(&checkpoint).into_iter();
    report.parts = parts
        .map(|part| {
            let (config, error) = match part.config(&checkpoint) {
                Ok(config) => (Some(config), None),
                Err(error) => (None, Some(error.to_string())),
            };
            Part {
                family: part.family(),
                component: part.component().name(),
                naming: part.naming(),
                prefix: part.prefix().to_owned(),
                config_is_told: part.is_told(&checkpoint),
                config,
                error,
            }
        })
        .collect();
    Ok(report)
}

fn summed(
    path: &Path,
    class: Option<String>,
    supported: Option<bool>,
    components: Vec<Component>,
) -> Report {
    Report {
        path: path.display().to_string(),
        class,
        supported,
        parameters: components
            .iter()
            .map(|component| component.parameters)
            .sum(),
        bytes: components.iter().map(|component| component.bytes).sum(),
        parts: Vec::new(),
        components,
    }
}

fn component(checkpoint: &Checkpoint, name: &str, with_tensors: bool) -> Component {
    let mut types = BTreeMap::new();
    for (_, info) in checkpoint.tensors() {
        *types.entry(info.stored.to_string()).or_insert(0) += 1;
    }
    let tensors = checkpoint
        .tensors()
        .filter(|_| with_tensors)
        .map(|(name, info)| Tensor {
            name: name.to_owned(),
            stored: info.stored.to_string(),
            shape: info.shape.clone(),
            bytes: info.bytes,
        });
    Component {
        name: name.to_owned(),
        class: None,
        files: checkpoint.files().len(),
        parameters: checkpoint.parameters(),
        bytes: checkpoint.bytes(),
        types,
        metadata: checkpoint.metadata().clone(),
        tensors: tensors.collect(),
    }
}

fn print(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    match (&report.class, report.supported) {
        (Some(class), Some(true)) => writeln!(out, "{}: {class}", report.path)?,
        (Some(class), _) => writeln!(
            out,
            "{}: {class} (not supported by sd generate or sd video)",
            report.path
        )?,
        (None, _) => writeln!(out, "{}", report.path)?,
    }
    writeln!(
        out,
        "{} parameters, {}",
        count(report.parameters),
        Bytes(report.bytes)
    )?;
    for part in &report.parts {
        let Part {
            family,
            component,
            naming,
            prefix,
            config_is_told,
            ..
        } = part;
        let prefix = match prefix.is_empty() {
            true => String::new(),
            false => format!(" behind {}", prefix.escape_debug()),
        };
        writeln!(out, "  {component} of {family}, names {naming}{prefix}")?;
        match (&part.config, &part.error) {
            (Some(config), _) => {
                let from = match config_is_told {
                    true => "by its metadata",
                    false => "by names and shapes, which do not tell all: the rest as published",
                };
                writeln!(out, "    {from}: {config}")?;
            }
            (None, error) => writeln!(out, "    {}", error.as_deref().unwrap_or_default())?,
        }
    }
    if report.parts.is_empty() && report.class.is_none() {
        writeln!(out, "  not recognised as a part of a model")?;
    }
    for component in &report.components {
        let types: Vec<String> = component
            .types
            .iter()
            .map(|(name, number)| format!("{number} {name}"))
            .collect();
        let class = component
            .class
            .as_ref()
            .map_or_else(String::new, |class| format!(" ({class})"));
        let files = if component.files == 1 {
            String::new()
        } else {
            format!(" in {} files", component.files)
        };
        writeln!(
            out,
            "  {}{class}: {} parameters, {}{files}, tensors: {}",
            component.name,
            count(component.parameters),
            Bytes(component.bytes),
            if types.is_empty() {
                "none".to_owned()
            } else {
                types.join(", ")
            }
        )?;
        for (key, value) in &component.metadata {
            writeln!(out, "    {} = {}", key.escape_debug(), value.escape_debug())?;
        }
        for tensor in &component.tensors {
            writeln!(
                out,
                "    {} {} {:?}",
                tensor.name.escape_debug(),
                tensor.stored,
                tensor.shape
            )?;
        }
    }
    Ok(())
}

/// A number as people say it: `7.12 B`, `3.69 M`.
fn count(number: u64) -> String {
    let value = number as f64;
    match number {
        0..1_000 => number.to_string(),
        1_000..1_000_000 => format!("{:.2} K", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} M", value / 1e6),
        _ => format!("{:.2} B", value / 1e9),
    }
}
