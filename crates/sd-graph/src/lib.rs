//! Checked tensor graphs and weight loading on ggml.
//!
//! What this crate promises:
//!
//! - no assertion of ggml can be reached from safe code: shapes, types, names, row numbers and memory are checked
//!   first, and a mistake is a value;
//! - a checkpoint is judged as a whole before a byte of it moves;
//! - a [`Plan`] is built and allocated once per set of shapes and then only run.
//!
//! ```no_run
//! use sd_backend::{Backend, BackendOptions, Device};
//! use sd_graph::{Cancel, Plan};
//!
//! # fn main() -> Result<(), sd_graph::Error> {
//! let mut backend = Backend::new(Device::cpu()?, &BackendOptions::default())?;
//! let mut plan = Plan::build(&backend, |g| {
//!     let x = g.input::<f32>("x", [2, 3]);
//!     g.output("y", (x * 2.0).silu());
//! })?;
//! plan.set("x", &[0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0])?;
//! plan.run(&mut backend, &Cancel::new())?;
//! let y: Vec<f32> = plan.read("y")?;
//! # Ok(()) }
//! ```

mod acquire;
mod cache;
mod checkpoint;
mod convert;
mod convolution;
mod error;
mod form;
mod graph;
mod layout;
mod load;
mod load_plan;
mod low_rank;
mod lower;
mod lowering;
mod op;
mod ops;
mod param;
mod plan;
mod raw;
mod relay;
mod relief;
mod ring;
mod run;
mod runner_cache;
mod running;
mod scope;
mod segment;
pub mod shape;
mod slots;
mod small_floats;
mod snake;
mod split;
mod split_plan;
mod state;
mod stream;
mod transfer;
mod weight_types;
mod weights;
mod workspace;

pub use cache::PlanCache;
pub use checkpoint::{
    Checkpoint, CheckpointError, Conversion, ConversionReport, Existing, FileFormat, Rows,
    Selection, StoredType, TensorInfo, UnknownStoredType, WriteError,
};
pub use convert::{ConvertError, convert, is_convertible};
pub use convolution::Convolution;
pub use error::{Allocation, Error, FailureKind, Result};
pub use graph::{Element, Graph, GraphError, Tensor};
pub use load::{LoadReport, load, unload};
pub use load_plan::{LoadCost, LoadPlan};
pub use low_rank::{Adapter, Adapters, LowRank};
pub use op::Pairing;
pub use ops::{Conv1d, FrameConv};
pub use param::Param;
pub use plan::{Estimate, Plan, Segmentation};
pub use relief::{Failure, Relief, with_relief};
pub use run::{Cancel, Progress, Reporter, RunReport};
pub use runner_cache::{CacheEntry, RunnerCache};
pub use scope::{Declarations, Mismatch, Scope};
pub use shape::Shape;
pub use split::{Share, Split};
pub use split_plan::SplitPlan;
pub use state::State;
pub use weight_types::{Fallback, LoadOptions, Role, TensorTypes, WeightTypeError, weight_type};
pub use weights::Weights;
