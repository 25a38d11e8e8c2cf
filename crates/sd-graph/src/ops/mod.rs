//! What can be done with tensors, as methods and operators.
//!
//! Every method checks element types and asks the shape rule; a mistake is kept by the graph (see [`crate::graph`]).

mod arithmetic;
mod frames;
mod layout;
mod linear;
mod picture;
mod rotary;
mod signal;

pub use frames::FrameConv;
use sd_backend::DType;
pub use signal::Conv1d;

use crate::graph::Tensor;
use crate::shape::Reason;

/// Refuses operands that are not of the type an operation computes with.
fn expect(tensor: Tensor<'_>, role: &str, wanted: DType) -> Result<(), Reason> {
    if tensor.dtype() == wanted {
        Ok(())
    } else {
        Err(format!("{role} must be {wanted}, not {}", tensor.dtype()).into())
    }
}
