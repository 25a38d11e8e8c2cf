//! Weight files: what is read, what is refused and in which words.

// Helpers are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::panic)]

mod gguf;
mod gguf_refused;
mod mutations;
mod reading;
mod refused;
mod tables;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use sd_graph::Checkpoint;
use tempfile::TempDir;

/// A folder that holds `files`.
fn folder<N: AsRef<Path>, B: AsRef<[u8]>>(files: impl IntoIterator<Item = (N, B)>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    folder
}

/// A safetensors file with this header, as it stands, and so many bytes of data.
fn raw(header: impl AsRef<[u8]>, data: usize) -> Vec<u8> {
    let header = header.as_ref();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header);
    bytes.extend(pattern(data));
    bytes
}

/// `len` bytes that differ from their neighbours.
fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 151 + at / 256 * 7 + 3) as u8)
        .collect()
}

/// A file with these tensors as the safetensors crate writes it.
fn written(tensors: &[(&str, Dtype, &[usize])], metadata: &[(&str, &str)]) -> Vec<u8> {
    let size =
        |dtype: Dtype, shape: &[usize]| shape.iter().product::<usize>() * dtype.bitsize() / 8;
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|&(_, dtype, shape)| pattern(size(dtype, shape)))
        .collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|(&(name, dtype, shape), data)| {
            (name, TensorView::new(dtype, shape.to_vec(), data).unwrap())
        });
    let metadata: HashMap<String, String> = metadata
        .iter()
        .map(|&(key, text)| (key.to_owned(), text.to_owned()))
        .collect();
    serialize(views, (!metadata.is_empty()).then_some(metadata)).unwrap()
}

/// The index that puts each tensor into its shard.
fn index(entries: &[(&str, &str)]) -> String {
    let map: HashMap<_, _> = entries.iter().copied().collect();
    serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string()
}

/// Every tensor of `checkpoint` is what the safetensors crate reads from `files`, byte for byte, and no other is there.
#[track_caller]
fn assert_same<'a>(checkpoint: &Checkpoint, files: impl IntoIterator<Item = &'a [u8]>) {
    let (mut count, mut bytes, mut parameters) = (0, 0, 0);
    for file in files {
        for (name, view) in SafeTensors::deserialize(file).unwrap().iter() {
            let info = checkpoint.get(name).unwrap();
            assert_eq!(info.shape, view.shape(), "{name}");
            assert_eq!(info.stored.name(), view.dtype().to_string(), "{name}");
            assert_eq!(info.bytes, view.data().len() as u64, "{name}");
            assert_eq!(
                info.elements(),
                view.shape().iter().product::<usize>() as u64,
                "{name}"
            );
            let mut data = vec![0; view.data().len()];
            checkpoint.read(name, &mut data).unwrap();
            assert_eq!(data, view.data(), "{name}");
            (count, bytes, parameters) =
                (count + 1, bytes + info.bytes, parameters + info.elements());
        }
    }
    assert_eq!(
        (
            checkpoint.len(),
            checkpoint.bytes(),
            checkpoint.parameters()
        ),
        (count, bytes, parameters)
    );
    assert_eq!(checkpoint.is_empty(), count == 0);
    let names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
    assert!(names.len() == count && names.is_sorted());
}

/// All types of the format, with shapes that fill whole bytes.
#[rustfmt::skip]
const EVERY_TYPE: &[(&str, Dtype, &[usize])] = &[
    ("bool", Dtype::BOOL, &[3]),
    ("f4", Dtype::F4, &[3, 2]),
    ("f6.a", Dtype::F6_E2M3, &[4, 3]),
    ("f6.b", Dtype::F6_E3M2, &[4]),
    ("u8", Dtype::U8, &[5]),
    ("i8", Dtype::I8, &[1, 1, 1, 1, 7]),
    ("f8.a", Dtype::F8_E5M2, &[9]),
    ("f8.b", Dtype::F8_E4M3, &[9]),
    ("f8.c", Dtype::F8_E8M0, &[2]),
    ("f8.d", Dtype::F8_E4M3FNUZ, &[2]),
    ("f8.e", Dtype::F8_E5M2FNUZ, &[2]),
    ("i16", Dtype::I16, &[3]),
    ("u16", Dtype::U16, &[3]),
    ("f16", Dtype::F16, &[2, 3]),
    ("bf16", Dtype::BF16, &[3, 2]),
    ("i32", Dtype::I32, &[1]),
    ("u32", Dtype::U32, &[1]),
    ("f32", Dtype::F32, &[2, 3, 4, 5]),
    ("c64", Dtype::C64, &[2]),
    ("f64", Dtype::F64, &[2]),
    ("i64", Dtype::I64, &[2]),
    ("u64", Dtype::U64, &[2]),
];

/// Tensors that are rare and right.
#[rustfmt::skip]
const RARE: &[(&str, Dtype, &[usize])] = &[
    ("scalar", Dtype::F32, &[]),
    ("empty", Dtype::F32, &[0]),
    ("empty.4d", Dtype::F16, &[3, 0, 5, 7]),
    ("many.sides", Dtype::U8, &[1; 64]),
    ("", Dtype::U8, &[1]),
    ("größe \u{1f600}\n\"quoted\"", Dtype::U8, &[2]),
];

#[test]
fn one_file_is_what_its_own_library_reads() {
    #[rustfmt::skip]
    let cases = [
        ("every type", written(EVERY_TYPE, &[])),
        ("rare tensors", written(RARE, &[("format", "pt"), ("größe", "\n")])),
        ("no tensor", written(&[], &[])),
        ("only metadata", written(&[], &[("format", "pt")])),
        ("null metadata", raw(r#"{"__metadata__":null,"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#, 3)),
        ("unsorted", raw(r#" {"a":{"data_offsets":[2,6],"x":[{}],"shape":[1],"dtype":"F32"},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}} "#, 6)),
        ("empty tensors between", raw(r#"{"c":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},"b":{"dtype":"F32","shape":[0],"data_offsets":[2,2]}, "a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, 4)),
    ];
    for (what, bytes) in &cases {
        let folder = folder([("weights.bin", bytes)]);
        let path = folder.path().join("weights.bin");
        let checkpoint = Checkpoint::open(&path).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_same(&checkpoint, [bytes.as_slice()]);
        assert_eq!(checkpoint.path(), path);
        assert_eq!(
            checkpoint.files().collect::<Vec<_>>(),
            [(path.as_path(), bytes.len() as u64)]
        );
        let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
        let metadata: HashMap<String, String> = checkpoint.metadata().clone().into_iter().collect();
        assert_eq!(
            metadata,
            header.metadata().clone().unwrap_or_default(),
            "{what}"
        );
    }
}

#[test]
fn folders_and_shards_are_found() {
    let a = written(
        &[("a", Dtype::F32, &[2, 3]), ("b", Dtype::BF16, &[5])],
        &[("format", "pt"), ("shard", "1")],
    );
    let b = written(
        &[("c", Dtype::F32, &[4])],
        &[("shard", "2"), ("only", "second")],
    );
    let (one, two) = (
        "x-00001-of-00002.safetensors",
        "x-00002-of-00002.safetensors",
    );
    let sharded = index(&[("a", one), ("b", one), ("c", two)]);
    let incomplete = index(&[("a", one), ("c", two)]);
    let nested = index(&[
        ("a", "in/one.safetensors"),
        ("b", "in//one.safetensors"),
        ("c", "two.safetensors"),
    ]);
    let (ab, c, abc) = (
        [&a[..]].to_vec(),
        [&b[..]].to_vec(),
        [&a[..], &b[..]].to_vec(),
    );
    let other = b"{}".as_slice();
    let (dit, text) = ("diffusion_pytorch_model.safetensors", "model.safetensors");
    let (dit_index, text_index) = (
        "diffusion_pytorch_model.safetensors.index.json",
        "model.safetensors.index.json",
    );

    type Case<'a> = (&'a str, &'a [(&'a str, &'a [u8])], &'a str, &'a [&'a [u8]]);
    #[rustfmt::skip]
    let cases: &[Case<'_>] = &[
        ("diffusers", &[(dit, &a), ("config.json", other)], "", &ab),
        ("transformers", &[(text, &a), ("tokenizer.json", other)], "", &ab),
        ("variant beside", &[(text, &a), ("model.fp16.safetensors", &b)], "", &ab),
        ("variant by name", &[(text, &a), ("model.fp16.safetensors", &b)], "model.fp16.safetensors", &c),
        ("lone file", &[("my weights.safetensors", &a), ("._x.safetensors", other)], "", &ab),
        ("only shard", &[("x-00001-of-00001.safetensors", &a)], "", &ab),
        ("index in folder", &[(dit_index, sharded.as_bytes()), (one, &a), (two, &b)], "", &abc),
        ("index by name", &[("any.JSON", sharded.as_bytes()), (one, &a), (two, &b)], "any.JSON", &abc),
        ("index beside a stray file", &[(text_index, sharded.as_bytes()), (one, &a), (two, &b), ("z.safetensors", other)], "", &abc),
        ("index with a hole", &[(text_index, incomplete.as_bytes()), (one, &a), (two, &b)], "", &abc),
        ("shard in a folder", &[(text_index, nested.as_bytes()), ("in/one.safetensors", &a), ("two.safetensors", &b)], "", &abc),
        ("one shard by name", &[(text_index, sharded.as_bytes()), (one, &a), (two, &b)], two, &c),
    ];
    for (what, files, open, expected) in cases {
        let folder = folder(files.iter().copied());
        let checkpoint = Checkpoint::open(folder.path().join(open))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_same(&checkpoint, expected.iter().copied());
        assert_eq!(checkpoint.files().len(), expected.len(), "{what}");
        if expected.len() == 2 {
            let metadata: Vec<_> = checkpoint
                .metadata()
                .iter()
                .map(|(key, text)| (key.as_str(), text.as_str()))
                .collect();
            assert_eq!(
                metadata,
                [("format", "pt"), ("only", "second"), ("shard", "1")],
                "{what}"
            );
        }
    }
}
