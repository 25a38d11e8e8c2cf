//! A stream of work on a device.

use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;

use sd_ggml_sys as sys;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use crate::processor::Processor;

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
    processor: Option<Processor>,
    device: Device,
    ledger: Ledger,
}

#[derive(Debug)]
struct Raw(NonNull<sys::ggml_backend>);

// SAFETY: a ggml backend keeps no thread-local state; it must only not be used from two threads at once, which `&mut`
// in `compute` rules out.
unsafe impl Send for Raw {}

impl Backend {
    /// Starts a stream of work on `device`.
    ///
    /// # Errors
    /// [`Error::DeviceStart`] if the driver refuses, [`Error::Connection`] if the device's server does not answer.
    pub fn new(device: Device, options: &BackendOptions) -> Result<Backend> {
        let failed = || {
            device.unreachable().unwrap_or_else(|| Error::DeviceStart {
                device: device.name(),
            })
        };
        // SAFETY: the device lives for ever and null parameters mean its defaults.
        let raw = unsafe { sys::ggml_backend_dev_init(device.as_ptr(), std::ptr::null()) };
        let raw = Raw(NonNull::new(raw).ok_or_else(failed)?);
        let processor = Processor::start(device, options.threads)
            .transpose()
            .map_err(|()| failed())?;
        if let Some(processor) = &processor {
            // SAFETY: the backend is the processor's; its threads are kept beside it and freed after it.
            unsafe { processor.serve(raw.0.as_ptr()) };
        }
        Ok(Backend {
            raw,
            processor,
            device,
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
        self.processor.as_ref().map_or(1, Processor::threads)
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
    /// [`Error::OutOfMemory`] when the driver could not allocate, [`Error::Cancelled`], [`Error::DeviceLost`] when the
    /// device's server is gone, or [`Error::Compute`].
    ///
    /// # Safety
    /// Every tensor of `graph` is live, allocated in memory that this backend's device can use, and supported.
    pub unsafe fn compute(
        &mut self,
        graph: *mut sys::ggml_cgraph,
        cancel: Option<&AtomicBool>,
    ) -> Result<()> {
        // SAFETY: the graph is live.
        if unsafe { sys::ggml_graph_n_nodes(graph) } == 0 {
            // A remote device asserts that there is something to do.
            return Ok(());
        }
        let backend = self.raw.0.as_ptr();
        if let Some(processor) = &self.processor {
            // SAFETY: the flag is borrowed for this whole call, and the callback is taken back below.
            unsafe { processor.stop_by(backend, cancel) };
        }
        // SAFETY: the graph is as the caller promises.
        let status = unsafe { sys::ggml_backend_graph_compute(backend, graph) };
        if let Some(processor) = &self.processor {
            // SAFETY: takes the callback back.
            unsafe { processor.stop_by(backend, None) };
        }
        // To a remote device the graph was only sent so far: this waits for it.
        self.device.check_connection()?;
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
        // For a remote device that only means "sent". A lost one has nothing left to wait for, and whoever computes on it
        // or reads from it is told.
        let _ = self.device.check_connection();
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
