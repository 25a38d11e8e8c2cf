//! Conversion between types, against what torch and ggml make of the same bytes.

use std::path::Path;

use sd_backend::DType;
use sd_graph::{Checkpoint, ConvertError, StoredType, convert, is_convertible};

use crate::quantized::{numbers, quantized};

/// Bits that torch made, as 32-bit words; see `tools/reference/conversions.py`.
fn bits(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../sd-models/tests/fixtures/conversions/torch.safetensors");
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut bytes = vec![0; checkpoint.get(name).unwrap().bytes as usize];
    checkpoint.read(name, &mut bytes).unwrap();
    bytes
}

fn made(from: &[u8], stored: StoredType, memory: DType) -> Result<Vec<u8>, ConvertError> {
    let (len, bytes) = stored
        .block()
        .unwrap_or_else(|| (1, u64::from(stored.bits().unwrap() / 8)));
    let elements = from.len() / bytes as usize * len as usize;
    let mut into = vec![0xA5; memory.row_bytes(elements).unwrap()];
    convert(from, stored, memory, &mut into).map(|()| into)
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn singles(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.as_chunks().0.iter();
    words.map(|&word| f32::from_le_bytes(word)).collect()
}

/// The same numbers, bit for bit but for the bits of NaN, of type `dtype`.
fn assert_same(is: &[u8], wanted: &[u8], dtype: DType, what: &str) {
    assert_eq!(is.len(), wanted.len());
    let size = dtype.block_bytes();
    for (at, (is, wanted)) in is.chunks(size).zip(wanted.chunks(size)).enumerate() {
        let is_nan = |bits: &[u8]| match dtype {
            DType::F32 => f32::from_le_bytes(bits.try_into().unwrap()).is_nan(),
            DType::F16 => half::f16::from_le_bytes(bits.try_into().unwrap()).is_nan(),
            _ => half::bf16::from_le_bytes(bits.try_into().unwrap()).is_nan(),
        };
        let same = is == wanted || is_nan(is) && is_nan(wanted);
        assert!(same, "{what} number {at}: {is:x?} instead of {wanted:x?}");
    }
}

#[test]
fn all_codes_of_8_bit_floats_are_what_torch_says() {
    let codes: Vec<u8> = (0..=255).collect();
    for stored in [
        StoredType::F8E4M3,
        StoredType::F8E5M2,
        StoredType::F8E4M3Fnuz,
        StoredType::F8E5M2Fnuz,
        StoredType::F8E8M0,
    ] {
        let wanted = bits(&format!("f8.{stored}.f32"));
        let is = made(&codes, stored, DType::F32).unwrap();
        assert_same(&is, &wanted, DType::F32, stored.name());
        if stored != StoredType::F8E8M0 {
            // Half precision holds all of them, so there and back changes nothing.
            let half = made(&codes, stored, DType::F16).unwrap();
            let back = made(&half, StoredType::F16, DType::F32).unwrap();
            assert_same(&back, &wanted, DType::F32, stored.name());
        }
    }
}

#[test]
fn fewer_bits_are_rounded_as_torch_rounds() {
    for stored in [StoredType::F32, StoredType::F64] {
        let name = stored.name().to_lowercase();
        let from = bits(&format!("{name}.in"));
        for memory in [DType::F32, DType::F16, DType::BF16] {
            let wanted = bits(&format!("{name}.out.{memory}"));
            let is = made(&from, stored, memory).unwrap();
            assert_same(&is, &wanted, memory, &format!("{stored} to {memory}"));
        }
    }
    // All 65536 bit patterns become single precision and come back.
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (stored, memory) in [
        (StoredType::F16, DType::F16),
        (StoredType::BF16, DType::BF16),
    ] {
        let single = made(&all, stored, DType::F32).unwrap();
        let back = made(&single, StoredType::F32, memory).unwrap();
        assert_same(&back, &all, memory, stored.name());
    }
}

#[test]
fn integers_are_taken_by_value() {
    type Case<'a> = (StoredType, Vec<u8>, &'a [f32]);
    let cases: [Case<'_>; 9] = [
        (
            StoredType::I8,
            vec![0, 1, 127, 128, 255],
            &[0.0, 1.0, 127.0, -128.0, -1.0],
        ),
        (
            StoredType::U8,
            vec![0, 1, 127, 128, 255],
            &[0.0, 1.0, 127.0, 128.0, 255.0],
        ),
        (StoredType::Bool, vec![0, 1, 2], &[0.0, 1.0, 1.0]),
        (
            StoredType::I16,
            [i16::MIN, -1, 300].map(i16::to_le_bytes).concat(),
            &[-32768.0, -1.0, 300.0],
        ),
        (
            StoredType::U16,
            [65535_u16, 1].map(u16::to_le_bytes).concat(),
            &[65535.0, 1.0],
        ),
        // 2^24 + 1 lies halfway and goes to the even neighbour.
        (
            StoredType::I32,
            [i32::MIN, 16_777_217].map(i32::to_le_bytes).concat(),
            &[-2147483648.0, 16777216.0],
        ),
        (
            StoredType::U32,
            [u32::MAX, 16_777_219].map(u32::to_le_bytes).concat(),
            &[4294967296.0, 16777220.0],
        ),
        (
            StoredType::I64,
            [i64::MIN, -7].map(i64::to_le_bytes).concat(),
            &[-9223372036854775808.0, -7.0],
        ),
        (
            StoredType::U64,
            [u64::MAX, 7].map(u64::to_le_bytes).concat(),
            &[18446744073709551616.0, 7.0],
        ),
    ];
    for (stored, from, wanted) in cases {
        assert_eq!(
            singles(&made(&from, stored, DType::F32).unwrap()),
            wanted,
            "{stored}"
        );
        let half: Vec<u8> = wanted
            .iter()
            .flat_map(|&v| half::f16::from_f32(v).to_le_bytes())
            .collect();
        assert_eq!(made(&from, stored, DType::F16).unwrap(), half, "{stored}");
    }
}

/// Types that can be made, with the largest error for numbers from -1 to 1: half a step of the blocks' codes, which is
/// the range over the number of steps, and what rounding the scale to half precision or to 6 bits adds.
const MADE: [(DType, f32); 13] = [
    (DType::Q8_0, 0.5 / 127.0 + 1e-3),
    // 16 steps over 2, but one end only reaches 7 of 8.
    (DType::Q4_0, 1.0 / 8.0 + 1e-3),
    (DType::Q4_1, 1.0 / 15.0 + 2e-3),
    (DType::Q5_0, 1.0 / 16.0 + 1e-3),
    (DType::Q5_1, 1.0 / 31.0 + 2e-3),
    // Scales and minima of 4 and 6 bits; the search for the best ones weighs the numbers, so single ones may lose more
    // than half a step: a whole one.
    (DType::Q2K, 2.0 / 3.0),
    (DType::Q3K, 2.0 / 7.0),
    (DType::Q4K, 2.0 / 15.0),
    (DType::Q5K, 2.0 / 31.0),
    (DType::Q6K, 2.0 / 63.0),
    // Uneven steps, at most 25 of 127 (from 89 to 113) or 23 (from -127 to -104): a whole one.
    (DType::Iq4Nl, 25.0 / 113.0),
    (DType::Iq4Xs, 25.0 / 113.0),
    // The steps 4 and 6 are the widest, of a scale whose largest number is 6 or, where the largest number is above
    // that and below 8, is cut to 6.
    (DType::Mxfp4, 2.0 / 6.0),
];

#[test]
fn quantised_numbers_are_near_what_they_were() {
    let values = numbers(4 * 4096 + 512, 5);
    let from = bytes_of(&values);
    let mut kinds = 0;
    for (memory, room) in MADE {
        let blocks = made(&from, StoredType::F32, memory).unwrap();
        let stored: StoredType = memory.name().parse().unwrap();
        let back = singles(&made(&blocks, stored, DType::F32).unwrap());
        let (mut worst, mut sum) = (0.0_f32, 0.0_f64);
        for (was, is) in values.iter().zip(&back) {
            worst = worst.max((was - is).abs());
            sum += f64::from(was - is).powi(2);
        }
        let relative = (sum / values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()).sqrt();
        println!("{memory}: worst {worst:.4} of {room:.4}, relative {relative:.5}");
        assert!(worst <= room, "{memory}: {worst} is more than {room}");
        // Half of a room evenly filled would be its root mean square over 3; numbers have one of 0.577.
        assert!(relative <= f64::from(room), "{memory}: {relative}");

        // As ggml itself makes and reads them.
        let (theirs, theirs_back) = quantized(memory, &values, 256);
        assert!(blocks == theirs, "{memory} is not what ggml makes");
        assert!(back == theirs_back, "{memory} is not what ggml reads");

        // Through half precision and from other types: the same as from what those hold.
        let half = made(&from, StoredType::F32, DType::F16).unwrap();
        let exact = made(&half, StoredType::F16, DType::F32).unwrap();
        assert!(
            made(&half, StoredType::F16, memory) == made(&exact, StoredType::F32, memory),
            "{memory}"
        );
        let from_blocks = made(&theirs, stored, DType::F32).unwrap();
        assert!(
            made(&theirs, stored, DType::Q8_0) == made(&from_blocks, StoredType::F32, DType::Q8_0)
                || memory == DType::Q8_0
        );
        kinds += 1;
    }
    let makes = |dtype: &&DType| dtype.is_quantized() && is_convertible(StoredType::F32, **dtype);
    assert_eq!(DType::ALL.iter().filter(makes).count(), kinds);
}

#[test]
fn every_kind_of_block_is_read_as_ggml_reads_it() {
    let values = numbers(4096 + 256, 6);
    for dtype in DType::ALL
        .iter()
        .copied()
        .filter(|dtype| dtype.is_quantized())
    {
        let (blocks, wanted) = quantized(dtype, &values, 256);
        let stored: StoredType = dtype.name().parse().unwrap();
        let is = made(&blocks, stored, DType::F32).unwrap();
        assert!(singles(&is) == wanted, "{dtype}");
        for (memory, also) in [
            (DType::F16, StoredType::F16),
            (DType::BF16, StoredType::BF16),
        ] {
            let rounded = made(&bytes_of(&wanted), StoredType::F32, memory).unwrap();
            assert_eq!(
                made(&blocks, stored, memory).unwrap(),
                rounded,
                "{dtype} {also}"
            );
        }
        assert_eq!(made(&blocks, stored, dtype).unwrap(), blocks, "{dtype}");
    }
}

#[test]
fn numbers_that_would_spoil_a_block_are_refused() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65505.0, -1e30] {
        let mut values = numbers(5120, 7);
        values[5000] = value;
        for (memory, _) in MADE {
            match made(&bytes_of(&values), StoredType::F32, memory) {
                Err(ConvertError::Value { value: told, .. }) => {
                    assert!(told == value || told.is_nan() && value.is_nan());
                }
                other => panic!("{value} as {memory}: {:?}", other.map(|bytes| bytes.len())),
            }
        }
        assert!(made(&bytes_of(&values), StoredType::F32, DType::BF16).is_ok());
    }
    // The largest that may be, nothing, and next to nothing.
    for value in [65504.0, 0.0, -0.0, 1e-14, 1e-30, 1e-45] {
        let values: Vec<f32> = (0..512)
            .map(|at| if at % 3 == 0 { -value } else { value })
            .collect();
        for (memory, room) in MADE {
            let blocks = made(&bytes_of(&values), StoredType::F32, memory).unwrap();
            let again = made(&bytes_of(&values), StoredType::F32, memory).unwrap();
            assert_eq!(blocks, again, "{memory} leaves something to chance");
            let stored: StoredType = memory.name().parse().unwrap();
            for (was, is) in values
                .iter()
                .zip(singles(&made(&blocks, stored, DType::F32).unwrap()))
            {
                let near = (was - is).abs() <= room * value + 1e-7;
                assert!(near, "{was} as {memory} is {is}");
            }
        }
    }
}

#[test]
fn pieces_are_what_the_whole_is() {
    let values = numbers(3 * 4096 + 256, 8);
    let from = bytes_of(&values);
    for memory in [DType::F16, DType::Q8_0, DType::Q4K, DType::Iq4Xs] {
        let whole = made(&from, StoredType::F32, memory).unwrap();
        let mut pieces = Vec::new();
        // Not at the borders of the chunks inside, and from an odd address.
        let shifted = [&[0], from.as_slice()].concat();
        for piece in shifted[1..].chunks(1280 * 4) {
            pieces.extend(made(piece, StoredType::F32, memory).unwrap());
        }
        assert!(pieces == whole, "{memory}");
    }
}
