//! Which file of a folder holds its weights.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::{CheckpointError, shown};

/// The names that diffusers and transformers give their weights, without ending.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];
const SINGLE: &str = ".safetensors";
const SHARDED: &str = ".safetensors.index.json";
const GGUF: &str = ".gguf";
/// Files that an error names.
const NAMED: usize = 5;

/// The one file in `folder` that stands for its weights; none or several is an error that says what was looked for.
pub(super) fn choose(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let names = list(folder)?;
    let standard: Vec<&str> = STEMS
        .iter()
        .flat_map(|stem| [SINGLE, SHARDED].map(|ending| format!("{stem}{ending}")))
        .filter_map(|wanted| {
            names
                .iter()
                .find(|name| **name == wanted)
                .map(String::as_str)
        })
        .collect();
    let refuse = |reason: String| {
        Err(CheckpointError::Folder {
            folder: folder.to_owned(),
            reason,
        })
    };
    match standard[..] {
        [name] => return Ok(folder.join(name)),
        [_, ..] => {
            return refuse(format!(
                "several files could be meant ({}); open one by name",
                standard.join(", ")
            ));
        }
        [] => {}
    }

    let single: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| name.ends_with(SINGLE) || name.ends_with(GGUF))
        .collect();
    match single[..] {
        [] => {
            let pipeline = names.iter().any(|name| name == "model_index.json");
            let hint = if pipeline {
                "; this is a pipeline, its folders (`transformer`, `vae`) hold weights"
            } else {
                ""
            };
            let [a, b] = STEMS;
            refuse(format!(
                "no weights: looked for {a}{SINGLE}, {a}{SHARDED}, {b}{SINGLE}, {b}{SHARDED} and for one file \
                 *{SINGLE} of another name or *{GGUF}{hint}"
            ))
        }
        [name] if is_variant(name) => refuse(format!(
            "it has the variant {} and not the plain file; a variant is used only where it is opened by name",
            shown(name)
        )),
        [name] if is_one_of_several(name) && name.ends_with(GGUF) => refuse(format!(
            "{} is one part of several, and parts of GGUF files are not put together",
            shown(name)
        )),
        [name] if is_one_of_several(name) => refuse(format!(
            "{} is one shard of several, and their index (*{SHARDED}) is missing",
            shown(name)
        )),
        [name] => Ok(folder.join(name)),
        _ => {
            let mut some: Vec<String> = single.iter().take(NAMED).map(|name| shown(name)).collect();
            if single.len() > NAMED {
                some.push(format!("{} more", single.len() - NAMED));
            }
            refuse(format!(
                "several files could be meant ({}); open one, or an index of shards, by name",
                some.join(", ")
            ))
        }
    }
}

/// Names in `folder`, sorted; hidden files are left out, and so are names that are not Unicode, which no form has.
fn list(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let failed = |error| CheckpointError::io(folder, "listed", &error);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        if let Ok(name) = entry.map_err(failed)?.file_name().into_string()
            && !name.starts_with('.')
        {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// `model.fp16.safetensors`: the same weights in another form, beside `model.safetensors`.
fn is_variant(name: &str) -> bool {
    let is_of = |stem: &&str| {
        name.strip_prefix(*stem)
            .is_some_and(|rest| rest.starts_with('.'))
    };
    name.ends_with(SINGLE) && STEMS.iter().any(is_of)
}

/// `model-00001-of-00003.safetensors`, but not the only shard of one.
fn is_one_of_several(name: &str) -> bool {
    let stem = name
        .strip_suffix(SINGLE)
        .or_else(|| name.strip_suffix(GGUF))
        .unwrap_or(name);
    let number = |text: &str| {
        if text.len() == 5 {
            text.parse::<u32>().ok()
        } else {
            None
        }
    };
    let Some((first, of)) = stem.rsplit_once("-of-") else {
        return false;
    };
    let part = first.rsplit_once('-').and_then(|(_, part)| number(part));
    part.is_some() && number(of).is_some_and(|count| count > 1)
}
