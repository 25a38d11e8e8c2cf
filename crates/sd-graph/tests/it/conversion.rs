//! Writing weight files: what stands in them, what it takes, and that nothing is left of what fails.

use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use sd_backend::{DType, Device, Ledger, MemoryKind};
use sd_graph::{
    Cancel, Checkpoint, Conversion, ConversionReport, Error, Existing, FileFormat, Progress,
    StoredType, TensorInfo, WriteError, convert,
};

/// Numbers from -1 to 1 that differ from their neighbours.
fn numbers(count: usize) -> Vec<u8> {
    let number = |at: usize| ((at * 7919) % 2001) as f32 / 1000.0 - 1.0;
    (0..count).flat_map(|at| number(at).to_le_bytes()).collect()
}

fn source(path: &Path, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Checkpoint {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (
            *name,
            TensorView::new(*dtype, shape.to_vec(), bytes).unwrap(),
        )
    });
    let metadata = [
        ("format".to_owned(), "pt".to_owned()),
        ("who".to_owned(), "me".to_owned()),
    ];
    std::fs::write(
        path,
        safetensors::serialize(views, Some(metadata.into())).unwrap(),
    )
    .unwrap();
    Checkpoint::open(path).unwrap()
}

fn write(
    conversion: &Conversion,
    path: &Path,
    existing: Existing,
) -> Result<ConversionReport, Error> {
    let quiet = &mut |_: &Progress| {};
    conversion.write(path, existing, &Ledger::default(), &Cancel::new(), quiet)
}

fn bytes(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let mut bytes = vec![0; checkpoint.get(name).unwrap().bytes as usize];
    checkpoint.read(name, &mut bytes).unwrap();
    bytes
}

/// Names of the files in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Two matrices, one of them of several pieces, a kernel of five sides, a scalar, a vector and small floats.
fn mixed(folder: &Path) -> Checkpoint {
    let large = numbers(1100 * 1024);
    source(
        &folder.join("in.safetensors"),
        &[
            ("large.weight", Dtype::F32, &[1100, 1024], large),
            ("small.weight", Dtype::F32, &[3, 32], numbers(96)),
            ("kernel", Dtype::F32, &[2, 3, 2, 2, 5], numbers(120)),
            ("count", Dtype::I64, &[], 7_i64.to_le_bytes().to_vec()),
            ("empty", Dtype::F32, &[0, 4], Vec::new()),
            ("eight", Dtype::F8_E4M3, &[5], vec![0x38, 0x40, 0xb8, 0, 1]),
        ],
    )
}

#[test]
fn both_formats_hold_what_converting_in_memory_makes() {
    let at = tempfile::tempdir().unwrap();
    let checkpoint = mixed(at.path());
    let matrices =
        |dtype: DType| move |name: &str, _: &TensorInfo| name.ends_with("weight").then_some(dtype);
    for (name, dtype) in [
        ("out.gguf", DType::Q8_0),
        ("k.gguf", DType::F16),
        ("out.safetensors", DType::BF16),
    ] {
        let path = at.path().join(name);
        let format = FileFormat::of(&path).unwrap();
        let planned = Conversion::new(&checkpoint, format, matrices(dtype)).unwrap();
        let planned = planned.metadata("who", "you").metadata("more", "text");
        let report = write(&planned, &path, Existing::Keep).unwrap();
        assert_eq!(report.bytes, std::fs::metadata(&path).unwrap().len());
        let small = usize::from(format == FileFormat::Gguf);
        assert_eq!((report.tensors, report.converted), (6, 2 + small));

        let written = Checkpoint::open(&path).unwrap();
        let text = |key: &str| written.metadata().get(key).cloned();
        assert_eq!(
            (text("who"), text("more")),
            (Some("you".to_owned()), Some("text".to_owned()))
        );
        for (name, info) in checkpoint.tensors() {
            let is = written.get(name).unwrap();
            let shape = match (format, &info.shape[..]) {
                // A scalar is a vector of one there.
                (FileFormat::Gguf, []) => &[1],
                (_, shape) => shape,
            };
            assert_eq!(is.shape, shape, "{name}");
            let memory = match (name, format) {
                (name, _) if name.ends_with("weight") => dtype,
                ("eight", FileFormat::Gguf) => DType::F16,
                _ => {
                    assert_eq!(is.stored, info.stored, "{name}");
                    assert_eq!(bytes(&written, name), bytes(&checkpoint, name), "{name}");
                    continue;
                }
            };
            let mut wanted = vec![0; is.bytes as usize];
            convert(&bytes(&checkpoint, name), info.stored, memory, &mut wanted).unwrap();
            assert_eq!(bytes(&written, name), wanted, "{name}");
        }
        if format == FileFormat::Safetensors {
            // The format's own library reads it, and finds every tensor aligned for its elements.
            let file = std::fs::read(&path).unwrap();
            let read = SafeTensors::deserialize(&file).unwrap();
            assert_eq!(read.len(), 6);
            let large = read.tensor("large.weight").unwrap();
            assert_eq!(
                (large.dtype(), large.shape()),
                (Dtype::BF16, &[1100, 1024][..])
            );
            assert_eq!(read.tensor("count").unwrap().data(), 7_i64.to_le_bytes());
        }
    }
    // What was written is read and written again: the metadata of a GGUF file stays, but for what the format itself says.
    let (from, to) = (at.path().join("out.gguf"), at.path().join("again.gguf"));
    let first = Checkpoint::open(&from).unwrap();
    let again = Conversion::new(&first, FileFormat::Gguf, |_, _| None).unwrap();
    write(&again, &to, Existing::Keep).unwrap();
    assert_eq!(
        std::fs::read(&from).unwrap().len(),
        std::fs::read(&to).unwrap().len()
    );
    let again = Checkpoint::open(&to).unwrap();
    assert_eq!(again.metadata(), first.metadata());
    assert_eq!(bytes(&again, "large.weight"), bytes(&first, "large.weight"));
}

#[test]
fn memory_does_not_grow_with_the_file() {
    let one_thread = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .use_current_thread();
    one_thread.build().unwrap().install(memory_of_two_sizes);
}

fn memory_of_two_sizes() {
    let at = tempfile::tempdir().unwrap();
    let cpu = Device::cpu().unwrap();
    // Eight and thirty-two pieces for each thread's one.
    let staging = [8, 32].map(|pieces| {
        let elements = pieces << 20;
        let path = at.path().join(format!("{pieces}.safetensors"));
        let shape: &[usize] = &[elements >> 10, 1 << 10];
        let checkpoint = source(&path, &[("w", Dtype::F16, shape, vec![0; elements * 2])]);
        let planned = Conversion::new(&checkpoint, FileFormat::Gguf, |_, _| Some(DType::Q4_0));
        let ledger = Ledger::default();
        let watch = ledger.watch(cpu);
        let to = at.path().join(format!("{pieces}.gguf"));
        let (mut heard, cancel) = (0, Cancel::new());
        let mut listen = |progress: &Progress| {
            assert!(matches!(
                progress,
                Progress::Writing {
                    done: 1,
                    total: 1,
                    ..
                }
            ));
            heard += 1;
        };
        let planned = planned.unwrap();
        // What is allocated is what was reserved, and a little for names and lists. Allocations are counted by thread: all of the
        // work is done on this one.
        let (mut taken, mut report) = (0, ConversionReport::default());
        let info = allocation_counter::measure(|| {
            let written = planned.write(&to, Existing::Keep, &ledger, &cancel, &mut listen);
            report = written.unwrap();
            taken = watch.most().of(MemoryKind::Staging);
        });
        assert_eq!((heard, taken), (1, report.staging));
        println!(
            "{pieces} pieces: staging of {taken} bytes, {} allocated at once",
            info.bytes_max
        );
        assert!(
            (taken..taken + (1 << 20)).contains(&info.bytes_max),
            "{info:?}"
        );
        taken
    });
    // A piece as it is read and as it is written.
    let piece = (1_u64 << 20) * 2 + (1 << 20) / 32 * 18;
    assert_eq!(staging, [piece; 2]);
}

#[test]
fn what_fails_leaves_nothing_and_what_was_there_stays() {
    let at = tempfile::tempdir().unwrap();
    let checkpoint = mixed(at.path());
    let keep = |format| Conversion::new(&checkpoint, format, |_, _| None).unwrap();
    let (gguf, tensors) = (keep(FileFormat::Gguf), keep(FileFormat::Safetensors));
    let out = at.path().join("out.gguf");
    let write_error = |outcome: Result<ConversionReport, Error>| match outcome {
        Err(Error::Write(error)) => error,
        other => panic!("{other:?}"),
    };

    // The file that is read, by its name, by a link to it, and by another name of the same bytes.
    let input = at.path().join("in.safetensors");
    let mut same = vec![input.clone()];
    #[cfg(unix)]
    {
        let (soft, hard) = (
            at.path().join("soft.safetensors"),
            at.path().join("hard.safetensors"),
        );
        std::os::unix::fs::symlink(&input, &soft).unwrap();
        std::fs::hard_link(&input, &hard).unwrap();
        same.extend([soft, hard]);
    }
    let before = names(at.path());
    for path in &same {
        for existing in [Existing::Keep, Existing::Replace] {
            let error = write_error(write(&tensors, path, existing));
            assert!(matches!(error, WriteError::SameFile { .. }), "{error}");
        }
    }
    assert_eq!(names(at.path()), before);
    assert_eq!(Checkpoint::open(&input).unwrap().len(), 6);

    // A folder that is not there, a folder in the file's place.
    let error = write_error(write(&gguf, &at.path().join("no/out.gguf"), Existing::Keep));
    assert!(
        error
            .to_string()
            .ends_with("cannot be written: there is no such folder"),
        "{error}"
    );
    let folder = at.path().join("folder.gguf");
    std::fs::create_dir(&folder).unwrap();
    let error = write_error(write(&gguf, &folder, Existing::Replace));
    assert!(error.to_string().contains("it is a folder"), "{error}");
    std::fs::remove_dir(&folder).unwrap();

    // A file that is there stays unless it is to be replaced.
    std::fs::write(&out, "old").unwrap();
    let error = write_error(write(&gguf, &out, Existing::Keep));
    assert!(matches!(error, WriteError::Exists { .. }), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), b"old");

    // Cancelled in the middle, and a value that the type cannot hold in the last tensor: what was there stays too.
    let cancel = Cancel::new();
    let mut stop = |_: &Progress| cancel.cancel();
    let outcome = gguf.write(
        &out,
        Existing::Replace,
        &Ledger::default(),
        &cancel,
        &mut stop,
    );
    assert!(outcome.unwrap_err().is_cancelled());
    let infinite = source(
        &at.path().join("infinite.safetensors"),
        &[
            ("a", Dtype::F32, &[2, 32], numbers(64)),
            (
                "z",
                Dtype::F32,
                &[1, 32],
                f32::INFINITY.to_le_bytes().repeat(32),
            ),
        ],
    );
    let q8_0 = Conversion::new(&infinite, FileFormat::Gguf, |_, _| Some(DType::Q8_0)).unwrap();
    let error = write(&q8_0, &out, Existing::Replace).unwrap_err();
    assert!(
        matches!(&error, Error::Unconvertible { name, .. } if name == "z"),
        "{error}"
    );
    assert_eq!(std::fs::read(&out).unwrap(), b"old");

    write(&gguf, &out, Existing::Replace).unwrap();
    assert_eq!(Checkpoint::open(&out).unwrap().len(), 6);
    let mut left = before;
    left.extend(["infinite.safetensors".to_owned(), "out.gguf".to_owned()]);
    left.sort();
    assert_eq!(names(at.path()), left);
}

#[test]
fn what_a_format_cannot_hold_is_known_before() {
    let table = |name: &str, stored, shape: &[usize]| {
        Checkpoint::from_table("table", [(name.to_owned(), stored, shape.to_vec())]).unwrap()
    };
    let refused = |checkpoint: &Checkpoint, format, dtype: Option<DType>| -> String {
        match Conversion::new(checkpoint, format, |_, _| dtype) {
            Ok(_) => "accepted".to_owned(),
            Err(error) => error.to_string(),
        }
    };
    use FileFormat::{Gguf, Safetensors};
    let blocks = table("w", StoredType::Q4K, &[2, 256]);
    assert_eq!(refused(&blocks, Gguf, None), "accepted");
    assert_eq!(refused(&blocks, Safetensors, Some(DType::F16)), "accepted");
    assert!(refused(&blocks, Safetensors, None).contains("a safetensors file holds no q4_K"));
    assert!(
        refused(&table("w", StoredType::Bool, &[2]), Gguf, None)
            .contains("a GGUF file holds no BOOL")
    );
    assert!(
        refused(
            &table("w", StoredType::C64, &[2, 32]),
            Gguf,
            Some(DType::F16)
        )
        .contains("C64 cannot become f16")
    );
    assert!(
        refused(
            &table("w", StoredType::F32, &[2, 31]),
            Gguf,
            Some(DType::Q8_0)
        )
        .contains("rows of 31")
    );
    let long = "x".repeat(64);
    assert!(
        refused(&table(&long, StoredType::F32, &[2]), Gguf, None).contains("its name has 64 bytes")
    );
    assert_eq!(
        refused(&table(&long, StoredType::F32, &[2]), Safetensors, None),
        "accepted"
    );
    let error = FileFormat::of(Path::new("model.bin")).unwrap_err();
    assert!(
        error.to_string().contains(".gguf or .safetensors"),
        "{error}"
    );
    assert_eq!(FileFormat::of(Path::new("Model.GGUF")), Ok(Gguf));
}

#[test]
#[cfg(unix)]
fn a_folder_without_permission_is_said_to_be() {
    use std::os::unix::fs::PermissionsExt;
    let at = tempfile::tempdir().unwrap();
    let checkpoint = mixed(at.path());
    let locked = at.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o500)).unwrap();
    if std::fs::write(locked.join("probe"), "").is_ok() {
        println!("permissions do not hold for this user");
        return;
    }
    let planned = Conversion::new(&checkpoint, FileFormat::Gguf, |_, _| None).unwrap();
    let error = write(&planned, &locked.join("out.gguf"), Existing::Keep).unwrap_err();
    assert!(error.to_string().contains("permission denied"), "{error}");
}
