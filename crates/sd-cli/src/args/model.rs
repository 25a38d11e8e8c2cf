//! Arguments that say which model is loaded, in which types, and where to.

use std::path::{Path, PathBuf};

use clap::Args;
use sd_backend::{
    Backend, BackendOptions, DType, Device, Ledger, Mapping, MemoryBudgets, Placement,
};
use sd_graph::{LoadOptions, TensorTypes};
use sd_models::{ModelArgs, ModelFiles, PipelineBuilder};

/// Files of single parts of a model.
#[derive(Debug, Args)]
pub(crate) struct Parts {
    /// Transformer, in place of the model's: a .safetensors or .gguf file, or a folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) transformer: Option<PathBuf>,

    /// Text encoder, in place of the model's: a .safetensors file, a .gguf file as llama.cpp has it, or a folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) text_encoder: Option<PathBuf>,

    /// Vision tower of a text encoder whose file has none, for prompts about pictures: a .gguf file as llama.cpp has it (mmproj).
    #[arg(long, value_name = "FILE")]
    pub(crate) vision: Option<PathBuf>,

    /// VAE, in place of the model's: a file or a folder.
    #[arg(long, value_name = "PATH")]
    pub(crate) vae: Option<PathBuf>,

    /// Tokenizer, in place of the model's or of that in a .gguf text encoder: tokenizer.json, or a folder with it.
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,

    /// LoRA to add to the transformer, and how many times [default: 1]. May be given several times.
    #[arg(long, value_name = "FILE[:STRENGTH]", value_parser = lora)]
    pub(crate) lora: Vec<(PathBuf, f32)>,
}

impl Parts {
    /// All files of a model with these parts.
    pub(crate) fn files(&self, model: Option<&Path>) -> ModelFiles {
        let mut files = ModelFiles::default();
        if let Some(path) = model {
            files = files.model(path);
        }
        if let Some(path) = &self.transformer {
            files = files.transformer(path);
        }
        if let Some(path) = &self.text_encoder {
            files = files.text_encoder(path);
        }
        if let Some(path) = &self.vision {
            files = files.vision(path);
        }
        if let Some(path) = &self.vae {
            files = files.vae(path);
        }
        if let Some(path) = &self.tokenizer {
            files = files.tokenizer(path);
        }
        let loras = self.lora.iter();
        loras.fold(files, |files, (path, strength)| files.lora(path, *strength))
    }
}

/// A path, and behind a colon a number if what is there is one.
fn lora(text: &str) -> Result<(PathBuf, f32), String> {
    let (path, strength) = match text.rsplit_once(':') {
        Some((path, number)) if !path.is_empty() && number.parse::<f32>().is_ok() => {
            (path, number.parse().unwrap_or(1.0))
        }
        _ => (text, 1.0),
    };
    if path.is_empty() {
        return Err("a file is expected".to_owned());
    }
    if !f32::is_finite(strength) {
        return Err(format!("{strength} is no strength"));
    }
    Ok((path.into(), strength))
}

/// Which model is loaded, in which types, and where to.
#[derive(Debug, Args)]
pub(crate) struct Loading {
    #[command(flatten, next_help_heading = "Parts of the model")]
    pub(crate) parts: Parts,

    #[command(flatten, next_help_heading = "Devices and memory")]
    resources: Resources,

    #[command(flatten, next_help_heading = "Types of weights")]
    weights: Weights,
}

impl Loading {
    /// Passes on where to and in which types.
    pub(crate) fn apply<P>(&self, builder: PipelineBuilder<P>) -> PipelineBuilder<P> {
        self.weights.apply(self.resources.apply(builder))
    }
}

/// A device, and what is granted of the machine.
#[derive(Debug, Args)]
pub(crate) struct Machine {
    /// Device to run on: auto, cpu, gpu, the name of one, or rpc://HOST:PORT for one of a server.
    #[arg(short, long, value_name = "NAME", default_value = "auto")]
    pub(crate) device: String,

    /// Memory that may be used: auto, 8GiB, free-2GiB, or by device: cuda0=8GiB,cpu=4GiB.
    #[arg(long, value_name = "BUDGET", default_value = "auto")]
    pub(crate) memory_budget: MemoryBudgets,

    /// Threads that compute on the processor [default: as many as there are].
    #[arg(short, long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,
}

impl Machine {
    /// The device, with what is granted.
    pub(crate) fn backend(&self) -> Result<Backend, sd_backend::Error> {
        let mut options =
            BackendOptions::default().ledger(&Ledger::new(self.memory_budget.clone()));
        if let Some(threads) = self.threads {
            options = options.threads(threads);
        }
        Backend::new(Device::select(&self.device)?, &options)
    }
}

/// A number of threads, at least one.
pub(super) fn threads(text: &str) -> Result<usize, String> {
    let threads = text
        .parse()
        .map_err(|_| "a number is expected".to_owned())?;
    match threads {
        0 => Err("at least 1 thread is needed".to_owned()),
        _ => Ok(threads),
    }
}

/// Where the model runs, and in how much memory.
#[derive(Debug, Args)]
pub(crate) struct Resources {
    #[command(flatten)]
    machine: Machine,

    /// Where the parts go: a device for all, or by part, such as diffusion=cuda0,vae=cpu,text-encoder=cuda0@disk. After
    /// an @: where the part's weights are while it does not run (device, host, disk). The rest is chosen.
    #[arg(long, value_name = "PLACEMENT")]
    placement: Option<Placement>,

    /// Use weight files where they lie in memory: auto, never, always (also where a device does not say it can).
    #[arg(long, value_name = "MODE", default_value = "auto")]
    mapping: Mapping,
}

impl Resources {
    /// Passes them on.
    pub(crate) fn apply<P>(&self, builder: PipelineBuilder<P>) -> PipelineBuilder<P> {
        let machine = &self.machine;
        let builder = builder
            .device(machine.device.as_str())
            .placement(self.placement.clone().unwrap_or_default())
            .mapping(self.mapping)
            .memory_budget(machine.memory_budget.clone());
        match machine.threads {
            Some(threads) => builder.threads(threads),
            None => builder,
        }
    }
}

/// Options of single models.
#[derive(Debug, Args)]
pub(crate) struct Model {
    /// Options of single models, with commas between them: qwen_image_2_1_prefix_cache=true|false keeps keys and values of
    /// the prompt between steps [default: true], qwen_image_2_1_prefix_cache_type=f32|f16|q8_0 says in which type
    /// [default: f32]. May be given several times.
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) model_args: Vec<ModelArgs>,
}

impl Model {
    /// Passes them on; the last that says something decides.
    pub(crate) fn apply(&self, builder: PipelineBuilder) -> PipelineBuilder {
        let args = self.model_args.iter();
        let args = args.fold(ModelArgs::default(), |before, args| args.or(before));
        builder.prefix_cache(args.prefix_cache())
    }
}

/// Which types weights get in memory.
#[derive(Debug, Args)]
pub(crate) struct Weights {
    /// Type that weights get, such as f16, q8_0 or q4_K [default: that of the files].
    #[arg(long, value_name = "TYPE", value_parser = sd_graph::weight_type)]
    pub(crate) weight_type: Option<DType>,

    /// Type of the weights in whose full name a regular expression is found, such as '^transformer\..*attn=q8_0'. May be
    /// given several times; the first that fits decides, and comes before --weight-type.
    #[arg(long, value_name = "PATTERN=TYPE")]
    pub(crate) tensor_type: Vec<TensorTypes>,
}

impl Weights {
    /// What they ask of a file.
    pub(crate) fn apply_to(&self, mut options: LoadOptions) -> LoadOptions {
        if let Some(dtype) = self.weight_type {
            options = options.weight_type(dtype);
        }
        let rules = self.tensor_type.iter();
        rules.fold(options, |options, rules| {
            options.tensor_types(rules.clone())
        })
    }

    /// Passes them on.
    pub(crate) fn apply<P>(&self, mut builder: PipelineBuilder<P>) -> PipelineBuilder<P> {
        if let Some(dtype) = self.weight_type {
            builder = builder.weight_type(dtype);
        }
        for rules in &self.tensor_type {
            builder = builder.tensor_types(rules.clone());
        }
        builder
    }
}
