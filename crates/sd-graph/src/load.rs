//! Bringing declared parameters into a device's memory. One of the places of this crate with `unsafe` in it.

use std::sync::Arc;

use half::{bf16, f16};
use rayon::prelude::*;
use sd_backend::{Buffer, BufferUsage, DType, Device};
use sd_ggml_sys as sys;

use crate::checkpoint::{Checkpoint, StoredType};
use crate::error::{Error, Result};
use crate::param::{Param, Place};
use crate::raw::Arena;
use crate::run::{Cancel, Progress, Reporter};

/// What loading did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Bytes of memory that the parameters take.
    pub bytes: u64,
    /// Bytes among them whose type was changed on the way.
    pub converted: u64,
}

/// Loads `params`, which were declared against `checkpoint`, into the memory of `device`.
///
/// # Errors
/// [`Error::Backend`] when memory runs out (nothing stays allocated), [`Error::Checkpoint`] when a file cannot be
/// read, [`Error::Backend`] with [`sd_backend::Error::Cancelled`].
pub fn load(
    checkpoint: &Checkpoint,
    params: &[Param],
    device: Device,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<LoadReport> {
    let alignment = Buffer::alignment(device);
    let mut offsets = Vec::with_capacity(params.len());
    let mut total = 0_usize;
    for param in params {
        offsets.push(total);
        total = param
            .bytes()
            .checked_next_multiple_of(alignment)
            .and_then(|bytes| total.checked_add(bytes))
            .ok_or_else(|| device.out_of_memory(u64::MAX))?;
    }
    if params.is_empty() {
        return Ok(LoadReport::default());
    }
    let buffer = Arc::new(Buffer::allocate(device, total, BufferUsage::Weights)?);
    let arena = Arena::new(params.len(), false).map_err(|_| device.out_of_memory(total as u64))?;

    let mut report = LoadReport {
        bytes: total as u64,
        converted: 0,
    };
    let mut stored_bytes = Vec::new();
    let mut memory_bytes = Vec::new();
    for (index, (param, &offset)) in params.iter().zip(&offsets).enumerate() {
        cancel.check()?;
        let info = checkpoint
            .get(param.name())
            .ok_or_else(|| Error::NotDeclared {
                name: param.name().to_owned(),
            })?;
        stored_bytes.clear();
        stored_bytes.resize(info.bytes as usize, 0);
        checkpoint.read(param.name(), &mut stored_bytes)?;
        let bytes = if is_same(info.stored, param.dtype()) {
            &stored_bytes
        } else {
            report.converted += param.bytes() as u64;
            convert(&stored_bytes, info.stored, param.dtype(), &mut memory_bytes).ok_or_else(
                || Error::NotDeclared {
                    name: param.name().to_owned(),
                },
            )?;
            &memory_bytes
        };
        if bytes.len() != param.bytes() {
            return Err(Error::NotDeclared {
                name: param.name().to_owned(),
            });
        }
        let tensor = arena
            .tensor(param.dtype(), param.shape())
            .map_err(|_| device.out_of_memory(total as u64))?;
        // SAFETY: the tensor is fresh; its bytes lie inside the buffer (`total` is the sum of all), aligned as the
        // device asks; exactly `param.bytes()` bytes are copied from a slice of that length.
        let status = unsafe {
            let base = sys::ggml_backend_buffer_get_base(buffer.as_ptr()).cast::<u8>();
            let status = sys::ggml_backend_tensor_alloc(
                buffer.as_ptr(),
                tensor.as_ptr(),
                base.add(offset).cast(),
            );
            if status == sys::GGML_STATUS_SUCCESS {
                sys::ggml_backend_tensor_set(
                    tensor.as_ptr(),
                    bytes.as_ptr().cast(),
                    0,
                    bytes.len(),
                );
            }
            status
        };
        if status != sys::GGML_STATUS_SUCCESS {
            return Err(device.out_of_memory(param.bytes() as u64).into());
        }
        progress.report(&Progress::Loading {
            done: index + 1,
            total: params.len(),
            bytes: (offset + bytes.len()) as u64,
        });
    }
    for (param, offset) in params.iter().zip(offsets) {
        param.set_place(Place {
            buffer: Arc::clone(&buffer),
            offset,
        });
    }
    Ok(report)
}

fn is_same(stored: StoredType, memory: DType) -> bool {
    matches!(
        (stored, memory),
        (StoredType::F32, DType::F32)
            | (StoredType::F16, DType::F16)
            | (StoredType::BF16, DType::BF16)
    )
}

/// Converts little-endian numbers in `from` to `memory` in `into`; `None` for types that `Scope::param` never asks for.
fn convert(from: &[u8], stored: StoredType, memory: DType, into: &mut Vec<u8>) -> Option<()> {
    into.clear();
    macro_rules! each {
        ($bytes:literal, $number:ty) => {
            match memory {
                DType::F32 => map(from, into, |b: [u8; $bytes]| {
                    (<$number>::from_le_bytes(b).to_f32()).to_ne_bytes()
                }),
                DType::F16 => map(from, into, |b: [u8; $bytes]| {
                    f16::from_f32(<$number>::from_le_bytes(b).to_f32()).to_ne_bytes()
                }),
                DType::BF16 => map(from, into, |b: [u8; $bytes]| {
                    bf16::from_f32(<$number>::from_le_bytes(b).to_f32()).to_ne_bytes()
                }),
                _ => return None,
            }
        };
    }
    match stored {
        StoredType::F64 => each!(8, f64),
        StoredType::F32 => each!(4, f32),
        StoredType::F16 => each!(2, f16),
        StoredType::BF16 => each!(2, bf16),
        _ => return None,
    }
    Some(())
}

/// Turns every `N` bytes of `from` into `M` bytes of `into`, on all cores.
fn map<const N: usize, const M: usize>(
    from: &[u8],
    into: &mut Vec<u8>,
    each: impl Fn([u8; N]) -> [u8; M] + Sync,
) {
    let numbers = from.as_chunks::<N>().0;
    into.resize(numbers.len() * M, 0);
    let places = into.as_chunks_mut::<M>().0;
    places
        .par_iter_mut()
        .zip(numbers)
        .with_min_len(1 << 14)
        .for_each(|(place, &number)| *place = each(number));
}

/// Numbers that single precision can be made of.
trait ToF32 {
    fn to_f32(self) -> f32;
}

impl ToF32 for f64 {
    fn to_f32(self) -> f32 {
        self as f32
    }
}

impl ToF32 for f32 {
    fn to_f32(self) -> f32 {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_conversion() {
        let values = [0.0_f32, -1.5, 65504.0, 1e-3, -0.25];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut half_bytes = Vec::new();
        convert(&bytes, StoredType::F32, DType::F16, &mut half_bytes).unwrap();
        let mut back = Vec::new();
        convert(&half_bytes, StoredType::F16, DType::F32, &mut back).unwrap();
        let back: Vec<f32> = back
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&b| f32::from_le_bytes(b))
            .collect();
        for (was, is) in values.iter().zip(&back) {
            // Half precision keeps eleven bits.
            assert!((was - is).abs() <= was.abs() / 2048.0, "{was} became {is}");
        }
        let doubles: Vec<u8> = values
            .iter()
            .flat_map(|&v| f64::from(v).to_le_bytes())
            .collect();
        let mut singles = Vec::new();
        convert(&doubles, StoredType::F64, DType::F32, &mut singles).unwrap();
        assert_eq!(singles, bytes);
    }

    #[test]
    fn types_that_cannot_be_computed_with_are_refused() {
        assert!(convert(&[0; 8], StoredType::I64, DType::F32, &mut Vec::new()).is_none());
        assert!(convert(&[0; 8], StoredType::F32, DType::I32, &mut Vec::new()).is_none());
    }
}
