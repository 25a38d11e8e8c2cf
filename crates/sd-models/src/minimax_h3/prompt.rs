//! From a prompt, and what it speaks of, to the rows of text that the transformer sees.
//!
//! There is no template: labels and places of what is referred to, each tokenized by itself, and then the prompt as it is.
//!
//! Source: [`encoders.py`](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/modular_pipelines/minimax_h3/encoders.py#L530).

use tokenizers::Tokenizer;

use super::layout::Tag;
use crate::error::{Error, Result};
use crate::qwen3_vl::{self, IMAGE_TOKEN, VIDEO_TOKEN};
use crate::rope::{Part, Size};

/// Before the tokens of a picture.
const START: &str = "<|vision_start|>";
/// Behind them.
const END: &str = "<|vision_end|>";

/// Pictures of a clip that the text encoder sees of a second.
const SEEN_PER_SECOND: f64 = 2.0;

/// Something that the prompt speaks of, as the text encoder is told of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Mention {
    /// A picture of so many rows and columns of tokens.
    Picture(Size),
    /// Sound, of which the text encoder hears nothing.
    Sound,
    /// A clip.
    Clip {
        /// Rows and columns of tokens of each group of its pictures that is seen.
        tokens: Size,
        /// Seconds at which each group is seen.
        times: Vec<f64>,
        /// Whether it has sound.
        has_sound: bool,
    },
}

/// A prompt as the text encoder reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct Tokens {
    /// Token numbers; a picture has one for each of its tokens.
    pub ids: Vec<i32>,
    /// What each stands for: what marks the ends of a picture counts as a part of it.
    pub tags: Vec<Tag>,
    /// Text and pictures in order, pictures in tokens. Marks of pictures are text here.
    pub parts: Vec<Part>,
}

impl Tokens {
    /// Token numbers of the text alone.
    pub(crate) fn text_ids(&self) -> Vec<i32> {
        let mut ids = Vec::new();
        let mut rest = &self.ids[..];
        for part in &self.parts {
            let (here, behind) = rest.split_at(part.tokens().min(rest.len()));
            if let Part::Text(_) = part {
                ids.extend(here);
            }
            rest = behind;
        }
        ids
    }
}

/// Tokenizes prompts as the model was trained with them.
#[derive(Debug)]
pub struct Presentation {
    tokenizer: Tokenizer,
    picture: u32,
    clip: u32,
    start: u32,
    end: u32,
    limit: usize,
}

impl Presentation {
    /// With a tokenizer that was read, and the text encoder's configuration.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if it has no tokens for pictures.
    pub fn new(mut tokenizer: Tokenizer, config: &qwen3_vl::Config) -> Result<Presentation> {
        // Prompts are read whole, whatever a file says about cutting and filling.
        tokenizer
            .with_truncation(None)
            .map_err(|error| Error::Tokenizer(error.to_string()))?
            .with_padding(None);
        let token = |text: &str| {
            let missing = || Error::Tokenizer(format!("there is no token {text}"));
            tokenizer.token_to_id(text).ok_or_else(missing)
        };
        let (start, end) = (token(START)?, token(END)?);
        let (picture, clip) = (token(IMAGE_TOKEN)?, token(VIDEO_TOKEN)?);
        if picture != config.image_token_id {
            return Err(Error::Tokenizer(format!(
                "{IMAGE_TOKEN} is not the token of the text encoder's pictures"
            )));
        }
        Ok(Presentation {
            picture,
            clip,
            start,
            end,
            limit: config.text_config.max_position_embeddings,
            tokenizer,
        })
    }

    /// Rows for a prompt that speaks of `mentions`: those first, in their order, numbered by kind. Keyframes are pictures. A prompt
    /// without anything is read as a space, since the text encoder needs something to read.
    ///
    /// # Errors
    /// [`Error::Prompt`] for a prompt too long for the text encoder, or with a token that stands for a picture.
    pub fn tokenize(&self, prompt: &str, mentions: &[Mention]) -> Result<Tokens> {
        let prompt = match mentions.is_empty() && prompt.is_empty() {
            true => " ",
            false => prompt,
        };
        let mut rows = Rows::default();
        let (mut pictures, mut clips, mut sounds) = (0, 0, 0);
        let number = |count: &mut usize| {
            *count += 1;
            *count
        };
        for mention in mentions {
            if let Mention::Sound
            | Mention::Clip {
                has_sound: true, ..
            } = mention
            {
                let label = format!("<Audio {}>: ", number(&mut sounds));
                rows.text(&self.ids(&label)?);
            }
            match mention {
                Mention::Sound => {}
                Mention::Picture(tokens) => {
                    let label = format!("<Picture {}>: ", number(&mut pictures));
                    rows.text(&self.ids(&label)?);
                    rows.picture(self, self.picture, *tokens);
                }
                Mention::Clip { tokens, times, .. } => {
                    let label = format!("<Video {}>: ", number(&mut clips));
                    rows.text(&self.ids(&label)?);
                    for time in times {
                        // One place behind the point, exact halves to even, as in Python: 0.25 is 0.2.
                        rows.text(&self.ids(&format!("<{time:.1} seconds>"))?);
                        rows.picture(self, self.clip, *tokens);
                    }
                }
            }
        }
        let ids = self.ids(prompt)?;
        let reserved = [self.picture, self.clip];
        if let Some(&id) = ids.iter().find(|id| reserved.contains(id)) {
            let text = self.tokenizer.id_to_token(id).unwrap_or_default();
            return Err(Error::Prompt(format!(
                "contains {text}, which stands for a picture that was not given"
            )));
        }
        rows.text(&ids);
        let length = rows.0.ids.len();
        if length > self.limit {
            return Err(Error::Prompt(format!(
                "has {length} tokens with what it refers to; the model reads at most {}",
                self.limit
            )));
        }
        Ok(rows.0)
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .tokenizer
            .encode_fast(text, false)
            .map_err(|error| Error::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// Rows while they are put one behind the other.
struct Rows(Tokens);

impl Default for Rows {
    fn default() -> Rows {
        Rows(Tokens {
            ids: Vec::new(),
            tags: Vec::new(),
            parts: Vec::new(),
        })
    }
}

impl Rows {
    fn text(&mut self, ids: &[u32]) {
        self.read(ids, Tag::Text);
    }

    fn picture(&mut self, presentation: &Presentation, id: u32, tokens: Size) {
        self.read(&[presentation.start], Tag::Video);
        let count = tokens.height * tokens.width;
        self.put(&vec![id; count], Tag::Video);
        self.0.parts.push(Part::Picture(tokens));
        self.read(&[presentation.end], Tag::Video);
    }

    /// What the text encoder reads as text, whatever the transformer takes it for.
    fn read(&mut self, ids: &[u32], tag: Tag) {
        self.put(ids, tag);
        match self.0.parts.last_mut() {
            Some(Part::Text(tokens)) => *tokens += ids.len(),
            _ => self.0.parts.push(Part::Text(ids.len())),
        }
    }

    fn put(&mut self, ids: &[u32], tag: Tag) {
        let ids = ids.iter();
        let ids = ids.map(|&id| i32::try_from(id).unwrap_or(i32::MAX));
        self.0.ids.extend(ids);
        self.0.tags.resize(self.0.ids.len(), tag);
    }
}

/// Which of a clip's frames, at `rate` a second, the text encoder sees, and the seconds of each group of `joined` of them.
///
/// # Errors
/// [`Error::ClipReferences`] for a clip of fewer than one group.
pub(crate) fn seen_of_clip(
    frames: usize,
    rate: u32,
    joined: usize,
) -> Result<(Vec<usize>, Vec<f64>)> {
    let stride = f64::from(rate) / SEEN_PER_SECOND;
    let mut indices: Vec<usize> = Vec::new();
    let mut cursor = 0.0_f64;
    loop {
        let index = cursor.round_ties_even() as usize;
        if index >= frames {
            break;
        }
        if indices.last().is_none_or(|&last| index > last) {
            indices.push(index);
        }
        cursor += stride;
    }
    let joined = joined.max(1);
    if indices.len() < joined {
        let least = ((joined - 1) as f64 * stride).round_ties_even() as usize + 1;
        return Err(Error::ClipReferences(format!(
            "a clip of {frames} frames at {rate} a second is too short: {least} are the fewest"
        )));
    }
    let mut times: Vec<f64> = (0..indices.len())
        .map(|index| index as f64 / SEEN_PER_SECOND)
        .collect();
    let last = times.last().copied().unwrap_or_default();
    times.resize(times.len().next_multiple_of(joined), last);
    let groups = times.chunks_exact(joined);
    let middle = |group: &[f64]| {
        let ends = group.first().zip(group.last());
        ends.map_or(0.0, |(first, last)| (first + last) / 2.0)
    };
    Ok((indices, groups.map(middle).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clips_are_seen_twice_a_second() {
        // `_sample_video_condition_frames` of diffusers.
        let (indices, times) = seen_of_clip(49, 24, 2).unwrap();
        assert_eq!(indices, [0, 12, 24, 36, 48]);
        assert_eq!(times, [0.25, 1.25, 2.0]);
        assert_eq!(seen_of_clip(13, 24, 2).unwrap().0, [0, 12]);
        let error = seen_of_clip(12, 24, 2).unwrap_err().to_string();
        assert!(error.contains("13 are the fewest"), "{error}");
        let labels: Vec<String> = [0.25, 0.75, 1.25].map(|t| format!("{t:.1}")).into();
        assert_eq!(labels, ["0.2", "0.8", "1.2"]);
    }
}
