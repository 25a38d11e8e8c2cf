//! A device on another machine, with the other machine in a thread.

use std::ffi::CString;
use std::net::{TcpListener, TcpStream};
use std::ptr;
use std::thread;
use std::time::Duration;

use sd_ggml_sys as sys;

use crate::product::cpu_backend;

/// Serves the CPU on a free port of this machine and adds it to ggml's registry as a remote device.
pub(crate) fn register() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let address = format!("127.0.0.1:{port}");
    let endpoint = CString::new(address.clone()).unwrap();
    let served = endpoint.clone();
    thread::spawn(move || {
        // The server keeps a CPU backend of its own; this one makes sure that there is a CPU device to serve.
        let backend = cpu_backend();
        // SAFETY: the endpoint is a terminated string, the device lives as long as the process, there is one of it. The
        // call never returns.
        unsafe {
            let mut device = sys::ggml_backend_get_device(backend);
            sys::ggml_backend_rpc_start_server(served.as_ptr(), ptr::null(), 1, 1, &raw mut device);
        }
    });
    // The server listens a moment later.
    let reachable = (0..100).any(|_| {
        thread::sleep(Duration::from_millis(50));
        TcpStream::connect(&address).is_ok()
    });
    assert!(reachable, "the server does not listen");
    // SAFETY: the endpoint is a terminated string; the registry struct that comes back is never freed.
    unsafe { sys::ggml_backend_register(sys::ggml_backend_rpc_add_server(endpoint.as_ptr())) };
}

#[test]
fn the_remote_device_is_registered() {
    crate::fill_registry();
    // SAFETY: the name is a terminated string.
    let device = unsafe { sys::ggml_backend_dev_by_name(c"RPC0".as_ptr()) };
    assert!(!device.is_null());
}

/// Patch 0004: without it this ends the process.
#[cfg(not(feature = "system"))]
#[test]
fn a_server_that_is_not_there_is_a_null_pointer() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let endpoint = CString::new(format!("127.0.0.1:{port}")).unwrap();
    let (mut free, mut total) = (1, 1);
    // SAFETY: the endpoint is a terminated string, and both pointers lead to live numbers.
    unsafe {
        assert!(sys::ggml_backend_rpc_add_server(endpoint.as_ptr()).is_null());
        assert!(sys::ggml_backend_rpc_init(endpoint.as_ptr(), 0).is_null());
        assert!(sys::ggml_backend_rpc_buffer_type(endpoint.as_ptr(), 0).is_null());
        sys::ggml_backend_rpc_get_device_memory(endpoint.as_ptr(), 0, &mut free, &mut total);
    }
    assert_eq!((free, total), (0, 0));
}
