//! Ways to compute a convolution of pictures, and which of them is taken.

use sd_backend::{DType, Device};

/// How a convolution of pictures is computed. All give the same numbers but for the order of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Convolution {
    /// By ggml's own operation, which needs no memory beside the result.
    Direct,
    /// As a product of the kernel with the patches of the picture that it sees, which take as many times the memory of the
    /// picture as the kernel has elements.
    Patches,
}

/// Where patches are taken although the device has an operation of its own: the backend, the type of the kernel, and the most
/// bytes of patches, since speed is not worth any amount of memory.
///
/// Measured by `cargo xtask bench conv`, whose figures docs/wan_vae.md has. A Xeon of 2 cores with AVX-512
/// multiplies patches 1.15 to 1.4 times as fast as its own operation convolves with kernels in single precision, and with
/// kernels in half precision no faster. An H200 is 4 to 27 times as fast with patches in single precision, where its operation has no kernel
/// for that card: few channels, or strides. Where it has one it says so by the memory it asks for, and is taken.
const PATCHES: &[(&str, DType, u64)] =
    &[("CPU", DType::F32, 64 << 20), ("CUDA", DType::F32, 3 << 30)];

impl Convolution {
    /// The way to take on `device` for kernels of this type, where patches would take so many bytes.
    pub(crate) fn best(device: Device, kernel: DType, patch_bytes: u64) -> Convolution {
        let backend = device.backend_name();
        let mut known = PATCHES.iter();
        match known.find(|(name, dtype, _)| *name == backend && *dtype == kernel) {
            Some((_, _, most)) if patch_bytes <= *most => Convolution::Patches,
            _ => Convolution::Direct,
        }
    }
}
