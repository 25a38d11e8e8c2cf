//! The devices of this process: finding, describing, choosing.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::ptr::NonNull;

use sd_ggml_sys as sys;

use crate::error::{Error, Result};

/// What kind of hardware a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The processor, working in host memory.
    Cpu,
    /// A graphics card with memory of its own.
    Gpu,
    /// A graphics processor that shares the host's memory.
    IntegratedGpu,
    /// Something that helps the processor, such as a matrix library.
    Accelerator,
}

/// Memory of a device in bytes, as it reports it at the moment of asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Bytes free now.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// What a device can do beside computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Graphs and copies may be queued without waiting.
    pub asynchronous: bool,
    /// Offers pinned host memory that it copies from faster.
    pub host_buffer: bool,
    /// Says that it can use host memory where it lies.
    pub buffer_from_host_ptr: bool,
    /// Has events for ordering queues.
    pub events: bool,
}

/// One of the devices that ggml found in this process. A cheap handle; equal handles name the same device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Device {
    raw: NonNull<sys::ggml_backend_device>,
}

// SAFETY: a device lives in ggml's registry until the process ends, and its interface is only read after registration.
unsafe impl Send for Device {}
// SAFETY: as for `Send`; the functions called through `&Device` (name, props, memory) keep no state of their own.
unsafe impl Sync for Device {}

impl Device {
    /// All devices in ggml's order: graphics cards and accelerators first, the processor last; then those that were added
    /// later, from servers or loaded libraries.
    pub fn all() -> Vec<Device> {
        crate::registry::lock().devices()
    }

    /// A device of ggml's registry; `None` for null.
    pub(crate) fn from_raw(raw: sys::ggml_backend_dev_t) -> Option<Device> {
        NonNull::new(raw).map(|raw| Device { raw })
    }

    /// The processor.
    ///
    /// # Errors
    /// [`Error::DeviceNotFound`] if ggml was built without its CPU backend.
    pub fn cpu() -> Result<Device> {
        Device::select("cpu")
    }

    /// Chooses a device by a person's words, in any case:
    ///
    /// - `auto`: the first graphics card, else an integrated one, else the processor;
    /// - `gpu`, `cpu`: the first of that kind;
    /// - a device's name (`Vulkan0`), its backend's name (`vulkan`), or a beginning that fits one device only;
    /// - `rpc://host:port`, the first device of that server, or `rpc://host:port/1`, its second and so on. The server's
    ///   devices are added as by [`Device::add_server`].
    ///
    /// # Errors
    /// [`Error::DeviceNotFound`] or [`Error::AmbiguousDevice`], both listing names; for servers those of
    /// [`Device::add_server`].
    pub fn select(wanted: &str) -> Result<Device> {
        if crate::rpc::is_endpoint(wanted) {
            return crate::rpc::select(wanted);
        }
        choose(&Device::all(), wanted, |device| {
            (device.name(), device.backend_name(), device.kind())
        })
    }

    /// The device that ggml calls `raw`, which must live for ever.
    #[cfg(feature = "fake-device")]
    pub(crate) fn from_non_null(raw: NonNull<sys::ggml_backend_device>) -> Device {
        Device { raw }
    }

    /// Short unique name: `CPU`, `CUDA0`, `Vulkan1`.
    pub fn name(self) -> String {
        // SAFETY: the device lives for ever and its name is a zero-terminated string it owns.
        unsafe { text(sys::ggml_backend_dev_name(self.raw.as_ptr())) }
    }

    /// The hardware's own name.
    pub fn description(self) -> String {
        // SAFETY: as for `name`.
        unsafe { text(sys::ggml_backend_dev_description(self.raw.as_ptr())) }
            .trim()
            .to_owned()
    }

    /// Name of the backend that drives it: `CPU`, `CUDA`, `Metal`, `Vulkan`.
    pub fn backend_name(self) -> String {
        self.driver_name().to_string_lossy().into_owned()
    }

    /// As [`Device::backend_name`], without allocating: asked after every graph.
    pub(crate) fn driver_name(self) -> &'static CStr {
        // SAFETY: every registered device points to its registry, which lives as long, as does its name.
        unsafe {
            let registry = sys::ggml_backend_dev_backend_reg(self.raw.as_ptr());
            if registry.is_null() {
                return c"";
            }
            let name = sys::ggml_backend_reg_name(registry);
            if name.is_null() {
                c""
            } else {
                CStr::from_ptr(name)
            }
        }
    }

    /// Its kind.
    pub fn kind(self) -> DeviceKind {
        // SAFETY: reads a constant of a device that lives for ever.
        match unsafe { sys::ggml_backend_dev_type(self.raw.as_ptr()) } {
            sys::GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
            sys::GGML_BACKEND_DEVICE_TYPE_GPU => DeviceKind::Gpu,
            sys::GGML_BACKEND_DEVICE_TYPE_IGPU => DeviceKind::IntegratedGpu,
            _ => DeviceKind::Accelerator,
        }
    }

    /// Its memory now; `None` where it does not say (0 of 0). Where Vulkan says that more is free than there is, more is
    /// in use than its driver grants and a difference has wrapped: nothing is free then. Other devices that say so are
    /// taken to be empty.
    ///
    /// ggml calls all of the processor's memory free, so for the processor the operating system is asked instead,
    /// and a control group's limit is honoured.
    pub fn memory(self) -> Option<Memory> {
        if self.kind() == DeviceKind::Cpu {
            return host_memory();
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers lead to live variables; the device lives for ever.
        unsafe { sys::ggml_backend_dev_memory(self.raw.as_ptr(), &mut free, &mut total) };
        believable(free as u64, total as u64, &self.backend_name())
    }

    /// What it can do.
    pub fn capabilities(self) -> Capabilities {
        // SAFETY: all-zero bytes are a valid value of this plain struct, which the call fills.
        let mut props: sys::ggml_backend_dev_props = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer leads to a live struct; the device lives for ever.
        unsafe { sys::ggml_backend_dev_get_props(self.raw.as_ptr(), &mut props) };
        Capabilities {
            asynchronous: props.caps.async_,
            host_buffer: props.caps.host_buffer,
            buffer_from_host_ptr: props.caps.buffer_from_host_ptr,
            events: props.caps.events,
        }
    }

    /// Whether it has a way at all to use host memory where it lies, whatever [`Capabilities::buffer_from_host_ptr`]
    /// says: drivers can do so on some machines and not on others.
    pub fn has_host_pointers(self) -> bool {
        // SAFETY: the device lives for ever, and its interface is only read after registration. ggml's own function calls
        // through this slot without a look, so a device without it must be known before.
        unsafe { self.raw.as_ref() }
            .iface
            .buffer_from_host_ptr
            .is_some()
    }

    /// The type of host memory that it copies from by itself, if it offers that.
    pub(crate) fn host_buffer_type(self) -> Option<sys::ggml_backend_buffer_type_t> {
        if !self.capabilities().host_buffer {
            return None;
        }
        // SAFETY: the device lives for ever; one without the function gives a null pointer.
        let buffer_type = unsafe { sys::ggml_backend_dev_host_buffer_type(self.raw.as_ptr()) };
        (!buffer_type.is_null()).then_some(buffer_type)
    }

    /// Whether it offers pinned memory of the host, which it copies from by itself.
    pub fn has_pinned_memory(self) -> bool {
        self.host_buffer_type().is_some()
    }

    /// The handle for calls into `sd_ggml_sys`; valid until the process ends.
    pub fn as_ptr(self) -> sys::ggml_backend_dev_t {
        self.raw.as_ptr()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// # Safety
/// `raw` is null or a zero-terminated string that lives during the call.
pub(crate) unsafe fn text(raw: *const c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: not null, and zero-terminated as the caller promises.
    unsafe { CStr::from_ptr(raw) }
        .to_string_lossy()
        .into_owned()
}

/// The rules of [`Device::select`], apart from ggml so that they can be tested with devices that are not there.
fn choose<D: Copy>(
    all: &[D],
    wanted: &str,
    describe: impl Fn(D) -> (String, String, DeviceKind),
) -> Result<D> {
    let described: Vec<_> = all
        .iter()
        .map(|&device| (device, describe(device)))
        .collect();
    let first = |kind| {
        described
            .iter()
            .find(|(_, (_, _, k))| *k == kind)
            .map(|(device, _)| *device)
    };
    let graphics = || first(DeviceKind::Gpu).or_else(|| first(DeviceKind::IntegratedGpu));
    let not_found = || Error::DeviceNotFound {
        wanted: wanted.to_owned(),
        available: described
            .iter()
            .map(|(_, (name, _, _))| name.clone())
            .collect(),
    };

    let lower = wanted.trim().to_lowercase();
    match lower.as_str() {
        "" => return Err(not_found()),
        "auto" => {
            return graphics()
                .or_else(|| first(DeviceKind::Cpu))
                .ok_or_else(not_found);
        }
        "gpu" => return graphics().ok_or_else(not_found),
        "cpu" => return first(DeviceKind::Cpu).ok_or_else(not_found),
        _ => {}
    }
    if let Some((device, _)) = described
        .iter()
        .find(|(_, (name, _, _))| name.to_lowercase() == lower)
    {
        return Ok(*device);
    }
    if let Some((device, _)) = described
        .iter()
        .find(|(_, (_, backend, _))| backend.to_lowercase() == lower)
    {
        return Ok(*device);
    }
    let fitting: Vec<_> = described
        .iter()
        .filter(|(_, (name, _, _))| name.to_lowercase().starts_with(&lower))
        .collect();
    match fitting.as_slice() {
        [] => Err(not_found()),
        [(device, _)] => Ok(*device),
        several => Err(Error::AmbiguousDevice {
            wanted: wanted.to_owned(),
            candidates: several
                .iter()
                .map(|(_, (name, _, _))| name.clone())
                .collect(),
        }),
    }
}

/// What a report of `free` of `total` bytes is worth.
fn believable(free: u64, total: u64, backend: &str) -> Option<Memory> {
    let free = match free <= total {
        true => free,
        false if backend.eq_ignore_ascii_case("vulkan") => 0,
        false => total,
    };
    (total > 0).then_some(Memory { free, total })
}

fn host_memory() -> Option<Memory> {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let (mut free, mut total) = (system.available_memory(), system.total_memory());
    if let Some(limits) = system.cgroup_limits() {
        total = total.min(limits.total_memory);
        free = free.min(limits.free_memory);
    }
    (total > 0).then_some(Memory {
        free: free.min(total),
        total,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Fake = (&'static str, &'static str, DeviceKind);

    fn pick(all: &[Fake], wanted: &str) -> Result<&'static str> {
        choose(all, wanted, |(name, backend, kind)| {
            (name.to_owned(), backend.to_owned(), kind)
        })
        .map(|(name, _, _)| name)
    }

    const MACHINE: &[Fake] = &[
        ("Vulkan0", "Vulkan", DeviceKind::IntegratedGpu),
        ("CUDA0", "CUDA", DeviceKind::Gpu),
        ("CUDA1", "CUDA", DeviceKind::Gpu),
        ("CPU", "CPU", DeviceKind::Cpu),
    ];

    #[test]
    fn selectors_find_what_they_say() {
        for (wanted, found) in [
            ("auto", "CUDA0"),
            ("GPU", "CUDA0"),
            ("cpu", "CPU"),
            ("cuda1", "CUDA1"),
            ("vulkan", "Vulkan0"),
            ("cuda", "CUDA0"),
            ("vul", "Vulkan0"),
            (" Cpu ", "CPU"),
        ] {
            assert_eq!(pick(MACHINE, wanted), Ok(found), "{wanted}");
        }
        assert_eq!(pick(&MACHINE[3..], "auto"), Ok("CPU"));
        assert_eq!(pick(&[MACHINE[0], MACHINE[3]], "auto"), Ok("Vulkan0"));
    }

    #[test]
    fn what_fits_nothing_or_several_lists_names() {
        let Err(Error::DeviceNotFound { available, .. }) = pick(MACHINE, "metal") else {
            panic!()
        };
        assert_eq!(available, ["Vulkan0", "CUDA0", "CUDA1", "CPU"]);
        assert!(matches!(
            pick(MACHINE, ""),
            Err(Error::DeviceNotFound { .. })
        ));
        assert!(matches!(
            pick(&MACHINE[3..], "gpu"),
            Err(Error::DeviceNotFound { .. })
        ));
        let Err(Error::AmbiguousDevice { candidates, .. }) = pick(MACHINE, "cud") else {
            panic!()
        };
        assert_eq!(candidates, ["CUDA0", "CUDA1"]);
    }

    #[test]
    fn impossible_reports_are_not_believed() {
        assert_eq!(believable(1, 2, "CUDA"), Some(Memory { free: 1, total: 2 }));
        assert_eq!(believable(0, 0, "CUDA"), None);
        assert_eq!(
            believable(u64::MAX, 2, "Vulkan"),
            Some(Memory { free: 0, total: 2 })
        );
        assert_eq!(believable(1, 0, "Vulkan"), None);
        assert_eq!(
            believable(3, 2, "Metal"),
            Some(Memory { free: 2, total: 2 })
        );
    }

    #[test]
    fn the_processor_is_always_there() {
        let cpu = Device::cpu().unwrap();
        assert_eq!(cpu.kind(), DeviceKind::Cpu);
        let memory = cpu.memory().unwrap();
        assert!(memory.free > 0 && memory.free <= memory.total);
    }
}
