//! `sd devices`: what there is to run on.

use std::io::Write;

use sd_backend::{Bytes, Device, DeviceKind};
use serde::Serialize;

use crate::args::Devices;
use crate::error::Error;
use crate::json;

/// What `--json` prints of one device. Sizes are bytes; `null` where the device does not say.
#[derive(Debug, Serialize)]
struct Report {
    name: String,
    description: String,
    backend: String,
    kind: &'static str,
    free: Option<u64>,
    total: Option<u64>,
    asynchronous: bool,
    events: bool,
    pinned_host_memory: bool,
    /// Uses host memory where it lies: `yes`, `no`, or `when asked` where it does not say that it can.
    host_memory_in_place: &'static str,
}

pub(crate) fn run(arguments: &Devices) -> Result<(), Error> {
    for server in &arguments.server {
        Device::select(server)?;
    }
    let reports: Vec<Report> = Device::all().into_iter().map(report).collect();
    let mut out = std::io::stdout().lock();
    if arguments.json {
        json::print(&mut out, &reports)?;
        return Ok(());
    }
    for device in &reports {
        let memory = match (device.free, device.total) {
            (Some(free), Some(total)) => format!("{} free of {}", Bytes(free), Bytes(total)),
            _ => "it does not say what is free".to_owned(),
        };
        writeln!(
            out,
            "{:10} {}; {}, {memory}",
            device.name, device.description, device.kind
        )?;
        let mut can = vec![match device.host_memory_in_place {
            "yes" => "uses host memory in place",
            "no" => "copies weights to itself",
            _ => "may use host memory in place when asked (--mapping always)",
        }];
        if device.asynchronous {
            can.push("works without being waited for");
        }
        if device.pinned_host_memory {
            can.push("has pinned host memory");
        }
        writeln!(out, "{:10} {}", "", can.join(", "))?;
    }
    Ok(())
}

fn report(device: Device) -> Report {
    let (memory, can) = (device.memory(), device.capabilities());
    Report {
        name: device.name(),
        description: device.description(),
        backend: device.backend_name(),
        kind: match device.kind() {
            DeviceKind::Cpu => "processor",
            DeviceKind::Gpu => "graphics card",
            DeviceKind::IntegratedGpu => "integrated graphics",
            _ => "accelerator",
        },
        free: memory.map(|memory| memory.free),
        total: memory.map(|memory| memory.total),
        asynchronous: can.asynchronous,
        events: can.events,
        pinned_host_memory: can.host_buffer,
        host_memory_in_place: match (device.has_host_pointers(), can.buffer_from_host_ptr) {
            (true, true) => "yes",
            (true, false) => "when asked",
            (false, _) => "no",
        },
    }
}
