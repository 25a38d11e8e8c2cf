//! A build whose backends are all libraries.

use sd_backend::{
    Backend, BackendOptions, Device, DeviceKind, RpcServer, RpcServerOptions, built_backends,
};

#[test]
fn loaded_backends_are_there_once_and_complete() {
    assert!(matches!(
        Device::cpu(),
        Err(sd_backend::Error::DeviceNotFound { .. })
    ));
    let folder = built_backends().unwrap();
    let devices = Device::load_backends(folder).unwrap();
    let cpu = Device::cpu().unwrap();
    assert!(devices.contains(&cpu));
    assert_eq!(Device::load_backends(folder).unwrap(), devices);
    let processors = Device::all()
        .into_iter()
        .filter(|device| device.kind() == DeviceKind::Cpu);
    assert_eq!(processors.count(), 1);

    // Its threads are functions that only the library has.
    let backend = Backend::new(cpu, &BackendOptions::default().threads(2)).unwrap();
    assert_eq!(backend.threads(), 2);
    let server =
        RpcServer::bind(&RpcServerOptions::default().address("127.0.0.1:0".parse().unwrap()));
    assert_eq!(server.is_ok(), cfg!(feature = "rpc"));
}
