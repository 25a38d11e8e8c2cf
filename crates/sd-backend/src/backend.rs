//! A stream of work on a device.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use sd_ggml_sys as sys;

use crate::device::{Device, DeviceKind};
use crate::error::{Error, Result};
use crate::ledger::Ledger;

/// How a [`Backend`] works.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct BackendOptions {
    /// Threads that compute on the processor; `None` takes as many as the machine runs at once. Other devices ignore it.
    pub threads: Option<usize>,
    /// The account that everything allocated for this backend is on; one of its own if not given.
    pub ledger: Ledger,
}

impl BackendOptions {
    /// Sets the number of threads; 0 is taken as 1.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads.max(1));
        self
    }

    /// Sets the account that everything allocated for this backend is on; a clone shares it.
    pub fn ledger(mut self, ledger: &Ledger) -> Self {
        self.ledger = ledger.clone();
        self
    }
}

/// One stream of work on one device. Owns ggml's backend and, on the processor, its threads.
#[derive(Debug)]
pub struct Backend {
    // Field order is drop order: the backend goes before the threads it computes with.
    raw: Raw,
    _threads: Option<Threads>,
    device: Device,
    threads: usize,
    ledger: Ledger,
}

#[derive(Debug)]
struct Raw(NonNull<sys::ggml_backend>);

#[derive(Debug)]
struct Threads(NonNull<sys::ggml_threadpool>);

// SAFETY: a ggml backend keeps no thread-local state; it must only not be used from two threads at once, which `&mut`
// in `compute` rules out.
unsafe impl Send for Raw {}
// SAFETY: the pool's threads are joined from whichever thread frees it.
unsafe impl Send for Threads {}

impl Backend {
    /// Starts a stream of work on `device`.
    ///
    /// # Errors
    /// [`Error::DeviceStart`] if the driver refuses.
    pub fn new(device: Device, options: &BackendOptions) -> Result<Backend> {
        let failed = || Error::DeviceStart {
            device: device.name(),
        };
        // SAFETY: the device lives for ever and null parameters mean its defaults.
        let raw = unsafe { sys::ggml_backend_dev_init(device.as_ptr(), std::ptr::null()) };
        let raw = Raw(NonNull::new(raw).ok_or_else(failed)?);

        let mut threads = None;
        let mut count = 1;
        if device.kind() == DeviceKind::Cpu {
            count = options
                .threads
                .unwrap_or_else(|| {
                    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
                })
                .clamp(1, sys::GGML_MAX_N_THREADS as usize);
            let pool = Threads::new(count).ok_or_else(failed)?;
            // SAFETY: the backend is the processor's; the pool is kept beside it and freed after it.
            unsafe {
                sys::ggml_backend_cpu_set_n_threads(raw.0.as_ptr(), count as i32);
                sys::ggml_backend_cpu_set_threadpool(raw.0.as_ptr(), pool.0.as_ptr());
            }
            threads = Some(pool);
        }
        Ok(Backend {
            raw,
            _threads: threads,
            device,
            threads: count,
            ledger: options.ledger.clone(),
        })
    }

    /// The device this works on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The account that everything allocated for this backend is on.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The error of an allocation of `bytes` that was refused although it had been granted.
    pub fn out_of_memory(&self, bytes: u64) -> Error {
        self.ledger.refused(self.device, bytes)
    }

    /// Threads that compute; 1 where the device is not the processor.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether the device can run the operation of `node`.
    ///
    /// # Safety
    /// `node` and its sources are live tensors.
    pub unsafe fn supports(&self, node: *const sys::ggml_tensor) -> bool {
        // SAFETY: the backend is live, the node is as the caller promises.
        unsafe { sys::ggml_backend_supports_op(self.raw.0.as_ptr(), node) }
    }

    /// Runs a graph to its end, or until `cancel` becomes true where the device can stop between operations (the
    /// processor can).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the driver could not allocate, [`Error::Cancelled`], or [`Error::Compute`].
    ///
    /// # Safety
    /// Every tensor of `graph` is live, allocated in memory that this backend's device can use, and supported.
    pub unsafe fn compute(
        &mut self,
        graph: *mut sys::ggml_cgraph,
        cancel: Option<&AtomicBool>,
    ) -> Result<()> {
        let on_cpu = self.device.kind() == DeviceKind::Cpu;
        if on_cpu {
            let data = cancel.map_or(std::ptr::null_mut(), |flag| {
                std::ptr::from_ref(flag).cast_mut().cast::<c_void>()
            });
            let callback: sys::ggml_abort_callback = cancel.map(|_| is_cancelled as _);
            // SAFETY: the flag is borrowed for this whole call, and the callback is taken back below.
            unsafe {
                sys::ggml_backend_cpu_set_abort_callback(self.raw.0.as_ptr(), callback, data)
            };
        }
        // SAFETY: the graph is as the caller promises.
        let status = unsafe { sys::ggml_backend_graph_compute(self.raw.0.as_ptr(), graph) };
        if on_cpu {
            // SAFETY: none and null are how ggml says "no callback".
            unsafe {
                sys::ggml_backend_cpu_set_abort_callback(
                    self.raw.0.as_ptr(),
                    None,
                    std::ptr::null_mut(),
                )
            };
        }
        match status {
            sys::GGML_STATUS_SUCCESS => Ok(()),
            sys::GGML_STATUS_ABORTED => Err(Error::Cancelled),
            sys::GGML_STATUS_ALLOC_FAILED => Err(self.out_of_memory(0)),
            _ => Err(Error::Compute {
                device: self.device.name(),
                reason: "the graph failed",
            }),
        }
    }

    /// Waits until everything that was queued is done.
    pub fn synchronize(&mut self) {
        // SAFETY: the backend is live.
        unsafe { sys::ggml_backend_synchronize(self.raw.0.as_ptr()) };
    }
}

/// Asked by ggml between the operations of a graph.
unsafe extern "C" fn is_cancelled(data: *mut c_void) -> bool {
    // SAFETY: `data` is the flag that `Backend::compute` borrows while the graph runs.
    unsafe { &*data.cast::<AtomicBool>() }.load(Ordering::Relaxed)
}

impl Threads {
    fn new(count: usize) -> Option<Threads> {
        // SAFETY: the parameters are a live struct that ggml copies.
        let raw = unsafe {
            let mut params = sys::ggml_threadpool_params_default(count as i32);
            sys::ggml_threadpool_new(&mut params)
        };
        NonNull::new(raw).map(Threads)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // SAFETY: the pool is live, and the backend that used it was dropped before (field order of `Backend`).
        unsafe { sys::ggml_threadpool_free(self.0.as_ptr()) };
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: the backend is live and nobody else frees it.
        unsafe { sys::ggml_backend_free(self.0.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_starts_and_stops() {
        for device in Device::all() {
            for _ in 0..3 {
                let mut backend =
                    Backend::new(device, &BackendOptions::default().threads(2)).unwrap();
                backend.synchronize();
                assert_eq!(backend.device(), device);
            }
        }
    }

    #[test]
    fn a_thread_count_of_zero_means_one() {
        let backend = Backend::new(
            Device::cpu().unwrap(),
            &BackendOptions::default().threads(0),
        )
        .unwrap();
        assert_eq!(backend.threads(), 1);
    }
}
