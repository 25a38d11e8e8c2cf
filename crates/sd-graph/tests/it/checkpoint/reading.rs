//! Reading tensors and parts of them, from several threads, and from files that change meanwhile.

use std::fs;

use safetensors::tensor::Dtype;
use sd_graph::{Checkpoint, CheckpointError};

use super::{assert_same, folder, pattern, written};

#[test]
fn parts_are_read_and_wrong_parts_are_errors() {
    let bytes = written(
        &[
            ("a", Dtype::U8, &[10]),
            ("b", Dtype::U8, &[20]),
            ("empty", Dtype::U8, &[0]),
        ],
        &[],
    );
    let folder = folder([("model.safetensors", &bytes)]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let whole = pattern(20);

    for (offset, len) in [(0, 20), (0, 0), (20, 0), (19, 1), (3, 8)] {
        let mut part = vec![0; len];
        checkpoint.read_at("b", offset as u64, &mut part).unwrap();
        assert_eq!(part, whole[offset..offset + len]);
    }
    checkpoint.read("empty", &mut []).unwrap();

    for (offset, len) in [
        (0, 21),
        (20, 1),
        (21, 0),
        (u64::MAX, 1),
        (u64::MAX, 0),
        (u64::MAX - 3, 8),
    ] {
        let error = checkpoint
            .read_at("b", offset, &mut vec![0; len])
            .unwrap_err();
        assert!(
            matches!(error, CheckpointError::OutOfRange { bytes: 20, .. }),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains(&format!("tensor `b`: {len} bytes at offset {offset} ")),
            "{error}"
        );
    }
    for len in [0, 19, 21] {
        let error = checkpoint.read("b", &mut vec![0; len]).unwrap_err();
        assert!(
            matches!(error, CheckpointError::OutOfRange { .. }),
            "{error}"
        );
    }
    let error = checkpoint.read("c", &mut []).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NoSuchTensor { .. })
            && error.to_string().contains("no tensor `c`"),
        "{error}"
    );
}

#[test]
fn threads_read_one_checkpoint_at_once() {
    fn shared<T: Send + Sync + Clone + 'static>(value: &T) -> T {
        value.clone()
    }
    let shape: &[usize] = &[1000, 33];
    let names: Vec<String> = (0..16)
        .map(|number| format!("blocks.{number}.weight"))
        .collect();
    let tensors: Vec<_> = names
        .iter()
        .map(|name| (name.as_str(), Dtype::F16, shape))
        .collect();
    let bytes = written(&tensors, &[]);
    let folder = folder([("model.safetensors", &bytes)]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (checkpoint, bytes) = (shared(&checkpoint), bytes.clone());
            std::thread::spawn(move || {
                (0..8).for_each(|_| assert_same(&checkpoint, [bytes.as_slice()]))
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_file_that_changes_while_open_never_mixes_in() {
    let bytes = written(&[("a", Dtype::U8, &[10]), ("b", Dtype::U8, &[20])], &[]);
    let folder = folder([
        ("model.safetensors", &bytes),
        ("new", &vec![0; bytes.len()]),
    ]);
    let path = folder.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(&path).unwrap();
    if cfg!(unix) {
        fs::rename(folder.path().join("new"), &path).unwrap();
        assert_same(&checkpoint, [bytes.as_slice()]);
        fs::write(&path, &bytes).unwrap();
    }

    let checkpoint = Checkpoint::open(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(bytes.len() as u64 - 7).unwrap();
    checkpoint.read("a", &mut [0; 10]).unwrap();
    let error = checkpoint.read("b", &mut [0; 20]).unwrap_err();
    assert!(matches!(error, CheckpointError::Shrunk { .. }), "{error}");
    let told = format!(
        "it had {} bytes when it was opened, now it has {}",
        bytes.len(),
        bytes.len() - 7
    );
    assert!(
        error.to_string().contains("tensor `b`: ") && error.to_string().contains(&told),
        "{error}"
    );
}
