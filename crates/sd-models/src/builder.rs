//! Between files and a loaded model: what all models may be told of devices, memory and types; planning and loading one of pictures.

use std::marker::PhantomData;

use sd_backend::{
    BackendOptions, Component, DType, DeviceChoice, Ledger, Mapping, MemoryBudgets, Placement,
};
use sd_graph::{Cancel, LoadOptions, LoadReport, Progress, Reporter, TensorTypes};

use crate::config::read_json;
use crate::error::Result;
use crate::minimax_h3::QkvOrder;
use crate::model_files::ModelFiles;
use crate::pipeline::Pipeline;
use crate::qwen_image_2_1::{
    IN_ORDER, MemoryPlan, PrefixCache, QwenImage21, Scene, find_largest, reference_sizes,
    segments_for,
};
use crate::request::{Defaults, rounded};
use crate::seating::{Backends, Seating, Wishes};

/// Tokens of a prompt of common length, for what is decided before there is one.
pub(crate) const COMMON_PROMPT: usize = 64;

/// A model that was found but not yet loaded, and how it is to be loaded. `P` is the pipeline that it becomes, of pictures if not
/// said: it is planned and loaded as that one needs, and has its options beside those of all.
#[derive(Debug)]
pub struct PipelineBuilder<P = Pipeline> {
    pub(crate) files: ModelFiles,
    pub(crate) wishes: Wishes,
    pub(crate) backend: BackendOptions,
    pub(crate) load: LoadOptions,
    /// Of MiniMax H3's files.
    pub(crate) order: QkvOrder,
    becomes: PhantomData<fn() -> P>,
}

impl<P> PipelineBuilder<P> {
    pub(crate) fn new(files: ModelFiles) -> PipelineBuilder<P> {
        PipelineBuilder {
            files,
            wishes: Wishes::default(),
            backend: BackendOptions::default(),
            load: LoadOptions::default(),
            order: QkvOrder::default(),
            becomes: PhantomData,
        }
    }

    /// Chooses the device for everything that no [`PipelineBuilder::placement`] puts elsewhere: in the words of
    /// [`Device::select`](sd_backend::Device::select), or a device itself. `auto` if not called.
    pub fn device(mut self, device: impl Into<DeviceChoice>) -> Self {
        self.wishes.device = device.into();
        self
    }

    /// Says which device runs each part, and where its parameters live. What is left open is chosen: as much as the
    /// memory allows stays on its device, the transformer first. The sound VAE of a model of clips runs where the video VAE does.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.wishes.placement = placement;
        self
    }

    /// Says whether weight files may be used where they lie in memory. [`Mapping::Auto`] if not called.
    pub fn mapping(mut self, mapping: Mapping) -> Self {
        self.wishes.mapping = mapping;
        self
    }

    /// Threads that compute on the processor; as many as the machine runs at once if not called.
    pub fn threads(mut self, threads: usize) -> Self {
        self.backend = self.backend.threads(threads);
        self
    }

    /// Grants memory: a number of bytes, all that is free but some, or (if not called) what is free. Replaces an account
    /// set by [`PipelineBuilder::ledger`].
    pub fn memory_budget(mut self, budgets: MemoryBudgets) -> Self {
        self.backend = self.backend.ledger(&Ledger::new(budgets));
        self
    }

    /// Uses an account of memory that other pipelines of this process share.
    pub fn ledger(mut self, ledger: &Ledger) -> Self {
        self.backend = self.backend.ledger(ledger);
        self
    }

    /// Gives weights this type on loading: F32 for the reference's own numbers, `q8_0` or `q4_K` for less memory. The
    /// files' own types if not called. [`LoadOptions`] says what it holds for.
    pub fn weight_type(mut self, dtype: DType) -> Self {
        self.load = self.load.weight_type(dtype);
        self
    }

    /// Gives weights types by their names, which begin with the part's: `transformer.img_in.weight`. May be called several
    /// times; the first rule that fits decides, and comes before [`PipelineBuilder::weight_type`].
    pub fn tensor_types(mut self, rules: TensorTypes) -> Self {
        self.load = self.load.tensor_types(rules);
        self
    }
}

impl PipelineBuilder<Pipeline> {
    /// Says whether keys and values of prompts are kept between steps, which saves the time to compute them again, and in
    /// which type. [`PrefixCache::F32`] if not called. Where memory does not suffice they are not kept.
    pub fn prefix_cache(mut self, prefix: PrefixCache) -> Self {
        self.wishes.prefix = prefix;
        self
    }

    /// What the model needs for one picture of the given size (the model's default if none) and a prompt of `tokens`
    /// tokens. Nothing is loaded.
    ///
    /// # Errors
    /// [`Error::Size`](crate::Error::Size), and everything that can be wrong with files.
    pub fn plan(&self, size: Option<(usize, usize)>, tokens: usize) -> Result<MemoryPlan> {
        self.plan_with(size, tokens, &[], None)
    }

    /// As [`PipelineBuilder::plan`], with reference pictures of the given widths and heights, whose reading is counted, scaled to
    /// `resolution` as by [`Pipeline::read_references`]. Without a size the picture is as large as the last reference, as in a
    /// request.
    ///
    /// # Errors
    /// Those of [`Pipeline::read_references`], and as for [`PipelineBuilder::plan`].
    pub fn plan_with(
        &self,
        size: Option<(usize, usize)>,
        tokens: usize,
        references: &[(u32, u32)],
        resolution: Option<usize>,
    ) -> Result<MemoryPlan> {
        let defaults = self.defaults()?;
        let model = QwenImage21::open(self.files.clone(), &self.load)?;
        let area = defaults.reference_area(resolution)?;
        let reading = match references {
            [] => Vec::new(),
            _ => reference_sizes(references, area, model.reader()?.processor())?,
        };
        let scaled = || reading.iter().map(|size| (size.width, size.height));
        let size = size.or(scaled().next_back());
        let (width, height) = rounded(size.unwrap_or((defaults.width, defaults.height)))?;
        let scale = model.scale_factor();
        let (seating, canvas) = find_largest(
            &model,
            &self.wishes,
            &mut Backends::new(self.backend.clone()),
            Scene {
                prompt: &segments_for(tokens, &reading),
                reading: &reading,
                passes: 1,
                canvas: (height / scale, width / scale).into(),
                reads_prefix: true,
            },
            |_| 0,
        )?;
        Ok(MemoryPlan {
            width,
            height,
            vae_tile: canvas.tile.map(|tile| tile * scale),
            seats: seating.seats,
            readers: seating.readers,
            references: scaled().collect(),
            devices: seating.devices,
            fallbacks: model.fallbacks().cloned().collect(),
            prefix_cache: seating.prefix,
        })
    }

    /// The author's recommendations, if the folder has any.
    fn defaults(&self) -> Result<Defaults> {
        let path = self
            .files
            .folder()
            .map(|folder| folder.join("sd-defaults.json"));
        match path.filter(|path| path.is_file()) {
            Some(path) => read_json(&path),
            None => Ok(Defaults::default()),
        }
    }

    /// Loads the weights.
    ///
    /// # Errors
    /// Everything that can be wrong with files, and memory that runs out.
    pub fn load(self) -> Result<Pipeline> {
        self.load_with(&Cancel::new(), &mut |_: &Progress| {})
    }

    /// Loads the weights, telling of progress; `cancel` stops loading, and later everything else too.
    ///
    /// Where parts go is decided for a picture of the model's default size and a prompt of common length. It is decided
    /// anew for a picture that needs more.
    ///
    /// # Errors
    /// Everything that can be wrong with files, memory that runs out, or the run was cancelled.
    pub fn load_with(self, cancel: &Cancel, progress: &mut dyn Reporter) -> Result<Pipeline> {
        let mut backends = Backends::new(self.backend.clone());
        let defaults = self.defaults()?;
        let mut model = QwenImage21::open(self.files.clone(), &self.load)?;
        let scale = model.scale_factor();
        let size = (defaults.height / scale, defaults.width / scale);
        let (seating, _) = find_largest(
            &model,
            &self.wishes,
            &mut backends,
            Scene {
                prompt: &segments_for(COMMON_PROMPT, &[]),
                reading: &[],
                passes: 1,
                canvas: size.into(),
                reads_prefix: true,
            },
            |_| 0,
        )?;
        // What does not fit now may still do for a smaller picture, unless not even the weights get in.
        progress.report(&Progress::Stage("load"));
        let loaded = seat(&mut model, &seating, &mut backends, cancel, progress)
            .map_err(|error| seating.explain(error))?;
        Ok(Pipeline {
            model,
            backends,
            wishes: self.wishes,
            seating,
            defaults,
            loaded,
            cancel: cancel.clone(),
            empty: None,
        })
    }
}

/// Brings the parts of `model` to where `seating` has them.
pub(crate) fn seat(
    model: &mut QwenImage21,
    seating: &Seating,
    backends: &mut Backends,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<LoadReport> {
    let mut total = LoadReport::default();
    for (seat, component) in seating.seats.iter().zip(IN_ORDER) {
        let weights = model.weights_mut(component);
        weights.live(seat.residence, seating.mapping);
        weights.stream(seat.is_streamed);
        total.add(weights.load(backends.on(seat.device)?, cancel, progress)?);
    }
    Ok(total)
}

/// The device that runs the steps, which is what a pipeline is said to run on.
pub(crate) const MAIN: Component = Component::Diffusion;
