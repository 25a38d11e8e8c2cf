//! Servers of devices: what can be wrong with one, and what a server must bear.

use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use sd_backend::{
    Backend, BackendOptions, Buffer, Device, Error, Ledger, MemoryKind, RpcServer, RpcServerOptions,
};

fn options() -> RpcServerOptions {
    RpcServerOptions::default()
        .address("127.0.0.1:0".parse().unwrap())
        .device(Device::cpu().unwrap())
        .threads(1)
}

/// A server in a thread of this process.
fn serve(options: &RpcServerOptions) -> SocketAddrV4 {
    let server = RpcServer::bind(options).unwrap();
    let address = server.address();
    thread::spawn(move || server.run());
    let until = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(10));
    }
    address
}

/// Something that listens and treats its n-th client by `treat`.
fn listen(treat: impl Fn(usize, TcpStream) + Send + 'static) -> SocketAddrV4 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for (index, stream) in listener.incoming().enumerate() {
            treat(index, stream.unwrap());
        }
    });
    address.to_string().parse().unwrap()
}

#[track_caller]
fn assert_refused(endpoint: &str, parts: &[&str]) {
    let error = Device::add_server(endpoint).unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    for part in parts {
        assert!(
            error.to_string().contains(part),
            "{endpoint}: `{part}` in `{error}`"
        );
    }
}

/// Reads one request and answers it.
fn answer(stream: &mut TcpStream, bytes: &[u8]) {
    let mut head = [0; 9];
    stream.read_exact(&mut head).unwrap();
    let length = u64::from_ne_bytes(head[1..].try_into().unwrap());
    stream.read_exact(&mut vec![0; length as usize]).unwrap();
    stream
        .write_all(&(bytes.len() as u64).to_ne_bytes())
        .and_then(|()| stream.write_all(bytes))
        .unwrap();
}

fn hello(major: u8) -> [u8; 28] {
    let mut hello = [0; 28];
    hello[0] = major;
    hello
}

#[test]
fn a_closed_port_and_an_unknown_host_are_errors() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let endpoint = format!("127.0.0.1:{port}");
    assert_refused(&endpoint, &[&endpoint, "cannot connect"]);
    assert_refused("host.invalid:1", &["host.invalid:1", "not known"]);
}

#[test]
fn another_protocol_is_an_error() {
    let banner = listen(|_, mut stream| {
        let _ = stream.write_all(b"220 mail.example ESMTP ready\r\n");
        // Stays open: closing with unread bytes would look like a refusal.
        thread::sleep(Duration::from_secs(1));
    });
    assert_refused(&banner.to_string(), &["does not speak"]);
    let closes = listen(|_, stream| drop(stream));
    assert_refused(&closes.to_string(), &["closed the connection"]);
}

#[test]
fn another_version_and_impossible_answers_are_errors() {
    let old = listen(|_, mut stream| answer(&mut stream, &hello(3)));
    assert_refused(&old.to_string(), &["version 3.0.0", "this program 7."]);
    let short = listen(|_, mut stream| answer(&mut stream, &[7, 0, 0]));
    assert_refused(&short.to_string(), &["another version"]);
    for count in [0_u32, u32::MAX] {
        let many = listen(move |_, mut stream| {
            answer(&mut stream, &hello(7));
            answer(&mut stream, &count.to_ne_bytes());
        });
        assert_refused(&many.to_string(), &[&format!("{count} devices")]);
    }
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let silent = listen(|_, stream| std::mem::forget(stream));
    let began = Instant::now();
    assert_refused(&silent.to_string(), &["did not answer within 10 s"]);
    assert!(began.elapsed() < Duration::from_secs(15));
}

#[test]
fn a_server_that_goes_after_its_greeting_is_given_up() {
    for hangs in [false, true] {
        let turncoat = listen(move |index, mut stream| {
            if index == 0 {
                answer(&mut stream, &hello(7));
                answer(&mut stream, &1_u32.to_ne_bytes());
            } else if hangs {
                std::mem::forget(stream);
            }
        });
        assert_refused(&turncoat.to_string(), &["broke"]);
    }
}

#[test]
fn devices_of_a_server_join_those_of_this_process() {
    let cpu = Device::cpu().unwrap();
    let address = serve(&options().device(cpu));
    let devices = Device::add_server(&format!("rpc://{address}")).unwrap();
    assert_eq!(devices.len(), 2);
    for (index, &device) in devices.iter().enumerate() {
        let selector = format!("RPC://localhost:{}/{index}", address.port());
        assert_eq!(Device::select(&selector).unwrap(), device);
        assert_eq!(Device::select(&device.name()).unwrap(), device);
        assert!(device.is_remote() && device.backend_name() == "RPC");
        assert!(device.memory().is_some_and(|memory| memory.total > 0));
        assert!(device.check_connection().is_ok());
        assert!(Device::all().contains(&device));
    }
    let Err(Error::DeviceNotFound { available, .. }) =
        Device::select(&format!("rpc://{address}/2"))
    else {
        panic!()
    };
    assert_eq!(available.len(), 2);
    assert!(!cpu.is_remote() && cpu.check_connection().is_ok());
}

#[test]
fn threads_that_add_and_list_at_once_see_the_same() {
    let address = serve(&options());
    let found: Vec<Vec<Device>> = thread::scope(|scope| {
        let adding: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..100 {
                        assert!(!Device::all().is_empty());
                    }
                    Device::add_server(&address.to_string()).unwrap()
                })
            })
            .collect();
        adding
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(found.windows(2).all(|pair| pair[0] == pair[1]));
    let listed = Device::all();
    assert_eq!(
        listed
            .iter()
            .filter(|device| found[0].contains(device))
            .count(),
        1
    );
}

#[test]
fn memory_of_a_server_is_taken_and_given_back() {
    let address = serve(&options());
    let device = Device::add_server(&address.to_string()).unwrap()[0];
    let ledger = Ledger::default();
    for _ in 0..3 {
        let buffer = Buffer::allocate(&ledger, device, 1 << 20, MemoryKind::Weights).unwrap();
        assert!(buffer.len() >= 1 << 20);
        let backend = Backend::new(device, &BackendOptions::default()).unwrap();
        assert_eq!(backend.threads(), 1);
    }
    assert_eq!(ledger.report(device).used.total(), 0);
    let error = Buffer::allocate(&ledger, device, 1 << 60, MemoryKind::Weights).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
}

#[test]
fn clients_that_talk_nonsense_do_not_end_a_server() {
    let address = serve(&options());
    let request = |command: u8, length: u64, bytes: &[u8]| {
        let mut request = vec![command];
        request.extend(length.to_ne_bytes());
        request.extend(bytes);
        request
    };
    let greeting = request(14, 24, &[0; 24]);
    let after_greeting = |rest: Vec<u8>| [greeting.clone(), rest].concat();
    let nonsense: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        greeting[..10].to_vec(),
        request(14, u64::MAX, &[]),
        // A message of impossible and of improbable length, one that ends early, a command that is none.
        after_greeting(request(6, u64::MAX, &[])),
        after_greeting(request(6, 1 << 40, &[0; 64])),
        after_greeting(request(10, 1000, &[0xff; 10])),
        after_greeting(request(99, 0, &[])),
        // A graph and a write full of ones.
        after_greeting(request(10, 4096, &[0xff; 4096])),
        after_greeting(request(6, 4096, &[0xff; 4096])),
        // A buffer and a device that do not exist.
        after_greeting(request(4, 8, &[1; 8])),
        after_greeting(request(0, 12, &[0xff; 12])),
    ];
    for bytes in nonsense {
        let mut stream = TcpStream::connect(address).unwrap();
        // The server may hang up at any moment; this waits until it has.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let device = Device::add_server(&address.to_string()).unwrap()[0];
    assert!(device.check_connection().is_ok());
}

#[test]
fn what_cannot_be_served_says_why() {
    let taken = serve(&options());
    for (options, part) in [
        (options().address(taken), "in use"),
        (
            options().address("203.0.113.1:1".parse().unwrap()),
            "203.0.113.1",
        ),
        (options().cache("no/such/folder"), "not a folder"),
        (
            options().device(Device::add_server(&taken.to_string()).unwrap()[0]),
            "belongs to the server",
        ),
    ] {
        let error = RpcServer::bind(&options).unwrap_err();
        assert!(matches!(error, Error::Serve { .. }), "{error}");
        assert!(error.to_string().contains(part), "`{part}` in `{error}`");
    }
    let server =
        RpcServer::bind(&RpcServerOptions::default().address("127.0.0.1:0".parse().unwrap()));
    assert!(!server.unwrap().devices().is_empty());
}
