//! Serving this machine's devices to others, by ggml's RPC server.

use std::convert::Infallible;
use std::ffi::{CString, c_char};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::path::{Path, PathBuf};

use sd_ggml_sys as sys;

use crate::device::{Device, DeviceKind};
use crate::error::{Error, Result};
use crate::rpc;

/// What an [`RpcServer`] serves, and where.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RpcServerOptions {
    /// Where it listens; 127.0.0.1:50052 by default, which only this machine reaches. Port 0 takes a free one.
    ///
    /// The protocol asks nobody who they are and believes what it is told: whoever reaches another address than a
    /// loopback one can read what clients have on the devices, and bring the server down.
    pub address: SocketAddrV4,
    /// The devices, in the order that clients see; if there are none, all graphics cards of this machine, or else the
    /// processor.
    pub devices: Vec<Device>,
    /// Threads that compute on the processor; `None` takes as many as the machine runs at once.
    pub threads: Option<usize>,
    /// A folder for large weights, so that a client need not send them again. It is never emptied.
    pub cache: Option<PathBuf>,
}

impl Default for RpcServerOptions {
    fn default() -> Self {
        RpcServerOptions {
            address: SocketAddrV4::new(Ipv4Addr::LOCALHOST, rpc::DEFAULT_PORT),
            devices: Vec::new(),
            threads: None,
            cache: None,
        }
    }
}

impl RpcServerOptions {
    /// Sets where it listens.
    pub fn address(mut self, address: SocketAddrV4) -> Self {
        self.address = address;
        self
    }

    /// Serves this device too.
    pub fn device(mut self, device: Device) -> Self {
        self.devices.push(device);
        self
    }

    /// Sets the number of threads; 0 is taken as 1.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads.max(1));
        self
    }

    /// Keeps large weights in this folder.
    pub fn cache(mut self, folder: impl AsRef<Path>) -> Self {
        self.cache = Some(folder.as_ref().to_path_buf());
        self
    }
}

type StartServer =
    unsafe extern "C" fn(*const c_char, *const c_char, usize, usize, *mut sys::ggml_backend_dev_t);

/// A server that has found its devices and a free port, and is about to serve.
#[derive(Debug)]
pub struct RpcServer {
    address: SocketAddrV4,
    devices: Vec<Device>,
    threads: usize,
    cache: Option<CString>,
    start: StartServer,
}

impl RpcServer {
    /// Finds the devices, and whether the port is free.
    ///
    /// # Errors
    /// [`Error::Serve`] for a port that is taken, an address that this machine does not have, a device of another server
    /// and a cache folder that does not exist; [`Error::MissingBackend`]; [`Error::DeviceNotFound`].
    pub fn bind(options: &RpcServerOptions) -> Result<RpcServer> {
        let failed = |reason: String| Error::Serve {
            address: options.address.to_string(),
            reason,
        };
        // SAFETY: the type is that of the function of this name in `ggml-rpc.h`.
        let start =
            unsafe { rpc::driver()?.function::<StartServer>(c"ggml_backend_rpc_start_server") };
        let start = start.ok_or_else(|| failed("this ggml has no server".to_owned()))?;

        let devices = if options.devices.is_empty() {
            local_devices()?
        } else {
            options.devices.clone()
        };
        if let Some(remote) = devices.iter().find(|device| device.is_remote()) {
            return Err(failed(format!(
                "{remote} belongs to the server {}, which serves it itself",
                remote.description()
            )));
        }
        let cache = match &options.cache {
            None => None,
            Some(folder) if !folder.is_dir() => {
                return Err(failed(format!(
                    "the cache {} is not a folder",
                    folder.display()
                )));
            }
            Some(folder) => Some(
                folder
                    .to_str()
                    .and_then(|folder| CString::new(folder).ok())
                    .ok_or_else(|| failed("the cache's name is not text".to_owned()))?,
            ),
        };
        let threads = options.threads.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        });

        // ggml takes the port itself, and says nothing but that it failed: taking it first finds the reason. It is given up
        // again at once, since clients that came before ggml listens would be thrown out.
        let address = TcpListener::bind(options.address)
            .and_then(|listener| listener.local_addr())
            .map_err(|error| failed(error.to_string()))?;
        let address = match address {
            SocketAddr::V4(address) => address,
            SocketAddr::V6(_) => options.address,
        };
        Ok(RpcServer {
            address,
            devices,
            threads,
            cache,
            start,
        })
    }

    /// Where it will listen: the port that was chosen, if 0 was asked for.
    pub fn address(&self) -> SocketAddrV4 {
        self.address
    }

    /// The devices it serves.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Serves one client after the other, for ever: ggml's server knows no end. A client that dies or talks nonsense
    /// loses its connection and its memory, and the next one is served. What happens is logged.
    ///
    /// # Errors
    /// [`Error::Serve`] if it stops nevertheless; the log says why.
    pub fn run(self) -> Result<Infallible> {
        let failed = || Error::Serve {
            address: self.address.to_string(),
            reason: "the server stopped".to_owned(),
        };
        let endpoint = CString::new(self.address.to_string()).map_err(|_| failed())?;
        let cache = self
            .cache
            .as_ref()
            .map_or(std::ptr::null(), |cache| cache.as_ptr());
        let mut devices: Vec<sys::ggml_backend_dev_t> =
            self.devices.iter().map(|device| device.as_ptr()).collect();
        // SAFETY: the strings are terminated and outlive the call, as does the list of devices, whose length is given;
        // each of them lives for ever.
        unsafe {
            (self.start)(
                endpoint.as_ptr(),
                cache,
                self.threads,
                devices.len(),
                devices.as_mut_ptr(),
            );
        }
        Err(failed())
    }
}

/// What a machine has to offer.
fn local_devices() -> Result<Vec<Device>> {
    let all = Device::all();
    let cards: Vec<Device> = all
        .into_iter()
        .filter(|device| !device.is_remote())
        .filter(|device| matches!(device.kind(), DeviceKind::Gpu | DeviceKind::IntegratedGpu))
        .collect();
    if cards.is_empty() {
        Ok(vec![Device::cpu()?])
    } else {
        Ok(cards)
    }
}
