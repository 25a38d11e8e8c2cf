//! The joint sequence of text and pictures: positions, what may see what, and which timestep each token takes.

use half::f16;

use crate::rope::{self, Circular, Embedding, Part, Size, TooLarge};

/// A run of tokens of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Segment {
    /// Tokens of text.
    Text(usize),
    /// The latent pixels of a picture, row by row.
    Image {
        /// Latent rows.
        height: usize,
        /// Latent columns.
        width: usize,
    },
}

impl Segment {
    /// Tokens in this run.
    pub fn tokens(self) -> usize {
        match self {
            Segment::Text(tokens) => tokens,
            Segment::Image { height, width } => height * width,
        }
    }
}

/// Queries that attend in one go: tokens `start .. start + tokens` to the keys `0 .. keys`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionRun {
    /// First query.
    pub start: usize,
    /// Number of queries.
    pub tokens: usize,
    /// Number of keys, from the first token on.
    pub keys: usize,
    /// What is added to the scores, `[tokens, keys]`; nothing if every query sees every key.
    pub mask: Option<Vec<f16>>,
}

/// A joint sequence: text and reference pictures in the order of the prompt, the target picture last.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    prefix: Vec<Segment>,
    height: usize,
    width: usize,
    /// One per text token of the prefix: whether it may be seen. Padding may not.
    valid_text: Vec<bool>,
    circular: Circular,
}

impl Layout {
    /// `tokens` of text, then a target of `height x width` latents.
    pub fn text_to_image(tokens: usize, height: usize, width: usize) -> Layout {
        Layout::new(vec![Segment::Text(tokens)], height, width)
    }

    /// A prefix of text and reference pictures, then a target of `height x width` latents.
    pub fn new(prefix: Vec<Segment>, height: usize, width: usize) -> Layout {
        let text = prefix
            .iter()
            .map(|segment| {
                if let Segment::Text(tokens) = segment {
                    *tokens
                } else {
                    0
                }
            })
            .sum();
        Layout {
            prefix,
            height,
            width,
            valid_text: vec![true; text],
            circular: Circular::NONE,
        }
    }

    /// Marks text tokens that are only padding, in order of the text; they keep their positions but nobody sees them.
    /// Tokens beyond `valid` stay valid.
    pub fn with_valid_text(mut self, valid: &[bool]) -> Layout {
        for (slot, &valid) in self.valid_text.iter_mut().zip(valid) {
            *slot = valid;
        }
        self
    }

    /// All runs of tokens, the target last.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + '_ {
        self.prefix.iter().copied().chain([Segment::Image {
            height: self.height,
            width: self.width,
        }])
    }

    /// Tokens before the target.
    pub fn prefix_tokens(&self) -> usize {
        self.prefix.iter().map(|segment| segment.tokens()).sum()
    }

    /// Tokens of the target.
    pub fn target_tokens(&self) -> usize {
        self.height * self.width
    }

    /// All tokens.
    pub fn tokens(&self) -> usize {
        self.prefix_tokens() + self.target_tokens()
    }

    /// Tokens of text.
    pub fn text_tokens(&self) -> usize {
        self.valid_text.len()
    }

    /// Latent pixels of all pictures, the target's included.
    pub fn image_tokens(&self) -> usize {
        self.tokens() - self.text_tokens()
    }

    /// Joins the sides of all pictures.
    pub fn circular(mut self, circular: Circular) -> Layout {
        self.circular = circular;
        self
    }

    /// Where each token lies on the axes frame, height and width, and how it is turned: see
    /// [`rope::qwen_image_2_1`].
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn rotary_embedding(&self, dims: [usize; 3]) -> Result<Embedding, TooLarge> {
        let parts = self.segments().map(|segment| match segment {
            Segment::Text(tokens) => Part::Text(tokens),
            Segment::Image { height, width } => Part::Picture(Size::new(height, width)),
        });
        Ok(rope::qwen_image_2_1(parts, dims, 1)?.circular(self.circular))
    }

    /// Who sees whom, one run of queries after the other: text sees what comes before it, each picture sees itself as a
    /// whole and what comes before it, nobody sees padding. So no run needs scores beyond its own keys, and a target
    /// without padding needs no mask at all.
    pub fn attention_runs(&self) -> Vec<AttentionRun> {
        let mut runs = Vec::new();
        let mut is_valid: Vec<bool> = Vec::with_capacity(self.tokens());
        let mut valid_text = self.valid_text.iter();
        for segment in self.segments().filter(|segment| segment.tokens() > 0) {
            let (start, tokens) = (is_valid.len(), segment.tokens());
            let is_text = matches!(segment, Segment::Text(_));
            if is_text {
                is_valid.extend(valid_text.by_ref().take(tokens));
            } else {
                is_valid.extend(std::iter::repeat_n(true, tokens));
            }
            let needs_mask = is_text || is_valid.contains(&false);
            let mask = needs_mask.then(|| {
                (0..tokens)
                    .flat_map(|query| {
                        let last = if is_text { start + query } else { usize::MAX };
                        let score = move |(key, &valid): (usize, &bool)| {
                            if valid && key <= last {
                                f16::ZERO
                            } else {
                                f16::NEG_INFINITY
                            }
                        };
                        is_valid.iter().enumerate().map(score)
                    })
                    .collect()
            });
            runs.push(AttentionRun {
                start,
                tokens,
                keys: is_valid.len(),
                mask,
            });
        }
        runs
    }

    /// Which of two timesteps each token is modulated by: 0 for the sampled one (the target), 1 for zero (the prefix).
    pub fn timestep_rows(&self) -> Vec<i32> {
        let mut rows = vec![1; self.prefix_tokens()];
        rows.resize(self.tokens(), 0);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_walks_and_pictures_spread() {
        let layout = Layout::new(
            vec![
                Segment::Text(2),
                Segment::Image {
                    height: 1,
                    width: 3,
                },
                Segment::Text(1),
            ],
            2,
            1,
        );
        let embedding = layout.rotary_embedding([2, 2, 2]).unwrap();
        assert_eq!(
            embedding.positions().as_chunks().0,
            [
                [0.0, 0.0, 0.0],
                [1.0, 1.0, 1.0],
                [2.0, -1.0, -2.0],
                [2.0, -1.0, -1.0],
                [2.0, -1.0, 0.0],
                [5.0, 5.0, 5.0],
                [6.0, -1.0, -1.0],
                [6.0, 0.0, -1.0],
            ]
        );
        assert_eq!(layout.timestep_rows(), [1, 1, 1, 1, 1, 1, 0, 0]);
        assert_eq!(
            (
                layout.prefix_tokens(),
                layout.text_tokens(),
                layout.image_tokens()
            ),
            (6, 3, 5)
        );
    }

    #[test]
    fn pictures_side_by_side_stay_apart_and_padding_is_not_seen() {
        let image = Segment::Image {
            height: 1,
            width: 2,
        };
        let layout =
            Layout::new(vec![Segment::Text(2), image, image], 1, 1).with_valid_text(&[true, false]);
        let runs = layout.attention_runs();
        let seen: Vec<String> = runs
            .iter()
            .flat_map(|run| {
                let mask = run
                    .mask
                    .clone()
                    .unwrap_or_else(|| vec![f16::ZERO; run.tokens * run.keys]);
                let rows = mask.chunks(run.keys).map(|row| {
                    let row: String = row
                        .iter()
                        .map(|&score| if score == f16::ZERO { 'x' } else { '.' })
                        .collect();
                    format!("{row:.<7}")
                });
                rows.collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(
            seen,
            [
                "x......", "x......", "x.xx...", "x.xx...", "x.xxxx.", "x.xxxx.", "x.xxxxx"
            ]
        );
    }

    #[test]
    fn a_target_without_padding_needs_no_mask() {
        let runs = Layout::text_to_image(3, 64, 64).attention_runs();
        assert_eq!(runs.len(), 2);
        assert_eq!(
            (
                runs[0].tokens,
                runs[0].keys,
                runs[0].mask.as_ref().map(Vec::len)
            ),
            (3, 3, Some(9))
        );
        assert_eq!(
            (runs[1].start, runs[1].tokens, runs[1].keys, &runs[1].mask),
            (3, 4096, 4099, &None)
        );
    }
}
