//! Benchmarks of the workspace: `cargo bench -p sd-benches`. They measure and judge nothing; see `benches/`.

pub mod transformer;
