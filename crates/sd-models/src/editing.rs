//! Prompts that speak of pictures.

use sd_backend::{Component, Seat};
use sd_graph::{Progress, Reporter};

use crate::builder::COMMON_PROMPT;
use crate::error::Result;
use crate::image::Image;
use crate::pipeline::Pipeline;
use crate::qwen_image_2_1::{
    Condition, Reference, References, Scene, dimensions, reference_sizes, segments_for,
};
use crate::resample::{lanczos, on_white};
use crate::rope::Size;

/// A picture of two by two latents, the smallest there is.
const SMALLEST: (usize, usize) = (2, 2);

impl Pipeline {
    /// Reads one to four reference pictures, for prompts that say what to make of them. The result may be kept and used for
    /// any number of prompts; of no pictures it is [`References::none`].
    ///
    /// Each picture is scaled to the area of a square of `resolution` pixels by side, whatever its own size, and keeps its aspect
    /// as far as sides of whole 32 pixels allow; without a `resolution`, to the area of the model's default size. The vision
    /// tower sees transparent pictures on white, the transformer sees them as they are.
    ///
    /// The weights that this takes are loaded for it alone. `progress` hears of the stage `read references`, and of two
    /// steps for each picture.
    ///
    /// # Errors
    /// [`Error::TooManyReferences`](crate::Error::TooManyReferences), [`Error::Reference`](crate::Error::Reference),
    /// [`Error::Resolution`](crate::Error::Resolution); [`Error::NoReferences`](crate::Error::NoReferences) for a checkpoint that
    /// cannot read pictures; or the engine's.
    pub fn read_references(
        &mut self,
        images: &[Image],
        resolution: Option<usize>,
        progress: &mut dyn Reporter,
    ) -> Result<References> {
        let area = self.defaults.reference_area(resolution)?;
        if images.is_empty() {
            return Ok(References::none());
        }
        let sizes = reference_sizes(&dimensions(images), area, self.model.reader()?.processor())?;
        // What is made of them is not known yet; it takes this at least.
        let scene = Scene {
            prompt: &segments_for(COMMON_PROMPT, &sizes),
            reading: &sizes,
            passes: 1,
            canvas: SMALLEST.into(),
            reads_prefix: false,
        };
        self.fit(scene, &[], progress)?;
        let outcome = self.read_all(images, &sizes, progress);
        if let Ok(reader) = self.model.reader_mut() {
            reader.release();
        }
        self.seating.readers.clear();
        outcome
    }

    /// Encodes a prompt about `references`. The result may be kept and used for any number of pictures.
    ///
    /// # Errors
    /// [`Error::Prompt`](crate::Error::Prompt), or the engine's.
    pub fn encode_with(&mut self, prompt: &str, references: &References) -> Result<Condition> {
        let quiet = &mut |_: &Progress| {};
        if !references.is_empty() {
            let prompt = self.model.prefix(prompt, references)?;
            let scene = Scene {
                prompt: &prompt,
                reading: &[],
                passes: 1,
                canvas: SMALLEST.into(),
                reads_prefix: false,
            };
            self.fit(scene, &[], quiet)?;
        }
        self.with_retry(Component::TextEncoder, |pipeline| {
            pipeline.with_part(
                Component::TextEncoder,
                &mut |_: &Progress| {},
                |model, backend, cancel, _| model.encode_with(backend, prompt, references, cancel),
            )
        })
    }

    fn read_all(
        &mut self,
        images: &[Image],
        sizes: &[Size],
        progress: &mut dyn Reporter,
    ) -> Result<References> {
        progress.report(&Progress::Stage("read references"));
        let total = 2 * images.len();
        let pictures: Vec<_> = images
            .iter()
            .zip(sizes)
            .map(|(image, size)| lanczos(image.pixels(), size.width as u32, size.height as u32))
            .collect();
        let is_streamed = self
            .seating
            .readers
            .first()
            .is_some_and(|seat: &Seat| seat.is_streamed);
        let device = self.device_of(Component::TextEncoder);
        let mut seen = Vec::with_capacity(images.len());
        for (picture, &size) in pictures.iter().zip(sizes) {
            let planes = on_white(picture);
            let features = self.with_retry_beside(self.parts_on(device), |pipeline| {
                let (backend, cancel) = (pipeline.backends.on(device)?, &pipeline.cancel);
                let reader = pipeline.model.reader_mut()?;
                reader.stream(is_streamed);
                reader.look(backend, (&planes, size), cancel, progress)
            })?;
            seen.push(features);
            let done = seen.len();
            progress.report(&Progress::Step { done, total });
        }
        self.model.reader_mut()?.release();
        let device = self.device_of(Component::Vae);
        let mut references = Vec::with_capacity(images.len());
        for ((picture, &size), seen) in pictures.into_iter().zip(sizes).zip(seen) {
            let picture = Image::from(picture);
            let latents = self.with_retry_beside(self.parts_on(device), |pipeline| {
                let (backend, cancel) = (pipeline.backends.on(device)?, &pipeline.cancel);
                let reader = pipeline.model.reader_mut()?;
                reader.encode(backend, picture.to_planes(4), size, cancel)
            })?;
            references.push(Reference {
                size,
                latents,
                seen,
            });
            let done = images.len() + references.len();
            progress.report(&Progress::Step { done, total });
        }
        Ok(References::new(references))
    }
}
