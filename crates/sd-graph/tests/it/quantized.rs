//! Quantised weights: multiplied as they are, turned into floating point, or refused.

use std::path::Path;

use sd_backend::{Backend, BackendOptions, DType, Device};
use sd_ggml_sys as sys;
use sd_graph::{
    Cancel, Checkpoint, Declarations, LoadOptions, Plan, Progress, Role, StoredType,
    is_convertible, load,
};

use crate::gguf_file::{Given, written};

/// Numbers between -1 and 1, different ones for every `seed`.
pub(crate) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f64::from(state) / f64::from(u32::MAX) * 2.0 - 1.0
    };
    (0..count).map(|_| next() as f32).collect()
}

/// Blocks of the type `dtype` that stand for rows of `row` numbers, and what ggml makes of them again. Blocks of a type
/// that is never made have other numbers, of about the same size, than `values`.
pub(crate) fn quantized(dtype: DType, values: &[f32], row: usize) -> (Vec<u8>, Vec<f32>) {
    let rows = values.len() / row;
    let length = rows * dtype.row_bytes(row).unwrap();
    let mut blocks = vec![0_u64; length.div_ceil(8)];
    let mut back = vec![0_f32; values.len()];
    if !is_convertible(StoredType::F32, dtype) {
        // ggml would have to be told which weights matter, and take seconds to get ready. Any codes will do; without
        // their two upper bits no scale is above 2, wherever it is.
        let places = bytemuck::cast_slice_mut::<u64, u8>(&mut blocks).iter_mut();
        for (at, place) in places.enumerate() {
            *place = ((values[at % values.len()] + 1.0) * 2048.0) as u8 & 0x3f;
        }
    } else {
        // SAFETY: such a type needs no importance matrix; `row` is whole blocks, `blocks` has room for all rows and is
        // aligned for any block.
        unsafe {
            sys::ggml_quantize_chunk(
                dtype.to_ggml(),
                values.as_ptr(),
                blocks.as_mut_ptr().cast(),
                0,
                rows as i64,
                row as i64,
                std::ptr::null(),
            );
        }
    }
    // SAFETY: `blocks` holds whole blocks and is aligned for any of them, `back` has room for their numbers.
    unsafe {
        let to_float = (*sys::ggml_get_type_traits(dtype.to_ggml())).to_float;
        to_float.unwrap()(
            blocks.as_ptr().cast(),
            back.as_mut_ptr(),
            values.len() as i64,
        );
    }
    let mut bytes = bytemuck::cast_slice(&blocks).to_vec();
    bytes.truncate(length);
    (bytes, back)
}

fn open(folder: &Path, given: &[Given<'_>]) -> Checkpoint {
    let path = folder.join("model.gguf");
    std::fs::write(&path, written(3, 32, &[], given)).unwrap();
    Checkpoint::open(path).unwrap()
}

fn quantized_types() -> Vec<DType> {
    let all = DType::ALL.iter().copied();
    all.filter(|dtype| dtype.is_quantized()).collect()
}

fn options(convert: Option<DType>) -> LoadOptions {
    convert.map_or(LoadOptions::default(), |dtype| {
        LoadOptions::default().weight_type(dtype)
    })
}

#[test]
fn a_quantised_matrix_multiplies_as_its_numbers_do() {
    const SIDE: usize = 512;
    let folder = tempfile::tempdir().unwrap();
    // A few vectors, and as many as a processor turns the weights into panels for.
    let cases = quantized_types()
        .into_iter()
        .flat_map(|dtype| [(dtype, 5, 2), (dtype, 64, 67)]);
    for (dtype, rows, columns) in cases {
        let x = numbers(columns * SIDE, 1);
        let (bytes, weights) = quantized(dtype, &numbers(rows * SIDE, 2), SIDE);
        let given: Given<'_> = ("w", &[rows, SIDE], dtype.to_ggml(), bytes);
        let checkpoint = open(folder.path(), &[given]);
        for convert in [None, Some(DType::F32), Some(DType::F16)] {
            let declarations = Declarations::new(&checkpoint, options(convert));
            let weight = declarations.root().param("w", [rows, SIDE], Role::Matrix);
            let params = declarations.finish().unwrap();
            assert_eq!(weight.dtype(), convert.unwrap_or(dtype));

            let device = Device::cpu().unwrap();
            let mut backend = Backend::new(device, &BackendOptions::default().threads(1)).unwrap();
            let report = load(
                &checkpoint,
                &params,
                &backend,
                &Cancel::new(),
                &mut |_: &Progress| {},
            )
            .unwrap();
            let converted = convert.map_or(0, |_| weight.bytes() as u64);
            assert_eq!(report.converted, converted);
            let mut plan = Plan::build(&backend, |g| {
                let x = g.input::<f32>("x", [columns, SIDE]);
                g.output("y", x.matmul_transposed(g.param(&weight)));
            })
            .unwrap();
            plan.set("x", &x).unwrap();
            plan.run(&mut backend, &Cancel::new()).unwrap();
            let y = plan.read::<f32>("y").unwrap();

            // ggml rounds `x`, which is at most 1, to 8 bits (steps of 1/127, half of one lost, and a scale in half
            // precision), or both to half precision; F32 loses only in the sum.
            let lost = match weight.dtype() {
                DType::F32 => 1e-6,
                DType::F16 => 2.0 / 2048.0,
                _ => 0.5 / 127.0 + 1.0 / 2048.0,
            };
            for (at, &is) in y.iter().enumerate() {
                let row = &weights[at % rows * SIDE..][..SIDE];
                let x = &x[at / rows * SIDE..][..SIDE];
                let pairs = || {
                    row.iter()
                        .zip(x)
                        .map(|(&w, &x)| (f64::from(w), f64::from(x)))
                };
                let wanted: f64 = pairs().map(|(w, x)| w * x).sum();
                let room = lost * pairs().map(|(w, _)| w.abs()).sum::<f64>();
                let error = (f64::from(is) - wanted).abs();
                assert!(
                    error <= room,
                    "{dtype} as {}: {is}, not {wanted}",
                    weight.dtype()
                );
            }
        }
    }
}

#[test]
fn numbers_come_back_exactly_also_from_tensors_of_many_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::cpu().unwrap();
    for (dtype, rows, side) in [
        (DType::Q4_0, 3, 96),
        (DType::Q5_1, 1, 32),
        (DType::Q6K, 3, 256),
        // More than the 2^21 elements that are brought into memory at once.
        (DType::Q8_0, 16_400, 160),
        (DType::Q4K, 8_200, 256),
    ] {
        let (bytes, wanted) = quantized(dtype, &numbers(rows * side, 3), side);
        let given: Given<'_> = ("w", &[rows, side], dtype.to_ggml(), bytes);
        let checkpoint = open(folder.path(), &[given]);
        let declarations = Declarations::new(&checkpoint, LoadOptions::default());
        let weight = declarations.root().param("w", [rows, side], Role::Vector);
        let params = declarations.finish().unwrap();
        assert_eq!(weight.dtype(), DType::F32);
        let mut backend = Backend::new(device, &BackendOptions::default().threads(1)).unwrap();
        load(
            &checkpoint,
            &params,
            &backend,
            &Cancel::new(),
            &mut |_: &Progress| {},
        )
        .unwrap();
        let mut plan = Plan::build(&backend, |g| {
            let ones = g.input::<f32>("x", [rows, side]);
            g.output("y", ones * g.param(&weight));
        })
        .unwrap();
        plan.set("x", &vec![1.0_f32; rows * side]).unwrap();
        plan.run(&mut backend, &Cancel::new()).unwrap();
        assert!(plan.read::<f32>("y").unwrap() == wanted, "{dtype}");
    }
}

#[test]
fn types_and_shapes_that_cannot_serve_are_told() {
    let table = |stored: StoredType, shape: [usize; 2]| {
        Checkpoint::from_table("t", [("w".to_owned(), stored, shape.to_vec())]).unwrap()
    };
    // What the parameter becomes, or the reason why it cannot.
    type Case<'a> = (
        StoredType,
        &'a [usize],
        Role,
        Option<DType>,
        Result<DType, &'a str>,
    );
    #[rustfmt::skip]
    let cases: &[Case<'_>] = &[
        (StoredType::Q8_0, &[1, 256], Role::Matrix, None, Ok(DType::Q8_0)),
        (StoredType::Q4K, &[1, 256], Role::Matrix, None, Ok(DType::Q4K)),
        (StoredType::Q8_0, &[256], Role::Matrix, None, Ok(DType::Q8_0)),
        (StoredType::Q8_0, &[256, 1], Role::Matrix, None, Err("w ([1, 256] instead of [256, 1])")),
        (StoredType::Q8_0, &[256, 1], Role::Matrix, Some(DType::F16), Ok(DType::F16)),
        (StoredType::Q8_0, &[256], Role::Vector, None, Ok(DType::F32)),
        (StoredType::Q8_0, &[256, 1], Role::Vector, Some(DType::F16), Ok(DType::F32)),
        (StoredType::Q8_0, &[256, 1], Role::Kernel, None, Ok(DType::F32)),
        (StoredType::Q8_0, &[1, 256], Role::Kernel, Some(DType::F16), Ok(DType::F16)),
        (StoredType::Iq4Nl, &[1, 256], Role::Matrix, None, Ok(DType::Iq4Nl)),
        (StoredType::Mxfp4, &[1, 256], Role::Matrix, Some(DType::F32), Ok(DType::F32)),
        (StoredType::Q8_1, &[1, 256], Role::Matrix, None, Err("w (q8_1)")),
        (StoredType::I8, &[1, 256], Role::Matrix, None, Err("w (I8)")),
    ];
    for (stored, shape, role, convert, expected) in cases {
        let checkpoint = table(*stored, [1, 256]);
        let declarations = Declarations::new(&checkpoint, options(*convert));
        let param = declarations.root().param("w", shape, *role);
        match (declarations.finish(), expected) {
            (Ok(_), Ok(dtype)) => assert_eq!(param.dtype(), *dtype, "{stored} {role:?}"),
            (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{error}"),
            (is, _) => panic!("{stored} {shape:?} {role:?}: {is:?}"),
        }
    }
}
