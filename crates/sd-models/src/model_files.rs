//! Which files a model is made of, when it is not a folder alone.

use std::path::{Path, PathBuf};

use sd_backend::Component;

/// Where the parts of a model are: a folder in the diffusers layout or a file that holds some or all of them, and files of single
/// parts, which come before what the folder has.
///
/// ```no_run
/// use sd_models::{ModelFiles, Pipeline};
///
/// # fn main() -> Result<(), sd_models::Error> {
/// let files = ModelFiles::default()
///     .transformer("qwen-image-2.1-Q4_K_M.gguf")
///     .text_encoder("Qwen3VL-8B-Instruct-Q4_K_M.gguf")
///     .vae("qwen_image_2.1_vae_bf16.safetensors");
/// let pipeline = Pipeline::open(files)?.load()?;
/// # let _ = pipeline;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelFiles {
    pub(crate) model: Option<PathBuf>,
    pub(crate) transformer: Option<PathBuf>,
    pub(crate) reference_transformer: Option<PathBuf>,
    pub(crate) text_encoder: Option<PathBuf>,
    pub(crate) vision: Option<PathBuf>,
    pub(crate) vae: Option<PathBuf>,
    pub(crate) sound_vae: Option<PathBuf>,
    pub(crate) tokenizer: Option<PathBuf>,
    pub(crate) loras: Vec<(PathBuf, f32)>,
}

impl ModelFiles {
    /// The model folder, or a file with several parts.
    pub fn model(mut self, path: impl Into<PathBuf>) -> Self {
        self.model = Some(path.into());
        self
    }

    /// The transformer: a `.safetensors` or `.gguf` file, or a folder of either.
    pub fn transformer(mut self, path: impl Into<PathBuf>) -> Self {
        self.transformer = Some(path.into());
        self
    }

    /// The transformer of MiniMax H3 that makes clips from references, which is another than that for prompts and keyframes.
    pub fn reference_transformer(mut self, path: impl Into<PathBuf>) -> Self {
        self.reference_transformer = Some(path.into());
        self
    }

    /// The text encoder: a `.safetensors` file, a `.gguf` file as llama.cpp has it, or a folder of either.
    pub fn text_encoder(mut self, path: impl Into<PathBuf>) -> Self {
        self.text_encoder = Some(path.into());
        self
    }

    /// The vision tower of a text encoder whose file has none: the `mmproj` file that llama.cpp has beside its language models.
    pub fn vision(mut self, path: impl Into<PathBuf>) -> Self {
        self.vision = Some(path.into());
        self
    }

    /// The VAE: a file with the names of diffusers or of its authors, or a folder of it.
    pub fn vae(mut self, path: impl Into<PathBuf>) -> Self {
        self.vae = Some(path.into());
        self
    }

    /// The sound VAE of MiniMax H3: a file or a folder of it.
    pub fn sound_vae(mut self, path: impl Into<PathBuf>) -> Self {
        self.sound_vae = Some(path.into());
        self
    }

    /// The tokenizer: `tokenizer.json`, or a folder with it. Without one it is that of the model folder, or the one that a GGUF
    /// file of the text encoder holds.
    pub fn tokenizer(mut self, path: impl Into<PathBuf>) -> Self {
        self.tokenizer = Some(path.into());
        self
    }

    /// Adds a LoRA to the transformer, behind those that are there, `strength` times.
    pub fn lora(mut self, path: impl Into<PathBuf>, strength: f32) -> Self {
        self.loras.push((path.into(), strength));
        self
    }

    /// What was given for one part alone.
    pub(crate) fn of(&self, component: Component) -> Option<&Path> {
        let path = match component {
            Component::Diffusion => &self.transformer,
            Component::TextEncoder => &self.text_encoder,
            Component::Vae => &self.vae,
        };
        path.as_deref()
    }

    /// What stands for all of it in errors.
    pub(crate) fn label(&self) -> &Path {
        let main = self.model.as_ref().or(self.transformer.as_ref());
        main.map_or(Path::new("the model"), PathBuf::as_path)
    }

    /// The folder that may say how pictures are made ready for the vision tower; one that is not there if nothing was given.
    pub(crate) fn processor(&self) -> PathBuf {
        let of_tokenizer = self.tokenizer.as_deref();
        let of_tokenizer = of_tokenizer.map(|path| match path.is_dir() {
            true => path,
            false => path.parent().unwrap_or(path),
        });
        let of_model = self.folder().map(|folder| folder.join("processor"));
        let of_model = of_model.filter(|folder| folder.is_dir() || of_tokenizer.is_none());
        // Below a file there is nothing.
        let nothing = || self.label().join("processor");
        let of_tokenizer = || of_tokenizer.map(Path::to_owned);
        of_model.or_else(of_tokenizer).unwrap_or_else(nothing)
    }

    /// The model folder in the diffusers layout, if there is one.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.model.as_deref().filter(|path| path.is_dir())
    }
}

impl<P: AsRef<Path>> From<P> for ModelFiles {
    /// The model folder, or a file with several parts.
    fn from(path: P) -> ModelFiles {
        ModelFiles::default().model(path.as_ref())
    }
}
