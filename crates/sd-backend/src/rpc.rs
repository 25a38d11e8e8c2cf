//! Devices of other machines, through ggml's RPC backend.
//!
//! Everything is looked up by name in the driver `RPC`: it may be built in, loaded as a library, or missing.

use std::ffi::{CString, c_char};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, SocketAddrV4, TcpStream, ToSocketAddrs};
use std::time::Duration;

use sd_ggml_sys as sys;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::registry::{self, Driver};

/// The port that ggml's own server takes when none is given.
pub(crate) const DEFAULT_PORT: u16 = 50052;

const SCHEME: &str = "rpc://";

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// How long it may take for an answer of the handshake. It serves one client at a time, and the others wait.
const ANSWER: Duration = Duration::from_secs(10);

/// More devices than one machine has: a number above it is not an answer of this protocol.
const MOST_DEVICES: u32 = 1024;

impl Device {
    /// Adds the devices of the server at `host:port` (50052 if there is no port), with or without `rpc://` in front, to
    /// those of this process, and returns them in the server's order. From then on they are listed by [`Device::all`]
    /// and chosen by their names (`RPC0`) like any other; `auto` takes them only where there is no graphics card before
    /// them. Adding a server again gives the same devices.
    ///
    /// The connection is kept while a backend or a buffer of a device exists, and made anew when one is needed. Nothing
    /// is encrypted and nobody is asked who they are: keep it to networks where everybody may use the server.
    ///
    /// # Errors
    /// [`Error::Connection`] for an address that does not exist, a server that cannot be reached or does not answer
    /// within 15 seconds, and one that speaks another protocol or version of it; [`Error::MissingBackend`].
    pub fn add_server(endpoint: &str) -> Result<Vec<Device>> {
        let endpoint = Endpoint::parse(endpoint)?;
        if let Some(devices) = registry::lock().server(endpoint.address) {
            return Ok(devices);
        }
        let driver = driver()?;
        match connect(driver, &endpoint) {
            Ok(server) => Ok(registry::lock().add_server(endpoint.address, server)),
            // Another thread may have added it meanwhile, and keep it busy.
            Err(error) => registry::lock().server(endpoint.address).ok_or(error),
        }
    }

    /// Whether this device belongs to a server, on another machine or on this one. What hardware it has, only the server
    /// knows.
    pub fn is_remote(self) -> bool {
        self.driver_name() == c"RPC"
    }

    /// Waits until a remote device has done all that was sent to it, and asks whether it still answers. Other devices
    /// are always there.
    ///
    /// Writing to a remote device, computing on it and reading from it go on without a word when its server is gone
    /// (what is read is all zeros then): ask this before believing a result.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn check_connection(self) -> Result<()> {
        if !self.is_remote() {
            return Ok(());
        }
        type Alive = unsafe extern "C" fn(sys::ggml_backend_dev_t) -> bool;
        // SAFETY: the type is that of the function of this name in patch 0004.
        let alive = Driver::of(self).and_then(|driver| unsafe {
            driver.function::<Alive>(c"ggml_backend_rpc_device_alive")
        });
        match alive {
            // SAFETY: the device is one of the driver that handed the function out, and lives for ever.
            Some(alive) if !unsafe { alive(self.as_ptr()) } => Err(Error::DeviceLost {
                device: self.name(),
                endpoint: self.description(),
            }),
            // Without our patch ggml ends the process where a server is lost: who comes here is connected.
            _ => Ok(()),
        }
    }

    /// Why a remote device cannot be started.
    pub(crate) fn unreachable(self) -> Option<Error> {
        self.is_remote().then(|| Error::Connection {
            endpoint: self.description(),
            reason: "it does not answer; it may have ended, or be serving another client"
                .to_owned(),
        })
    }
}

/// The driver of remote devices.
pub(crate) fn driver() -> Result<Driver> {
    registry::lock().driver("RPC").ok_or(Error::MissingBackend {
        backend: "RPC",
        feature: "rpc",
    })
}

/// Whether a selector of devices names a server.
pub(crate) fn is_endpoint(selector: &str) -> bool {
    let selector = selector.trim_start().as_bytes();
    selector
        .get(..SCHEME.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(SCHEME.as_bytes()))
}

/// The device that `rpc://host:port/n` names.
pub(crate) fn select(selector: &str) -> Result<Device> {
    let index = Endpoint::split(selector)?.1.unwrap_or(0);
    let devices = Device::add_server(selector)?;
    devices
        .get(index)
        .copied()
        .ok_or_else(|| Error::DeviceNotFound {
            wanted: selector.to_owned(),
            available: devices.iter().map(|device| device.name()).collect(),
        })
}

/// Where a server is.
struct Endpoint {
    /// As it was written, without the scheme and the device.
    text: String,
    address: SocketAddrV4,
}

impl Endpoint {
    /// Host and port as written, and the number of a device.
    fn split(text: &str) -> Result<(&str, Option<usize>)> {
        let text = text.trim();
        let rest = if is_endpoint(text) {
            &text[SCHEME.len()..]
        } else {
            text
        };
        match rest.split_once('/') {
            None | Some((_, "")) => Ok((rest.trim_end_matches('/'), None)),
            Some((host, index)) => match index.parse() {
                Ok(index) => Ok((host, Some(index))),
                Err(_) => Err(Error::Connection {
                    endpoint: rest.to_owned(),
                    reason: format!("`{index}` is not the number of a device"),
                }),
            },
        }
    }

    fn parse(text: &str) -> Result<Endpoint> {
        let (text, _) = Endpoint::split(text)?;
        let failed = |reason: String| Error::Connection {
            endpoint: text.to_owned(),
            reason,
        };
        let (host, port) = match text.split_once(':') {
            None => (text, DEFAULT_PORT),
            Some((host, port)) => match port.parse() {
                Ok(port @ 1..) => (host, port),
                _ => {
                    return Err(failed(format!(
                        "`{port}` is not a port (host:port is expected, with a name or an IPv4 address)"
                    )));
                }
            },
        };
        if host.is_empty() {
            return Err(failed("there is no host in it".to_owned()));
        }
        let mut addresses = (host, port)
            .to_socket_addrs()
            .map_err(|error| failed(format!("the host is not known ({error})")))?;
        // ggml connects by IPv4 only. The address, not the name, says which server it is.
        let address = addresses
            .find_map(|address| match address {
                SocketAddr::V4(address) => Some(address),
                SocketAddr::V6(_) => None,
            })
            .ok_or_else(|| failed("the host has no IPv4 address".to_owned()))?;
        Ok(Endpoint {
            text: text.to_owned(),
            address,
        })
    }

    fn failed(&self, reason: impl fmt::Display) -> Error {
        Error::Connection {
            endpoint: self.text.clone(),
            reason: reason.to_string(),
        }
    }
}

/// Lets ggml connect to a server that was found to be one.
fn connect(driver: Driver, endpoint: &Endpoint) -> Result<Driver> {
    let devices = greet(endpoint.address).map_err(|reason| endpoint.failed(reason))?;
    tracing::debug!("server {}: {devices} devices", endpoint.text);

    type AddServer = unsafe extern "C" fn(*const c_char) -> sys::ggml_backend_reg_t;
    let broken = || endpoint.failed("the connection broke while its devices were listed");
    // SAFETY: the type is that of the function of this name in `ggml-rpc.h`.
    let add = unsafe { driver.function::<AddServer>(c"ggml_backend_rpc_add_server") };
    let address = CString::new(endpoint.address.to_string()).map_err(|_| broken())?;
    // SAFETY: the address is terminated. What comes back is null or a registration that ggml never frees.
    let server = add.and_then(|add| unsafe { Driver::from_raw(add(address.as_ptr())) });
    let server = server.ok_or_else(broken)?;
    for device in server.devices() {
        // SAFETY: the device lives for ever. Its buffer type is made now, while the server is known to answer: later it
        // is only looked up, and can be no null pointer.
        let alignment = unsafe {
            let buffer_type = sys::ggml_backend_dev_buffer_type(device.as_ptr());
            if buffer_type.is_null() {
                return Err(broken());
            }
            sys::ggml_backend_buft_get_alignment(buffer_type)
        };
        if !alignment.is_power_of_two() {
            return Err(endpoint.failed(format!("it aligns memory to {alignment} bytes")));
        }
    }
    Ok(server)
}

/// Speaks the beginning of ggml's protocol on a connection of its own and returns the number of devices. ggml's client
/// says no more than that it failed, and would wait for an answer without end where our patches are missing.
fn greet(address: SocketAddrV4) -> Result<u32, String> {
    const HELLO: u8 = 14;
    const DEVICE_COUNT: u8 = 15;
    /// What each side can do besides TCP: nothing.
    const CAPABILITIES: [u8; 24] = [0; 24];

    let mut stream = TcpStream::connect_timeout(&address.into(), CONNECT)
        .map_err(|error| format!("cannot connect ({error})"))?;
    stream
        .set_read_timeout(Some(ANSWER))
        .and_then(|()| stream.set_write_timeout(Some(ANSWER)))
        .map_err(|error| error.to_string())?;

    let hello: [u8; 28] = ask(&mut stream, HELLO, &CAPABILITIES)?;
    let [major, minor, patch, ..] = hello;
    let ours = (
        sys::RPC_PROTO_MAJOR_VERSION,
        sys::RPC_PROTO_MINOR_VERSION,
        sys::RPC_PROTO_PATCH_VERSION,
    );
    if u32::from(major) != ours.0 || u32::from(minor) > ours.1 {
        return Err(format!(
            "it speaks version {major}.{minor}.{patch} of ggml's protocol, this program {}.{}.{}",
            ours.0, ours.1, ours.2
        ));
    }
    if u32::from(patch) != ours.2 {
        tracing::warn!(
            "server {address} was built from another ggml: it may not know every operation"
        );
    }
    let count = u32::from_ne_bytes(ask(&mut stream, DEVICE_COUNT, &[])?);
    if (1..=MOST_DEVICES).contains(&count) {
        Ok(count)
    } else {
        Err(format!("it claims to have {count} devices"))
    }
}

/// One request with an answer of known length. Numbers go in the machine's own order, as ggml sends them.
fn ask<const N: usize>(
    stream: &mut TcpStream,
    command: u8,
    input: &[u8],
) -> Result<[u8; N], String> {
    let mut request = vec![command];
    request.extend((input.len() as u64).to_ne_bytes());
    request.extend(input);
    let mut length = [0; 8];
    let mut answer = [0; N];
    stream
        .write_all(&request)
        .and_then(|()| stream.read_exact(&mut length))
        .map_err(|error| silence(&error))?;
    if u64::from_ne_bytes(length) != N as u64 {
        return Err("it does not speak ggml's RPC protocol, or another version of it".to_owned());
    }
    stream
        .read_exact(&mut answer)
        .map_err(|error| silence(&error))?;
    Ok(answer)
}

fn silence(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => format!(
            "it accepts connections but did not answer within {} s; it may be serving another client, or be no server \
             of this kind",
            ANSWER.as_secs()
        ),
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionAborted => {
            "it closed the connection: it does not speak ggml's RPC protocol, or another version of it".to_owned()
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_read_as_people_write_them() {
        for (text, address, index) in [
            ("rpc://127.0.0.1:1234", "127.0.0.1:1234", None),
            ("RPC://127.0.0.1", "127.0.0.1:50052", None),
            ("127.0.0.1:7/", "127.0.0.1:7", None),
            (" rpc://localhost:9/3 ", "127.0.0.1:9", Some(3)),
        ] {
            assert_eq!(
                Endpoint::parse(text).unwrap().address.to_string(),
                address,
                "{text}"
            );
            assert_eq!(Endpoint::split(text).unwrap().1, index, "{text}");
        }
        assert!(!is_endpoint("rpc"));
        assert!(!is_endpoint("rpc:/"));
        assert!(!is_endpoint("RPC0"));
    }

    #[test]
    fn what_is_no_endpoint_says_why() {
        for (text, part) in [
            ("rpc://", "no host"),
            ("rpc://:5", "no host"),
            ("rpc://127.0.0.1:0", "not a port"),
            ("rpc://127.0.0.1:65536", "not a port"),
            ("rpc://[::1]:5", "not a port"),
            ("rpc://127.0.0.1:5/x", "number of a device"),
            ("rpc://127.0.0.1:5/-1", "number of a device"),
        ] {
            let Err(error) = Endpoint::parse(text) else {
                panic!("{text}")
            };
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }
}
