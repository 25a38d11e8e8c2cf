//! What loading costs: a synthetic checkpoint of a few GiB, mapped, read and converted, each in a process of its own, and
//! beside them the same file loaded by other programs in the same run.
//!
//! ```sh
//! cargo xtask bench memory --gib 4 --python python3
//! ```
//!
//! Each line is one process: seconds until the weights may be used, seconds of the first and of the second product with
//! all of them, and the process's resident memory after that, split into its own and that shared with the file's pages.
//! `--cold` asks the system to forget the file's pages before each process.
#![allow(clippy::print_stdout)]

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use sd_backend::{Backend, BackendOptions, Bytes, DType, Device, Ledger, Mapping, MemoryKind};
use sd_graph::{
    Cancel, Checkpoint, Declarations, LoadOptions, LoadPlan, Param, Plan, Progress, Role,
};

/// Side of each matrix: 32 MiB in half precision.
const SIDE: usize = 4096;

/// The ways to load: name, mapping and type.
const WAYS: [(&str, Mapping, Option<DType>); 4] = [
    ("mapped", Mapping::Always, None),
    ("read", Mapping::Never, None),
    ("converted to q8_0", Mapping::Never, Some(DType::Q8_0)),
    ("converted to f32", Mapping::Never, Some(DType::F32)),
];

/// What loading costs, beside other programs.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Size of the checkpoint in GiB.
    #[arg(long, default_value_t = 4)]
    gib: usize,
    /// A Python with torch and safetensors, to load the same file.
    #[arg(long)]
    python: Option<String>,
    /// Where that Python loads it to.
    #[arg(long, default_value = "cpu")]
    torch_device: String,
    /// Ask the system to forget the file's pages before each process.
    #[arg(long)]
    cold: bool,
    /// Device to load to.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Folder of backends to load first.
    #[arg(long)]
    backends: Option<PathBuf>,
    /// Where to write the checkpoint.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("sd-memory.safetensors"))]
    file: PathBuf,
    /// Only this way, in this process.
    #[arg(long, hide = true)]
    way: Option<usize>,
}

/// Prints the table; each of its lines is a process of this program.
pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(way) = arguments.way {
        return load(arguments, way);
    }
    write(&arguments.file, arguments.gib)?;
    println!(
        "{} of half precision in matrices of {SIDE}x{SIDE}, {} pages in the cache, device {}",
        Bytes((arguments.gib as u64) << 30),
        if arguments.cold { "no" } else { "all" },
        arguments.device
    );
    println!(
        "{:32} {:>8} {:>9} {:>9} {:>11} {:>11} {:>11}",
        "", "load s", "first s", "second s", "own", "file pages", "budgeted"
    );
    for (way, (name, _, dtype)) in WAYS.iter().enumerate() {
        // Single precision takes twice the file, which small machines do not have.
        if dtype == &Some(DType::F32) && arguments.gib > 2 {
            continue;
        }
        prepare(arguments)?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["memory", "--way", &way.to_string()])
            .args(["--device", &arguments.device])
            .arg("--file")
            .arg(&arguments.file);
        if let Some(folder) = &arguments.backends {
            command.arg("--backends").arg(folder);
        }
        line(&format!("sd, {name}"), &mut command)?;
    }
    if let Some(python) = &arguments.python {
        for (name, how) in [
            ("safetensors load_file", "file"),
            ("safetensors load", "bytes"),
        ] {
            prepare(arguments)?;
            let mut command = Command::new(python);
            command
                .args(["-c", PYTHON, how])
                .arg(&arguments.file)
                .arg(&arguments.torch_device);
            line(&format!("torch, {name}"), &mut command)?;
        }
    }
    std::fs::remove_file(&arguments.file)?;
    Ok(())
}

/// The same with PyTorch: `load_file` maps the file, `load` takes bytes that were read.
const PYTHON: &str = r"
import sys, time, torch, safetensors.torch as st
how, path, device = sys.argv[1:]
torch.set_num_threads(2)
wait = torch.cuda.synchronize if device != 'cpu' else lambda: None
x = torch.ones(1, 4096, dtype=torch.float16, device=device)
wait()
begin = time.perf_counter()
if how == 'file':
    tensors = st.load_file(path, device=device)
else:
    tensors = {name: w.to(device) for name, w in st.load(open(path, 'rb').read()).items()}
wait()
load = time.perf_counter() - begin
def product():
    begin = time.perf_counter()
    y = sum((x @ w.T).float() for w in tensors.values()).cpu()
    return time.perf_counter() - begin
first, second = product(), product()
status = dict(line.split(':') for line in open('/proc/self/status') if line.startswith('Rss'))
kib = lambda name: int(status[name].split()[0]) * 1024
print(load, first, second, kib('RssAnon'), kib('RssFile') + kib('RssShmem'), 0)
";

/// Runs a process that prints its figures, and prints them as one line of the table.
fn line(name: &str, command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| name.to_owned())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let figures: Vec<f64> = text
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [load, first, second, own, shared, budgeted] = figures[..] else {
        bail!(
            "{name} printed `{text}` and {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let size = |bytes: f64| Bytes(bytes as u64).to_string();
    println!(
        "{name:32} {load:8.2} {first:9.2} {second:9.2} {:>11} {:>11} {:>11}",
        size(own),
        size(shared),
        if budgeted > 0.0 {
            size(budgeted)
        } else {
            String::new()
        }
    );
    Ok(())
}

/// One way, in this process.
fn load(arguments: &Arguments, way: usize) -> Result<()> {
    let (_, mapping, dtype) = WAYS[way];
    if let Some(folder) = &arguments.backends {
        Device::load_backends(folder)?;
    }
    let ledger = Ledger::default();
    let options = BackendOptions::default().threads(2).ledger(&ledger);
    let mut backend = Backend::new(Device::select(&arguments.device)?, &options)?;
    let begin = Instant::now();
    let checkpoint = Checkpoint::open(&arguments.file)?;
    let mut options = LoadOptions::default();
    if let Some(dtype) = dtype {
        options = options.weight_type(dtype);
    }
    let declarations = Declarations::new(&checkpoint, options);
    let root = declarations.root();
    let weights: Vec<Param> = (0..checkpoint.len())
        .map(|index| root.param(&format!("w{index:05}"), [SIDE, SIDE], Role::Matrix))
        .collect();
    let params = declarations.finish()?;
    LoadPlan::new(&checkpoint, &params, backend.device(), mapping)?.load(
        &backend,
        &Cancel::new(),
        &mut |_: &Progress| {},
    )?;
    let load = begin.elapsed().as_secs_f64();
    let mut plan = Plan::build(&backend, |g| {
        let x = g.input::<f32>("x", [1, SIDE]);
        let products = weights
            .iter()
            .map(|weight| x.matmul_transposed(g.param(weight)));
        if let Some(sum) = products.reduce(|sum, product| sum + product) {
            g.output("y", sum);
        }
    })?;
    let mut product = || {
        let begin = Instant::now();
        plan.set("x", &[1.0_f32; SIDE])?;
        plan.run(&mut backend, &Cancel::new())?;
        plan.read::<f32>("y")?;
        Ok::<_, sd_graph::Error>(begin.elapsed().as_secs_f64())
    };
    let (first, second) = (product()?, product()?);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.trim_matches([':', ' ', '\t']).split(' ').next());
        number.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let used = ledger.report(backend.device()).used;
    println!(
        "{load} {first} {second} {} {} {}",
        bytes("RssAnon"),
        bytes("RssFile") + bytes("RssShmem"),
        used.of(MemoryKind::Weights) + used.of(MemoryKind::Mapping)
    );
    Ok(())
}

/// Puts the file's pages into the system's cache, or asks it to forget them.
fn prepare(arguments: &Arguments) -> Result<()> {
    let file = File::open(&arguments.file)?;
    if arguments.cold {
        file.sync_all()?;
        // `dd` is the one common program that asks for this.
        let status = Command::new("dd")
            .arg(format!("if={}", arguments.file.display()))
            .args(["of=/dev/null", "iflag=nocache", "count=0", "status=none"])
            .status()?;
        anyhow::ensure!(status.success(), "dd failed");
    } else {
        std::io::copy(
            &mut std::io::BufReader::with_capacity(1 << 22, file),
            &mut std::io::sink(),
        )?;
    }
    Ok(())
}

/// Writes the checkpoint.
fn write(path: &Path, gib: usize) -> Result<()> {
    let bytes = SIDE * SIDE * 2;
    let count = (gib << 30) / bytes;
    let mut header = String::from("{");
    for index in 0..count {
        let (begin, end) = (index * bytes, (index + 1) * bytes);
        let comma = if index == 0 { "" } else { "," };
        header.push_str(&format!(
            "{comma}\"w{index:05}\":{{\"dtype\":\"F16\",\"shape\":[{SIDE},{SIDE}],\"data_offsets\":[{begin},{end}]}}"
        ));
    }
    header.push('}');
    let padded = (header.len() + 8).next_multiple_of(64) - 8;
    let mut file = BufWriter::with_capacity(1 << 22, File::create(path)?);
    file.write_all(&(padded as u64).to_le_bytes())?;
    file.write_all(format!("{header:padded$}").as_bytes())?;
    // Small numbers of both signs, none of them special.
    let mut state = 1_u32;
    let mut matrix = vec![0_u8; bytes];
    for _ in 0..count {
        for pair in matrix.as_chunks_mut::<2>().0 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *pair = (((state >> 16) as u16 & 0x83ff) | 0x2000).to_le_bytes();
        }
        file.write_all(&matrix)?;
    }
    file.flush()?;
    file.get_ref().sync_all()?;
    Ok(())
}
