//! A small valid file, damaged in thousands of ways: never a panic, and never another answer than the one of the
//! format's own library.

use std::fs::File;
use std::io::{Seek, Write};

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use sd_graph::Checkpoint;

use super::{assert_same, folder, written};

/// Bytes that mean something in a header, or nothing anywhere.
const BYTES: &[u8] = b"\"{}[]:,\\ -.09eEFU_ab\0\x1f\x7f\x80\xff";

/// All files made from `valid`, whose header is the first `header` bytes after its length, by one change.
fn damaged(valid: &[u8], header: usize) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for at in 0..valid.len() {
        all.push((format!("cut to {at}"), valid[..at].to_vec()));
    }
    for at in 0..8 + header {
        let mut replace = |byte: u8| {
            let mut bytes = valid.to_vec();
            bytes[at] = byte;
            all.push((format!("{byte:#x} at {at}"), bytes));
        };
        (0..8).for_each(|bit| replace(valid[at] ^ (1 << bit)));
        BYTES.iter().for_each(|&byte| replace(byte));

        let mut lost = valid.to_vec();
        lost.remove(at);
        all.push((format!("without {at}"), lost));
        let mut doubled = valid.to_vec();
        doubled.insert(at, valid[at]);
        all.push((format!("{at} doubled"), doubled));
    }
    // The same inside the header, with its length put right.
    for at in 8..8 + header {
        let mut lost = valid.to_vec();
        lost.remove(at);
        lost[..8].copy_from_slice(&(header as u64 - 1).to_le_bytes());
        all.push((format!("header without {at}"), lost));
        for &byte in BYTES {
            let mut longer = valid.to_vec();
            longer.insert(at, byte);
            longer[..8].copy_from_slice(&(header as u64 + 1).to_le_bytes());
            all.push((format!("header with {byte:#x} before {at}"), longer));
        }
    }
    all
}

/// Puts `bytes` in place of what `file` holds. A file written anew each time would be waited for by some file systems.
pub(super) fn put(file: &mut File, bytes: &[u8]) {
    file.rewind().unwrap();
    file.write_all(bytes).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

#[test]
fn damaged_files_are_read_as_the_formats_own_library_does() {
    let tensors: &[(&str, Dtype, &[usize])] = &[
        ("a", Dtype::F32, &[2, 1]),
        ("b", Dtype::F4, &[2, 3]),
        ("c", Dtype::U8, &[0, 9]),
        ("ab", Dtype::F16, &[]),
    ];
    let valid = written(tensors, &[("k", "v")]);
    let header = u64::from_le_bytes(valid[..8].try_into().unwrap()) as usize;
    let folder = folder([("x.safetensors", &valid)]);
    let path = folder.path().join("x.safetensors");

    let mut file = File::options().write(true).open(&path).unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for (what, bytes) in damaged(&valid, header) {
        put(&mut file, &bytes);
        let outside = SafeTensors::deserialize(&bytes);
        match Checkpoint::open(&path) {
            Ok(checkpoint) => {
                assert!(
                    outside.is_ok(),
                    "{what}: only ours accepts it: {}",
                    String::from_utf8_lossy(&bytes)
                );
                assert_same(&checkpoint, [bytes.as_slice()]);
                accepted += 1;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    outside.is_err() || text.contains("twice"),
                    "{what}: only ours refuses it: {text}"
                );
                assert!(
                    text.contains("x.safetensors: ") && text.chars().count() < 1000,
                    "{what}: {text}"
                );
                assert!(!text.contains(char::is_control), "{what}: {text:?}");
                refused += 1;
            }
        }
    }
    // Most damage is to what matters; some only renames a tensor or adds a blank.
    assert!(
        accepted > 300 && refused > 8000,
        "{accepted} accepted, {refused} refused"
    );
}

#[test]
fn damaged_indexes_never_reach_other_files() {
    let one = written(&[("a", Dtype::F32, &[2])], &[]);
    let two = written(&[("b", Dtype::U8, &[3])], &[]);
    let valid = br#"{"metadata":{"total_size":11},"weight_map":{"a":"1.safetensors","b":"in/2.safetensors"}}"#;
    let folder = folder([
        ("i.json", valid.as_slice()),
        ("1.safetensors", &one),
        ("in/2.safetensors", &two),
    ]);
    let path = folder.path().join("i.json");
    let mut file = File::options().write(true).open(&path).unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for (what, bytes) in damaged(valid, valid.len() - 8) {
        put(&mut file, &bytes);
        match Checkpoint::open(&path) {
            Ok(checkpoint) => {
                assert!(
                    checkpoint
                        .files()
                        .all(|(file, _)| file.starts_with(folder.path())),
                    "{what}"
                );
                assert!(!checkpoint.is_empty(), "{what}");
                accepted += 1;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.chars().count() < 1000 && !text.contains(char::is_control),
                    "{what}: {text:?}"
                );
                refused += 1;
            }
        }
    }
    assert!(
        accepted > 100 && refused > 2000,
        "{accepted} accepted, {refused} refused"
    );
}
