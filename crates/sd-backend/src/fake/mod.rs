//! A device that fails on demand, for tests of what real hardware shows once a year.
//!
//! Written against ggml's backend interface, so that everything above sees an ordinary graphics card: with memory of its
//! own that the host cannot address, with reports that may lie, with allocations, host pointers and graphs that fail when
//! a test says so, with queues that work as late as they may. Its memory is really the host's, and the processor's backend computes for it, so its results are the
//! processor's, bit for bit.
//!
//! Not in ggml's registry: nobody gets it who does not hold its [`FakeDevice`]. A fake device is never freed, as no
//! device is.

mod interface;
mod queues;

use std::ffi::{CString, c_void};
use std::mem::zeroed;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sd_ggml_sys as sys;

use crate::device::Device;

pub use queues::Queues;
use queues::Waiting;

/// What a [`FakeDevice`] does when it is asked to use host memory where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostPointers {
    /// The interface has no function for it.
    #[default]
    Missing,
    /// It can.
    Work,
    /// It returns a null pointer, as Vulkan does.
    Refuse,
    /// It returns a buffer without a context, whose way of being freed follows that null pointer, as Metal does.
    FailLikeMetal,
    /// It seems to, and reads other bytes.
    ReadWrong,
}

/// What a [`FakeDevice`] gives whoever wants memory of the host that it copies from by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pinned {
    /// The interface has no function for it.
    #[default]
    Missing,
    /// That.
    Work,
    /// Ordinary memory, without a word, as CUDA does when nothing can be pinned.
    FallBack,
}

/// What a [`FakeDevice`] says of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryStory {
    /// What is so.
    #[default]
    True,
    /// These bytes free, of these in all.
    Of(u64, u64),
}

/// How a [`FakeDevice`] is made.
#[derive(Debug, Clone)]
pub struct FakeOptions {
    /// Its name.
    pub name: String,
    /// The name of the backend that drives it.
    pub backend: String,
    /// Bytes of its memory.
    pub memory: usize,
    /// What it does with host memory.
    pub host_pointers: HostPointers,
    /// Whether its capabilities speak of that.
    pub says_host_pointers: bool,
    /// Bytes of its largest buffer.
    pub largest_buffer: usize,
    /// Bytes that weights and inputs are padded to in its memory.
    pub padding: usize,
    /// When it does what was queued.
    pub queues: Queues,
    /// Queues that may be there at once.
    pub most_queues: usize,
    /// Whether it makes events, if it says that it has some.
    pub makes_events: bool,
    /// What it does about pinned memory of the host.
    pub pinned: Pinned,
}

impl Default for FakeOptions {
    fn default() -> Self {
        FakeOptions {
            name: "Fake0".to_owned(),
            backend: "Fake".to_owned(),
            memory: 1 << 30,
            host_pointers: HostPointers::Missing,
            says_host_pointers: false,
            largest_buffer: usize::MAX,
            padding: 1,
            queues: Queues::None,
            most_queues: usize::MAX,
            makes_events: true,
            pinned: Pinned::Missing,
        }
    }
}

/// What a [`FakeDevice`] counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FakeCounts {
    /// Allocations that were asked for, refused ones included.
    pub allocations: u64,
    /// Bytes of its memory that are taken now.
    pub bytes: usize,
    /// The most that ever were.
    pub peak_bytes: usize,
    /// Bytes of host memory that it uses in place now.
    pub mapped_bytes: usize,
    /// Buffers of both kinds that are alive.
    pub buffers: usize,
    /// Bytes of pinned host memory that are taken now.
    pub pinned_bytes: usize,
    /// Bytes that were copied to it, queued ones included.
    pub uploaded: u64,
    /// Bytes that were copied from it.
    pub downloaded: u64,
    /// Queues that are alive.
    pub queues: usize,
    /// Memory, events and queues that were given up, and memory that was read or written past the queues, while something
    /// that was queued needed them; graphs that saw anything but zeros in the padding of weights.
    pub misuses: u64,
    /// Graphs that were computed, failed ones included.
    pub graphs: u64,
}

#[derive(Debug, Default)]
struct Script {
    story: MemoryStory,
    /// Allocations from now on until one fails; that one is number 1.
    fail_allocation: Option<u64>,
    /// Graphs from now on until one fails.
    fail_graph: Option<(u64, GraphFailure)>,
    delay: Duration,
    counts: FakeCounts,
}

/// How a graph fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphFailure {
    /// The driver could not allocate what it needed meanwhile.
    Allocation,
    /// Anything else.
    Other,
}

/// The structs that ggml keeps pointers to, and what they share.
struct Fake {
    registry: sys::ggml_backend_reg,
    device: sys::ggml_backend_device,
    buffer_type: sys::ggml_backend_buffer_type,
    host_buffer_type: sys::ggml_backend_buffer_type,
    guid: [u8; 16],
    name: CString,
    backend: CString,
    options: FakeOptions,
    script: Mutex<Script>,
    waiting: Mutex<Waiting>,
}

/// A device that does what a test tells it to. Clones are the same device.
#[derive(Clone, Copy)]
pub struct FakeDevice(&'static Fake);

// SAFETY: the pointers among the structs lead to parts of the same leaked value, which is only read after it was made,
// except for the script, which has a lock.
unsafe impl Send for Fake {}
// SAFETY: as for `Send`.
unsafe impl Sync for Fake {}

/// Type of the function that says a device's name.
type Name = unsafe extern "C" fn(sys::ggml_backend_dev_t) -> *const std::ffi::c_char;

impl FakeDevice {
    /// A device as `options` say; a zero byte in a name ends it.
    pub fn new(options: FakeOptions) -> FakeDevice {
        let c_string =
            |text: &str| CString::new(text.split('\0').next().unwrap_or("")).unwrap_or_default();
        // SAFETY: every field of these structs is a nullable function pointer, a pointer or a number: zero is valid.
        let (registry, device, types) = unsafe { (zeroed(), zeroed(), (zeroed(), zeroed())) };
        let fake: &'static mut Fake = Box::leak(Box::new(Fake {
            registry,
            device,
            buffer_type: types.0,
            host_buffer_type: types.1,
            guid: *b"a fake device's.",
            name: c_string(&options.name),
            backend: c_string(&options.backend),
            options,
            script: Mutex::default(),
            waiting: Mutex::default(),
        }));
        let context = (&raw mut *fake).cast::<c_void>();
        fake.registry.api_version = sys::GGML_BACKEND_API_VERSION as i32;
        fake.registry.context = context;
        fake.registry.iface.get_name = Some(interface::registry_name);
        fake.registry.iface.get_device_count = Some(interface::device_count);
        fake.registry.iface.get_device = Some(interface::device_of_registry);
        fake.device.reg = &raw mut fake.registry;
        fake.device.context = context;
        fake.device.iface.get_name = Some(interface::device_name);
        fake.device.iface.get_description = Some(interface::device_name);
        fake.device.iface.get_memory = Some(interface::device_memory);
        fake.device.iface.get_type = Some(interface::device_type);
        fake.device.iface.get_props = Some(interface::device_props);
        fake.device.iface.init_backend = Some(interface::init_backend);
        fake.device.iface.get_buffer_type = Some(interface::buffer_type_of_device);
        fake.device.iface.supports_op = Some(interface::supports_op);
        fake.device.iface.supports_buft = Some(interface::supports_buffer_type);
        if fake.options.host_pointers != HostPointers::Missing {
            fake.device.iface.buffer_from_host_ptr = Some(interface::buffer_from_host_ptr);
        }
        if fake.options.queues != Queues::None {
            fake.device.iface.event_new = Some(queues::event_new);
            fake.device.iface.event_free = Some(queues::event_free);
            fake.device.iface.event_synchronize = Some(queues::event_synchronize);
        }
        if fake.options.pinned != Pinned::Missing {
            fake.device.iface.get_host_buffer_type = Some(interface::host_buffer_type_of_device);
        }
        fake.host_buffer_type.device = &raw mut fake.device;
        fake.host_buffer_type.context = context;
        fake.host_buffer_type.iface.get_name = Some(interface::buffer_type_name);
        fake.host_buffer_type.iface.alloc_buffer = Some(interface::alloc_host_buffer);
        fake.host_buffer_type.iface.get_alignment = Some(interface::alignment);
        fake.host_buffer_type.iface.get_max_size = Some(interface::max_size);
        fake.host_buffer_type.iface.is_host = Some(interface::is_host);
        fake.buffer_type.device = &raw mut fake.device;
        fake.buffer_type.context = context;
        fake.buffer_type.iface.get_name = Some(interface::buffer_type_name);
        fake.buffer_type.iface.alloc_buffer = Some(interface::alloc_buffer);
        fake.buffer_type.iface.get_alignment = Some(interface::alignment);
        fake.buffer_type.iface.get_max_size = Some(interface::max_size);
        fake.buffer_type.iface.get_alloc_size = Some(interface::alloc_size);
        FakeDevice(fake)
    }

    /// The device.
    pub fn device(&self) -> Device {
        Device::from_non_null(NonNull::from(&self.0.device))
    }

    /// The fake that `device` is, if it is one.
    pub fn of(device: Device) -> Option<FakeDevice> {
        // SAFETY: a device lives for ever, and its interface is only read after registration. Only fakes have this function.
        unsafe {
            let device = &*device.as_ptr();
            let name = device.iface.get_name?;
            let is_fake = std::ptr::fn_addr_eq(name, interface::device_name as Name);
            is_fake.then(|| FakeDevice(&*device.context.cast::<Fake>()))
        }
    }

    /// What it says of its memory from now on.
    pub fn tell(&self, story: MemoryStory) {
        self.0.lock().story = story;
    }

    /// Lets the `nth` allocation from now on fail (1 is the next), once; 0 lets none.
    pub fn fail_allocation(&self, nth: u64) {
        self.0.lock().fail_allocation = (nth > 0).then_some(nth);
    }

    /// Lets the `nth` graph from now on fail (1 is the next), once; 0 lets none.
    pub fn fail_graph(&self, nth: u64, how: GraphFailure) {
        self.0.lock().fail_graph = (nth > 0).then_some((nth, how));
    }

    /// Lets every graph take this much longer.
    pub fn delay(&self, delay: Duration) {
        self.0.lock().delay = delay;
    }

    /// What was counted.
    pub fn counts(&self) -> FakeCounts {
        let seen = self.0.lock_waiting().misuses;
        let mut counts = self.0.lock().counts;
        counts.misuses += seen;
        counts
    }
}

impl std::fmt::Debug for FakeDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FakeDevice({:?})", self.0.name)
    }
}

impl Fake {
    fn lock(&self) -> MutexGuard<'_, Script> {
        // The script is plain data, right after every statement.
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a fault of whoever uses the device, if it is one.
    fn misused(&self, is_so: bool) {
        self.lock().counts.misuses += u64::from(is_so);
    }

    /// Counts one allocation of `bytes`; false if it is to fail.
    fn grant(&self, bytes: usize, memory: Memory) -> bool {
        let mut script = self.lock();
        script.counts.allocations += 1;
        if let Some(left) = script.fail_allocation {
            script.fail_allocation = (left > 1).then_some(left - 1);
            if left == 1 {
                return false;
            }
        }
        let counts = &mut script.counts;
        match memory {
            Memory::Mapped => counts.mapped_bytes += bytes,
            Memory::Pinned => counts.pinned_bytes += bytes,
            Memory::Own if bytes > self.options.memory - counts.bytes => return false,
            Memory::Own => {
                counts.bytes += bytes;
                counts.peak_bytes = counts.peak_bytes.max(counts.bytes);
            }
        }
        counts.buffers += 1;
        true
    }
}

/// What a buffer's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// The device's.
    Own,
    /// The host's, used in place.
    Mapped,
    /// The host's, copied from.
    Pinned,
}
