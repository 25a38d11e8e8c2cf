//! What a convolution of pictures costs by the way that it is computed, for the shapes of the VAEs' decoders.
//!
//! ```sh
//! cargo xtask bench conv --device CUDA0 --backends DIR
//! ```
//!
//! Ways: `direct`, ggml's own operation; `patches`, its patches (`im2col`) times the kernel; `taps`, the sum of nine products of
//! pixels with one element of the kernel each, channels innermost, which copies nothing nine times (the turning of the picture
//! into that order and back is counted). It prints a table: GFLOP/s, and MiB that are computed in. A way that the device lacks
//! is `-`.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_graph::{Cancel, Convolution, Graph, Plan, Tensor};
use sd_models::noise;

/// What convolutions cost.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Device to run on.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Folder of backends to load first.
    #[arg(long)]
    backends: Option<PathBuf>,
    /// Threads that compute on the processor.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Runs that are measured, after one to warm up; the fastest counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Divides the sides of all pictures, for slow devices.
    #[arg(long, default_value_t = 1)]
    smaller: usize,
}

/// `[in, out, side]` of convolutions three by three in the decoders of Qwen-Image 2.1, for a picture of 1024, and of WAN 2.1.
const SHAPES: [[usize; 3]; 9] = [
    [1152, 1152, 64],
    [1152, 1152, 128],
    [576, 576, 256],
    [288, 288, 512],
    [144, 144, 1024],
    [144, 4, 1024],
    [384, 384, 104],
    [192, 192, 416],
    [96, 96, 832],
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Ggml(Convolution),
    Taps,
}

const WAYS: [(&str, Way); 3] = [
    ("direct", Way::Ggml(Convolution::Direct)),
    ("patches", Way::Ggml(Convolution::Patches)),
    ("taps", Way::Taps),
];

/// Prints the table.
pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let device = Device::select(&arguments.device)?;
    println!("{device} ({})", device.description());
    print!("{:>6} {:>6} {:>6} {:>5}", "in", "out", "side", "type");
    for (name, _) in WAYS {
        print!(" {name:>9} {:>6}", "MiB");
    }
    println!();
    for [input, output, side] in SHAPES {
        let side = (side / arguments.smaller).max(8);
        for dtype in [DType::F32, DType::F16] {
            print!("{input:>6} {output:>6} {side:>6} {dtype:>5}");
            for (_, way) in WAYS {
                match measure(arguments, device, [input, output, side], dtype, way) {
                    Ok((seconds, bytes)) => {
                        let operations = (2 * 9 * input * output * side * side) as f64;
                        print!(" {:>9.1} {:>6}", operations / seconds / 1e9, bytes >> 20);
                    }
                    Err(_) => print!(" {:>9} {:>6}", "-", "-"),
                }
            }
            println!();
        }
    }
    Ok(())
}

/// Seconds of the fastest run, and bytes that are computed in.
fn measure(
    arguments: &Arguments,
    device: Device,
    [input, output, side]: [usize; 3],
    dtype: DType,
    way: Way,
) -> Result<(f64, u64)> {
    let options = BackendOptions::default().threads(arguments.threads);
    let mut backend = Backend::new(device, &options)?;
    let pixels = noise::normal(1, input * side * side);
    let values = noise::normal(2, output * input * 9);
    let mut plan = Plan::build(&backend, |g: Graph<'_>| {
        let x = g.input::<f32>("x", [1, input, side, side]);
        let y = match way {
            Way::Ggml(by) => {
                let kernel = g.constant(&values, [output, input, 3, 3]).cast(dtype);
                x.conv2d_by(kernel, 1, [1, 1], by)
            }
            Way::Taps => {
                let kernel = g.constant(&values, [9, output, input]).cast(dtype);
                taps(x, kernel)
            }
        };
        // A single number, so that reading the result costs nothing.
        g.output("y", y.slice(3, 0, 1).slice(2, 0, 1).slice(1, 0, 1));
    })?;
    let (cancel, mut best) = (Cancel::new(), f64::INFINITY);
    for run in 0..=arguments.runs {
        plan.set("x", &pixels)?;
        let begin = Instant::now();
        plan.run(&mut backend, &cancel)?;
        plan.read::<f32>("y")?;
        if run > 0 {
            best = best.min(begin.elapsed().as_secs_f64());
        }
    }
    Ok((best, plan.compute_bytes()))
}

/// `x [1, in, h, w]` with a kernel `[9, out, in]`, zeros around.
fn taps<'g>(x: Tensor<'g>, kernel: Tensor<'g>) -> Tensor<'g> {
    let (input, h, w) = (x.dim(1), x.dim(2), x.dim(3));
    let output = kernel.dim(1);
    let row = x.slice(2, 0, 1) * 0.0;
    let tall = row.concat(x, 2);
    let column = tall.slice(3, 0, 1) * 0.0;
    // A pixel more on each side; two rows more below, so that the last tap ends inside.
    let padded = column.concat(tall, 3).pad_end(2, 1);
    let (rows, stride) = (h + 3, w + 2);
    let pixels = padded
        .reshape([input, rows * stride])
        .transpose(0, 1)
        .reshape([rows * stride, input]);
    let count = h * stride;
    let mut sum: Option<Tensor<'g>> = None;
    for tap in 0..9 {
        let seen = pixels.slice(0, tap / 3 * stride + tap % 3, count);
        let part = seen.matmul_transposed(kernel.slice(0, tap, 1).reshape([output, input]));
        sum = Some(match sum {
            None => part,
            Some(sum) => sum + part,
        });
    }
    let sum = sum.unwrap_or(pixels);
    sum.transpose(0, 1)
        .reshape([1, output, h, stride])
        .slice(3, 0, w)
}
