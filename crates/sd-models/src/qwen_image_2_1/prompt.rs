//! From a prompt to token numbers.

use std::path::Path;

use tokenizers::Tokenizer;

use crate::error::{Error, Result};
use crate::qwen3_vl;
use crate::rope::{Part, Size};

const SYSTEM: &str = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n";

/// Stands in a prompt for a picture; one for each of its tokens when the prompt is read.
const PICTURE: &str = "<|image_pad|>";

/// Positions beyond which the reference's rotary table wraps; a prompt that long is refused.
const LONGEST: usize = 8192;

/// Tokenizes prompts in the template that the model was trained with.
#[derive(Debug)]
pub struct PromptTokenizer {
    tokenizer: Tokenizer,
    system_tokens: usize,
    image_token: u32,
    video_token: Option<u32>,
    limit: usize,
}

/// A prompt as the text encoder reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizedPrompt {
    /// Token numbers, the system message's included; a picture has one for each of its tokens.
    pub ids: Vec<i32>,
    /// How many of them belong to the system message; their hidden states are dropped.
    pub system_tokens: usize,
    /// Text and pictures in order, pictures in tokens.
    pub parts: Vec<Part>,
}

impl PromptTokenizer {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] with the file and the reason.
    pub fn read(path: &Path, config: &qwen3_vl::Config) -> Result<PromptTokenizer> {
        let tokenizer = Tokenizer::from_file(path)
            .map_err(|error| Error::Tokenizer(format!("{}: {error}", path.display())))?;
        PromptTokenizer::new(tokenizer, config)
    }

    /// As [`PromptTokenizer::read`], for a tokenizer that was read.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub(crate) fn new(
        mut tokenizer: Tokenizer,
        config: &qwen3_vl::Config,
    ) -> Result<PromptTokenizer> {
        // Prompts are read whole, whatever a file says about cutting and filling.
        tokenizer
            .with_truncation(None)
            .map_err(|error| Error::Tokenizer(error.to_string()))?
            .with_padding(None);
        let mut prompts = PromptTokenizer {
            tokenizer,
            system_tokens: 0,
            image_token: config.image_token_id,
            video_token: config.video_token_id,
            limit: config.text_config.max_position_embeddings,
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
        self.tokenize_with(prompt, &[])
    }

    /// As [`PromptTokenizer::tokenize`], for a prompt about `pictures` of so many rows and columns of tokens, which come
    /// before it.
    ///
    /// # Errors
    /// As for [`PromptTokenizer::tokenize`].
    pub fn tokenize_with(&self, prompt: &str, pictures: &[Size]) -> Result<TokenizedPrompt> {
        let prompt = if prompt.is_empty() { " " } else { prompt };
        let places: Vec<String> = (1..=pictures.len())
            .map(|number| format!("<image{number}><|vision_start|>{PICTURE}<|vision_end|>"))
            .collect();
        let read = self.ids(&format!(
            "{SYSTEM}<|im_start|>user\n{}{prompt}<|im_end|>\n<|im_start|>assistant\n",
            places.join(" ")
        ))?;
        let mut sizes = pictures.iter();
        let mut ids = Vec::with_capacity(read.len());
        let (mut parts, mut text) = (Vec::new(), 0);
        for id in read {
            let number = i32::try_from(id).unwrap_or(i32::MAX);
            if id != self.image_token && Some(id) != self.video_token {
                ids.push(number);
                text += 1;
                continue;
            }
            // The template's come first.
            let Some(&size) = sizes.next().filter(|_| id == self.image_token) else {
                let text = self.tokenizer.id_to_token(id).unwrap_or_default();
                return Err(Error::Prompt(format!(
                    "contains {text}, which stands for a picture that was not given"
                )));
            };
            ids.extend(std::iter::repeat_n(number, size.height * size.width));
            parts.extend([Part::Text(std::mem::take(&mut text)), Part::Picture(size)]);
        }
        parts.push(Part::Text(text));
        if sizes.next().is_some() {
            return Err(Error::Tokenizer(format!(
                "{PICTURE} is not the token of the text encoder's pictures"
            )));
        }
        self.check_length(ids.len(), &parts)?;
        Ok(TokenizedPrompt {
            ids,
            system_tokens: self.system_tokens,
            parts,
        })
    }

    /// Refuses what goes on beyond what the text encoder reads, or beyond the positions of the transformer, on which a
    /// picture takes as many as its longer side has latents.
    fn check_length(&self, tokens: usize, parts: &[Part]) -> Result<()> {
        let positions = parts.iter().map(|part| match part {
            Part::Text(tokens) => *tokens,
            Part::Picture(size) => 2 * size.longer(),
        });
        let limits = [(tokens, self.limit), (positions.sum(), LONGEST)];
        match limits.into_iter().find(|(length, limit)| length > limit) {
            Some((length, limit)) => Err(Error::Prompt(format!(
                "has {length} tokens with its template; the model reads at most {limit}"
            ))),
            None => Ok(()),
        }
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
