//! Mapped files as memory of a device: weights that are used where they lie.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use sd_ggml_sys as sys;

use crate::buffer::Buffer;
use crate::device::{Device, DeviceKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ledger::{Ledger, MemoryKind};
use crate::mapped_file::{MappedFile, page_size};

/// Part of a mapped file as memory of one device.
///
/// On the account with all of its pages, once, for as long as anyone keeps it or its [`Buffer`]. The file stays mapped
/// as long.
#[derive(Debug, Clone)]
pub struct HostMapping {
    buffer: Arc<Buffer>,
    /// Bytes of the file that it covers, beginning and ending at pages.
    covered: Range<u64>,
}

impl HostMapping {
    /// Makes the pages of `file` that hold the bytes of `range` memory of `device`. `largest` is the size in bytes of
    /// the largest tensor among them, which some devices want to know.
    ///
    /// Devices other than the processor are not believed: a few of the bytes are copied inside the device and read back
    /// before this returns.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the pages are not granted; [`Error::CannotMap`] if the mapping is writable, the range
    /// is not in the file, or the device cannot use it.
    pub fn new(
        ledger: &Ledger,
        device: Device,
        file: &Arc<MappedFile>,
        range: Range<u64>,
        largest: usize,
    ) -> Result<HostMapping> {
        let cannot = |reason| Error::CannotMap {
            device: device.name(),
            reason,
        };
        if !file.is_read_only() {
            return Err(cannot("the mapping is writable"));
        }
        if range.start >= range.end || range.end > file.len() {
            return Err(cannot("the range is not in the file"));
        }
        if !device.has_host_pointers() {
            return Err(cannot("it only uses memory of its own"));
        }
        let page = page_size();
        let covered = range.start / page * page..range.end.next_multiple_of(page);
        let bytes = covered.end - covered.start;
        let reservation = ledger.reserve(device, bytes, MemoryKind::Mapping)?;
        // SAFETY: the slot of the device's interface was found to be filled. The pages are mapped from the file's first
        // byte to the end of its last page, as long as `file`, which the buffer keeps; they are never written, since
        // buffers of this kind are only read from (`Buffer::is_writable`).
        let raw = unsafe {
            sys::ggml_backend_dev_buffer_from_host_ptr(
                device.as_ptr(),
                file.as_ptr()
                    .add(covered.start as usize)
                    .cast_mut()
                    .cast::<c_void>(),
                bytes as usize,
                largest,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| cannot("its driver refused"))?;
        // SAFETY: `raw` was just returned as a live buffer.
        if unsafe { raw.as_ref() }.context.is_null() {
            // The Metal backend returns an empty shell when it fails, whose own way of being freed follows this null.
            // SAFETY: the shell is live and nobody else knows it; without the callback only the shell is freed.
            unsafe {
                (*raw.as_ptr()).iface.free_buffer = None;
                sys::ggml_backend_buffer_free(raw.as_ptr());
            }
            return Err(cannot("its driver failed"));
        }
        let buffer = Arc::new(Buffer::over_file(
            raw,
            device,
            reservation,
            Arc::clone(file),
        ));
        if buffer.len() as u64 != bytes {
            return Err(cannot("its driver took another size"));
        }
        let mapping = HostMapping { buffer, covered };
        mapping.verify(ledger, file, range)?;
        Ok(mapping)
    }

    /// The memory. Read only.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Where in [`HostMapping::buffer`] the bytes of the file in `range` are; `None` if they are not all covered.
    pub fn offset_of(&self, range: Range<u64>) -> Option<usize> {
        (self.covered.start <= range.start && range.end <= self.covered.end)
            .then(|| (range.start - self.covered.start) as usize)
    }

    /// Bytes of all pages.
    pub fn bytes(&self) -> u64 {
        self.covered.end - self.covered.start
    }

    /// Copies the first, the middle and the last bytes of `range` inside the device, reads them back and compares them
    /// with the file's.
    fn verify(&self, ledger: &Ledger, file: &MappedFile, range: Range<u64>) -> Result<()> {
        /// Bytes of each sample, a multiple of the alignment of every known device.
        const SAMPLE: u64 = 1024;
        let device = self.buffer.device();
        if device.kind() == DeviceKind::Cpu {
            return Ok(());
        }
        let differs = || Error::CannotMap {
            device: device.name(),
            reason: "it read other bytes than the file has",
        };
        let alignment = (Buffer::alignment(device) as u64).max(size_of::<f32>() as u64);
        let length = SAMPLE.min(range.end - range.start) / 4 * 4;
        if length == 0 {
            return Ok(());
        }
        let copy = Buffer::allocate(ledger, device, SAMPLE as usize, MemoryKind::Staging)?;
        let last = range.end - length;
        for begin in [range.start, range.start + (last - range.start) / 2, last] {
            // Down to what the device can address; the pages before the range belong to the mapping too.
            let begin = (begin / alignment * alignment).max(self.covered.start);
            let sample = begin..begin + length;
            let (mut wanted, mut found) = (vec![0; length as usize], vec![1; length as usize]);
            file.read(sample.clone(), &mut wanted).ok_or_else(differs)?;
            let offset = self.offset_of(sample).ok_or_else(differs)?;
            copy_and_read(&self.buffer, offset, &copy, &mut found).ok_or_else(differs)?;
            if wanted != found {
                return Err(differs());
            }
        }
        Ok(())
    }
}

/// Copies bytes from `offset` of `from` to the beginning of `to`, both on one device, and reads them into `into`, whose
/// length is a multiple of 4.
fn copy_and_read(from: &Buffer, offset: usize, to: &Buffer, into: &mut [u8]) -> Option<()> {
    // SAFETY: the context is local and freed before the return. Its arena has room for two tensors. Their bytes lie
    // inside the buffers: `offset..offset + into.len()` was checked against the mapping, and `to` is at least as long.
    unsafe {
        let context = sys::ggml_init(sys::ggml_init_params {
            mem_size: 2 * sys::ggml_tensor_overhead(),
            mem_buffer: std::ptr::null_mut(),
            no_alloc: true,
        });
        if context.is_null() {
            return None;
        }
        let numbers = (into.len() / size_of::<f32>()) as i64;
        let place = |buffer: &Buffer, offset: usize| {
            let tensor = sys::ggml_new_tensor_1d(context, DType::I32.to_ggml(), numbers);
            let base = sys::ggml_backend_buffer_get_base(buffer.as_ptr()).cast::<u8>();
            let address = base.add(offset).cast::<c_void>();
            let status = sys::ggml_backend_tensor_alloc(buffer.as_ptr(), tensor, address);
            (status == sys::GGML_STATUS_SUCCESS).then_some(tensor)
        };
        let done = match (place(from, offset), place(to, 0)) {
            (Some(source), Some(copy)) => {
                sys::ggml_backend_tensor_copy(source, copy);
                sys::ggml_backend_tensor_get(copy, into.as_mut_ptr().cast(), 0, into.len());
                Some(())
            }
            _ => None,
        };
        sys::ggml_free(context);
        done
    }
}
