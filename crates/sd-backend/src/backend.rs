//! A stream of work on a device.

use std::sync::atomic::AtomicBool;

use sd_ggml_sys as sys;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use crate::processor::Processor;
use crate::queue::{Event, Queue};

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
    queue: Queue,
    processor: Option<Processor>,
    device: Device,
    ledger: Ledger,
}

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
        let queue = Queue::new(device).ok_or_else(failed)?;
        let processor = Processor::start(device, options.threads)
            .transpose()
            .map_err(|()| failed())?;
        if let Some(processor) = &processor {
            // SAFETY: the backend is the processor's; its threads are kept beside it and freed after it.
            unsafe { processor.serve(queue.as_ptr()) };
        }
        Ok(Backend {
            queue,
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
        unsafe { sys::ggml_backend_supports_op(self.queue.as_ptr(), node) }
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
        // SAFETY: as the caller promises; this returns when nothing is queued any more.
        let outcome = unsafe { self.enqueue(graph, cancel) };
        self.finish()?;
        outcome
    }

    /// As [`Backend::compute`], but where the device works by itself the graph is only queued.
    ///
    /// # Errors
    /// Those of [`Backend::compute`], as far as they are known when the graph is queued.
    ///
    /// # Safety
    /// As for [`Backend::compute`], until [`Backend::finish`] or an event that is marked later says that the graph is done;
    /// and nobody else writes what it reads or reads what it writes except for work that events order with it.
    pub unsafe fn enqueue(
        &mut self,
        graph: *mut sys::ggml_cgraph,
        cancel: Option<&AtomicBool>,
    ) -> Result<()> {
        // SAFETY: the graph is live.
        if unsafe { sys::ggml_graph_n_nodes(graph) } == 0 {
            // A remote device asserts that there is something to do.
            return Ok(());
        }
        let backend = self.queue.as_ptr();
        if let Some(processor) = &self.processor {
            // SAFETY: the flag is borrowed for this whole call, in which the processor does all its work, and the callback
            // is taken back below.
            unsafe { processor.stop_by(backend, cancel) };
        }
        self.queue.is_given_work();
        // SAFETY: the graph is as the caller promises.
        let status = unsafe { sys::ggml_backend_graph_compute_async(backend, graph) };
        if let Some(processor) = &self.processor {
            // SAFETY: takes the callback back.
            unsafe { processor.stop_by(backend, None) };
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

    /// Whether it works by itself, and events order it with other queues of its device.
    pub fn has_events(&self) -> bool {
        self.queue.has_events()
    }

    /// Marks what was queued so far: `event` happens when that is done.
    ///
    /// # Errors
    /// [`Error::Compute`] for another device's event.
    pub fn mark(&mut self, event: &Event) -> Result<()> {
        self.queue.mark(event)
    }

    /// Lets what is queued from now on wait for the latest mark of `event`. The host does not wait.
    ///
    /// # Errors
    /// [`Error::Compute`] for another device's event.
    pub fn wait_for(&mut self, event: &Event) -> Result<()> {
        self.queue.wait_for(event)
    }

    /// Whether something was queued that nobody has waited for by [`Backend::finish`].
    pub fn is_busy(&self) -> bool {
        self.queue.is_busy()
    }

    /// Waits until everything that was queued is done.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] when the device's server is gone.
    pub fn finish(&mut self) -> Result<()> {
        self.queue.synchronize();
        // For a remote device that only means "sent": this waits for it.
        self.device.check_connection()
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
                backend.finish().unwrap();
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
