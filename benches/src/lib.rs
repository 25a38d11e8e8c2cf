//! Benchmarks of the workspace: `cargo xtask bench`. They measure and judge nothing.
//!
//! The groups of `sd-bench` measure what a user waits for and write results that can be compared and drawn. Beside them are programs
//! for one question each: `step`, `h3-step`, `stream`, `vae`, `conv`, `memory`,
//! `quality`.

pub mod conv;
pub mod groups;
pub mod h3_step;
pub mod memory;
pub mod peers;
pub mod plot;
pub mod quality;
pub mod results;
pub mod rope;
pub mod statistics;
pub mod step;
pub mod stream;
pub mod table;
pub mod tiny;
pub mod transformer;
pub mod vae;
