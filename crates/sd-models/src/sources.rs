//! Where the parts of a model are among its files, what their tensors are called, and what says what they are like.

use std::path::{Path, PathBuf};

use sd_backend::Component;
use sd_graph::Checkpoint;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::config::{from_json, read_json};
use crate::error::{Error, Result};
use crate::families::{Known, config_of, part_in};
use crate::gguf_tokenizer;
use crate::model_files::ModelFiles;
use crate::qwen3_vl::{self, IMAGE_TOKEN, VIDEO_TOKEN, with_vision};

/// One part of a model as its files have it.
#[derive(Debug)]
pub(crate) struct Source<C> {
    /// Its tensors, under the reference's names; those of a VAE under the names that its file has behind a prefix.
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: C,
}

/// Files that were opened, so that a file with several parts is opened once.
#[derive(Debug, Default)]
pub(crate) struct Opened(Vec<(PathBuf, Checkpoint)>);

impl Opened {
    pub(crate) fn get(&mut self, path: &Path) -> Result<Checkpoint> {
        if let Some((_, known)) = self.0.iter().find(|(known, _)| known == path) {
            return Ok(known.clone());
        }
        let checkpoint = Checkpoint::open(path)?;
        self.0.push((path.to_owned(), checkpoint.clone()));
        Ok(checkpoint)
    }
}

/// A part and the text of its configuration.
pub(crate) struct Described {
    checkpoint: Checkpoint,
    config: Value,
    /// Whether a file says so; else it follows from the tensors.
    is_told: bool,
    /// What stands beside a single file, if anything: it may be about another.
    beside: Option<Value>,
    /// What errors about the configuration name.
    path: PathBuf,
}

impl Described {
    /// Finds the part `known`: at the path that was given for it, or in the `folder` of the model's, or in its file.
    ///
    /// # Errors
    /// [`Error::MissingPart`] with the `hint` how to give it, and everything that can be wrong with files.
    pub(crate) fn find(
        files: &ModelFiles,
        known: &'static Known,
        folder: &str,
        hint: &'static str,
        opened: &mut Opened,
    ) -> Result<Described> {
        let given = files.of(known.component);
        Described::find_at((files, given), known, folder, hint, opened)
    }

    /// As [`Described::find`], for a part for which the path `given` was given, if one was.
    ///
    /// # Errors
    /// As for [`Described::find`].
    pub(crate) fn find_at(
        (files, given): (&ModelFiles, Option<&Path>),
        known: &'static Known,
        folder: &str,
        hint: &'static str,
        opened: &mut Opened,
    ) -> Result<Described> {
        let missing = || Error::MissingPart {
            path: files.label().to_owned(),
            part: known.component.name(),
            hint,
        };
        let path = match (given, &files.model) {
            (Some(path), _) => path.to_owned(),
            (None, Some(model)) if model.is_dir() => model.join(folder),
            (None, Some(model)) => model.clone(),
            (None, None) => return Err(missing()),
        };
        let is_of_all = given.is_none() && path.is_file();
        let is_of_folder = given.is_none() && !is_of_all;
        let beside = path.join("config.json");
        // A model folder says what its parts are like; a folder that was given for one part may.
        let is_told = is_of_folder || beside.is_file();
        let told: Option<Value> = is_told.then(|| read_json(&beside)).transpose()?;
        let whole = opened.get(&path)?;
        let found = match part_in(&whole, known) {
            Err(Error::UnknownFile { .. }) if is_of_all => return Err(missing()),
            Err(Error::UnknownFile { .. }) if is_told => None,
            outcome => Some(outcome?),
        };
        let checkpoint = match &found {
            Some(found) => found.select(&whole)?,
            // Whatever is missing will be told when it is declared.
            None => whole,
        };
        let folder = path.parent().filter(|_| path.is_file());
        let beside_file = folder.map(|folder| folder.join("config.json"));
        let beside_file = beside_file.filter(|config| config.is_file());
        let config = match told {
            Some(config) => config,
            None => config_of(known, &checkpoint).map_err(|reason| Error::Config {
                path: path.clone(),
                reason,
            })?,
        };
        Ok(Described {
            checkpoint,
            config,
            is_told,
            beside: beside_file.and_then(|config| read_json(&config).ok()),
            path: if is_told { beside } else { path },
        })
    }

    /// The part with its configuration read, and checked by `check`.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn read<C: serde::de::DeserializeOwned>(
        self,
        check: impl Fn(C, &Path) -> Result<C>,
    ) -> Result<Source<C>> {
        let read = |value: Value| check(from_json(&self.path, value)?, &self.path);
        // As a file of a folder in the diffusers layout has it.
        let beside = self.beside.and_then(|value| read(value).ok());
        Ok(Source {
            config: match beside {
                Some(config) => config,
                None => read(self.config)?,
            },
            checkpoint: self.checkpoint,
        })
    }
}

/// The text encoder that was found, with the vision tower of a file of its own if one was given, and its tokenizer.
///
/// # Errors
/// Everything that can be wrong with files; see [`Error`].
pub(crate) fn text_encoder(
    files: &ModelFiles,
    mut text: Described,
) -> Result<(Source<qwen3_vl::Config>, Tokenizer)> {
    if let Some(path) = &files.vision {
        let (checkpoint, config) = with_vision(&text.checkpoint, &Checkpoint::open(path)?)?;
        text.checkpoint = checkpoint;
        if !text.is_told {
            text.config["vision_config"] = config;
        }
    }
    let tokenizer = tokenizer(files, &text.checkpoint)?;
    if !text.is_told {
        for (field, token) in [
            ("image_token_id", IMAGE_TOKEN),
            ("video_token_id", VIDEO_TOKEN),
        ] {
            if let Some(id) = tokenizer.token_to_id(token) {
                text.config[field] = json!(id);
            }
        }
    }
    Ok((text.read(qwen3_vl::Config::checked)?, tokenizer))
}

/// The tokenizer that was given, or that of the model folder, or one beside the text encoder, or the one in its file.
fn tokenizer(files: &ModelFiles, text_encoder: &Checkpoint) -> Result<Tokenizer> {
    let within = |folder: &Path| -> Vec<PathBuf> {
        let folders = ["processor", "tokenizer", ""].map(|part| folder.join(part));
        folders.map(|folder| folder.join("tokenizer.json")).into()
    };
    let path = if let Some(given) = &files.tokenizer {
        let places = match given.is_dir() {
            true => within(given),
            false => vec![given.clone()],
        };
        let missing = || Error::Missing {
            path: given.clone(),
            what: "tokenizer.json",
        };
        Some(
            places
                .into_iter()
                .find(|path| path.is_file())
                .ok_or_else(missing)?,
        )
    } else {
        let mut places = files.folder().map(within).unwrap_or_default();
        let beside = files
            .of(Component::TextEncoder)
            .filter(|path| path.is_dir());
        for folder in beside
            .into_iter()
            .flat_map(|folder| [Some(folder), folder.parent()])
        {
            places.extend(folder.map(within).unwrap_or_default());
        }
        places.into_iter().find(|path| path.is_file())
    };
    if let Some(path) = path {
        let wrong = |error| Error::Tokenizer(format!("{}: {error}", path.display()));
        return Tokenizer::from_file(&path).map_err(wrong);
    }
    match gguf_tokenizer::read(text_encoder)? {
        Some(tokenizer) => Ok(tokenizer),
        None if files.folder().is_some() => Err(Error::Missing {
            path: files.label().to_owned(),
            what: "processor/tokenizer.json",
        }),
        None => Err(Error::MissingPart {
            path: text_encoder.path().to_owned(),
            part: "tokenizer",
            hint: "--tokenizer",
        }),
    }
}
