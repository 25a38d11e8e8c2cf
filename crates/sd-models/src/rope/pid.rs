//! PiD: a picture spread over a fixed extent, columns and rows in turns.

use super::embedding::{Embedding, Precision, TooLarge};
use super::frequency::{Frequency, ntk_theta, omegas};
use super::sequence::{Sequence, Size};

/// Units of position between the first and the last row, and the first and the last column.
const EXTENT: f32 = 16.0;

/// The picture of PiD: a grid of `size` tokens whose rows and columns are spread from 0 to 16, whatever their number, in
/// heads of `head_dim` channels; pairs follow columns and rows in turns, columns first. Bases are stretched by how much
/// longer a side is than the `reference` grid's (64 x 64 in the first version, 128 x 128 in 1.5); without one they stay.
/// A single row or column lies at 0.
///
/// A wrapped side repeats one step beyond its last row: after 16 h / (h - 1) units. Text has an embedding of its own,
/// [`one_axis`](super::one_axis).
///
/// Source: [`make_rope_2d`](https://github.com/leejet/stable-diffusion.cpp/blob/97d2990807fe6d558e395f8764198d7c7e7b411c/src/model/diffusion/pid.hpp).
///
/// # Errors
/// [`TooLarge`].
pub fn pid(size: Size, head_dim: usize, reference: Option<Size>) -> Result<Embedding, TooLarge> {
    let dim = head_dim / 2;
    let theta = |side: usize, reference: Option<usize>| match reference {
        Some(reference) if reference > 0 && side > 0 => {
            ntk_theta(10_000.0, dim, side as f64 / reference as f64)
        }
        _ => 10_000.0,
    };
    let columns = theta(size.width, reference.map(|reference| reference.width));
    let rows = theta(size.height, reference.map(|reference| reference.height));
    let frequencies = omegas(dim, columns, Precision::Double)
        .zip(omegas(dim, rows, Precision::Double))
        .flat_map(|(x, y)| [(2, x), (1, y)].map(|(axis, omega)| Frequency { axis, omega }))
        .collect();

    let place = |index: usize, side: usize| {
        if side > 1 {
            EXTENT * index as f32 / (side - 1) as f32
        } else {
            0.0
        }
    };
    let step = |side: usize| {
        if side > 1 {
            EXTENT / (side - 1) as f32
        } else {
            1.0
        }
    };
    let mut sequence = Sequence::new();
    sequence.frames(
        1,
        size,
        (step(size.height), step(size.width)),
        |_, row, column| [0.0, place(row, size.height), place(column, size.width)],
    );
    sequence.embed(frequencies, Precision::Double, 1)
}
