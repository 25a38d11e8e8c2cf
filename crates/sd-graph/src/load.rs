//! Bringing declared parameters into a device's memory. One of the places of this crate with `unsafe` in it.

use std::sync::Arc;

use half::{bf16, f16};
use rayon::prelude::*;
use sd_backend::{Backend, Buffer, DType, MemoryKind};
use sd_ggml_sys as sys;

use crate::checkpoint::{Checkpoint, StoredType};
use crate::error::{Error, Result};
use crate::param::{Param, Place};
use crate::raw::Arena;
use crate::run::{Cancel, Progress, Reporter};

/// Elements that are brought into memory at once: whole blocks and whole bytes of every type.
const PIECE: usize = 1 << 21;

/// What loading did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Bytes of memory that the parameters take.
    pub bytes: u64,
    /// Bytes among them whose type was changed on the way.
    pub converted: u64,
}

/// Loads `params`, which were declared against `checkpoint`, into the memory of the device of `backend`, on its account.
///
/// # Errors
/// [`Error::Backend`] when memory runs out (nothing stays allocated), [`Error::Checkpoint`] when a file cannot be
/// read, [`Error::Backend`] with [`sd_backend::Error::Cancelled`].
pub fn load(
    checkpoint: &Checkpoint,
    params: &[Param],
    backend: &Backend,
    cancel: &Cancel,
    progress: &mut dyn Reporter,
) -> Result<LoadReport> {
    let device = backend.device();
    let alignment = Buffer::alignment(device);
    let mut offsets = Vec::with_capacity(params.len());
    let mut total = 0_usize;
    for param in params {
        offsets.push(total);
        total = param
            .bytes()
            .checked_next_multiple_of(alignment)
            .and_then(|bytes| total.checked_add(bytes))
            .ok_or_else(|| backend.out_of_memory(u64::MAX))?;
    }
    if params.is_empty() {
        return Ok(LoadReport::default());
    }
    let buffer = Arc::new(Buffer::allocate(
        backend.ledger(),
        device,
        total,
        MemoryKind::Weights,
    )?);
    let arena = Arena::new(params.len(), false).map_err(|_| backend.out_of_memory(total as u64))?;

    let mut report = LoadReport {
        bytes: total as u64,
        converted: 0,
    };
    let mut stored_words = Vec::new();
    let mut memory_bytes = Vec::new();
    for (index, (param, &offset)) in params.iter().zip(&offsets).enumerate() {
        let not_declared = || Error::NotDeclared {
            name: param.name().to_owned(),
        };
        let info = checkpoint.get(param.name()).ok_or_else(not_declared)?;
        let elements = info.elements();
        if elements != param.shape().elements() as u64 {
            return Err(not_declared());
        }
        let tensor = arena
            .tensor(param.dtype(), param.shape())
            .map_err(|_| backend.out_of_memory(total as u64))?;
        // SAFETY: the tensor is fresh; its bytes lie inside the buffer (`total` is the sum of all), aligned as the
        // device asks.
        let status = unsafe {
            let base = sys::ggml_backend_buffer_get_base(buffer.as_ptr()).cast::<u8>();
            sys::ggml_backend_tensor_alloc(
                buffer.as_ptr(),
                tensor.as_ptr(),
                base.add(offset).cast(),
            )
        };
        if status != sys::GGML_STATUS_SUCCESS {
            return Err(backend.out_of_memory(param.bytes() as u64).into());
        }

        let keep = info.stored.in_memory() == Some(param.dtype());
        if !keep {
            report.converted += param.bytes() as u64;
        }
        // In pieces, so that staging stays small however large the tensor is.
        let (mut read, mut written) = (0, 0);
        for first in (0..elements).step_by(PIECE) {
            cancel.check()?;
            let count = (elements - first).min(PIECE as u64);
            let length = info.stored.bytes(count).ok_or_else(not_declared)? as usize;
            stored_words.resize(length.div_ceil(size_of::<u64>()), 0_u64);
            let stored_bytes = &mut bytemuck::cast_slice_mut(&mut stored_words)[..length];
            checkpoint.read_at(param.name(), read, stored_bytes)?;
            let bytes = if keep {
                stored_bytes
            } else {
                convert(stored_bytes, info.stored, param.dtype(), &mut memory_bytes)
                    .ok_or_else(not_declared)?;
                &mut memory_bytes
            };
            if bytes.len() > param.bytes() - written {
                return Err(not_declared());
            }
            // SAFETY: the tensor lies in a live buffer; the bytes come from a slice of that length and end inside the
            // tensor, which has `param.bytes()` bytes.
            unsafe {
                sys::ggml_backend_tensor_set(
                    tensor.as_ptr(),
                    bytes.as_ptr().cast(),
                    written,
                    bytes.len(),
                );
            }
            read += length as u64;
            written += bytes.len();
        }
        if written != param.bytes() {
            return Err(not_declared());
        }
        progress.report(&Progress::Loading {
            done: index + 1,
            total: params.len(),
            bytes: (offset + written) as u64,
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

/// Converts little-endian numbers or blocks in `from` to `memory` in `into`; `None` for types that `Scope::param` never
/// asks for.
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
        _ => {
            return match memory {
                DType::F32 => dequantize(from, stored, into, f32::to_ne_bytes),
                DType::F16 => dequantize(from, stored, into, |v| f16::from_f32(v).to_ne_bytes()),
                DType::BF16 => dequantize(from, stored, into, |v| bf16::from_f32(v).to_ne_bytes()),
                _ => None,
            };
        }
    }
    Some(())
}

/// Turns the whole blocks in `from` into numbers of `M` bytes in `into`, on all cores; `None` for a type that ggml
/// cannot turn into single precision.
fn dequantize<const M: usize>(
    from: &[u8],
    stored: StoredType,
    into: &mut Vec<u8>,
    each: impl Fn(f32) -> [u8; M] + Sync,
) -> Option<()> {
    /// Elements that are turned at once: whole blocks of every type.
    const CHUNK: usize = 4096;
    let number = stored.to_ggml()?;
    let (len, bytes) = stored.block()?;
    let (len, bytes) = (len as usize, bytes as usize);
    // SAFETY: the number is one that ggml defines, so this is a pointer into its constant table.
    let traits = unsafe { sys::ggml_get_type_traits(number).as_ref() }?;
    let to_float = traits.to_float?;
    let chunk_bytes = CHUNK / len * bytes;
    let same_size = traits.blck_size == len as i64 && traits.type_size == bytes;
    let aligned = from.as_ptr().cast::<u32>().is_aligned();
    if !same_size
        || !aligned
        || !from.len().is_multiple_of(bytes)
        || !chunk_bytes.is_multiple_of(16)
    {
        return None;
    }
    into.resize(from.len() / bytes * len * M, 0);
    into.as_chunks_mut::<M>()
        .0
        .par_chunks_mut(CHUNK)
        .zip(from.par_chunks(chunk_bytes))
        .for_each(|(places, blocks)| {
            let mut numbers = [0.0_f32; CHUNK];
            // SAFETY: `blocks` are the whole blocks of `places.len()` elements, at most `CHUNK`, which is the length
            // of `numbers`. No member of a block has more than 4 bytes; `from` is aligned to that, and so is each
            // chunk of it, whose length is a multiple of 16.
            unsafe {
                to_float(
                    blocks.as_ptr().cast(),
                    numbers.as_mut_ptr(),
                    places.len() as i64,
                );
            }
            for (place, number) in places.iter_mut().zip(numbers) {
                *place = each(number);
            }
        });
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
        let zeros = [0_u64; 64];
        let block = |bytes: usize| &bytemuck::cast_slice(&zeros)[..bytes];
        // ggml cannot turn these back.
        assert!(convert(block(36), StoredType::Q8_1, DType::F32, &mut Vec::new()).is_none());
        assert!(convert(block(292), StoredType::Q8K, DType::F32, &mut Vec::new()).is_none());
        // Half a block, and another target.
        assert!(convert(block(17), StoredType::Q8_0, DType::F32, &mut Vec::new()).is_none());
        assert!(convert(block(34), StoredType::Q8_0, DType::Q4_0, &mut Vec::new()).is_none());
        assert!(convert(block(34), StoredType::Q8_0, DType::F16, &mut Vec::new()).is_some());
    }
}
