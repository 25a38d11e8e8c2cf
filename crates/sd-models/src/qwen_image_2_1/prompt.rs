//! From a prompt to token numbers.

use std::path::Path;

use tokenizers::Tokenizer;

use crate::error::{Error, Result};
use crate::qwen3_vl;

const SYSTEM: &str = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n";

/// Tokens beyond which the reference's rotary table wraps; a prompt that long is refused.
const LONGEST: usize = 8192;

/// Tokenizes prompts in the template that the model was trained with.
#[derive(Debug)]
pub struct PromptTokenizer {
    tokenizer: Tokenizer,
    system_tokens: usize,
    picture_tokens: Vec<u32>,
    limit: usize,
}

/// A prompt as the text encoder reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizedPrompt {
    /// Token numbers, the system message's included.
    pub ids: Vec<i32>,
    /// How many of them belong to the system message; their hidden states are dropped.
    pub system_tokens: usize,
}

impl PromptTokenizer {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] with the file and the reason.
    pub fn read(path: &Path, config: &qwen3_vl::Config) -> Result<PromptTokenizer> {
        let mut tokenizer = Tokenizer::from_file(path)
            .map_err(|error| Error::Tokenizer(format!("{}: {error}", path.display())))?;
        // Prompts are read whole, whatever a file says about cutting and filling.
        tokenizer
            .with_truncation(None)
            .map_err(|error| Error::Tokenizer(format!("{}: {error}", path.display())))?
            .with_padding(None);
        let mut prompts = PromptTokenizer {
            tokenizer,
            system_tokens: 0,
            picture_tokens: [Some(config.image_token_id), config.video_token_id]
                .into_iter()
                .flatten()
                .collect(),
            limit: config.text_config.max_position_embeddings.min(LONGEST),
        };
        prompts.system_tokens = prompts.ids(SYSTEM)?.len();
        Ok(prompts)
    }

    /// Token numbers of the templated prompt. An empty prompt is read as a space, since the encoder needs something to
    /// read.
    ///
    /// # Errors
    /// [`Error::Prompt`] for a prompt too long for the text encoder, or with a token that stands for a picture.
    pub fn tokenize(&self, prompt: &str) -> Result<TokenizedPrompt> {
        let prompt = if prompt.is_empty() { " " } else { prompt };
        let ids = self.ids(&format!(
            "{SYSTEM}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ))?;
        if ids.len() > self.limit {
            return Err(Error::Prompt(format!(
                "has {} tokens with its template; the model reads at most {}",
                ids.len(),
                self.limit
            )));
        }
        if let Some(&token) = ids.iter().find(|token| self.picture_tokens.contains(token)) {
            let text = self.tokenizer.id_to_token(token).unwrap_or_default();
            return Err(Error::Prompt(format!(
                "contains {text}, which stands for a picture that was not given"
            )));
        }
        let ids = ids
            .into_iter()
            .map(|id| i32::try_from(id).unwrap_or(i32::MAX))
            .collect();
        Ok(TokenizedPrompt {
            ids,
            system_tokens: self.system_tokens,
        })
    }

    /// Tokens of the system message, whose hidden states are dropped.
    pub fn system_tokens(&self) -> usize {
        self.system_tokens
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .tokenizer
            .encode_fast(text, true)
            .map_err(|error| Error::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}
