//! Memory of a device.

use std::ptr::NonNull;
use std::sync::Arc;

use sd_ggml_sys as sys;

use crate::device::Device;
use crate::error::Result;
use crate::ledger::{Ledger, MemoryKind, Reservation};
use crate::mapped_file::MappedFile;

/// A block of memory on one device, freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    raw: NonNull<sys::ggml_backend_buffer>,
    device: Device,
    reservation: Reservation,
    /// Where the memory is a file's: what keeps it mapped. Dropped after `Drop::drop` has freed `raw`, whoever drops what.
    file: Option<Arc<MappedFile>>,
    /// Whether a device copies from it without the processor's help.
    is_pinned: bool,
}

// SAFETY: a ggml buffer is not tied to the thread that made it; freeing it from another is what ggml's users do.
unsafe impl Send for Buffer {}
// SAFETY: through `&Buffer` only constants (base, size) are read; writing its memory goes through raw tensors, in
// code that must itself rule out races.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `bytes` on `device`, if `ledger` grants them. It asks what is free, too: an operating system that
    /// promises more than it has would otherwise kill the process when the memory is touched.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn allocate(
        ledger: &Ledger,
        device: Device,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<Buffer> {
        // SAFETY: the device lives for ever, and so do its types of buffers.
        let buffer_type = unsafe { sys::ggml_backend_dev_buffer_type(device.as_ptr()) };
        Buffer::of_type(buffer_type, ledger, device, bytes, kind)
    }

    /// Allocates `bytes` of the host's memory, on the host's account, that `device` copies from: pinned if it offers that
    /// and the system grants it, else ordinary. [`Buffer::is_pinned`] says which.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn allocate_on_host(
        ledger: &Ledger,
        device: Device,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<Buffer> {
        let host = Device::cpu()?;
        let Some(buffer_type) = device.host_buffer_type() else {
            return Buffer::allocate(ledger, host, bytes, kind);
        };
        let mut buffer = Buffer::of_type(buffer_type, ledger, host, bytes, kind)?;
        // Drivers give ordinary memory without a word when they cannot pin any.
        // SAFETY: the buffer is live.
        let got = unsafe { sys::ggml_backend_buffer_get_type(buffer.raw.as_ptr()) };
        buffer.is_pinned = got == buffer_type;
        if !buffer.is_pinned {
            tracing::warn!(
                "{} of host memory could not be pinned for {device}",
                crate::Bytes(bytes as u64)
            );
        }
        Ok(buffer)
    }

    /// Bytes of the largest buffer that [`Buffer::allocate_on_host`] can make for `device`, and the alignment in bytes
    /// that tensors in it need.
    ///
    /// # Errors
    /// [`Error::DeviceNotFound`](crate::Error::DeviceNotFound) without a processor.
    pub fn limits_on_host(device: Device) -> Result<(usize, usize)> {
        let Some(buffer_type) = device.host_buffer_type() else {
            let host = Device::cpu()?;
            return Ok((Buffer::largest(host), Buffer::alignment(host)));
        };
        // SAFETY: types of buffers live for ever.
        Ok(unsafe {
            (
                sys::ggml_backend_buft_get_max_size(buffer_type),
                sys::ggml_backend_buft_get_alignment(buffer_type).max(1),
            )
        })
    }

    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    fn of_type(
        buffer_type: sys::ggml_backend_buffer_type_t,
        ledger: &Ledger,
        device: Device,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<Buffer> {
        let reservation = ledger.reserve(device, bytes as u64, kind)?;
        // SAFETY: types of buffers live for ever; a refused allocation is a null pointer, which is looked at.
        let raw = unsafe { sys::ggml_backend_buft_alloc_buffer(buffer_type, bytes) };
        let raw = NonNull::new(raw).ok_or_else(|| ledger.refused(device, bytes as u64))?;
        if kind == MemoryKind::Weights {
            // SAFETY: `raw` was just returned as a live buffer. Drivers may place weights differently.
            unsafe {
                sys::ggml_backend_buffer_set_usage(
                    raw.as_ptr(),
                    sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS,
                )
            };
        }
        Ok(Buffer {
            raw,
            device,
            reservation,
            file: None,
            is_pinned: false,
        })
    }

    /// Takes over `raw`, a live buffer over pages of `file` that nobody else frees.
    pub(crate) fn over_file(
        raw: NonNull<sys::ggml_backend_buffer>,
        device: Device,
        reservation: Reservation,
        file: Arc<MappedFile>,
    ) -> Buffer {
        // SAFETY: `raw` is live. What lies in a file is read only, as weights are.
        unsafe {
            sys::ggml_backend_buffer_set_usage(raw.as_ptr(), sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        };
        Buffer {
            raw,
            device,
            reservation,
            file: Some(file),
            is_pinned: false,
        }
    }

    /// Whether it may be written: memory that is a file's may not.
    pub fn is_writable(&self) -> bool {
        self.file.is_none()
    }

    /// Whether it is memory of the host that a device copies from while the processor does something else.
    pub fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// What its bytes are held for.
    pub fn kind(&self) -> MemoryKind {
        self.reservation.kind()
    }

    /// The address of its bytes if the processor can reach them, which memory of most other devices is not.
    pub fn host_address(&self) -> Option<NonNull<u8>> {
        // SAFETY: the buffer lives as long as `self`.
        unsafe {
            if !sys::ggml_backend_buffer_is_host(self.raw.as_ptr()) {
                return None;
            }
            NonNull::new(sys::ggml_backend_buffer_get_base(self.raw.as_ptr()).cast())
        }
    }

    /// Bytes of this buffer.
    pub fn len(&self) -> usize {
        // SAFETY: the buffer lives as long as `self`.
        unsafe { sys::ggml_backend_buffer_get_size(self.raw.as_ptr()) }
    }

    /// Whether it holds no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device whose memory this is.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Alignment in bytes that tensors in this kind of buffer need: a power of two.
    pub fn alignment(device: Device) -> usize {
        // SAFETY: the device lives for ever and so does its buffer type.
        unsafe {
            sys::ggml_backend_buft_get_alignment(sys::ggml_backend_dev_buffer_type(device.as_ptr()))
        }
        .max(1)
    }

    /// Bytes of the largest buffer that `device` can allocate.
    pub fn largest(device: Device) -> usize {
        // SAFETY: as for `alignment`.
        unsafe {
            sys::ggml_backend_buft_get_max_size(sys::ggml_backend_dev_buffer_type(device.as_ptr()))
        }
    }

    /// Whether the processor can reach the memory of `device` by address.
    pub fn is_host(device: Device) -> bool {
        // SAFETY: as for `alignment`.
        unsafe {
            sys::ggml_backend_buft_is_host(sys::ggml_backend_dev_buffer_type(device.as_ptr()))
        }
    }

    /// The handle for calls into `sd_ggml_sys`; valid as long as `self`.
    pub fn as_ptr(&self) -> sys::ggml_backend_buffer_t {
        self.raw.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `raw` is a live buffer that nobody else frees.
        unsafe { sys::ggml_backend_buffer_free(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_buffer_is_on_the_account_while_it_lives() {
        let (cpu, ledger) = (Device::cpu().unwrap(), Ledger::default());
        let buffer = Buffer::allocate(&ledger, cpu, 4096, MemoryKind::Weights).unwrap();
        assert!(buffer.len() >= 4096);
        assert_eq!(buffer.device(), cpu);
        assert_eq!(ledger.report(cpu).used.of(MemoryKind::Weights), 4096);
        drop(buffer);
        assert_eq!(ledger.report(cpu).used.total(), 0);
        assert!(Buffer::alignment(cpu).is_power_of_two());
    }

    #[test]
    fn too_much_is_an_error_with_the_numbers() {
        let (cpu, ledger) = (Device::cpu().unwrap(), Ledger::default());
        let Err(Error::OutOfMemory {
            device,
            requested,
            free,
            ..
        }) = Buffer::allocate(&ledger, cpu, 1 << 60, MemoryKind::Compute)
        else {
            panic!()
        };
        assert_eq!((device.as_str(), requested), ("CPU", 1 << 60));
        assert!(free.is_some_and(|free| free > 0));
        assert_eq!(ledger.report(cpu).used.total(), 0);
    }
}
