//! Reading reference pictures: the vision tower and the VAE's encoder, which are in memory only while they read.

use sd_backend::{Backend, Mapping};
use sd_graph::{Cancel, Checkpoint, Estimate, LoadOptions, Reporter};

use super::VaeConfig;
use super::model::QwenImage21;
use crate::error::{Error, Result};
use crate::model_files::ModelFiles;
use crate::qwen3_vl::{self, ImageProcessor, Seen, Sight};
use crate::rope::Size;
use crate::sources::Source;
use crate::wan_vae::{Clip, Tiling, WanVae};

/// What reads reference pictures. Its weights come and go: most pictures are made without.
#[derive(Debug)]
pub(crate) struct Reader {
    sight: Sight,
    processor: ImageProcessor,
    /// By itself, since the decoder may be on its device all the time.
    vae: WanVae,
}

impl Reader {
    /// Opens what reads pictures, if the text encoder has a vision tower and the VAE an encoder. Checks names and shapes.
    pub(super) fn open(
        files: &ModelFiles,
        options: &LoadOptions,
        text: &Source<qwen3_vl::Config>,
        vae: &Source<VaeConfig>,
    ) -> Result<Option<Reader>> {
        let Some(vision) = &text.config.vision_config else {
            return Ok(None);
        };
        let has = |checkpoint: &Checkpoint, name: &str| {
            let mut names = checkpoint.tensors().map(|(found, _)| found);
            names.any(|found| found.starts_with(name))
        };
        if !has(&text.checkpoint, "model.visual.") || !has(&vae.checkpoint, "encoder.") {
            return Ok(None);
        }
        crate::config::check(
            files.label(),
            &[(
                "a token of the vision tower is two by two latents of the VAE",
                vision.token_side() == 2 * vae.config.scale_factor(),
            )],
        )?;
        Ok(Some(Reader {
            sight: Sight::open(text, vision, options)?,
            processor: ImageProcessor::read(&files.processor(), vision)?,
            vae: WanVae::new(&vae.checkpoint, vae.config.clone(), options)?.mapping(Mapping::Never),
        }))
    }

    /// How pictures are made ready.
    pub(crate) fn processor(&self) -> &ImageProcessor {
        &self.processor
    }

    /// The vision tower.
    pub(crate) fn sight(&self) -> &Sight {
        &self.sight
    }

    /// What looking at a picture of `size` pixels takes beside the tower's weights.
    pub(crate) fn tower_estimate(&self, backend: &Backend, size: Size) -> Result<Estimate> {
        self.sight.estimate(backend, self.processor.grid(size))
    }

    /// Bytes of weights, and of what is computed, that encoding a picture of `size` pixels takes: at once if `room` suffices for
    /// that, else in the smallest squares.
    pub(crate) fn encoder_bytes(
        &self,
        backend: &Backend,
        size: Size,
        room: Option<u64>,
    ) -> Result<(u64, u64)> {
        let fit = |tiling| {
            let size = (size.height, size.width);
            self.vae.fit_encoding(backend, 1, size, tiling)
        };
        let mut found = fit(Tiling::Whole)?;
        if room.is_some_and(|room| room < found.bytes) {
            found = fit(Tiling::Squares(Tiling::SMALLEST))?;
        }
        Ok((found.weights, found.bytes - found.weights))
    }

    /// Says whether the vision tower's weights pass through its device while it looks.
    pub(crate) fn stream(&mut self, is_streamed: bool) {
        self.sight.stream(is_streamed);
    }

    /// Gives up everything that it has in memory.
    pub(crate) fn release(&mut self) {
        self.sight.release();
        self.vae.unload();
    }

    /// Looks at the red, green and blue planes of a picture of `size` pixels. What it takes stays for the next picture.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn look(
        &mut self,
        backend: &mut Backend,
        (planes, size): (&[u8], Size),
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Seen> {
        let patches = self.processor.patches(planes, size);
        let grid = self.processor.grid(size);
        self.sight.look(backend, (&patches, grid), cancel, progress)
    }

    /// Normalised latents `[pixels, channels]` of a picture's planes `[4, height, width]` with values from -1 to 1: the means
    /// of what the encoder says.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn encode(
        &mut self,
        backend: &mut Backend,
        planes: Vec<f32>,
        size: Size,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let picture = Clip {
            frames: 1,
            channels: 4,
            height: size.height,
            width: size.width,
            values: planes,
        };
        let (mut latents, _) = self.vae.encode(backend, &picture, Tiling::Fit, cancel)?;
        self.vae.config().normalize(&mut latents);
        let pixels = latents.height * latents.width;
        Ok((0..pixels)
            .flat_map(|pixel| latents.values.iter().skip(pixel).step_by(pixels.max(1)))
            .copied()
            .collect())
    }
}

impl QwenImage21 {
    /// What reads reference pictures.
    ///
    /// # Errors
    /// [`Error::NoReferences`] for a checkpoint without.
    pub(crate) fn reader(&self) -> Result<&Reader> {
        self.reader.as_ref().ok_or(MISSING)
    }

    /// As [`QwenImage21::reader`], to read with it.
    ///
    /// # Errors
    /// [`Error::NoReferences`].
    pub(crate) fn reader_mut(&mut self) -> Result<&mut Reader> {
        self.reader.as_mut().ok_or(MISSING)
    }

    /// Whether it can read reference pictures.
    pub fn reads_references(&self) -> bool {
        self.reader.is_some()
    }
}

const MISSING: Error = Error::NoReferences("vision tower and VAE encoder to read references with");

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sd_backend::fake::{FakeDevice, FakeOptions};
    use sd_backend::{BackendOptions, DType, Ledger, MemoryBudget, MemoryBudgets};
    use sd_graph::Progress;

    use super::super::files::Sources;
    use super::*;

    #[test]
    fn a_tower_whose_weights_pass_through_sees_the_same() {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen-image-2.1");
        let files = ModelFiles::from(&tiny);
        let sources = Sources::open(&files).unwrap();
        let options = LoadOptions::default().weight_type(DType::F32);
        let mut reader = Reader::open(&files, &options, &sources.text_encoder, &sources.vae)
            .unwrap()
            .unwrap();
        let size = Size::new(64, 96);
        let planes: Vec<u8> = (0..3 * 64 * 96_u32).map(|n| (n * 37 % 251) as u8).collect();
        let mut look = |budget: MemoryBudget, is_streamed| {
            let fake = FakeDevice::new(FakeOptions {
                memory: 64 << 20,
                ..FakeOptions::default()
            });
            let budgets = MemoryBudgets::default().with("Fake0", budget);
            let ledger = Ledger::with_headroom(budgets, 0);
            let options = BackendOptions::default().ledger(&ledger);
            let mut backend = Backend::new(fake.device(), &options).unwrap();
            reader.stream(is_streamed);
            let picture = (&planes[..], size);
            let quiet = &mut |_: &Progress| {};
            let seen = reader.look(&mut backend, picture, &Cancel::new(), quiet);
            reader.release();
            assert_eq!(
                (
                    fake.counts().buffers,
                    ledger.report(fake.device()).used.total()
                ),
                (0, 0)
            );
            (seen, fake.counts().peak_bytes as u64)
        };
        let (whole, peak) = look(MemoryBudget::Automatic, false);
        let half = MemoryBudget::Bytes(peak / 2);
        assert!(look(half, false).0.unwrap_err().is_out_of_memory());
        let (streamed, least) = look(half, true);
        assert!(least <= peak / 2, "{least} of {peak}");
        let (whole, streamed) = (whole.unwrap(), streamed.unwrap());
        assert!(whole.embeddings == streamed.embeddings);
        assert!(whole.deepstack == streamed.deepstack && whole.deepstack.len() == 1);
    }
}
