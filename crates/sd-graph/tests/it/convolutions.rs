//! What stands around convolutions in decoders, in shapes that devices have kernels of their own for: they do such chains at
//! once, and must come to what the steps come to one after the other.

use sd_backend::DType;
use sd_graph::{FrameConv, Tensor};

use crate::frames::causal;
use crate::ops::check_with;
use crate::reference::{Array, conv2d};

const CHANNELS: usize = 12;
const OUT: usize = 10;
/// More than 256 pixels, in rows that no tile of 16 fills.
const HEIGHT: usize = 18;
const WIDTH: usize = 20;

/// Kernels in half precision: operands lose 2^-11 of their size, sums of a hundred products less.
const TOLERANCE: f64 = 2e-3;

fn picture(frames: usize, channels: usize, seed: u64) -> Array {
    Array::random(&[frames, channels, HEIGHT, WIDTH], seed)
}

fn kernel(side: usize, seed: u64) -> Array {
    Array::random(&[OUT, CHANNELS, side, side], seed)
}

/// Channels of each pixel brought to deviation 1, times a weight, through SiLU.
fn normed(x: &Array, weight: &Array) -> Array {
    Array::from_fn(&x.dims, |at| {
        let square = |channel| x.at(&[at[0], channel, at[2], at[3]]).powi(2);
        let mean = (0..CHANNELS).map(square).sum::<f64>() / CHANNELS as f64;
        let value = x.at(at) / (mean + 1e-12).sqrt() * weight.at(&[at[1]]);
        value / (1.0 + (-value).exp())
    })
}

fn norm<'g>(x: Tensor<'g>, weight: Tensor<'g>) -> Tensor<'g> {
    let x = x.permute([0, 2, 3, 1]).rms_norm(1e-12) * weight;
    x.silu().permute([0, 3, 1, 2])
}

/// The bias of each channel, and the same picture again.
fn added(x: &Array, bias: &Array, residual: &Array) -> Array {
    Array::from_fn(&x.dims, |at| x.at(at) + bias.at(&[at[1]]) + residual.at(at))
}

/// Norm, convolution, bias and residual; `seen` if something else needs the picture in between, which must find it.
fn block<'g>(t: &[Tensor<'g>], side: usize, seen: bool) -> Tensor<'g> {
    let normed = norm(t[0], t[1]);
    let conv = normed.conv2d(t[2].cast(DType::F16), 1, side / 2);
    let sum = conv + t[3].reshape([OUT, 1, 1]) + t[4];
    if seen {
        sum + normed.slice(1, 0, OUT) * 0.0
    } else {
        sum
    }
}

#[test]
fn a_residual_block_is_its_steps() {
    let (x, weight) = (
        picture(2, CHANNELS, 1),
        Array::random(&[CHANNELS], 2).map(|w| w + 1.0),
    );
    let (bias, residual) = (Array::random(&[OUT], 3), picture(2, OUT, 4));
    for side in [3, 1] {
        let kernel = kernel(side, 5);
        let seen = conv2d(&normed(&x, &weight), &kernel, 1, [side / 2; 2]);
        let expected = added(&seen, &bias, &residual);
        let inputs = [&x, &weight, &kernel, &bias, &residual];
        check_with("block", &inputs, &expected, TOLERANCE, |_, t| {
            block(t, side, false)
        });
        check_with("block, seen", &inputs, &expected, TOLERANCE, |_, t| {
            block(t, side, true)
        });
        // The order of what is added, and nothing added.
        check_with("residual first", &inputs, &expected, TOLERANCE, |_, t| {
            let conv = norm(t[0], t[1]).conv2d(t[2].cast(DType::F16), 1, side / 2);
            t[4] + conv + t[3].reshape([OUT, 1, 1])
        });
        check_with("alone", &inputs, &seen, TOLERANCE, |_, t| {
            norm(t[0], t[1]).conv2d(t[2].cast(DType::F16), 1, side / 2)
        });
    }
}

#[test]
fn a_doubled_picture_is_its_pixels() {
    let small = Array::random(&[2, CHANNELS, HEIGHT / 2, WIDTH / 2], 6);
    let doubled = Array::from_fn(&[2, CHANNELS, HEIGHT, WIDTH], |at| {
        small.at(&[at[0], at[1], at[2] / 2, at[3] / 2])
    });
    let (kernel, bias) = (kernel(3, 7), Array::random(&[OUT], 8));
    let seen = conv2d(&doubled, &kernel, 1, [1, 1]);
    let expected = added(&seen, &bias, &seen.map(|_| 0.0));
    let inputs = [&small, &kernel, &bias];
    check_with("doubled", &inputs, &expected, TOLERANCE, |_, t| {
        let conv = t[0].upscale_nearest(2).conv2d(t[1].cast(DType::F16), 1, 1);
        conv + t[2].reshape([OUT, 1, 1])
    });
    // Rows alone, which is no doubling.
    let wide = Array::from_fn(&[2, CHANNELS, HEIGHT / 2, WIDTH], |at| {
        small.at(&[at[0], at[1], at[2], at[3] / 2])
    });
    let expected = conv2d(&wide, &kernel, 1, [1, 1]);
    check_with("wide", &inputs, &expected, TOLERANCE, |_, t| {
        let wide = t[0].upscale_nearest_by([1, 2]);
        wide.conv2d(t[1].cast(DType::F16), 1, 1)
    });
}

#[test]
fn frames_are_seen_at_their_time() {
    let bias = Array::random(&[OUT], 9);
    for (past, side) in [(2, 3), (1, 3), (0, 3), (2, 1)] {
        let x = picture(past + 2, CHANNELS, 10);
        let kernel = Array::random(&[OUT, CHANNELS, 3, side, side], 11);
        let conv = FrameConv {
            side: [side; 2],
            padding: [side / 2; 2],
            past,
            stride: 1,
            spatial_stride: 1,
        };
        let seen = causal(&x, &kernel, conv);
        let residual = picture(2, OUT, 12);
        let expected = added(&seen, &bias, &residual);
        let flat = Array::new(&[OUT * CHANNELS, 3, side * side], kernel.values.clone());
        let inputs = [&x, &flat, &bias, &residual];
        let name = format!("{past} frames before, {side} by {side}");
        check_with(&name, &inputs, &expected, TOLERANCE, |_, t| {
            let conv = t[0].conv3d_causal(t[1].cast(DType::F16), conv);
            conv + t[2].reshape([OUT, 1, 1]) + t[3]
        });
    }
}
