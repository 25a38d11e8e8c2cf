//! Diffusion models on ggml: what each computes, in the words of its paper, and how a picture is made.

mod animation;
mod builder;
mod canvas;
mod config;
mod denoising;
mod editing;
mod error;
mod frame_rate;
mod image;
mod model_index;
pub mod nn;
pub mod noise;
mod pipeline;
pub mod qwen3_vl;
pub mod qwen_image_2_1;
mod request;
mod resample;
pub mod rope;
mod sampler;
mod schedule;
mod seating;
mod tiling;
pub mod wan_vae;

pub use animation::{AnimationReader, AnimationWriter};
pub use builder::PipelineBuilder;
pub use error::{Error, Result};
pub use frame_rate::FrameRate;
pub use image::Image;
pub use model_index::ModelIndex;
pub use pipeline::Pipeline;
pub use qwen_image_2_1::{Condition, ModelArgs, PrefixCache, References};
pub use request::{Defaults, GenerateReport, Request, SMALLEST_TILE};
pub use rope::Circular;
pub use sampler::{Sampler, Sampling};
pub use schedule::{FlowMatchEuler, Schedule, Scheduler, TimeShift};
pub use seating::{DeviceNeed, MemoryPlan, PrefixNeed};
