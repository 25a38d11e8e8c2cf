//! Every GGUF file that opening refuses, with the words that it is refused with.

use super::pattern;
use super::refused::refused;
use crate::gguf_file::{Given, array, entry, head, info, kind, padded, text, written};

const F32: u32 = 0;
const Q8_0: u32 = 8;

/// A file with these parts of a header and so many bytes of data.
fn file(parts: &[Vec<u8>], data: usize) -> Vec<u8> {
    [padded(parts.concat(), 32), pattern(data)].concat()
}

/// A file with one metadata entry and no tensor.
fn with(entry: Vec<u8>) -> Vec<u8> {
    file(&[head(3, 0, 1), entry], 0)
}

/// A file with one tensor `a`, and so many bytes of data.
fn one(dims: &[u64], number: u32, offset: u64, data: usize) -> Vec<u8> {
    file(&[head(3, 1, 0), info("a", dims, number, offset)], data)
}

/// A file with two tensors of 16 bytes, and 48 bytes of data.
fn two(first: (&str, u64), second: (&str, u64)) -> Vec<u8> {
    let line = |(name, offset): (&str, u64)| info(name, &[4], F32, offset);
    file(&[head(3, 2, 0), line(first), line(second)], 48)
}

#[track_caller]
fn all_refused(cases: &[(&str, Vec<u8>, &[&str])]) {
    for (what, bytes, expected) in cases {
        refused(what, &[("x.gguf", bytes)], "x.gguf", expected);
    }
}

#[test]
fn files_that_are_not_whole_or_of_another_version() {
    let tensors: [Given<'_>; 2] = [
        ("a", &[2, 32], Q8_0, pattern(68)),
        ("b", &[5], F32, pattern(20)),
    ];
    let valid = written(3, 32, &[entry("k", kind::TEXT, text("v"))], &tensors);
    let cut = "the download may have been cut off";
    let data = valid.len() - (96 + 32);
    let swapped = [b"GGUF".as_slice(), &3_u32.to_be_bytes(), &[0; 16]].concat();
    #[rustfmt::skip]
    let cases: &[(&str, Vec<u8>, &[&str])] = &[
        ("only the magic", valid[..4].to_vec(), &["the file ends after 4 of at least 8 bytes", cut]),
        ("half a head", valid[..20].to_vec(), &["the file ends after 20 of at least 24 bytes", cut]),
        ("a head", valid[..24].to_vec(), &["the file ends after 24 of at least 85 bytes", cut]),
        ("half a list", valid[..data / 2].to_vec(), &["of at least", cut]),
        ("no data", valid[..data].to_vec(), &[&format!("ends after {data} of {} bytes", data + 116), cut, "tensor `a`"]),
        ("no padding either", valid[..data - 20].to_vec(), &[cut]),
        ("half the data", valid[..data + 70].to_vec(), &[cut, "tensor `b` is the first"]),
        ("one byte short", valid[..data + 115].to_vec(), &[&format!("ends after {} of {} bytes", data + 115, data + 116), cut, "tensor `b`"]),
        ("twice", [&valid[..], &valid].concat(), &["of the file's bytes follow after the last tensor and belong to none"]),
        ("much padding", [&valid[..], &[0; 20]].concat(), &["32 of the file's bytes follow after the last tensor"]),
        ("version 0", head(0, 0, 0), &["version 0 of GGUF; versions 2 and 3 are read"]),
        ("version 1", head(1, 0, 0), &["version 1 of GGUF, which is no longer in use"]),
        ("version 4", head(4, 0, 0), &["version 4 of GGUF; versions 2 and 3"]),
        ("strange version", head(0x0102_0304, 0, 0), &["version 16909060 of GGUF"]),
        ("big endian", swapped, &["a GGUF file in big-endian byte order"]),
        ("lowercase", [b"gguf".as_slice(), &valid[4..]].concat(), &["not a safetensors file"]),
        ("all tensors there are", head(3, u64::MAX, 0), &["it announces 18446744073709551615 tensors, more than the 1000000"]),
        ("all metadata there is", head(3, 0, 1 << 63), &["it announces 9223372036854775808 metadata entries"]),
        ("many tensors", file(&[head(3, 1_000_000, 0)], 0), &["of at least 24000024 bytes", cut]),
        ("one tensor too many", file(&[head(3, 2, 0), info("a", &[], F32, 0)], 4), &["of at least"]),
    ];
    all_refused(cases);
}

#[test]
fn metadata_that_is_wrong() {
    let length = |length: u64| length.to_le_bytes();
    let align = |value: u32| entry("general.alignment", kind::U32, value.to_le_bytes());
    let nested = array(kind::ARRAY, 1, array(kind::U8, 1, [0]));
    let key = |bytes: &[u8]| with([bytes, &[0; 64]].concat());
    #[rustfmt::skip]
    let cases: &[(&str, Vec<u8>, &[&str])] = &[
        ("key twice", file(&[head(3, 0, 2), entry("k", 0, [1]), entry("k", 0, [1])], 0), &["metadata `k`: the file has it twice"]),
        ("key not UTF-8", with(entry(b"\xff", 0, [1])), &["the key of metadata entry number 0 is not UTF-8"]),
        ("long key", key(&length(65_536)), &["the key of metadata entry number 0 has 65536 bytes, more than the 65535"]),
        ("endless key", key(&length(u64::MAX)), &["has 18446744073709551615 bytes"]),
        ("key beyond the file", key(&length(60_000)), &["the file ends after", "cut off"]),
        ("control characters", with(entry("a\n\u{1b}[2J", 99, [1])), &[r"metadata `a\n\u{1b}[2J`: its type number 99 is not known"]),
        ("unknown type", with(entry("k", 13, [1; 8])), &["metadata `k`: its type number 13 is not known"]),
        ("truth of 2", with(entry("k", kind::BOOL, [2])), &["metadata `k`: it is a truth value of 2"]),
        ("text not UTF-8", with(entry("k", kind::TEXT, text(b"a\xffb"))), &["metadata `k`: it is not UTF-8"]),
        ("endless text", with(entry("k", kind::TEXT, length(u64::MAX))), &["goes beyond the 256000000 bytes", "damaged"]),
        ("text beyond the limit", with(entry("k", kind::TEXT, length(256_000_000))), &["goes beyond the 256000000 bytes"]),
        ("text beyond the file", with(entry("k", kind::TEXT, length(200_000_000))), &["the file ends after", "cut off"]),
        ("array of arrays", with(entry("k", kind::ARRAY, nested)), &["metadata `k`: it is an array of arrays"]),
        ("array of what", with(entry("k", kind::ARRAY, array(77, 1, [0]))), &["metadata `k`: it is an array of the type number 77"]),
        ("endless array", with(entry("k", kind::ARRAY, array(kind::U64, u64::MAX, [0]))), &["goes beyond the 256000000 bytes"]),
        ("wrapping array", with(entry("k", kind::ARRAY, array(kind::U64, 1 << 61, [0]))), &["goes beyond the 256000000 bytes"]),
        ("wrapping texts", with(entry("k", kind::ARRAY, array(kind::TEXT, 1 << 61, [0]))), &["goes beyond the 256000000 bytes"]),
        ("array beyond the file", with(entry("k", kind::ARRAY, array(kind::U64, 1 << 20, [0]))), &["the file ends after", "cut off"]),
        ("endless text in an array", with(entry("k", kind::ARRAY, array(kind::TEXT, 1, length(u64::MAX)))), &["goes beyond the 256000000 bytes"]),
        ("alignment of 0", with(align(0)), &["metadata `general.alignment`: it is 0, not a power of two up to 1048576"]),
        ("alignment of 24", with(align(24)), &["it is 24, not a power of two"]),
        ("huge alignment", with(align(1 << 31)), &["it is 2147483648, not a power of two up to"]),
        ("alignment of another type", with(entry("general.alignment", kind::U64, length(32))), &["metadata `general.alignment`: it is not an unsigned 32-bit number"]),
    ];
    all_refused(cases);
}

#[test]
fn tensors_that_are_impossible_or_in_the_wrong_place() {
    let long = "n".repeat(5000);
    #[rustfmt::skip]
    let cases: &[(&str, Vec<u8>, &[&str])] = &[
        ("name twice", two(("a", 0), ("a", 32)), &["tensor `a`: the file names it twice"]),
        ("name not UTF-8", file(&[head(3, 1, 0), info(b"\xc3", &[], F32, 0)], 4), &["the name of tensor number 0 is not UTF-8"]),
        ("long wrong name", file(&[head(3, 1, 0), info(&long, &[], 99, 0)], 4), &["… (5000 bytes)`: its element type, number 99"]),
        ("five dimensions", one(&[1; 5], F32, 0, 4), &["tensor `a`: it has 5 dimensions, more than the 4"]),
        ("all dimensions", file(&[head(3, 1, 0), [text("a"), vec![0xff; 64]].concat()], 4), &["tensor `a`: it has 4294967295 dimensions"]),
        ("unknown type", one(&[4], 43, 0, 16), &["tensor `a`: its element type, number 43, is not known"]),
        ("type that ggml took out", one(&[32], 4, 0, 32), &["tensor `a`: its element type, number 4, is not known"]),
        ("no type", one(&[4], u32::MAX, 0, 16), &["tensor `a`: its element type, number 4294967295"]),
        ("wraps to nothing", one(&[1 << 32, 1 << 32], F32, 0, 0), &["tensor `a`: shape [4294967296, 4294967296] of type F32 is impossible: its size overflows"]),
        ("wraps to little", one(&[(1 << 62) + 1, 4], F32, 0, 16), &["tensor `a`: shape", "is impossible"]),
        ("wraps beside a 0", one(&[1 << 40, 0, 1 << 40], F32, 0, 0), &["is impossible"]),
        ("blocks that wrap", one(&[1 << 59, 16], Q8_0, 0, 0), &["of type q8_0 is impossible"]),
        ("negative side", one(&[u64::MAX], F32, 0, 16), &["tensor `a`: shape [18446744073709551615] of type F32 is impossible"]),
        ("half a block", one(&[48, 2], Q8_0, 0, 102), &["tensor `a`: shape [2, 48] of type q8_0 has rows of 48, which are not whole blocks of 32"]),
        ("blocks across rows", one(&[2, 32], Q8_0, 0, 68), &["has rows of 2, which are not whole blocks"]),
        ("a block as scalar", one(&[], Q8_0, 0, 34), &["shape [] of type q8_0 has rows of 1"]),
        ("not aligned", two(("a", 0), ("b", 16)), &["tensor `b`: its data begins at 16, which is no multiple of the alignment 32"]),
        ("at the end of the world", one(&[64], F32, u64::MAX - 31, 256), &["tensor `a`: its data begins at 18446744073709551584", "overflows"]),
        ("far away", one(&[4], F32, 1 << 40, 16), &["tensor `a`: its data, from 1099511627776 to 1099511627792, lies outside of the file's 16 bytes"]),
        ("too large", one(&[5], F32, 0, 16), &["the file ends after", "tensor `a` is the first"]),
        ("far too large", one(&[1 << 40], F32, 0, 16), &["the file ends after", "cut off"]),
        ("shared", two(("a", 0), ("b", 0)), &["tensor `b`: its data begins at 0, inside that of tensor `a`, which ends at 16"]),
        ("overlap", file(&[head(3, 2, 0), info("a", &[9], F32, 0), info("b", &[4], F32, 32)], 48), &["tensor `b`: its data begins at 32, inside that of tensor `a`, which ends at 36"]),
        ("nothing inside", file(&[head(3, 2, 0), info("a", &[9], F32, 0), info("b", &[0], F32, 32)], 48), &["tensor `b`: its data begins at 32, inside that of tensor `a`"]),
        ("a hole before", one(&[4], F32, 32, 48), &["tensor `a`: its data begins at 32, the data before ends at 0: what lies between is more than padding"]),
        ("a hole between", file(&[head(3, 2, 0), info("a", &[4], F32, 0), info("b", &[4], F32, 64)], 80), &["tensor `b`: its data begins at 64, the data before ends at 16"]),
        ("a hole after", one(&[4], F32, 0, 48), &["32 of the file's bytes follow after the last tensor"]),
        ("no tensor", file(&[head(3, 0, 0)], 32), &["32 of the file's bytes follow after the last tensor"]),
    ];
    all_refused(cases);
}
