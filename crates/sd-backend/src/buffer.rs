//! Memory of a device.

use std::ptr::NonNull;

use sd_ggml_sys as sys;

use crate::device::Device;
use crate::error::{Error, Result};

/// What a buffer is for; some drivers place weights differently from what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BufferUsage {
    /// Parameters, written once and read often.
    Weights,
    /// Everything else.
    Compute,
}

/// A block of memory on one device, freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    raw: NonNull<sys::ggml_backend_buffer>,
    device: Device,
}

// SAFETY: a ggml buffer is not tied to the thread that made it; freeing it from another is what ggml's users do.
unsafe impl Send for Buffer {}
// SAFETY: through `&Buffer` only constants (base, size) are read; writing its memory goes through raw tensors, in
// code that must itself rule out races.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `bytes` on `device`.
    ///
    /// What is free is looked at first, since an operating system that promises more than it has would otherwise
    /// kill the process when the memory is touched.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn allocate(device: Device, bytes: usize, usage: BufferUsage) -> Result<Buffer> {
        let free = check_free(device, bytes as u64)?;
        // SAFETY: the device lives for ever; a refused allocation is a null pointer, which is looked at.
        let raw = unsafe {
            let buffer_type = sys::ggml_backend_dev_buffer_type(device.as_ptr());
            sys::ggml_backend_buft_alloc_buffer(buffer_type, bytes)
        };
        let raw = NonNull::new(raw).ok_or_else(|| out_of_memory(device, bytes as u64, free))?;
        if usage == BufferUsage::Weights {
            // SAFETY: `raw` was just returned as a live buffer.
            unsafe {
                sys::ggml_backend_buffer_set_usage(
                    raw.as_ptr(),
                    sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS,
                )
            };
        }
        Ok(Buffer { raw, device })
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

impl Device {
    /// Refuses `bytes` more than the device says are free.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn check_free(self, bytes: u64) -> Result<()> {
        check_free(self, bytes).map(drop)
    }

    /// The error of a failed allocation of `bytes` on this device, with what is free now.
    pub fn out_of_memory(self, bytes: u64) -> Error {
        out_of_memory(self, bytes, self.memory().map(|memory| memory.free))
    }
}

fn check_free(device: Device, bytes: u64) -> Result<Option<u64>> {
    let free = device.memory().map(|memory| memory.free);
    match free {
        Some(free) if bytes > free => Err(out_of_memory(device, bytes, Some(free))),
        _ => Ok(free),
    }
}

fn out_of_memory(device: Device, requested: u64, free: Option<u64>) -> Error {
    Error::OutOfMemory {
        device: device.name(),
        requested,
        free,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_has_the_size_it_was_asked_for() {
        let cpu = Device::cpu().unwrap();
        let buffer = Buffer::allocate(cpu, 4096, BufferUsage::Weights).unwrap();
        assert!(buffer.len() >= 4096);
        assert_eq!(buffer.device(), cpu);
        assert!(Buffer::alignment(cpu).is_power_of_two());
    }

    #[test]
    fn too_much_is_an_error_with_the_numbers() {
        let cpu = Device::cpu().unwrap();
        let Err(Error::OutOfMemory {
            device,
            requested,
            free,
        }) = Buffer::allocate(cpu, 1 << 60, BufferUsage::Compute)
        else {
            panic!()
        };
        assert_eq!((device.as_str(), requested), ("CPU", 1 << 60));
        assert!(free.is_some_and(|free| free > 0));
    }
}
