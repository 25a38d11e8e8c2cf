//! From a prompt, and the reference pictures that it is about, to a condition.

use sd_backend::Backend;
use sd_graph::{Cancel, Progress};

use super::condition::Condition;
use super::layout::Segment;
use super::model::QwenImage21;
use super::prefix::Prefixes;
use super::prompt::TokenizedPrompt;
use super::references::{References, segments};
use crate::error::Result;
use crate::qwen3_vl::{set_pictures, text_graph};
use crate::rope::Part;

impl QwenImage21 {
    /// Encodes a prompt.
    ///
    /// # Errors
    /// [`Error::Prompt`](crate::Error::Prompt), or the engine's.
    pub fn encode(
        &mut self,
        backend: &mut Backend,
        prompt: &str,
        cancel: &Cancel,
    ) -> Result<Condition> {
        self.encode_with(backend, prompt, &References::none(), cancel)
    }

    /// Encodes a prompt about `references`.
    ///
    /// # Errors
    /// As for [`QwenImage21::encode`].
    pub fn encode_with(
        &mut self,
        backend: &mut Backend,
        prompt: &str,
        references: &References,
        cancel: &Cancel,
    ) -> Result<Condition> {
        let TokenizedPrompt {
            ids,
            system_tokens,
            parts,
        } = self.prompts.tokenize_with(prompt, &references.tokens())?;
        let is_text = parts.iter().flat_map(|part| {
            let is_text = matches!(part, Part::Text(_));
            std::iter::repeat_n(is_text, part.tokens())
        });
        let is_text: Vec<bool> = is_text.collect();
        let text_ids: Vec<i32> = ids
            .iter()
            .zip(&is_text)
            .filter_map(|(&id, &is_text)| is_text.then_some(id))
            .collect();
        let module = &self.text_encoder.module;
        let features = features_of(references);
        let quiet = &mut |_: &Progress| {};
        let plan =
            self.text_plans
                .get_or_build_with(parts.clone(), backend, cancel, quiet, |g| {
                    text_graph(g, module, &parts, features);
                })?;
        plan.set("token_ids", &text_ids)?;
        set_pictures(
            plan,
            references.0.iter().map(|picture| &picture.seen),
            features,
        )?;
        plan.run(backend, cancel)?;
        let width = module.config().hidden_size;
        let hidden: Vec<f32> = plan
            .read::<f32>("hidden")?
            .chunks_exact(width)
            .zip(&is_text)
            .skip(system_tokens)
            .filter(|(_, is_text)| **is_text)
            .flat_map(|(row, _)| row)
            .copied()
            .collect();
        Ok(Condition {
            prompt: prompt.to_owned(),
            tokens: hidden.len() / width,
            token_ids: ids,
            hidden,
            segments: segments(&parts, system_tokens),
            references: references.clone(),
            prefixes: Prefixes::default(),
        })
    }

    /// What the transformer will see of a prompt about `references`.
    pub(crate) fn prefix(&self, prompt: &str, references: &References) -> Result<Vec<Segment>> {
        let tokenized = self.prompts.tokenize_with(prompt, &references.tokens())?;
        Ok(segments(&tokenized.parts, tokenized.system_tokens))
    }
}

/// How many features of each picture are added behind layers.
fn features_of(references: &References) -> usize {
    let first = references.0.first();
    first.map_or(0, |picture| picture.seen.deepstack.len())
}
