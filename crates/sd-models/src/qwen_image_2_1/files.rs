//! From the files of a model to what is declared against them: where each part is, what its tensors are called and what it is like.

use serde::Deserialize;
use serde_json::{Value, json};

use super::VaeConfig;
use super::names::TRANSFORMER;
use super::prompt::PromptTokenizer;
use super::transformer::TransformerConfig;
use crate::config::{from_json, read_json};
use crate::error::Result;
use crate::model_files::ModelFiles;
use crate::qwen3_vl::{self, TEXT_ENCODER};
use crate::schedule::FlowMatchEuler;
use crate::sources::{Described, Opened, Source, text_encoder};
use crate::wan_vae::VAE;

/// What of `model_index.json` bears on sampling.
#[derive(Debug, Default, Deserialize)]
struct ModelIndex {
    #[serde(default)]
    sample_sigmas: Option<Vec<f32>>,
}

/// All parts of a model.
#[derive(Debug)]
pub(super) struct Sources {
    pub(super) text_encoder: Source<qwen3_vl::Config>,
    pub(super) transformer: Source<TransformerConfig>,
    pub(super) vae: Source<VaeConfig>,
    pub(super) prompts: PromptTokenizer,
    pub(super) scheduler: FlowMatchEuler,
    pub(super) sample_sigmas: Option<Vec<f32>>,
}

impl Sources {
    /// Finds all parts, reads what describes them and checks it. No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`](crate::Error).
    pub(super) fn open(files: &ModelFiles) -> Result<Sources> {
        let index: ModelIndex = match files.folder() {
            Some(folder) => read_json(&folder.join("model_index.json"))?,
            None => ModelIndex::default(),
        };
        let mut opened = Opened::default();
        let mut part =
            |known, folder, hint| Described::find(files, known, folder, hint, &mut opened);
        let text = part(&TEXT_ENCODER, "text_encoder", "--text-encoder")?;
        let transformer = part(&TRANSFORMER, "transformer", "--transformer")?;
        let vae = part(&VAE, "vae", "--vae")?;
        let (text_encoder, tokenizer) = text_encoder(files, text)?;
        let prompts = PromptTokenizer::new(tokenizer, &text_encoder.config)?;
        let scheduler = match files.folder() {
            Some(folder) => FlowMatchEuler::read(&folder.join("scheduler/scheduler_config.json"))?,
            None => from_json(files.label(), published_schedule())?,
        };
        Ok(Sources {
            text_encoder,
            transformer: transformer.read(TransformerConfig::checked)?,
            vae: vae.read(VaeConfig::checked)?,
            prompts,
            scheduler,
            sample_sigmas: index.sample_sigmas,
        })
    }
}

/// The schedule of the published model, which files of weights do not hold.
fn published_schedule() -> Value {
    json!({
        "num_train_timesteps": 1000,
        "shift": 1.0,
        "use_dynamic_shifting": true,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
    })
}
