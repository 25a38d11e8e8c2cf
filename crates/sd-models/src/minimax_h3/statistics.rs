//! Means and deviations of latents, wherever files have them.

use sd_backend::DType;
use sd_graph::{Checkpoint, convert};
use serde::Deserialize;

/// The mean and the deviation of each channel.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Statistics {
    #[serde(rename = "latents_mean")]
    pub(super) mean: Vec<f32>,
    #[serde(rename = "latents_std")]
    pub(super) std: Vec<f32>,
}

/// Key of metadata under which the published single file of the frames' VAE has some of its configuration.
const PUBLISHED_KEY: &str = "minimax_h3_video_vae";

/// Those of the published VAE of frames, as [ComfyUI] and [stable-diffusion.cpp] have them: some single files do not say them.
///
/// [ComfyUI]: https://github.com/Comfy-Org/ComfyUI/blob/19315e86a379d3c820b7a56fb4d6b7fde79dcecc/comfy/ldm/minimax/vae.py
/// [stable-diffusion.cpp]: https://github.com/leejet/stable-diffusion.cpp/blob/09633572149742445487cdbc25431a1b92bd76ce/src/model/vae/minimax_h3_vae.hpp
#[rustfmt::skip]
const PUBLISHED: [[f32; 24]; 2] = [
    [
        0.858_090_34, -0.960_659_15, 1.066_164, -0.509_032_55, -0.272_758_2, -1.367_541_4, -0.255_325_5, -0.269_075_54,
        -0.537_684_1, -0.046_409_73, 0.665_737_03, 0.196_901_28, -0.546_060_8, -0.403_534_2, -0.236_830_25, 0.259_284_53,
        -0.301_339_45, 0.211_342, -1.120_684_9, 0.358_193_34, -0.042_251_438, 0.260_483, 0.228_640_93, 0.705_603_2,
    ],
    [
        1.222_377_4, 1.276_726_4, 1.683_177_5, 1.754_945_5, 1.563_621_6, 2.194_143_5, 0.965_313_8, 1.056_988_6,
        0.841_948_9, 0.772_995_3, 1.895_593_8, 0.946_841_84, 0.799_680_95, 0.449_889, 0.719_74, 0.693_629_3,
        2.961_095, 2.769_42, 3.049_618_5, 2.108_805_4, 3.276_226_3, 3.162_735_7, 2.281_681_3, 2.612_784_4,
    ],
];

impl Statistics {
    /// Those of the published VAE of frames.
    fn published() -> Statistics {
        let [mean, std] = PUBLISHED.map(Vec::from);
        Statistics { mean, std }
    }

    /// Those that are tensors of their own in a checkpoint.
    pub(super) fn stored(checkpoint: &Checkpoint) -> Option<Statistics> {
        Some(Statistics {
            mean: vector(checkpoint, "latents_mean")?,
            std: vector(checkpoint, "latents_std")?,
        })
    }

    /// Those of a VAE of frames: of the metadata of its file, of its tensors, or, where it `is_published`, the published ones.
    pub(super) fn of_frames(checkpoint: &Checkpoint, is_published: bool) -> Option<Statistics> {
        let text = checkpoint.metadata().get(PUBLISHED_KEY);
        if let Some(told) = text.and_then(|text| serde_json::from_str(text).ok()) {
            return Some(told);
        }
        let published = Statistics::published();
        match Statistics::stored(checkpoint) {
            // Published files have them in half precision, beside weights that were made with all of their digits.
            Some(stored) if stored.is_rounded(&published) => Some(published),
            None if is_published => Some(published),
            stored => stored,
        }
    }

    /// Whether these numbers are those of `other`, up to what half precision leaves of them.
    fn is_rounded(&self, other: &Statistics) -> bool {
        let near = |is: &Vec<f32>, of: &Vec<f32>| {
            is.len() == of.len()
                && is
                    .iter()
                    .zip(of)
                    .all(|(is, of)| (is - of).abs() <= of.abs() / 2048.0)
        };
        near(&self.mean, &other.mean) && near(&self.std, &other.std)
    }
}

/// The numbers of a tensor, if it is there and they can be read.
pub(super) fn vector(checkpoint: &Checkpoint, name: &str) -> Option<Vec<f32>> {
    let info = checkpoint.get(name)?;
    let count: usize = info.shape.iter().product();
    // What is read of is a few numbers.
    let bytes = usize::try_from(info.bytes).ok();
    let mut stored = vec![0; bytes.filter(|&bytes| bytes <= 1 << 20)?];
    let mut bytes = vec![0; count.checked_mul(4)?];
    checkpoint.read(name, &mut stored).ok()?;
    convert(&stored, info.stored, DType::F32, &mut bytes).ok()?;
    let values = bytes.as_chunks().0.iter();
    Some(values.map(|&bytes| f32::from_le_bytes(bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_half_precision_leaves_is_known_again() {
        let published = Statistics::published();
        let halves = |values: &[f32]| -> Vec<f32> {
            let halves = values.iter().map(|&value| half::f16::from_f32(value));
            halves.map(half::f16::to_f32).collect()
        };
        let mut stored = Statistics {
            mean: halves(&published.mean),
            std: halves(&published.std),
        };
        assert_ne!(stored, published);
        assert!(stored.is_rounded(&published));
        stored.std[23] *= 1.01;
        assert!(!stored.is_rounded(&published));
    }
}
