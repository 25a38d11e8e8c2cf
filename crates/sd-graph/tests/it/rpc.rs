//! Devices of a server: the same numbers as here, and errors in place of a lost process when the server goes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use sd_backend::{Backend, BackendOptions, Device, Error as Backends, RpcServer, RpcServerOptions};
use sd_graph::{Cancel, Error, Graph, Plan};

/// Set for this program when it runs again as a server.
const SERVE: &str = "SD_TEST_SERVE";
/// Set for this program when it runs again for a single test.
const ALONE: &str = "SD_TEST_ALONE";
/// Set by a person who wants all operations to be tested on a server's device too.
const EVERYWHERE: &str = "SD_TEST_RPC";

/// Adds a server's device to those that all operations are tested on, if that is asked for.
pub(crate) fn join_devices() {
    static JOINED: Once = Once::new();
    if std::env::var_os(EVERYWHERE).is_none() {
        return;
    }
    JOINED.call_once(|| {
        // As many threads as the tests take here: for some operations the bits depend on it.
        let server = RpcServer::bind(&options().threads(2)).unwrap();
        let endpoint = server.address().to_string();
        thread::spawn(move || server.run());
        select(&endpoint);
    });
}

/// Not a test of its own: this program again, as a server that a test can kill.
#[test]
fn server_process() {
    if std::env::var_os(SERVE).is_none() {
        return;
    }
    let server = RpcServer::bind(&options()).unwrap();
    println!("\nserving {}", server.address());
    let Err(error) = server.run();
    panic!("{error}");
}

fn options() -> RpcServerOptions {
    RpcServerOptions::default()
        .address("127.0.0.1:0".parse().unwrap())
        .device(Device::cpu().unwrap())
        .threads(2)
}

/// The first device of a server that is just starting: it says where it is a moment before it listens.
fn select(endpoint: &str) -> Device {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match Device::add_server(endpoint) {
            Ok(devices) => return devices[0],
            Err(error) if Instant::now() > until => panic!("{error}"),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Runs a test in a process of its own: its devices, of servers that it kills, stay out of the other tests' way.
#[track_caller]
fn alone(name: &str, test: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        return test();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("rpc::{name}"), "--nocapture"])
        .env(ALONE, "yes")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A server in a process of its own.
struct Server {
    process: Child,
    endpoint: String,
}

impl Server {
    fn start() -> Server {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rpc::server_process", "--nocapture"])
            .env(SERVE, "yes")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let endpoint = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.strip_prefix("serving ")?.to_owned()))
            .expect("the server says where it is");
        Server { process, endpoint }
    }

    fn device(&self) -> Device {
        select(&self.endpoint)
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Many products of a matrix with itself, so that there is time to kill somebody.
fn products(g: Graph<'_>, size: usize, count: usize) {
    let x = g.input::<f32>("x", &[size, size]);
    let mut y = x;
    for _ in 0..count {
        y = y.matmul_transposed(x) * (1.0 / size as f32);
    }
    g.output("y", y);
}

fn run(device: Device, size: usize, count: usize) -> Result<Vec<f32>, Error> {
    let mut backend = Backend::new(device, &BackendOptions::default().threads(2))?;
    let mut plan = Plan::build(&backend, |g| products(g, size, count))?;
    let x: Vec<f32> = (0..size * size).map(|i| (i % 17) as f32 - 8.0).collect();
    plan.set("x", &x)?;
    plan.run(&mut backend, &Cancel::new())?;
    plan.read("y")
}

#[test]
fn a_server_computes_the_same_bits() {
    alone("a_server_computes_the_same_bits", || {
        let server = Server::start();
        let device = server.device();
        assert!(device.is_remote());
        assert_eq!(device, server.device(), "adding twice adds once");
        assert!(Device::all().contains(&device));
        assert_eq!(Device::select(&device.name()).unwrap(), device);
        assert!(device.memory().is_some());

        let here = run(Device::cpu().unwrap(), 32, 5).unwrap();
        // Each time a connection of its own.
        for _ in 0..3 {
            assert_eq!(run(device, 32, 5).unwrap(), here);
        }
    });
}

#[test]
fn a_server_that_is_killed_while_it_computes_is_an_error() {
    alone(
        "a_server_that_is_killed_while_it_computes_is_an_error",
        || {
            let mut server = Server::start();
            let device = server.device();
            let mut backend = Backend::new(device, &BackendOptions::default()).unwrap();
            // Minutes of work.
            let mut plan = Plan::build(&backend, |g| products(g, 1024, 2000)).unwrap();
            plan.set("x", &vec![0.5_f32; 1024 * 1024]).unwrap();
            let killer = thread::spawn(move || {
                thread::sleep(Duration::from_millis(300));
                server.kill();
                server
            });
            let error = plan.run(&mut backend, &Cancel::new()).unwrap_err();
            assert_lost(&error);
            killer.join().unwrap();

            // Everything that was made on it fails from now on, and nothing takes the process along.
            plan.set("x", &vec![0.5_f32; 1024 * 1024]).unwrap();
            assert_lost(&plan.run(&mut backend, &Cancel::new()).unwrap_err());
            assert_lost(&Plan::build(&backend, |g| products(g, 8, 1)).unwrap_err());
            backend.finish().unwrap_err();
            assert_eq!(device.memory(), None);
            assert!(matches!(
                device.check_connection(),
                Err(Backends::DeviceLost { .. })
            ));
            drop((plan, backend));

            // With nothing left of the old connection the next use tries a new one.
            let error = run(device, 8, 1).unwrap_err();
            assert!(
                matches!(error, Error::Backend(Backends::Connection { .. })),
                "{error}"
            );
            assert!(run(Device::cpu().unwrap(), 8, 1).is_ok());
        },
    );
}

#[test]
fn a_result_is_not_read_from_a_server_that_is_gone() {
    alone("a_result_is_not_read_from_a_server_that_is_gone", || {
        let mut server = Server::start();
        let device = server.device();
        let mut backend = Backend::new(device, &BackendOptions::default()).unwrap();
        let mut plan = Plan::build(&backend, |g| products(g, 8, 1)).unwrap();
        plan.set("x", &[1.0_f32; 64]).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        server.kill();
        assert_lost(&plan.read::<f32>("y").unwrap_err());
        // Dropped in the other order this time.
        drop(backend);
        drop(plan);
    });
}

#[track_caller]
fn assert_lost(error: &Error) {
    assert!(
        matches!(error, Error::Backend(Backends::DeviceLost { .. })),
        "{error}"
    );
}
