//! `sd rpc-server`: this machine's devices for others.
//!
//! The command is there in every build, so that its help can be read and its error can name the feature that is missing.

use std::io::Write;
use std::net::SocketAddrV4;

use sd_backend::{Bytes, Device, RpcServerOptions};

use crate::args::RpcServer;
use crate::error::Error;

pub(crate) fn run(arguments: &RpcServer) -> Result<(), Error> {
    let mut options =
        RpcServerOptions::default().address(SocketAddrV4::new(arguments.host, arguments.port));
    for name in &arguments.device {
        options = options.device(Device::select(name)?);
    }
    if let Some(threads) = arguments.threads {
        options = options.threads(threads);
    }
    if let Some(cache) = &arguments.cache {
        options = options.cache(cache);
    }
    let server = sd_backend::RpcServer::bind(&options)?;
    if !arguments.host.is_loopback() {
        tracing::warn!(
            "other machines can reach {}: the protocol has no passwords and no encryption, so anybody on that network can \
             read what is computed here and bring the server down",
            server.address()
        );
    }

    let mut out = std::io::stdout().lock();
    for (index, device) in server.devices().iter().enumerate() {
        let memory = device.memory().map_or_else(String::new, |memory| {
            format!(", {} free", Bytes(memory.free))
        });
        writeln!(out, "{index}: {device} ({}{memory})", device.description())?;
    }
    // Without the port that is asked for when it is 0, nobody could connect.
    writeln!(out, "serving at rpc://{}", server.address())?;
    out.flush()?;
    drop(out);
    let Err(error) = server.run();
    Err(error.into())
}
