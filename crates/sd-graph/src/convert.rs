//! From the types of files to the types in memory. One of the places of this crate with `unsafe` in it: ggml's functions
//! for quantised types are called by pointer.
//!
//! [`convert`] is a pure function of bytes and knows neither files nor threads: who calls it cuts a tensor into pieces
//! of whole blocks and converts as many of them at once as there are cores. Everything goes through single precision,
//! as in PyTorch.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use sd_backend::DType;
use sd_ggml_sys as sys;

use crate::checkpoint::StoredType;
use crate::small_floats as small;

/// Elements that are converted at once, on the stack: whole blocks of every type.
const CHUNK: usize = 4096;
/// No quantised type takes more bytes for one element.
const MAX_BLOCK_BYTES: usize = 2;
/// Words that hold a chunk of blocks of any type, aligned for any member of a block: none has more than 4 bytes.
const BLOCK_WORDS: usize = CHUNK * MAX_BLOCK_BYTES / size_of::<u64>();

/// The largest number that is quantised: the scales of blocks are in half precision, which ends here.
const LARGEST: f32 = 65504.0;
/// What is smaller is quantised as 0. No scale but that of MXFP4 reaches so far down, and ggml divides by what it makes
/// of the largest number of a block: the quotient must not overflow.
const SMALLEST: f32 = 1e-28;

/// Why bytes could not be converted.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// There is no way from one type to the other: see [`is_convertible`].
    #[error("{stored} cannot become {memory}")]
    NoWay {
        /// The type in the file.
        stored: StoredType,
        /// The type that was asked for.
        memory: DType,
    },
    /// The lengths are not those of the same number of elements, or not of whole blocks.
    #[error("the bytes are not the same number of whole blocks of both types")]
    Length,
    /// A number that a quantised type cannot hold: ggml would spoil its whole block.
    #[error("{value} cannot become {memory}, which holds finite numbers up to {LARGEST}")]
    Value {
        /// The number.
        value: f32,
        /// The type that was asked for.
        memory: DType,
    },
}

/// Whether [`convert`] can make `memory` of `stored`.
///
/// Every type becomes itself. F32, F16 and BF16 are made of all floating-point types of 8 bits and more, of integers and
/// truth values by their value, and of all quantised types that ggml can turn back (not of its intermediate ones, `q8_1`
/// and `q8_K`). Of these again, `q4_0`, `q4_1`, `q5_0`, `q5_1`, `q8_0`, `q2_K` to `q6_K`, `iq4_nl`, `iq4_xs` and `mxfp4`
/// are made. The others are not: `iq1` to `iq3` need to know which weights matter, `q1_0`, `q2_0`, `tq1_0` and `tq2_0`
/// are for models that were trained to have two or three values, and `nvfp4` wants a second scale beside its blocks.
pub fn is_convertible(stored: StoredType, memory: DType) -> bool {
    stored.in_memory() == Some(memory)
        || (Reader::of(stored).is_some() && Writer::of(memory).is_some())
}

/// Turns all elements in `from`, stored as `stored` in little-endian order, into `memory`, which fills `into` exactly.
///
/// Both slices are whole blocks of their types and need no alignment. What is written depends on nothing else, so
/// pieces of a tensor may be converted in any order and at the same time.
///
/// Floating-point numbers are rounded to nearest, ties to even; what is too large becomes infinite and NaN stays NaN, as
/// in PyTorch. ggml quantises as it does without an importance matrix.
///
/// # Errors
/// [`ConvertError`]; `into` is then partly overwritten.
pub fn convert(
    from: &[u8],
    stored: StoredType,
    memory: DType,
    into: &mut [u8],
) -> Result<(), ConvertError> {
    if stored.in_memory() == Some(memory) {
        let whole = from.len().is_multiple_of(memory.block_bytes());
        if from.len() != into.len() || !whole {
            return Err(ConvertError::Length);
        }
        into.copy_from_slice(from);
        return Ok(());
    }
    let no_way = || ConvertError::NoWay { stored, memory };
    let reader = Reader::of(stored).ok_or_else(no_way)?;
    let writer = Writer::of(memory).ok_or_else(no_way)?;
    let (block, block_bytes) = match (stored.block(), stored.bits()) {
        (Some((len, bytes)), _) => (len as usize, bytes as usize),
        (None, bits) => (1, bits.unwrap_or(8) as usize / 8),
    };
    let elements = from.len() / block_bytes * block;
    let whole = from.len().is_multiple_of(block_bytes);
    if !whole || memory.row_bytes(elements) != Some(into.len()) {
        return Err(ConvertError::Length);
    }
    let from_step = CHUNK / block * block_bytes;
    let into_step = CHUNK / memory.block_len() * memory.block_bytes();
    let mut numbers = [0.0_f32; CHUNK];
    for ((from, into), first) in from
        .chunks(from_step)
        .zip(into.chunks_mut(into_step))
        .zip((0..elements).step_by(CHUNK))
    {
        let numbers = &mut numbers[..(elements - first).min(CHUNK)];
        reader.read(from, numbers);
        writer
            .write(numbers, into)
            .map_err(|value| ConvertError::Value { value, memory })?;
    }
    Ok(())
}

type ToFloat = unsafe extern "C" fn(*const core::ffi::c_void, *mut f32, i64);
type FromFloat = unsafe extern "C" fn(*const f32, *mut core::ffi::c_void, i64);

/// How numbers in single precision are made of stored bytes.
enum Reader {
    F64,
    F32,
    F16,
    BF16,
    /// The numbers of all codes of a byte.
    Byte(&'static [f32; 256]),
    I64,
    I32,
    I16,
    U64,
    U32,
    U16,
    Blocks(ToFloat),
}

impl Reader {
    fn of(stored: StoredType) -> Option<Reader> {
        Some(match stored {
            StoredType::F64 => Reader::F64,
            StoredType::F32 => Reader::F32,
            StoredType::F16 => Reader::F16,
            StoredType::BF16 => Reader::BF16,
            StoredType::F8E4M3 => Reader::Byte(&small::F8_E4M3),
            StoredType::F8E5M2 => Reader::Byte(&small::F8_E5M2),
            StoredType::F8E4M3Fnuz => Reader::Byte(&small::F8_E4M3FNUZ),
            StoredType::F8E5M2Fnuz => Reader::Byte(&small::F8_E5M2FNUZ),
            StoredType::F8E8M0 => Reader::Byte(&small::F8_E8M0),
            StoredType::I8 => Reader::Byte(&small::I8),
            StoredType::U8 => Reader::Byte(&small::U8),
            StoredType::Bool => Reader::Byte(&small::BOOL),
            StoredType::I64 => Reader::I64,
            StoredType::I32 => Reader::I32,
            StoredType::I16 => Reader::I16,
            StoredType::U64 => Reader::U64,
            StoredType::U32 => Reader::U32,
            StoredType::U16 => Reader::U16,
            _ => {
                let (len, bytes) = stored.block()?;
                let traits = traits(stored.to_ggml()?, len as usize, bytes as usize)?;
                Reader::Blocks(traits.to_float?)
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
            Reader::Byte(codes) => each(from, numbers, |[byte]| codes[usize::from(byte)]),
            Reader::I64 => each(from, numbers, |bytes| i64::from_le_bytes(bytes) as f32),
            Reader::I32 => each(from, numbers, |bytes| i32::from_le_bytes(bytes) as f32),
            Reader::I16 => each(from, numbers, |bytes| i16::from_le_bytes(bytes).into()),
            Reader::U64 => each(from, numbers, |bytes| u64::from_le_bytes(bytes) as f32),
            Reader::U32 => each(from, numbers, |bytes| u32::from_le_bytes(bytes) as f32),
            Reader::U16 => each(from, numbers, |bytes| u16::from_le_bytes(bytes).into()),
            Reader::Blocks(to_float) => {
                let mut blocks = [0_u64; BLOCK_WORDS];
                let blocks = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut blocks)[..from.len()];
                blocks.copy_from_slice(from);
                // SAFETY: `blocks` holds the whole blocks of `numbers.len()` elements, of the size that ggml gives them
                // (`traits` compared it), and is aligned for them. ggml reads these blocks and writes that many numbers,
                // whatever the blocks say: each index into its tables has as many bits as the table has entries for.
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
    Blocks(Quantizer),
}

/// How ggml makes blocks.
enum Quantizer {
    Reference(FromFloat),
    /// Looks for the scale that loses least.
    Search(sys::ggml_type),
}

impl Writer {
    fn of(memory: DType) -> Option<Writer> {
        Some(match memory {
            DType::F32 => Writer::F32,
            DType::F16 => Writer::F16,
            DType::BF16 => Writer::BF16,
            DType::Q4_0
            | DType::Q4_1
            | DType::Q5_0
            | DType::Q5_1
            | DType::Q8_0
            | DType::Q2K
            | DType::Q3K
            | DType::Q4K
            | DType::Q5K
            | DType::Q6K
            | DType::Iq4Xs
            | DType::Mxfp4 => {
                let traits = traits(memory.to_ggml(), memory.block_len(), memory.block_bytes())?;
                Writer::Blocks(Quantizer::Reference(traits.from_float_ref?))
            }
            // Here quantising by reference is the quick way, and leaves the codes of a block of zeros to chance.
            DType::Iq4Nl => {
                traits(memory.to_ggml(), memory.block_len(), memory.block_bytes())?;
                Writer::Blocks(Quantizer::Search(memory.to_ggml()))
            }
            _ => return None,
        })
    }

    /// `into` has room for exactly `numbers`, which are whole blocks, at most [`CHUNK`]. A number that cannot be written
    /// is the error.
    fn write(&self, numbers: &mut [f32], into: &mut [u8]) -> Result<(), f32> {
        match self {
            Writer::F32 => into.copy_from_slice(bytemuck::cast_slice(numbers)),
            Writer::F16 => {
                let mut halves = [f16::ZERO; CHUNK];
                let halves = &mut halves[..numbers.len()];
                halves.convert_from_f32_slice(numbers);
                into.copy_from_slice(bytemuck::cast_slice(halves));
            }
            Writer::BF16 => {
                for (place, &mut number) in into.as_chunks_mut().0.iter_mut().zip(numbers) {
                    *place = bf16::from_f32(number).to_ne_bytes();
                }
            }
            Writer::Blocks(quantizer) => quantizer.write(numbers, into)?,
        }
        Ok(())
    }
}

impl Quantizer {
    /// As [`Writer::write`]; `numbers` are changed where they are too small.
    fn write(&self, numbers: &mut [f32], into: &mut [u8]) -> Result<(), f32> {
        for number in &mut *numbers {
            let size = number.abs();
            if size > LARGEST || size.is_nan() {
                return Err(*number);
            }
            if size < SMALLEST {
                *number = 0.0;
            }
        }
        let mut blocks = [0_u64; BLOCK_WORDS];
        let blocks = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut blocks)[..into.len()];
        let (from, to) = (numbers.as_ptr(), blocks.as_mut_ptr().cast());
        let count = numbers.len() as i64;
        // SAFETY: `blocks` has room for the whole blocks of `count` elements, of the size that ggml gives them (`traits`
        // compared it), and is aligned for them. None of these types needs an importance matrix, or tables that have to
        // be made first; nothing is shared between threads; all numbers are finite.
        unsafe {
            match self {
                Quantizer::Reference(from_float) => from_float(from, to, count),
                Quantizer::Search(number) => {
                    let none = std::ptr::null();
                    sys::ggml_quantize_chunk(*number, from, to, 0, 1, count, none);
                }
            }
        }
        into.copy_from_slice(blocks);
        Ok(())
    }
}

/// What ggml can do with blocks of type `number`, which we take to have `len` elements and `bytes` bytes.
fn traits(
    number: sys::ggml_type,
    len: usize,
    bytes: usize,
) -> Option<&'static sys::ggml_type_traits> {
    // SAFETY: the number is one that ggml defines, so this is a pointer into its constant table.
    let traits = unsafe { sys::ggml_get_type_traits(number).as_ref() }?;
    let same_size = traits.blck_size == len as i64 && traits.type_size == bytes;
    (same_size && CHUNK.is_multiple_of(len) && bytes <= len * MAX_BLOCK_BYTES).then_some(traits)
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
        assert_eq!(outcome(8, StoredType::C64, DType::F32, 4), Err(false));
        assert_eq!(outcome(8, StoredType::F32, DType::I32, 8), Err(false));
        // ggml cannot turn these back.
        assert_eq!(outcome(36, StoredType::Q8_1, DType::F32, 128), Err(false));
        assert_eq!(outcome(292, StoredType::Q8K, DType::F32, 1024), Err(false));
        // Types that are kept and not made.
        assert_eq!(outcome(256, StoredType::F16, DType::Iq2Xs, 74), Err(false));
        assert_eq!(outcome(256, StoredType::F16, DType::Q1_0, 18), Err(false));
        assert_eq!(outcome(74, StoredType::Iq2Xs, DType::Iq2Xs, 74), Ok(()));
        // Half a block, too little room, and blocks that do not fill one of the other type.
        assert_eq!(outcome(34, StoredType::Q8_0, DType::Q4K, 144), Err(true));
        assert_eq!(outcome(272, StoredType::Q8_0, DType::Q4K, 144), Ok(()));
        assert_eq!(outcome(17, StoredType::Q8_0, DType::F32, 64), Err(true));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::F16, 62), Err(true));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::F16, 64), Ok(()));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::Q8_0, 34), Ok(()));
        assert_eq!(outcome(34, StoredType::Q8_0, DType::Q8_0, 35), Err(true));
    }
}
