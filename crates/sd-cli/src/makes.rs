//! What a model makes: pictures or clips.

use std::path::{Path, PathBuf};

use sd_backend::Component;
use sd_graph::Checkpoint;
use sd_models::{Pipeline, VideoPipeline, identify};

use crate::args::Parts;
use crate::error::Error;
use crate::tiny;

/// What a model makes, each by a command of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Makes {
    Pictures,
    Clips,
}

impl Makes {
    /// What a model makes, by its folder's index or by the names of its transformer's tensors; `None` where they do not tell.
    pub(crate) fn of(model: Option<&Path>, parts: &Parts) -> Option<Makes> {
        if let Some(folder) = model.filter(|model| model.is_dir()) {
            return match VideoPipeline::open(folder) {
                Ok(_) => Some(Makes::Clips),
                Err(_) => Pipeline::open(folder).ok().map(|_| Makes::Pictures),
            };
        }
        let checkpoint = Checkpoint::open(parts.transformer.as_deref().or(model)?).ok()?;
        let found = identify(&checkpoint);
        let mut transformers =
            (found.iter()).filter(|part| part.component() == Component::Diffusion);
        transformers.next().map(|part| match part.family() {
            "MiniMax H3" => Makes::Clips,
            _ => Makes::Pictures,
        })
    }

    /// The path of the model that was asked for, none if it is made of parts alone, or the tiny checkpoint if nothing was asked for.
    ///
    /// # Errors
    /// [`Error::NoModel`] without that; [`Error::OtherCommand`] for a model that makes something else.
    pub(crate) fn find(
        self,
        model: Option<&Path>,
        parts: &Parts,
    ) -> Result<Option<PathBuf>, Error> {
        let model = match (model, &parts.transformer) {
            (None, None) => Some(tiny::find(match self {
                Makes::Pictures => tiny::PICTURES,
                Makes::Clips => tiny::CLIPS,
            })?),
            (model, _) => model.map(Path::to_owned),
        };
        self.check(model.as_deref(), parts)?;
        Ok(model)
    }

    /// Refuses a model that makes something else, and says which command is for it.
    fn check(self, model: Option<&Path>, parts: &Parts) -> Result<(), Error> {
        let (makes, command) = match Makes::of(model, parts) {
            Some(Makes::Pictures) if self != Makes::Pictures => ("pictures", "generate"),
            Some(Makes::Clips) if self != Makes::Clips => ("clips", "video"),
            _ => return Ok(()),
        };
        let path = model
            .or(parts.transformer.as_deref())
            .unwrap_or(Path::new(""));
        Err(Error::OtherCommand {
            path: path.to_owned(),
            makes,
            command,
        })
    }
}
