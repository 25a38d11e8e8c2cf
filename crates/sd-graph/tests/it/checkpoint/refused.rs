//! Everything that opening refuses, each with the words that it is refused with.

use safetensors::tensor::Dtype;
use sd_graph::Checkpoint;

use super::{folder, index, raw, written};

/// Opens `open` in a folder of `files` and expects an error that begins with the file and contains `expected`.
#[track_caller]
pub(super) fn refused<B: AsRef<[u8]>>(
    what: &str,
    files: &[(&str, B)],
    open: &str,
    expected: &[&str],
) {
    let folder = folder(files.iter().map(|(name, bytes)| (*name, bytes)));
    let error = match Checkpoint::open(folder.path().join(open)) {
        Ok(checkpoint) => panic!("{what}: opened as {checkpoint:?}"),
        Err(error) => error.to_string(),
    };
    let place = folder.path().to_string_lossy();
    assert!(
        error.contains(&*place),
        "{what}: the error does not say where: {error}"
    );
    for fragment in expected {
        assert!(
            error.contains(fragment),
            "{what}: `{fragment}` is not in: {error}"
        );
    }
    let length = error.chars().count() - place.chars().count();
    assert!(length < 1000, "{what}: {length} characters: {error}");
    assert!(!error.contains(char::is_control), "{what}: {error:?}");
}

/// A header with one tensor `a`.
fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#)
}

fn prefix(header: u64, rest: &[u8]) -> Vec<u8> {
    [&header.to_le_bytes(), rest].concat()
}

#[test]
fn files_that_are_not_whole_or_not_safetensors() {
    let valid = written(&[("a", Dtype::F32, &[4]), ("b", Dtype::U8, &[5])], &[]);
    let header = u64::from_le_bytes(valid[..8].try_into().unwrap()) as usize;
    let total = valid.len();
    let cut = "the download may have been cut off";
    let random: Vec<u8> = (0..4096_u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let zeros = vec![0; 4096];
    let zip = [b"PK\x03\x04\0\0\0\0\0\0".as_slice(), &zeros].concat();
    #[rustfmt::skip]
    let cases: &[(&str, &[u8], &[&str])] = &[
        ("empty", b"", &["x.safetensors: the file is empty"]),
        ("one byte", &valid[..1], &["the file ends after 1 of at least 8 bytes", cut]),
        ("seven bytes", &valid[..7], &["the file ends after 7 of at least 8 bytes", cut]),
        ("no header", &valid[..8], &[&format!("ends after 8 of at least {} bytes", 8 + header), cut]),
        ("half a header", &valid[..40], &[&format!("ends after 40 of at least {} bytes", 8 + header), cut]),
        ("no data", &valid[..8 + header], &[&format!("ends after {} of {total} bytes", 8 + header), cut, "tensor `a`"]),
        ("one byte short", &valid[..total - 1], &[&format!("ends after {} of {total} bytes", total - 1), cut, "tensor `b`"]),
        ("a byte too many", &[&valid[..], b"!"].concat(), &["1 of the file's bytes follow after the last tensor"]),
        ("twice", &[&valid[..], &valid].concat(), &[&format!("{total} of the file's bytes follow after the last tensor")]),
        ("random", &random, &["it announces a header of", "more than the 100000000", "not a safetensors file"]),
        ("zeros", &zeros, &["announces a header of 0 bytes", "did not finish"]),
        ("huge header", &prefix(u64::MAX, b"{}"), &["a header of 18446744073709551615 bytes, more than the 100000000"]),
        ("header above the limit", &prefix(100_000_001, b"{}"), &["a header of 100000001 bytes, more than"]),
        ("header at the limit", &prefix(100_000_000, b"{}"), &["ends after 10 of at least 100000008 bytes"]),
        ("header beyond the file", &prefix(100, b"garbage"), &["a header of 100 bytes, beyond the file's 15", "damaged"]),
        ("web page", b"\n<!DOCTYPE html><html>", &["expected a safetensors or GGUF file, but this is a web page"]),
        ("bare web page", b"<HTML><body>404", &["but this is a web page"]),
        ("XML", b"<?xml version='1.0'?><Error>", &["but this is an XML text"]),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:", &["Git LFS pointer", "`git lfs pull`"]),
        ("PyTorch", &zip, &["but this is a zip archive", "PyTorch", "convert it to safetensors"]),
        ("pickle", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", &["but this is a Python pickle", "convert it"]),
        ("JSON", br#"{"weight_map":{}}"#, &["but this is a JSON text"]),
        ("message", b"Entry not found", &["but this is a text file"]),
        ("short message", b"404\n", &["but this is a text file"]),
        ("NumPy", b"\x93NUMPY\x01\0v\0{'descr'", &["but this is a NumPy array"]),
        ("gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\x03", &["but this is a gzip archive"]),
    ];
    for (what, bytes, expected) in cases {
        refused(what, &[("x.safetensors", bytes)], "x.safetensors", expected);
        refused(what, &[("x.safetensors", bytes)], "", expected);
    }
}

#[test]
fn headers_that_are_not_the_formats() {
    let long = "n".repeat(5000);
    let f32 = r#"{"dtype":"F32","shape":[],"data_offsets":[0,4]}"#;
    #[rustfmt::skip]
    let cases: &[(&str, Vec<u8>, &[&str])] = &[
        ("not UTF-8", b"{\"\xff\":1}".to_vec(), &["its header is not UTF-8 text"]),
        ("not JSON", b"{]".to_vec(), &["its header is not valid JSON", "line 1 column 2"]),
        ("unfinished name", br#"{"a"#.to_vec(), &["its header is not valid JSON"]),
        ("unfinished entry", br#"{"a":{"dtype":"F32""#.to_vec(), &["tensor `a`: its entry cannot be understood: EOF"]),
        ("unfinished metadata", br#"{"__metadata__":{"k""#.to_vec(), &["its header is not valid JSON: EOF"]),
        ("more after the object", b"{}{}".to_vec(), &["its header is not valid JSON: trailing characters"]),
        ("zero bytes", vec![0; 16], &["its header is not valid JSON"]),
        ("only blanks", vec![b' '; 16], &["its header is not valid JSON"]),
        ("a list", b"[]".to_vec(), &["its header is not a JSON object"]),
        ("a number", b"5".to_vec(), &["its header is not a JSON object"]),
        ("deep", "[".repeat(5000).into_bytes(), &["its header is not a JSON object"]),
        ("deep entry", format!(r#"{{"a":{}"#, "[".repeat(5000)).into_bytes(), &["tensor `a`: its entry cannot be understood"]),
        ("deep unknown field", format!(r#"{{"a":{{"x":{}"#, "[".repeat(50_000)).into_bytes(), &["tensor `a`: its entry cannot be understood"]),
        ("a name twice", format!(r#"{{"b":{f32},"a":{f32},"b":{f32}}}"#).into_bytes(), &["tensor `b`: the header names it twice"]),
        ("a name twice, escaped", format!(r#"{{"b":{f32},"\u0062":{f32}}}"#).into_bytes(), &["tensor `b`: the header names it twice"]),
        ("metadata twice", br#"{"__metadata__":{},"__metadata__":{}}"#.to_vec(), &["its header has `__metadata__` twice"]),
        ("metadata key twice", br#"{"__metadata__":{"k":"1","k":"2"}}"#.to_vec(), &["`__metadata__` names `k` twice"]),
        ("metadata number", br#"{"__metadata__":{"k":1}}"#.to_vec(), &["`__metadata__` is not a map from texts to texts"]),
        ("metadata list", br#"{"__metadata__":[]}"#.to_vec(), &["`__metadata__` is not a map from texts to texts"]),
        ("metadata text", br#"{"__metadata__":"pt"}"#.to_vec(), &["`__metadata__` is not a map from texts to texts"]),
        ("no shape", br#"{"a":{"dtype":"F32","data_offsets":[0,4]}}"#.to_vec(), &["tensor `a`: ", "missing field `shape`"]),
        ("no offsets", br#"{"a":{"dtype":"F32","shape":[]}}"#.to_vec(), &["tensor `a`: ", "missing field `data_offsets`"]),
        ("no type", br#"{"a":{"shape":[],"data_offsets":[0,4]}}"#.to_vec(), &["tensor `a`: ", "missing field `dtype`"]),
        ("shape twice", br#"{"a":{"shape":[],"shape":[1]}}"#.to_vec(), &["tensor `a`: ", "duplicate field `shape`"]),
        ("null entry", br#"{"a":null}"#.to_vec(), &["tensor `a`: its entry cannot be understood"]),
        ("long text as entry", format!(r#"{{"a":"{long}"}}"#).into_bytes(), &["tensor `a`: its entry cannot be understood", "…"]),
        ("long name", format!(r#"{{"{long}":5}}"#).into_bytes(), &["nnn… (5000 bytes)`: its entry"]),
        ("name that steers a terminal", br#"{"a\u001b[2J\n\u202e":5}"#.to_vec(), &[r"tensor `a\u{1b}[2J\n\u{202e}`: its entry"]),
    ];
    for (what, header, expected) in cases {
        refused(
            what,
            &[("x.safetensors", raw(header, 4))],
            "x.safetensors",
            expected,
        );
    }
}

#[test]
fn entries_that_lie_about_their_data() {
    let sides = |count: usize| format!("[{}]", vec!["1"; count].join(","));
    let long = "T".repeat(5000);
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"b":{{"dtype":"U8","shape":[8],"data_offsets":{second}}},"a":{{"dtype":"U8","shape":[8],"data_offsets":{first}}}}}"#
        )
    };
    #[rustfmt::skip]
    let cases: &[(&str, String, &[&str])] = &[
        ("unknown type", one(r#""F7""#, "[4]", "[0,16]"), &["tensor `a`: its element type `F7` is not known"]),
        ("type in lower case", one(r#""f32""#, "[4]", "[0,16]"), &["tensor `a`: its element type `f32` is not known"]),
        ("type of another kind", one(r#""Q4_K""#, "[4]", "[0,16]"), &["tensor `a`: its element type `Q4_K` is not known"]),
        ("type with a long name", one(&format!("\"{long}\""), "[4]", "[0,16]"), &["its element type `TTT", "… (5000 bytes)`"]),
        ("type that steers", one(r#""F\n""#, "[4]", "[0,16]"), &[r"its element type `F\n` is not known"]),
        ("type is a number", one("32", "[4]", "[0,16]"), &["tensor `a`: its entry cannot be understood"]),
        ("negative side", one(r#""F32""#, "[-4]", "[0,16]"), &["tensor `a`: its entry cannot be understood", "-4"]),
        ("fractional side", one(r#""F32""#, "[4.0]", "[0,16]"), &["tensor `a`: its entry cannot be understood"]),
        ("side above 64 bits", one(r#""F32""#, "[18446744073709551616]", "[0,16]"), &["tensor `a`: its entry"]),
        ("65 sides", one(r#""F32""#, &sides(65), "[0,4]"), &["tensor `a`: ", "more than 64 dimensions"]),
        ("a million sides", one(r#""F32""#, &sides(1_000_000), "[0,4]"), &["tensor `a`: ", "more than 64 dimensions"]),
        ("2^32 x 2^32", one(r#""F32""#, "[4294967296,4294967296]", "[0,16]"), &["tensor `a`: shape [4294967296, 4294967296] of type F32 is impossible"]),
        ("2^32 x 2^32 without elements", one(r#""F32""#, "[0,4294967296,4294967296]", "[0,0]"), &["tensor `a`: ", "is impossible"]),
        ("bytes wrap to 16", one(r#""F32""#, "[4611686018427387908]", "[0,16]"), &["tensor `a`: ", "is impossible"]),
        ("half a byte", one(r#""F4""#, "[31]", "[0,16]"), &["tensor `a`: shape [31] of type F4 does not fill whole bytes"]),
        ("three offsets", one(r#""F32""#, "[4]", "[0,16,16]"), &["tensor `a`: its entry cannot be understood"]),
        ("one offset", one(r#""F32""#, "[4]", "[0]"), &["tensor `a`: its entry cannot be understood"]),
        ("negative offset", one(r#""F32""#, "[4]", "[-16,0]"), &["tensor `a`: its entry cannot be understood"]),
        ("reversed", one(r#""F32""#, "[4]", "[16,0]"), &["tensor `a`: its data ends at 0, before it begins at 16"]),
        ("shape too small", one(r#""F32""#, "[3]", "[0,16]"), &["tensor `a`: it has 16 bytes of data (from 0 to 16), but shape [3] of type F32 takes 12"]),
        ("shape too large", one(r#""F32""#, "[5]", "[0,16]"), &["tensor `a`: it has 16 bytes", "takes 20"]),
        ("empty with data", one(r#""F32""#, "[0]", "[0,16]"), &["tensor `a`: it has 16 bytes", "takes 0"]),
        ("data without end", one(r#""F32""#, "[4]", "[0,18446744073709551615]"), &["tensor `a`: it has 18446744073709551615 bytes"]),
        ("beyond the file", one(r#""F32""#, "[4]", "[1000,1016]"), &["tensor `a`: its data, from 1000 to 1016, lies outside of the file's 16 bytes"]),
        ("at the end of the world", one(r#""U8""#, "[5]", "[18446744073709551610,18446744073709551615]"), &["tensor `a`: ", "lies outside"]),
        ("a hole before", one(r#""F32""#, "[3]", "[4,16]"), &["tensor `a`: its data begins at 4, the data before ends at 0: what lies between belongs to no tensor"]),
        ("a hole after", one(r#""F32""#, "[3]", "[0,12]"), &["4 of the file's bytes follow after the last tensor"]),
        ("a hole between", two("[0,8]", "[9,17]"), &["tensor `b`: ", "lies outside"]),
        ("overlap", two("[0,8]", "[7,15]"), &["tensor `b`: its data begins at 7, inside that of tensor `a`, which ends at 8"]),
        ("shared", two("[0,8]", "[0,8]"), &["tensor `b`: its data begins at 0, inside that of tensor `a`"]),
        ("no tensor", "{}".to_owned(), &["16 of the file's bytes follow after the last tensor and belong to none"]),
    ];
    for (what, header, expected) in cases {
        refused(
            what,
            &[("x.safetensors", raw(header, 16))],
            "x.safetensors",
            expected,
        );
    }
}

#[test]
fn indexes_that_do_not_fit_their_shards() {
    let a = written(&[("a", Dtype::F32, &[2])], &[]);
    let b = written(&[("b", Dtype::F32, &[2])], &[]);
    let both = written(&[("a", Dtype::F32, &[2]), ("b", Dtype::F32, &[2])], &[]);
    let bad = raw(r#"{"b":{"dtype":"F7","shape":[],"data_offsets":[0,4]}}"#, 4);
    let (one, two) = ("one.safetensors", "two.safetensors");
    let put = |shard: &str| index(&[("a", one), ("b", shard)]);
    let many: Vec<(String, String)> = (0..9)
        .map(|n| (format!("t{n}"), format!("s{n}.safetensors")))
        .collect();
    let many: Vec<_> = many
        .iter()
        .map(|(name, shard)| (name.as_str(), shard.as_str()))
        .collect();
    let long = "s".repeat(5000);
    #[rustfmt::skip]
    let cases: &[(&str, String, &[u8], &[&str])] = &[
        ("empty", String::new(), &b, &["i.json: the file is empty"]),
        ("not JSON", "{".to_owned(), &b, &["i.json: the index is not valid JSON"]),
        ("cut off", put(two)[..30].to_owned(), &b, &["i.json: the index is not valid JSON"]),
        ("more after the object", put(two) + "x", &b, &["i.json: the index is not valid JSON"]),
        ("a list", "[]".to_owned(), &b, &["i.json: ", "an object"]),
        ("a config", r#"{"_class_name":"X"}"#.to_owned(), &b, &["i.json: it is no index of shards: it has no `weight_map`"]),
        ("a list of names", r#"{"weight_map":["a"]}"#.to_owned(), &b, &["`weight_map` must map tensor names to file names"]),
        ("a number as shard", r#"{"weight_map":{"a":1}}"#.to_owned(), &b, &["tensor `a`: the index does not name a file for it"]),
        ("no tensor", r#"{"weight_map":{}}"#.to_owned(), &b, &["i.json: its `weight_map` names no tensor"]),
        ("two maps", r#"{"weight_map":{"a":"x"},"weight_map":{}}"#.to_owned(), &b, &["the index has `weight_map` twice"]),
        ("a name twice", r#"{"weight_map":{"a":"x","a":"y"}}"#.to_owned(), &b, &["tensor `a`: the index names it twice"]),
        ("web page", "<!doctype html>".to_owned(), &b, &["i.json: expected an index of shards, but this is a web page"]),
        ("pointer", "version https://git-lfs.github.com/spec/v1".to_owned(), &b, &["Git LFS pointer"]),
        ("missing shard", put("three.safetensors"), &b, &["i.json: 1 of 2 shards are missing: three.safetensors"]),
        ("many missing shards", index(&many), &b, &["9 of 9 shards are missing: s0.safetensors, ", ", 4 more"]),
        ("parent folder", put("../two.safetensors"), &b, &["i.json: tensor `b`: the index gives `../two.safetensors` as its shard: a shard must lie in the folder"]),
        ("parent folder inside", put("in/../two.safetensors"), &b, &["tensor `b`: ", "must lie in the folder"]),
        ("absolute", put("/etc/passwd"), &b, &["tensor `b`: the index gives `/etc/passwd` as its shard"]),
        ("drive", put("C:\\two.safetensors"), &b, &["tensor `b`: ", "must not contain a backslash, a colon"]),
        ("backslash", put("..\\two.safetensors"), &b, &["tensor `b`: ", "must not contain a backslash"]),
        ("zero", put("two\0.safetensors"), &b, &[r"tensor `b`: the index gives `two\u{0}.safetensors`"]),
        ("itself", put("."), &b, &["tensor `b`: ", "must lie in the folder"]),
        ("no name", put(""), &b, &["tensor `b`: ", "a file name is missing"]),
        ("long name", put(&long), &b, &["tensor `b`: ", "… (5000 bytes)`", "no file name is that long"]),
        ("a folder as shard", put("in"), &b, &["in: this is a folder where a file is needed"]),
        ("the index as shard", put("i.json"), &b, &["i.json: expected a safetensors or GGUF file, but this is a JSON text"]),
        ("shard without the tensor", put(two), &a[..0], &["two.safetensors: the file is empty"]),
        ("tensor nowhere", index(&[("a", one), ("b", two), ("c", two)]), &b, &["i.json: tensor `c`: the index puts it into the shard two.safetensors, which does not have it"]),
        ("tensor in the other shard", index(&[("a", two), ("b", one)]), &b, &["i.json: tensor `a`: the index puts it into the shard two.safetensors"]),
        ("tensor in both shards", put(two), &both, &["two.safetensors: tensor `a`: the shard one.safetensors has it too"]),
        ("broken shard", put(two), &bad, &["two.safetensors: tensor `b`: its element type `F7` is not known"]),
        ("cut shard", put(two), &b[..b.len() - 1], &["two.safetensors: the file ends after", "tensor `b`"]),
    ];
    for (what, text, second, expected) in cases {
        let files: &[(&str, &[u8])] = &[
            ("i.json", text.as_bytes()),
            (one, &a),
            (two, second),
            ("in/x", b""),
        ];
        refused(what, files, "i.json", expected);
    }
    refused(
        "not UTF-8",
        &[("i.json", b"{\"\xff")],
        "i.json",
        &["i.json: the index is not UTF-8 text"],
    );
}

#[test]
fn folders_without_one_meaning() {
    let looked = [
        "no weights: looked for",
        "diffusion_pytorch_model.safetensors,",
        "diffusion_pytorch_model.safetensors.index.json,",
        "model.safetensors,",
        "*.safetensors of another name",
    ];
    let (dit, dit_index) = (
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
    );
    #[rustfmt::skip]
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("nothing", &[], &looked),
        ("no weights", &["config.json", "pytorch_model.bin"], &looked),
        ("hidden", &["._model.safetensors"], &looked),
        ("a pipeline", &["model_index.json", "vae/diffusion_pytorch_model.safetensors"], &["this is a pipeline"]),
        ("single and sharded", &[dit, dit_index], &[&format!("several files could be meant ({dit}, {dit_index}); open one by name")]),
        ("two standard names", &["model.safetensors", dit], &["several files could be meant"]),
        ("two other names", &["a.safetensors", "b.safetensors"], &["several files could be meant (a.safetensors, b.safetensors)"]),
        ("many other names", &["1.safetensors", "2.safetensors", "3.safetensors", "4.safetensors", "5.safetensors", "6.safetensors"], &["5.safetensors, 1 more)"]),
        ("only a variant", &["model.fp16.safetensors"], &["it has the variant model.fp16.safetensors and not the plain file"]),
        ("only a shard", &["model-00001-of-00003.safetensors"], &["model-00001-of-00003.safetensors is one shard of several"]),
        ("a folder with a file's name", &["model.safetensors/x"], &["model.safetensors: this is a folder where a file is needed"]),
    ];
    for (what, names, expected) in cases {
        let files: Vec<_> = names.iter().map(|&name| (name, b"{}")).collect();
        refused(what, &files, "", expected);
    }
    refused::<&[u8]>(
        "missing",
        &[],
        "none/model.safetensors",
        &["none/model.safetensors: there is no such file or folder"],
    );
    refused::<&[u8]>("a zero in the name", &[], "a\0b", &["cannot be opened"]);
}

#[cfg(unix)]
#[test]
fn links_and_files_of_other_kinds() {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use sd_graph::StoredType;

    let valid = written(&[("a", Dtype::F32, &[2])], &[]);
    let cache = folder([
        ("blobs/0123", &valid),
        ("snapshot/config.json", &b"{}".to_vec()),
    ]);
    let snapshot = cache.path().join("snapshot");
    symlink("../blobs/0123", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(
        Checkpoint::open(&snapshot)
            .unwrap()
            .get("a")
            .unwrap()
            .stored,
        StoredType::F32
    );

    fs::remove_file(cache.path().join("blobs/0123")).unwrap();
    let error = Checkpoint::open(&snapshot).unwrap_err().to_string();
    assert!(
        error.contains("model.safetensors: this is a link to a file that does not exist"),
        "{error}"
    );

    let error = Checkpoint::open("/dev/null").unwrap_err().to_string();
    assert_eq!(error, "/dev/null: this is neither a file nor a folder");
    symlink("/dev/zero", snapshot.join("endless.safetensors")).unwrap();
    let error = Checkpoint::open(snapshot.join("endless.safetensors"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("this is neither a file nor a folder"),
        "{error}"
    );

    let locked = snapshot.join("locked.safetensors");
    fs::write(&locked, &valid).unwrap();
    fs::set_permissions(&locked, Permissions::from_mode(0o000)).unwrap();
    // A privileged user may read it all the same.
    if fs::File::open(&locked).is_err() {
        let error = Checkpoint::open(&locked).unwrap_err().to_string();
        assert!(
            error.ends_with("locked.safetensors: cannot be opened: permission denied"),
            "{error}"
        );
    }

    refused(
        "through a file",
        &[("f", b"")],
        "f/model.safetensors",
        &["f/model.safetensors: cannot be opened"],
    );
}
