//! Which types the tensors of a file get when it is converted.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use sd_backend::{Component, DType};
use sd_graph::{
    Checkpoint, Conversion, Declarations, FileFormat, LoadOptions, Param, TensorInfo, TensorTypes,
};
use serde_json::Value;

use crate::config::read_json;
use crate::error::Result;
use crate::families::{Found, config_of, parts_in};

/// Plans to write `checkpoint`, which was opened at `path`, in `format`, with types as `options` ask for.
///
/// - Matrices and tables of a known model get what loading it with the same options would give them, so that a converted file draws
///   what the file draws that is converted on loading. Of the diffusion model, matrices outside of its repeated layers keep their
///   type unless a rule names them: there are few of them, and all that the model sees and says goes through them.
/// - Of a file that is not known, matrices get the type and everything else keeps its own.
/// - Kernels get F32, F16 or BF16 where one of these is asked for, and else keep their type. Vectors become F32 in GGUF files, as
///   other readers of these expect, and keep their type in safetensors files.
/// - What a known model has and we have no use for keeps its type: a language model's head, a vision tower.
///
/// Names stay those of the file, but for GGUF files of one part, which have no prefix by custom and no room for one; and what the
/// file keeps as one tensor stays one. The `config.json` beside the weights goes into the metadata, from where
/// [`Pipeline`](crate::Pipeline) reads it.
///
/// # Errors
/// Types that a tensor cannot get or the format cannot hold, and a known model whose tensors do not fit it.
pub fn conversion(
    checkpoint: &Checkpoint,
    path: &Path,
    format: FileFormat,
    options: &LoadOptions,
) -> Result<Conversion> {
    let mut told = told_config(path)?;
    let mut parts = parts_in(checkpoint);
    let mut checkpoint = checkpoint.clone();
    if let ([found], FileFormat::Gguf) = (&mut parts[..], format)
        && checkpoint
            .tensors()
            .all(|(name, _)| name.starts_with(&found.prefix))
    {
        checkpoint = checkpoint.below(&found.prefix)?;
        found.prefix.clear();
    }
    let checkpoint = &checkpoint;
    let mut types: HashMap<String, DType> = HashMap::new();
    if parts.is_empty() {
        types = of_matrices(checkpoint, options)?;
    }
    for found in &parts {
        let part = found.select(checkpoint)?;
        let derived = || {
            config_of(found.known, &part).map_err(|reason| crate::Error::Config {
                path: path.to_owned(),
                reason,
            })
        };
        let told_of_it = told.clone().filter(|_| parts.len() == 1);
        let of_told = told_of_it.map(|config| of_part(found, &part, config, options));
        let asked = match of_told {
            Some(Ok(asked)) => asked,
            // What stands beside a single file may be about another.
            Some(Err(_)) if !path.is_dir() => {
                told = None;
                of_part(found, &part, derived()?, options)?
            }
            Some(Err(error)) => return Err(error),
            None => of_part(found, &part, derived()?, options)?,
        };
        for (stored, _) in checkpoint.tensors() {
            let Some(name) = stored.strip_prefix(&*found.prefix) else {
                continue;
            };
            let mut names = found.naming.in_model(name).into_iter();
            if let Some(dtype) = names.find_map(|(name, _)| asked.get(&name)) {
                types.insert(stored.to_owned(), *dtype);
            }
        }
    }
    let dtype = |name: &str, info: &TensorInfo| match info.shape.iter().filter(|&&n| n != 1).count()
    {
        0 | 1 => vector_type(info, format),
        _ if info.shape.len() == 2 => types.get(name).copied(),
        _ => options
            .weight_type
            .filter(|dtype| dtype.is_float() && is_number(info)),
    };
    let mut conversion = Conversion::new(checkpoint, format, dtype)
        .map_err(|error| crate::Error::Engine(error.into()))?;
    if let ([found], Some(config)) = (&parts[..], &told) {
        conversion = conversion.metadata(found.known.key, &config.to_string());
    }
    let architecture = "general.architecture";
    if let ([found, ..], FileFormat::Gguf) = (&parts[..], format)
        && !checkpoint.metadata().contains_key(architecture)
    {
        conversion = conversion.metadata(architecture, found.known.architecture);
    }
    Ok(conversion)
}

/// The `config.json` of a folder of weights, or beside a file of them.
fn told_config(path: &Path) -> Result<Option<Value>> {
    let folder = if path.is_dir() {
        Some(path)
    } else {
        path.parent()
    };
    let config = folder.map(|folder| folder.join("config.json"));
    match config.filter(|config| config.is_file()) {
        Some(config) if path.is_dir() => read_json(&config).map(Some),
        Some(config) => Ok(read_json(&config).ok()),
        None => Ok(None),
    }
}

/// F32 in GGUF files for a vector of numbers.
fn vector_type(info: &TensorInfo, format: FileFormat) -> Option<DType> {
    let is_made = format == FileFormat::Gguf && is_number(info);
    is_made.then_some(DType::F32)
}

/// Whether elements are floating-point numbers that stand for themselves.
fn is_number(info: &TensorInfo) -> bool {
    use sd_graph::StoredType::{BF16, F16, F32, F64};
    matches!(info.stored, F64 | F32 | F16 | BF16)
}

/// Types for the matrices of a file that is not known.
fn of_matrices(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<HashMap<String, DType>> {
    let declarations = Declarations::new(checkpoint, options.clone());
    let root = declarations.root();
    for (name, info) in checkpoint.tensors() {
        match info.shape[..] {
            [rows, columns] if is_number(info) || info.stored.is_quantized() => {
                root.param(name, [rows, columns], sd_graph::Role::Matrix);
            }
            _ => root.ignore(name),
        }
    }
    Ok(types_of(&declarations.finish()?))
}

/// Types for what a known part declares, by the model's names.
fn of_part(
    found: &Found,
    part: &Checkpoint,
    config: Value,
    options: &LoadOptions,
) -> Result<HashMap<String, DType>> {
    let component = found.known.component;
    let (name, path) = (component_name(component), part.path());
    let options = options.clone().component(name);
    let declared = |options: &LoadOptions| -> Result<HashMap<String, DType>> {
        let params = (found.known.declare)(part, options.clone(), config.clone())?;
        Ok(types_of(&params))
    };
    let is_lossy = options.weight_type.is_some_and(DType::is_quantized);
    if component != Component::Diffusion || !is_lossy {
        return declared(&options);
    }
    let mut layers: BTreeMap<String, usize> = BTreeMap::new();
    for (name, _) in part.tensors() {
        *layers.entry(without_numbers(name)).or_default() += 1;
    }
    let mut own = options.clone();
    own.weight_type = None;
    let mut kept = TensorTypes::default();
    for (weight, dtype) in declared(&own)? {
        if layers.get(&without_numbers(&weight)) == Some(&1) {
            kept = kept
                .rule(&format!("^{name}[.]{}$", weight.replace('.', "[.]")), dtype)
                .map_err(|error| crate::Error::Config {
                    path: path.to_owned(),
                    reason: error.to_string(),
                })?;
        }
    }
    declared(&options.tensor_types(kept))
}

/// A name with its numbers left open, which all layers of a stack share.
fn without_numbers(name: &str) -> String {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name
        .split('.')
        .map(|part| if is_number(part) { "#" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

fn types_of(params: &[Param]) -> HashMap<String, DType> {
    let each = |param: &Param| (param.name().to_owned(), param.dtype());
    params.iter().map(each).collect()
}

/// What stands before the names of a part's tensors in rules.
pub(crate) const fn component_name(component: Component) -> &'static str {
    match component {
        Component::Diffusion => "transformer",
        Component::TextEncoder => "text_encoder",
        Component::Vae => "vae",
    }
}
