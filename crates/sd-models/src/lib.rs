//! Diffusion models on ggml: what each computes, in the words of its paper, and how a picture is made.

mod animation;
mod avi;
mod builder;
mod canvas;
mod config;
mod convert;
mod denoising;
mod editing;
mod error;
mod families;
mod frame_rate;
mod gguf_tokenizer;
mod image;
mod lora;
pub mod minimax_h3;
mod model_files;
mod model_index;
mod naming;
pub mod nn;
pub mod noise;
mod part;
mod pipeline;
mod preview;
pub mod qwen3_vl;
pub mod qwen_image_2_1;
mod request;
mod resample;
pub mod rope;
mod sampler;
mod schedule;
mod seating;
mod shapes;
mod sound;
mod sources;
mod step_cache;
mod tiling;
mod video;
pub mod wan_vae;

pub use animation::{AnimationReader, AnimationWriter};
pub use avi::AviWriter;
pub use builder::PipelineBuilder;
pub use convert::conversion;
pub use error::{Error, Result};
pub use families::{Identified, identify};
pub use frame_rate::FrameRate;
pub use image::Image;
pub use lora::{Adapted, LoraReport};
pub use minimax_h3::{
    Reference, VideoMemoryPlan, VideoPipeline, VideoPipelineBuilder, VideoReport, VideoRequest,
    VideoShape,
};
pub use model_files::ModelFiles;
pub use model_index::ModelIndex;
pub use noise::{Generator, Rng};
pub use pipeline::Pipeline;
pub use preview::PreviewBy;
pub use qwen_image_2_1::{Condition, ModelArgs, PrefixCache, References};
pub use request::{Defaults, GenerateReport, Request, SMALLEST_TILE};
pub use rope::Circular;
pub use sampler::{Sampler, Sampling};
pub use schedule::{FlowMatchEuler, Schedule, Scheduler, TimeShift};
pub use seating::{DeviceNeed, MemoryPlan, PrefixNeed};
pub use sound::{RATES, Sound};
pub use video::Video;
