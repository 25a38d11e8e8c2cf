//! Integration tests of `sd-models`: against numbers that diffusers made, and against hostile folders.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod corpus;
mod counts;
mod editing;
mod fixtures;
#[path = "../../../sd-graph/tests/it/gguf_file.rs"]
#[allow(dead_code, reason = "what other tests need is not needed here")]
mod gguf_file;
mod h3_denoise;
mod h3_files;
mod h3_memory;
mod h3_pipeline;
mod h3_published;
mod h3_transformer;
mod layouts;
mod lora;
mod noise;
mod picture_tiles;
mod placement;
mod prefix;
mod preview;
mod prompt;
mod published;
mod rope;
mod rope_applied;
mod rope_properties;
mod sampler;
mod schedule;
mod seamless;
mod sound_vae;
mod step_cache;
mod text_encoder;
mod tiny;
mod tiny_clip;
mod transformer;
mod vae;
mod video_vae;
mod video_vae_files;
mod vision;
mod wan;
mod wan_files;
mod wan_tiles;
mod wide;
