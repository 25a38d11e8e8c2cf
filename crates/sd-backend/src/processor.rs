//! What only the processor's backend has: its own threads, and an end between two operations.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use sd_ggml_sys as sys;

use crate::device::{Device, DeviceKind};
use crate::registry::Driver;

/// The functions of `ggml-cpu.h`, as the driver hands them out: where backends are loaded at run time there is nothing to
/// link to.
#[derive(Clone, Copy)]
struct Functions {
    new_threads:
        unsafe extern "C" fn(*mut sys::ggml_threadpool_params) -> *mut sys::ggml_threadpool,
    free_threads: unsafe extern "C" fn(*mut sys::ggml_threadpool),
    use_threads: unsafe extern "C" fn(sys::ggml_backend_t, *mut sys::ggml_threadpool),
    set_thread_count: unsafe extern "C" fn(sys::ggml_backend_t, c_int),
    set_abort_callback:
        unsafe extern "C" fn(sys::ggml_backend_t, sys::ggml_abort_callback, *mut c_void),
}

impl Functions {
    fn of(device: Device) -> Option<Functions> {
        if device.kind() != DeviceKind::Cpu {
            return None;
        }
        let driver = Driver::of(device)?;
        // SAFETY: the types above are those of the functions of these names in `ggml-cpu.h` and `ggml-backend.h`.
        unsafe {
            Some(Functions {
                new_threads: driver.function(c"ggml_threadpool_new")?,
                free_threads: driver.function(c"ggml_threadpool_free")?,
                use_threads: driver.function(c"ggml_backend_cpu_set_threadpool")?,
                set_thread_count: driver.function(c"ggml_backend_set_n_threads")?,
                set_abort_callback: driver.function(c"ggml_backend_set_abort_callback")?,
            })
        }
    }
}

/// The threads of one backend on the processor. Must be dropped after the backend.
pub(crate) struct Processor {
    pool: NonNull<sys::ggml_threadpool>,
    count: usize,
    functions: Functions,
}

// SAFETY: the pool's threads are joined from whichever thread frees it.
unsafe impl Send for Processor {}

impl Processor {
    /// Starts `count` threads (as many as the machine runs at once if `None`). The outer `None` is a device that has no
    /// threads to choose: anything but a processor.
    pub(crate) fn start(device: Device, count: Option<usize>) -> Option<Result<Processor, ()>> {
        let functions = Functions::of(device)?;
        let count = count
            .unwrap_or_else(|| {
                std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
            })
            .clamp(1, sys::GGML_MAX_N_THREADS as usize);
        // SAFETY: the parameters are a live struct that ggml copies.
        let pool = unsafe {
            let mut params = sys::ggml_threadpool_params_default(count as c_int);
            (functions.new_threads)(&mut params)
        };
        Some(NonNull::new(pool).ok_or(()).map(|pool| Processor {
            pool,
            count,
            functions,
        }))
    }

    /// Number of threads.
    pub(crate) fn threads(&self) -> usize {
        self.count
    }

    /// Lets `backend` compute with these threads.
    ///
    /// # Safety
    /// `backend` is live, one of this device, and freed before `self`.
    pub(crate) unsafe fn serve(&self, backend: sys::ggml_backend_t) {
        // SAFETY: as the caller promises.
        unsafe {
            (self.functions.set_thread_count)(backend, self.count as c_int);
            (self.functions.use_threads)(backend, self.pool.as_ptr());
        }
    }

    /// Lets `cancel` stop `backend` between two operations; `None` takes that back.
    ///
    /// # Safety
    /// `backend` is live and one of this device, and the flag lives until this is called again.
    pub(crate) unsafe fn stop_by(&self, backend: sys::ggml_backend_t, cancel: Option<&AtomicBool>) {
        let data = cancel.map_or(std::ptr::null_mut(), |flag| {
            std::ptr::from_ref(flag).cast_mut().cast::<c_void>()
        });
        let callback: sys::ggml_abort_callback = cancel.map(|_| is_cancelled as _);
        // SAFETY: as the caller promises; none and null are how ggml says "no callback".
        unsafe { (self.functions.set_abort_callback)(backend, callback, data) };
    }
}

impl std::fmt::Debug for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Processor({} threads)", self.count)
    }
}

impl Drop for Processor {
    fn drop(&mut self) {
        // SAFETY: the pool is live, and the backend that used it was dropped before (field order of `Backend`).
        unsafe { (self.functions.free_threads)(self.pool.as_ptr()) };
    }
}

/// Asked by ggml between the operations of a graph.
unsafe extern "C" fn is_cancelled(data: *mut c_void) -> bool {
    // SAFETY: `data` is the flag that `Backend::compute` borrows while the graph runs.
    unsafe { &*data.cast::<AtomicBool>() }.load(Ordering::Relaxed)
}
