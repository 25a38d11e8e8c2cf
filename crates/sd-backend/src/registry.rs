//! ggml's registry of backends, and the functions that backends hand out by name.

use std::ffi::{CStr, c_void};
use std::net::SocketAddrV4;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sd_ggml_sys as sys;

use crate::device::{Device, text};

/// ggml keeps one registry per process and guards it against nothing: who lists devices while another thread adds some
/// reads a vector that is being moved. Whoever touches it holds this lock. A static is right here because what it guards
/// is one: a lock that callers own would guard only their own calls.
static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    servers: Vec::new(),
});

/// The right to read ggml's registry and to add to it.
#[derive(Debug)]
pub(crate) struct Registry {
    /// Servers of other machines that were added, with their devices in the server's order.
    servers: Vec<(SocketAddrV4, Vec<Device>)>,
}

/// Waits for the registry. Nothing slow is done while it is held.
pub(crate) fn lock() -> MutexGuard<'static, Registry> {
    crate::log::route_to_tracing();
    // Every change is one statement, so a panic elsewhere leaves nothing half done.
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// All devices in ggml's order.
    pub(crate) fn devices(&self) -> Vec<Device> {
        // SAFETY: the first call registers the built-in backends under ggml's own lock; `self` is the right to read, so
        // the count stays true and indices below it are valid.
        unsafe {
            (0..sys::ggml_backend_dev_count())
                .filter_map(|index| Device::from_raw(sys::ggml_backend_dev_get(index)))
                .collect()
        }
    }

    /// The driver of this name, in any case.
    pub(crate) fn driver(&self, name: &str) -> Option<Driver> {
        // SAFETY: as for `devices`.
        unsafe {
            (0..sys::ggml_backend_reg_count())
                .filter_map(|index| NonNull::new(sys::ggml_backend_reg_get(index)))
                .map(Driver)
                .find(|driver| driver.name().eq_ignore_ascii_case(name))
        }
    }

    /// Adds a driver and its devices, and returns the driver of its name: itself, or one that was there before. Two of one
    /// name would list the same hardware twice.
    pub(crate) fn add_unless_there(&mut self, driver: Driver) -> Driver {
        let name = driver.name();
        self.driver(&name).unwrap_or_else(|| {
            self.add(driver);
            driver
        })
    }

    fn add(&mut self, driver: Driver) {
        // SAFETY: a driver is a live registration that is never freed; `&mut self` is the right to add.
        unsafe { sys::ggml_backend_register(driver.0.as_ptr()) };
    }

    /// The devices of a server that was added.
    pub(crate) fn server(&self, address: SocketAddrV4) -> Option<Vec<Device>> {
        self.servers
            .iter()
            .find(|(known, _)| *known == address)
            .map(|(_, devices)| devices.clone())
    }

    /// Adds a server's driver; again for the same address changes nothing.
    pub(crate) fn add_server(&mut self, address: SocketAddrV4, driver: Driver) -> Vec<Device> {
        if let Some(devices) = self.server(address) {
            return devices;
        }
        self.add(driver);
        let devices = driver.devices();
        self.servers.push((address, devices.clone()));
        devices
    }
}

/// What drives devices of one kind: ggml's `ggml_backend_reg`. Lives until the process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Driver(NonNull<sys::ggml_backend_reg>);

impl Driver {
    /// # Safety
    /// `raw` is null or a live registration that is never freed.
    pub(crate) unsafe fn from_raw(raw: sys::ggml_backend_reg_t) -> Option<Driver> {
        NonNull::new(raw).map(Driver)
    }

    /// The driver of a device.
    pub(crate) fn of(device: Device) -> Option<Driver> {
        // SAFETY: every registered device points to its registration, which lives as long.
        NonNull::new(unsafe { sys::ggml_backend_dev_backend_reg(device.as_ptr()) }).map(Driver)
    }

    /// Its name: `CPU`, `CUDA`, `RPC`.
    pub(crate) fn name(self) -> String {
        // SAFETY: the registration lives for ever and its name is a zero-terminated string it owns.
        unsafe { text(sys::ggml_backend_reg_name(self.0.as_ptr())) }
    }

    /// The version of the interface that it was written for.
    pub(crate) fn api_version(self) -> i32 {
        // SAFETY: the registration lives for ever, and this field is its first in every version.
        unsafe { (*self.0.as_ptr()).api_version }
    }

    /// Its devices.
    pub(crate) fn devices(self) -> Vec<Device> {
        // SAFETY: indices below the driver's own count are valid.
        unsafe {
            (0..sys::ggml_backend_reg_dev_count(self.0.as_ptr()))
                .filter_map(|index| {
                    Device::from_raw(sys::ggml_backend_reg_dev_get(self.0.as_ptr(), index))
                })
                .collect()
        }
    }

    /// The function that it hands out under `name`. Linking to the function would not do: a driver may be a library that
    /// was loaded at run time, or one of an installed ggml without our patches.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that function.
    pub(crate) unsafe fn function<F: Copy>(self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the registration lives for ever, the name is terminated.
        let address =
            unsafe { sys::ggml_backend_reg_get_proc_address(self.0.as_ptr(), name.as_ptr()) };
        // SAFETY: `F` is a function pointer of this size (checked above), and the address is not null.
        (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
    }
}
