//! From the types of files to the types in memory. One of the places of this crate with `unsafe` in it: ggml's functions
//! for quantised types are called by pointer.
//!
//! [`convert`] is a pure function of bytes and knows neither files nor threads: who calls it cuts a tensor into pieces
//! of whole blocks and converts as many of them at once as there are cores.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use sd_backend::DType;
use sd_ggml_sys as sys;

use crate::checkpoint::StoredType;

/// Elements that are converted at once, on the stack: whole blocks of every type.
const CHUNK: usize = 4096;
/// No quantised type takes more bytes for one element.
const MAX_BLOCK_BYTES: usize = 2;

/// Why bytes could not be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConvertError {
    /// There is no way from one type to the other.
    #[error("{stored} cannot become {memory}")]
    NoWay { stored: StoredType, memory: DType },
    /// The lengths are not those of the same number of elements, or not of whole blocks.
    #[error("the bytes are not whole blocks of both types")]
    Length,
}

/// Whether [`convert`] can make `memory` of `stored`.
pub(crate) fn is_convertible(stored: StoredType, memory: DType) -> bool {
    stored.in_memory() == Some(memory)
        || (Reader::of(stored).is_some() && Writer::of(memory).is_some())
}

/// Turns all elements in `from`, stored as `stored` in little-endian order, into `memory`, which fills `into` exactly.
///
/// Both slices are whole blocks of their types and need no alignment. What is written depends on nothing else, so
/// pieces of a tensor may be converted in any order and at the same time.
///
/// # Errors
/// [`ConvertError`]; `into` is then partly overwritten.
pub(crate) fn convert(
    from: &[u8],
    stored: StoredType,
    memory: DType,
    into: &mut [u8],
) -> Result<(), ConvertError> {
    if stored.in_memory() == Some(memory) {
        if from.len() != into.len() {
            return Err(ConvertError::Length);
        }
        into.copy_from_slice(from);
        return Ok(());
    }
    let no_way = || ConvertError::NoWay { stored, memory };
    let reader = Reader::of(stored).ok_or_else(no_way)?;
    let writer = Writer::of(memory).ok_or_else(no_way)?;
    let step = |elements: usize| stored.bytes(elements as u64).map(|bytes| bytes as usize);
    let (Some(from_step), Some(into_step)) = (step(CHUNK), memory.row_bytes(CHUNK)) else {
        return Err(ConvertError::Length);
    };
    let (block, block_bytes) = stored.block().unwrap_or((1, (from_step / CHUNK) as u64));
    let elements = from.len() / block_bytes as usize * block as usize;
    if step(elements) != Some(from.len()) || memory.row_bytes(elements) != Some(into.len()) {
        return Err(ConvertError::Length);
    }
    let mut numbers = [0.0_f32; CHUNK];
    for ((from, into), first) in from
        .chunks(from_step)
        .zip(into.chunks_mut(into_step))
        .zip((0..elements).step_by(CHUNK))
    {
        let numbers = &mut numbers[..(elements - first).min(CHUNK)];
        reader.read(from, numbers);
        writer.write(numbers, into);
    }
    Ok(())
}

/// How numbers in single precision are made of stored bytes.
enum Reader {
    F64,
    F32,
    F16,
    BF16,
    Blocks(unsafe extern "C" fn(*const core::ffi::c_void, *mut f32, i64)),
}

impl Reader {
    fn of(stored: StoredType) -> Option<Reader> {
        Some(match stored {
            StoredType::F64 => Reader::F64,
            StoredType::F32 => Reader::F32,
            StoredType::F16 => Reader::F16,
            StoredType::BF16 => Reader::BF16,
            _ => {
                let (len, bytes) = stored.block()?;
                let number = stored.to_ggml()?;
                // SAFETY: the number is one that ggml defines, so this is a pointer into its constant table.
                let traits = unsafe { sys::ggml_get_type_traits(number).as_ref() }?;
                let same_size = traits.blck_size as u64 == len && traits.type_size as u64 == bytes;
                Reader::Blocks(
                    traits
                        .to_float
                        .filter(|_| same_size && bytes <= len * MAX_BLOCK_BYTES as u64)?,
                )
            }
        })
    }

    /// `from` holds exactly the elements of `numbers`, which are whole blocks, at most [`CHUNK`].
    fn read(&self, from: &[u8], numbers: &mut [f32]) {
        match self {
            Reader::F64 => each(from, numbers, |bytes| f64::from_le_bytes(bytes) as f32),
            Reader::F32 => each(from, numbers, f32::from_le_bytes),
            Reader::F16 => {
                let mut halves = [f16::ZERO; CHUNK];
                let halves = &mut halves[..numbers.len()];
                each(from, halves, f16::from_le_bytes);
                halves.convert_to_f32_slice(numbers);
            }
            Reader::BF16 => each(from, numbers, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Reader::Blocks(to_float) => {
                let mut blocks = [0_u64; CHUNK * MAX_BLOCK_BYTES / size_of::<u64>()];
                let blocks = &mut bytemuck::cast_slice_mut(&mut blocks)[..from.len()];
                blocks.copy_from_slice(from);
                // SAFETY: `blocks` holds the whole blocks of `numbers.len()` elements, of the size that ggml gives
                // them (`of` compared it), and begins at a multiple of 8: no member of a block has more than 4 bytes.
                // ggml's functions read these blocks and write that many numbers, whatever the blocks say.
                unsafe {
                    to_float(
                        blocks.as_ptr().cast(),
                        numbers.as_mut_ptr(),
                        numbers.len() as i64,
                    );
                }
            }
        }
    }
}

/// How bytes in memory are made of numbers in single precision.
enum Writer {
    F32,
    F16,
    BF16,
}

impl Writer {
    fn of(memory: DType) -> Option<Writer> {
        Some(match memory {
            DType::F32 => Writer::F32,
            DType::F16 => Writer::F16,
            DType::BF16 => Writer::BF16,
            _ => return None,
        })
    }

    /// `into` has room for exactly `numbers`, which are at most [`CHUNK`].
    fn write(&self, numbers: &[f32], into: &mut [u8]) {
        match self {
            Writer::F32 => into.copy_from_slice(bytemuck::cast_slice(numbers)),
            Writer::F16 => {
                let mut halves = [f16::ZERO; CHUNK];
                let halves = &mut halves[..numbers.len()];
                halves.convert_from_f32_slice(numbers);
                into.copy_from_slice(bytemuck::cast_slice(halves));
            }
            Writer::BF16 => {
                for (place, &number) in into.as_chunks_mut().0.iter_mut().zip(numbers) {
                    *place = bf16::from_f32(number).to_ne_bytes();
                }
            }
        }
    }
}

/// Makes one of `into` of every `N` bytes of `from`.
fn each<const N: usize, T>(from: &[u8], into: &mut [T], of: impl Fn([u8; N]) -> T) {
    for (place, &bytes) in into.iter_mut().zip(from.as_chunks().0) {
        *place = of(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_conversion() {
        let values = [0.0_f32, -1.5, 65504.0, 1e-3, -0.25];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut half_bytes = [0; 10];
        convert(&bytes, StoredType::F32, DType::F16, &mut half_bytes).unwrap();
        let mut back = [0; 20];
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
        let mut singles = [0; 20];
        convert(&doubles, StoredType::F64, DType::F32, &mut singles).unwrap();
        assert_eq!(singles[..], bytes);
    }

    #[test]
    fn types_that_cannot_be_computed_with_are_refused() {
        let zeros = [0; 292];
        let mut into = [0; 1024];
        let mut outcome = |bytes: usize, stored, memory, length: usize| {
            let result = convert(&zeros[..bytes], stored, memory, &mut into[..length]);
            let no_way = result == Err(ConvertError::NoWay { stored, memory });
            assert_eq!(no_way, !is_convertible(stored, memory), "{stored} {memory}");
            result.map_err(|error| matches!(error, ConvertError::Length))
        };
        assert_eq!(outcome(8, StoredType::I64, DType::F32, 4), Err(false));
        assert_eq!(outcome(8, StoredType::F32, DType::I32, 8), Err(false));
        // ggml cannot turn these back.
        assert_eq!(outcome(36, StoredType::Q8_1, DType::F32, 128), Err(false));
        assert_eq!(outcome(292, StoredType::Q8K, DType::F32, 1024), Err(false));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::Q4_0, 18), Err(false));
        // Half a block, and too little room.
        assert_eq!(outcome(17, StoredType::Q8_0, DType::F32, 64), Err(true));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::F16, 62), Err(true));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::F16, 64), Ok(()));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::Q8_0, 34), Ok(()));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::Q8_0, 35), Err(true));
    }
}
