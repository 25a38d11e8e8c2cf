//! Queues of work on a device, and the events that order them.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_ggml_sys as sys;

use crate::device::Device;
use crate::error::{Error, Result};

/// A mark in a [`Backend`](crate::Backend)'s or [`CopyQueue`]'s work that other queues of the device, or the host, can wait
/// for. May be used again and again; waiting means the latest mark. Clones are the same event.
#[derive(Debug, Clone)]
pub struct Event(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    raw: Mutex<RawEvent>,
    device: Device,
}

#[derive(Debug)]
struct RawEvent(NonNull<sys::ggml_backend_event>);

// SAFETY: an event has no thread affinity; it is used by one thread at a time, which its lock sees to.
unsafe impl Send for RawEvent {}

impl Drop for RawEvent {
    fn drop(&mut self) {
        // SAFETY: the event is live and nobody else frees it. No queue has it before it: queues keep clones of events that
        // are marked or waited for in work that may not be done.
        unsafe { sys::ggml_backend_event_free(self.0.as_ptr()) };
    }
}

impl Event {
    /// An event of `device`; `None` where it has none.
    pub fn new(device: Device) -> Option<Event> {
        if !has_events(device) {
            return None;
        }
        // SAFETY: the device lives for ever and has events.
        let raw = NonNull::new(unsafe { sys::ggml_backend_event_new(device.as_ptr()) })?;
        Some(Event(Arc::new(Shared {
            raw: Mutex::new(RawEvent(raw)),
            device,
        })))
    }

    /// The device whose queues it orders.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Waits until the work before its latest mark is done; at once if there is none.
    pub fn wait(&self) {
        let raw = self.lock();
        // SAFETY: the event is live, and its device has the function (`has_events`).
        unsafe { sys::ggml_backend_event_synchronize(raw.0.as_ptr()) };
    }

    fn lock(&self) -> MutexGuard<'_, RawEvent> {
        // The pointer never changes.
        self.0.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether `device` says that it has events, and has the functions that ggml calls without a look.
fn has_events(device: Device) -> bool {
    // SAFETY: the device lives for ever, and its interface is only read after registration.
    let interface = unsafe { &(*device.as_ptr()).iface };
    device.capabilities().events
        && interface.event_new.is_some()
        && interface.event_free.is_some()
        && interface.event_synchronize.is_some()
}

/// One of ggml's backends: a queue of work on one device.
#[derive(Debug)]
pub(crate) struct Queue {
    raw: NonNull<sys::ggml_backend>,
    device: Device,
    /// Whether something was queued that nobody has waited for.
    is_busy: bool,
    /// Events in work that may not be done.
    pending: Vec<Event>,
}

// SAFETY: a ggml backend keeps no thread-local state; it must only not be used from two threads at once, which `&mut`
// rules out.
unsafe impl Send for Queue {}

impl Queue {
    /// A queue on `device`; `None` if the driver refuses.
    pub(crate) fn new(device: Device) -> Option<Queue> {
        // SAFETY: the device lives for ever and null parameters mean its defaults.
        let raw = unsafe { sys::ggml_backend_dev_init(device.as_ptr(), std::ptr::null()) };
        Some(Queue {
            raw: NonNull::new(raw)?,
            device,
            is_busy: false,
            pending: Vec::new(),
        })
    }

    pub(crate) fn as_ptr(&self) -> sys::ggml_backend_t {
        self.raw.as_ptr()
    }

    /// What the driver offers.
    fn interface(&self) -> &sys::ggml_backend_i {
        // SAFETY: the backend lives as long as `self`.
        unsafe { &self.raw.as_ref().iface }
    }

    /// Whether events order its work, which runs by itself.
    pub(crate) fn has_events(&self) -> bool {
        let interface = self.interface();
        self.device.capabilities().asynchronous
            && has_events(self.device)
            && interface.synchronize.is_some()
            && interface.event_record.is_some()
            && interface.event_wait.is_some()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// Says that something was queued.
    pub(crate) fn is_given_work(&mut self) {
        self.is_busy = true;
    }

    pub(crate) fn mark(&mut self, event: &Event) -> Result<()> {
        self.take(event)?;
        // SAFETY: backend and event are live and of one device, and the function is there (`take`).
        unsafe { sys::ggml_backend_event_record(event.lock().0.as_ptr(), self.raw.as_ptr()) };
        Ok(())
    }

    pub(crate) fn wait_for(&mut self, event: &Event) -> Result<()> {
        self.take(event)?;
        // SAFETY: as in `mark`.
        unsafe { sys::ggml_backend_event_wait(self.raw.as_ptr(), event.lock().0.as_ptr()) };
        Ok(())
    }

    /// Keeps `event` until its work is done. Refuses what the driver would end the process for.
    fn take(&mut self, event: &Event) -> Result<()> {
        if event.device() != self.device || !self.has_events() {
            return Err(Error::Compute {
                device: self.device.name(),
                reason: "it has no such event",
            });
        }
        if !self
            .pending
            .iter()
            .any(|kept| Arc::ptr_eq(&kept.0, &event.0))
        {
            self.pending.push(event.clone());
        }
        self.is_busy = true;
        Ok(())
    }

    /// Waits until everything is done.
    pub(crate) fn synchronize(&mut self) {
        // SAFETY: the backend is live.
        unsafe { sys::ggml_backend_synchronize(self.raw.as_ptr()) };
        self.is_busy = false;
        self.pending.clear();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.is_busy {
            self.synchronize();
        }
        // SAFETY: the backend is live and nobody else frees it.
        unsafe { sys::ggml_backend_free(self.raw.as_ptr()) };
    }
}

/// A second queue of a device that copies beside what a [`Backend`](crate::Backend) computes. Waits until all is copied
/// when dropped.
#[derive(Debug)]
pub struct CopyQueue(Queue);

impl CopyQueue {
    /// A queue that copies to `device`; `None` where the device does not copy by itself, has no events to order that with
    /// computing, or its driver refuses a second queue.
    pub fn new(device: Device) -> Option<CopyQueue> {
        let capabilities = device.capabilities();
        if !(capabilities.asynchronous && has_events(device)) {
            return None;
        }
        let queue = Queue::new(device)
            .filter(|queue| queue.has_events() && queue.interface().set_tensor_async.is_some());
        if queue.is_none() {
            tracing::warn!("{device} has no second queue; weights are brought between computing");
        }
        queue.map(CopyQueue)
    }

    /// The device it copies to.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Queues a copy of `bytes` bytes at `from` to `tensor`, `offset` bytes behind its beginning.
    ///
    /// # Safety
    /// `tensor` is live and lies, with that range, in memory of this device. Until the copy is done, which an event that
    /// is marked later or [`CopyQueue::synchronize`] tells: the bytes at `from` stay, and nobody else reads or writes
    /// the range except for work that events order with the copy.
    pub unsafe fn copy(
        &mut self,
        tensor: *mut sys::ggml_tensor,
        offset: usize,
        from: *const u8,
        bytes: usize,
    ) {
        self.0.is_given_work();
        // SAFETY: as the caller promises; the function is there (`new`).
        unsafe {
            sys::ggml_backend_tensor_set_async(self.0.as_ptr(), tensor, from.cast(), offset, bytes)
        };
    }

    /// Marks what was queued so far: `event` happens when that is done.
    ///
    /// # Errors
    /// [`Error::Compute`] for another device's event.
    pub fn mark(&mut self, event: &Event) -> Result<()> {
        self.0.mark(event)
    }

    /// Lets what is queued from now on wait for the latest mark of `event`. The host does not wait.
    ///
    /// # Errors
    /// [`Error::Compute`] for another device's event.
    pub fn wait_for(&mut self, event: &Event) -> Result<()> {
        self.0.wait_for(event)
    }

    /// Waits until everything that was queued is done.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn synchronize(&mut self) -> Result<()> {
        self.0.synchronize();
        self.0.device.check_connection()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeDevice, FakeOptions, Pinned, Queues};
    use crate::{Backend, BackendOptions, Buffer, Ledger, MemoryKind};

    fn fake(options: FakeOptions) -> FakeDevice {
        FakeDevice::new(FakeOptions {
            queues: Queues::Late,
            ..options
        })
    }

    #[test]
    fn what_a_device_does_not_offer_is_not_there() {
        let plain = FakeDevice::new(FakeOptions::default()).device();
        let silent = fake(FakeOptions {
            makes_events: false,
            ..FakeOptions::default()
        });
        for device in [plain, Device::cpu().unwrap()] {
            assert!(CopyQueue::new(device).is_none());
        }
        for device in [plain, Device::cpu().unwrap(), silent.device()] {
            assert!(Event::new(device).is_none());
        }
        let single = fake(FakeOptions {
            most_queues: 1,
            ..FakeOptions::default()
        });
        let options = BackendOptions::default();
        let backend = Backend::new(single.device(), &options).unwrap();
        assert!(backend.has_events());
        assert!(CopyQueue::new(single.device()).is_none());
        drop(backend);
        let queue = CopyQueue::new(single.device()).unwrap();
        let error = Backend::new(single.device(), &options).unwrap_err();
        assert!(matches!(error, Error::DeviceStart { .. }));
        drop(queue);
        assert_eq!(single.counts().queues, 0);
    }

    #[test]
    fn events_are_kept_until_nobody_waits_for_them_and_stay_on_their_device() {
        let (one, other) = (fake(FakeOptions::default()), fake(FakeOptions::default()));
        let mut backend = Backend::new(one.device(), &BackendOptions::default()).unwrap();
        let mut queue = CopyQueue::new(one.device()).unwrap();
        let event = Event::new(one.device()).unwrap();
        // Without a mark there is nothing to wait for.
        event.wait();
        queue.mark(&event).unwrap();
        backend.wait_for(&event).unwrap();
        assert!(backend.is_busy());
        drop(event);
        drop(queue);
        backend.finish().unwrap();
        assert!(!backend.is_busy());
        assert_eq!(one.counts().misuses, 0);

        let strange = Event::new(other.device()).unwrap();
        for refused in [backend.mark(&strange), backend.wait_for(&strange)] {
            assert!(matches!(refused, Err(Error::Compute { .. })));
        }
        let mut host = Backend::new(Device::cpu().unwrap(), &BackendOptions::default()).unwrap();
        assert!(!host.has_events());
        assert!(host.mark(&strange).is_err());
    }

    #[test]
    fn memory_says_whether_it_is_pinned_and_is_the_hosts() {
        for (pinned, is_pinned) in [
            (Pinned::Missing, false),
            (Pinned::Work, true),
            (Pinned::FallBack, false),
        ] {
            let fake = fake(FakeOptions {
                pinned,
                ..FakeOptions::default()
            });
            let (device, host) = (fake.device(), Device::cpu().unwrap());
            assert_eq!(device.has_pinned_memory(), pinned != Pinned::Missing);
            let ledger = Ledger::default();
            let kind = MemoryKind::Weights;
            let buffer = Buffer::allocate_on_host(&ledger, device, 100, kind).unwrap();
            assert_eq!((buffer.is_pinned(), buffer.device()), (is_pinned, host));
            assert!(buffer.host_address().is_some() && buffer.len() >= 100);
            assert_eq!(ledger.report(host).used.of(kind), 100);
            assert_eq!(ledger.report(device).used.total(), 0);
            drop(buffer);
            assert_eq!(ledger.report(host).used.total(), 0);
            assert_eq!((fake.counts().pinned_bytes, fake.counts().buffers), (0, 0));
        }
    }
}
