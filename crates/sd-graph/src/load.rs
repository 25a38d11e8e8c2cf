//! Bringing declared parameters into a device's memory. One of the places of this crate with `unsafe` in it.

use std::sync::Arc;

use rayon::prelude::*;
use sd_backend::{Backend, Buffer, MemoryKind};
use sd_ggml_sys as sys;

use crate::checkpoint::Checkpoint;
use crate::convert::{ConvertError, convert};
use crate::error::{Error, Result};
use crate::param::{Param, Place};
use crate::raw::Arena;
use crate::run::{Cancel, Progress, Reporter};

/// Elements that are brought into memory at once: whole blocks and whole bytes of every type.
const PIECE: usize = 1 << 21;

/// Elements that one core converts before it takes more: whole blocks of every type.
const SHARE: usize = 1 << 16;

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
                let sizes = |elements: usize| {
                    let stored = info.stored.bytes(elements as u64)? as usize;
                    Some((stored, param.dtype().row_bytes(elements)?))
                };
                let sized = |elements| sizes(elements).ok_or_else(not_declared);
                let (from_share, into_share) = sized(SHARE)?;
                memory_bytes.resize(sized(count as usize)?.1, 0_u8);
                memory_bytes
                    .par_chunks_mut(into_share)
                    .zip(stored_bytes.par_chunks(from_share))
                    .try_for_each(|(into, from)| convert(from, info.stored, param.dtype(), into))
                    .map_err(|_: ConvertError| not_declared())?;
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
