//! `sd rpc-server`, and pictures through it.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sd_models::Sound;

use crate::run::{assert_refused, sd};

/// A server in a process of its own.
struct Server {
    process: Child,
    printed: Vec<String>,
    endpoint: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Server {
        let mut process = Command::new(env!("CARGO_BIN_EXE_sd"))
            .args([
                "rpc-server",
                "--port",
                "0",
                "--device",
                "cpu",
                "--threads",
                "2",
            ])
            .args(arguments)
            .env_remove("SD_LOG")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut printed = Vec::new();
        for line in BufReader::new(process.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let done = line.starts_with("serving at ");
            printed.push(line);
            if done {
                break;
            }
        }
        let endpoint = printed
            .last()
            .and_then(|line| line.strip_prefix("serving at "))
            .unwrap_or_else(|| panic!("{printed:?}"))
            .to_owned();
        let port = endpoint.rsplit(':').next().unwrap();
        // Between the line and ggml's listening there is a moment.
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(10));
        }
        Server {
            process,
            printed,
            endpoint,
        }
    }

    /// Ends it and returns what it wrote to standard error.
    fn kill(&mut self) -> String {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        let mut text = String::new();
        if let Some(mut stderr) = self.process.stderr.take() {
            stderr.read_to_string(&mut text).unwrap();
        }
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn generate<'a>(device: &'a str, output: &'a str, steps: &'a str) -> Vec<&'a str> {
    let tiny = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../models/tiny-qwen-image-2.1"
    );
    vec![
        "generate",
        "--model",
        tiny,
        "--prompt",
        "a red circle",
        "--width",
        "64",
        "--threads",
        "2",
        "--steps",
        steps,
        "--device",
        device,
        "--output",
        output,
    ]
}

#[test]
fn two_servers_make_the_picture_that_this_process_makes() {
    let folder = tempfile::tempdir().unwrap();
    let servers = [Server::start(&[]), Server::start(&[])];
    let mut pictures = Vec::new();
    for (device, output) in [
        ("cpu", "here.png"),
        (servers[0].endpoint.as_str(), "first.png"),
        (servers[1].endpoint.as_str(), "second.png"),
    ] {
        let ended = sd(folder.path(), &generate(device, output, "4"));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        pictures.push(std::fs::read(folder.path().join(output)).unwrap());
    }
    // One picture through both: the steps on one, the prompt on the other, the rest here.
    let placement = format!(
        "diffusion={},text-encoder={}@disk,vae=cpu",
        servers[0].endpoint, servers[1].endpoint
    );
    let mut together = generate("cpu", "together.png", "4");
    together.extend(["--placement", &placement]);
    let ended = sd(folder.path(), &together);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    pictures.push(std::fs::read(folder.path().join("together.png")).unwrap());
    assert!(pictures.windows(2).all(|pair| pair[0] == pair[1]));

    let planned = sd(
        folder.path(),
        &[
            "plan",
            generate("", "", "")[2],
            "--device",
            &servers[0].endpoint,
        ],
    );
    assert!(planned.out.contains("RPC0"), "{planned:?}");
    let [mut first, _] = servers;
    assert_eq!(first.printed.len(), 2, "{:?}", first.printed);
    assert!(first.printed[0].starts_with("0: CPU ("));
    assert_eq!(first.kill(), "", "loopback needs no warning");
}

/// A clip with sound, all of it through a server, and its steps alone: the pictures that this process makes. Its sound has an operation of
/// its own on this process's processor (`Tensor::snake`), which sums in another order: a step of 16 bits at most.
#[test]
fn a_server_makes_the_clip_that_this_process_makes() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&[]);
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-minimax-h3");
    let steps_alone = format!("diffusion={}", server.endpoint);
    let mut clips = Vec::new();
    for (option, value) in [
        ("--device", "cpu"),
        ("--device", server.endpoint.as_str()),
        ("--placement", steps_alone.as_str()),
    ] {
        let words = [
            "video",
            "-m",
            model,
            "-p",
            "a red circle",
            "-W",
            "64",
            "-H",
            "64",
            "-f",
            "22",
            "--steps",
            "4",
            "-t",
            "2",
            "-o",
            "clip.png",
            option,
            value,
        ];
        let ended = sd(folder.path(), &words);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let sound = Sound::open(folder.path().join("clip.wav")).unwrap();
        clips.push((
            std::fs::read(folder.path().join("clip.png")).unwrap(),
            sound,
        ));
    }
    let (here, there) = clips.split_first().unwrap();
    for (pictures, sound) in there {
        assert!(*pictures == here.0);
        assert_eq!(sound.samples(), here.1.samples());
        let apart = sound.channels().iter().zip(here.1.channels());
        let apart = apart.flat_map(|(a, b)| a.iter().zip(b));
        let most = apart.fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(most < 1.5 / 32768.0, "{most:e}");
    }
    assert_eq!(server.kill(), "");
}

#[test]
fn a_server_that_is_killed_ends_the_command_with_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&[]);
    let mut client = Command::new(env!("CARGO_BIN_EXE_sd"))
        .args(generate(&server.endpoint, "lost.png", "1000"))
        .current_dir(folder.path())
        .env_remove("SD_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(client.stderr.take().unwrap()).lines();
    // Steps are being computed then.
    let begun = lines.find(|line| {
        line.as_ref()
            .is_ok_and(|line| line.starts_with("denoise 2/"))
    });
    assert!(begun.is_some());
    server.kill();
    let said: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(client.wait().unwrap().code(), Some(2), "{said:?}");
    let last = said.last().unwrap();
    assert!(
        last.starts_with("error: ") && last.contains("is lost"),
        "{said:?}"
    );
    assert!(!folder.path().join("lost.png").exists());
}

#[test]
fn other_machines_are_let_in_with_a_warning() {
    let mut server = Server::start(&["--host", "0.0.0.0"]);
    let said = server.kill();
    assert!(said.contains("no passwords"), "{said}");
}

#[test]
fn what_cannot_be_served_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (arguments, parts) in [
        (vec!["--port", &port], vec!["cannot serve", &port, "in use"]),
        (vec!["--device", "nothing"], vec!["no device fits", "CPU"]),
        (
            vec!["--threads", "0"],
            vec!["--threads <N>", "at least 1 thread"],
        ),
        (vec!["--host", "example"], vec!["IPv4 address"]),
        (vec!["--port", "65536"], vec!["65536"]),
        (vec!["--cache", "nowhere"], vec!["nowhere", "not a folder"]),
    ] {
        let all: Vec<&str> = [vec!["rpc-server"], arguments].concat();
        assert_refused(folder.path(), &all, &parts);
    }
}

#[test]
fn a_device_of_no_server_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let device = format!("rpc://127.0.0.1:{port}");
    assert_refused(
        folder.path(),
        &generate(&device, "none.png", "1"),
        &[&device[6..], "cannot connect"],
    );
    assert!(!Path::new("none.png").exists());
}
