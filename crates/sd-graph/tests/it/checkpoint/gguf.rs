//! GGUF files: what is read of right ones, also of those that ggml writes, and thousands of damaged ones.

use std::ffi::CString;
use std::fs::{self, File};

use sd_ggml_sys as sys;
use sd_graph::{Checkpoint, StoredType};

use super::mutations::put;
use super::{folder, pattern};
use crate::gguf_file::{Given, array, entry, head, info, kind, padded, text, written};

/// Every type number that ggml has, as a tensor of three rows of two blocks.
fn every_type() -> Vec<(u32, u64)> {
    (0..sys::GGML_TYPE_COUNT)
        .filter_map(|number| {
            // SAFETY: this reads a constant table at a number below its length.
            let len = unsafe { sys::ggml_blck_size(number) };
            (len > 0).then_some((number, len as u64))
        })
        .collect()
}

#[test]
fn every_type_and_every_kind_of_metadata_is_read() {
    let types = every_type();
    assert_eq!(types.len(), 35);
    let names: Vec<String> = types
        .iter()
        .map(|(number, _)| format!("t{number}"))
        .collect();
    let shapes: Vec<[usize; 2]> = types
        .iter()
        .map(|(_, len)| [3, 2 * *len as usize])
        .collect();
    let given: Vec<Given<'_>> = (types.iter().zip(&names).zip(&shapes))
        .map(|((&(number, _), name), shape)| {
            // SAFETY: as above.
            let bytes = 6 * unsafe { sys::ggml_type_size(number) };
            (name.as_str(), shape.as_slice(), number, pattern(bytes))
        })
        .chain([
            ("scalar", [].as_slice(), sys::GGML_TYPE_F32, pattern(4)),
            ("4d", &[2, 1, 3, 5], sys::GGML_TYPE_F16, pattern(60)),
            ("empty", &[0, 7], sys::GGML_TYPE_F32, vec![]),
            ("empty.q", &[0, 32], sys::GGML_TYPE_Q8_0, vec![]),
            ("", &[1], sys::GGML_TYPE_I8, pattern(1)),
            ("größe\n", &[1], sys::GGML_TYPE_I8, pattern(1)),
            (LONG, &[1], sys::GGML_TYPE_I8, pattern(1)),
        ])
        .collect();
    let many: Vec<u8> = (0..17_u32).flat_map(u32::to_le_bytes).collect();
    let metadata = [
        (
            entry("general.architecture", kind::TEXT, text("qwen_image")),
            "general.architecture",
            "qwen_image",
        ),
        (entry("u8", 0, [200]), "u8", "200"),
        (entry("i8", 1, [200]), "i8", "-56"),
        (entry("u16", 2, [1, 2]), "u16", "513"),
        (entry("i16", 3, [0, 255]), "i16", "-256"),
        (entry("u32", 4, [1, 0, 0, 0]), "u32", "1"),
        (entry("i32", 5, [255; 4]), "i32", "-1"),
        (entry("f32", 6, 1.5_f32.to_le_bytes()), "f32", "1.5"),
        (entry("no", 7, [0]), "no", "false"),
        (entry("yes", 7, [1]), "yes", "true"),
        (entry("u64", 10, [255; 8]), "u64", "18446744073709551615"),
        (entry("i64", 11, [255; 8]), "i64", "-1"),
        (entry("f64", 12, f64::NAN.to_le_bytes()), "f64", "NaN"),
        (entry("empty", kind::TEXT, text("")), "empty", ""),
        (
            entry("few", kind::ARRAY, array(kind::U32, 2, &many[..8])),
            "few",
            "[0, 1]",
        ),
        (
            entry("none", kind::ARRAY, array(kind::BOOL, 0, [])),
            "none",
            "[]",
        ),
        (
            entry("many", kind::ARRAY, array(kind::U32, 17, &many)),
            "many",
            "[17 values]",
        ),
        (
            entry(
                "texts",
                kind::ARRAY,
                array(kind::TEXT, 2, [text("a"), text("bc")].concat()),
            ),
            "texts",
            "[2 values]",
        ),
        (
            entry("long", kind::TEXT, text("x".repeat(70_000))),
            "long",
            "[text of 70000 bytes]",
        ),
        (
            entry("general.alignment", kind::U32, 64_u32.to_le_bytes()),
            "general.alignment",
            "64",
        ),
    ];
    let entries: Vec<Vec<u8>> = metadata.iter().map(|(bytes, ..)| bytes.clone()).collect();
    for version in [2, 3] {
        let mut bytes = written(version, 64, &entries, &given);
        if version == 2 {
            // The last padding may be left out.
            bytes.truncate(bytes.len() - 63);
        }
        let folder = folder([("weights.bin", &bytes)]);
        let checkpoint = Checkpoint::open(folder.path().join("weights.bin")).unwrap();
        assert_given(&checkpoint, &given);
        assert_eq!(checkpoint.metadata().len(), metadata.len());
        for (_, key, text) in &metadata {
            assert_eq!(checkpoint.metadata()[*key], *text, "{key}");
        }
    }
}

/// A name longer than ggml takes.
const LONG: &str = "a.name.of.more.than.sixty-four.bytes.which.ggml.itself.would.not.take.but.which.is.harmless.here";

#[track_caller]
fn assert_given(checkpoint: &Checkpoint, given: &[Given<'_>]) {
    assert_eq!(checkpoint.len(), given.len());
    for (name, shape, number, data) in given {
        let stored = &checkpoint.get(name).unwrap();
        assert_eq!(&stored.shape, shape, "{name}");
        let plain = |stored: StoredType| stored.name().to_lowercase();
        // SAFETY: this gives a constant text for a number that ggml defines.
        let theirs = unsafe { std::ffi::CStr::from_ptr(sys::ggml_type_name(*number)) };
        assert_eq!(
            plain(stored.stored),
            theirs.to_str().unwrap().to_lowercase()
        );
        let mut bytes = vec![0; data.len()];
        checkpoint.read(name, &mut bytes).unwrap();
        assert!(bytes == *data, "{name}");
    }
}

#[test]
fn data_may_lie_in_any_order_and_a_file_may_be_empty() {
    let list = [
        info("b", &[4], sys::GGML_TYPE_F32, 32),
        info("a", &[2, 3], sys::GGML_TYPE_F32, 0),
    ]
    .concat();
    let data = pattern(48);
    let swapped = [padded([head(3, 2, 0), list].concat(), 32), data.clone()].concat();
    let folder = folder([
        ("swapped.gguf", swapped),
        ("empty.gguf", head(3, 0, 0)),
        ("padded.gguf", padded(head(3, 0, 0), 32)),
    ]);
    let checkpoint = Checkpoint::open(folder.path().join("swapped.gguf")).unwrap();
    let given: [Given<'_>; 2] = [
        ("a", &[3, 2], sys::GGML_TYPE_F32, data[..24].to_vec()),
        ("b", &[4], sys::GGML_TYPE_F32, data[32..].to_vec()),
    ];
    assert_given(&checkpoint, &given);
    for name in ["empty.gguf", "padded.gguf"] {
        assert!(
            Checkpoint::open(folder.path().join(name))
                .unwrap()
                .is_empty()
        );
    }
}

#[test]
fn a_folder_with_one_such_file_is_opened() {
    let ours = written(3, 32, &[], &[("a", &[2], sys::GGML_TYPE_I8, pattern(2))]);
    let cases: &[(&[&str], &str)] = &[
        (&["model.gguf"], ""),
        (&["qwen-Q4_K_M.gguf", "config.json", "._x.gguf"], ""),
        (&["x-00001-of-00001.gguf"], ""),
        (
            &["a.gguf", "b.gguf"],
            "several files could be meant (a.gguf, b.gguf)",
        ),
        (
            &["a.gguf", "b.safetensors"],
            "several files could be meant (a.gguf, b.safetensors)",
        ),
        (
            &["x-00001-of-00002.gguf"],
            "x-00001-of-00002.gguf is one part of several",
        ),
        (&["x.bin"], "*.safetensors of another name or *.gguf"),
    ];
    for (names, expected) in cases {
        let folder = folder(names.iter().map(|&name| (name, &ours)));
        match Checkpoint::open(folder.path()) {
            Ok(checkpoint) => assert!(expected.is_empty() && checkpoint.len() == 1, "{names:?}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!expected.is_empty() && error.contains(expected), "{error}");
            }
        }
    }
}

#[test]
fn what_ggml_writes_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("theirs.gguf");
    let c = |text: &str| CString::new(text).unwrap();
    let given: [Given<'_>; 3] = [
        ("m.weight", &[3, 64], sys::GGML_TYPE_Q8_0, pattern(3 * 68)),
        ("m.bias", &[3], sys::GGML_TYPE_F32, pattern(12)),
        ("conv", &[2, 3, 1, 5], sys::GGML_TYPE_F16, pattern(60)),
    ];
    // SAFETY: ggml makes and frees its own contexts; texts end in zero and live for the calls; every tensor has as
    // many bytes of data as its type and shape take, which live until the file is written.
    unsafe {
        let params = sys::ggml_init_params {
            mem_size: 1 << 16,
            mem_buffer: std::ptr::null_mut(),
            no_alloc: true,
        };
        let (context, file) = (sys::ggml_init(params), sys::gguf_init_empty());
        let (key, value) = (c("general.architecture"), c("tiny"));
        sys::gguf_set_val_str(file, key.as_ptr(), value.as_ptr());
        sys::gguf_set_val_u32(file, c("tiny.blocks").as_ptr(), 7);
        sys::gguf_set_arr_data(
            file,
            c("tiny.sides").as_ptr(),
            kind::U8,
            b"\x01\x02".as_ptr().cast(),
            2,
        );
        for (name, shape, number, data) in &given {
            let ne: Vec<i64> = shape.iter().rev().map(|&side| side as i64).collect();
            let tensor = sys::ggml_new_tensor(context, *number, ne.len() as i32, ne.as_ptr());
            sys::ggml_set_name(tensor, c(name).as_ptr());
            (*tensor).data = data.as_ptr().cast_mut().cast();
            sys::gguf_add_tensor(file, tensor);
        }
        assert!(sys::gguf_write_to_file(
            file,
            c(path.to_str().unwrap()).as_ptr(),
            false
        ));
        sys::gguf_free(file);
        sys::ggml_free(context);
    }
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_given(&checkpoint, &given);
    let metadata = [
        ("general.architecture", "tiny"),
        ("tiny.blocks", "7"),
        ("tiny.sides", "[1, 2]"),
    ];
    assert!(
        checkpoint
            .metadata()
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .eq(metadata)
    );
    // The helper of these tests writes the same.
    let entries = [
        entry("general.architecture", kind::TEXT, text("tiny")),
        entry("tiny.blocks", kind::U32, 7_u32.to_le_bytes()),
        entry("tiny.sides", kind::ARRAY, array(kind::U8, 2, [1, 2])),
    ];
    assert!(fs::read(&path).unwrap() == written(3, 32, &entries, &given));
}

#[test]
fn damaged_files_never_do_more_than_fail() {
    let entries = [
        entry("general.alignment", kind::U32, 16_u32.to_le_bytes()),
        entry("k", kind::TEXT, text("v")),
        entry(
            "n",
            kind::ARRAY,
            array(kind::TEXT, 2, [text("a"), text("b")].concat()),
        ),
        entry("f", kind::ARRAY, array(kind::F32, 1, 1_f32.to_le_bytes())),
        entry("c", kind::U64, [1; 8]),
    ];
    let given: [Given<'_>; 4] = [
        ("a", &[2, 32], sys::GGML_TYPE_Q8_0, pattern(68)),
        ("b", &[3], sys::GGML_TYPE_F16, pattern(6)),
        ("c", &[], sys::GGML_TYPE_F32, pattern(4)),
        ("d", &[0, 2], sys::GGML_TYPE_I64, vec![]),
    ];
    let valid = written(3, 16, &entries, &given);
    let header = valid.len() - (80 + 16 + 16);
    let folder = folder([("x.gguf", &valid)]);
    let path = folder.path().join("x.gguf");
    assert_given(&Checkpoint::open(&path).unwrap(), &given);

    let mut all: Vec<Vec<u8>> = (0..valid.len()).map(|end| valid[..end].to_vec()).collect();
    for at in 0..header {
        for byte in 0..=255 {
            let mut bytes = valid.clone();
            bytes[at] = byte;
            all.push(bytes);
        }
        let mut lost = valid.clone();
        lost.remove(at);
        let mut doubled = valid.clone();
        doubled.insert(at, valid[at]);
        let mut word = valid.clone();
        word[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff);
        all.extend([lost, doubled, word]);
    }
    let mut file = File::options().write(true).open(&path).unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for bytes in &all {
        put(&mut file, bytes);
        match Checkpoint::open(&path) {
            Ok(checkpoint) => {
                for (name, info) in checkpoint.tensors() {
                    assert!(info.bytes <= bytes.len() as u64);
                    checkpoint
                        .read(name, &mut vec![0; info.bytes as usize])
                        .unwrap();
                }
                accepted += 1;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("x.gguf: ") && text.chars().count() < 1000,
                    "{text}"
                );
                assert!(!text.contains(char::is_control), "{text:?}");
                refused += 1;
            }
        }
    }
    // Texts, numbers and padding may be anything.
    assert!(
        accepted > 5000 && refused > 50_000,
        "{accepted} accepted, {refused} refused"
    );
}
