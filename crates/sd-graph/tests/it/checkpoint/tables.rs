//! Lists without files, and the types that they name.

use std::path::Path;

use sd_graph::{Checkpoint, CheckpointError, StoredType};

use super::EVERY_TYPE;

#[test]
fn a_table_has_names_and_no_data() {
    let entries = [
        ("b", StoredType::BF16, vec![2, 3]),
        ("a", StoredType::F32, vec![]),
        ("c", StoredType::F4, vec![0, 9]),
    ];
    let table = entries
        .clone()
        .map(|(name, stored, shape)| (name.to_owned(), stored, shape));
    let checkpoint = Checkpoint::from_table("published", table).unwrap();
    let names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(
        (
            checkpoint.bytes(),
            checkpoint.parameters(),
            checkpoint.files().len()
        ),
        (16, 7, 0)
    );
    for (name, stored, shape) in entries {
        let info = checkpoint.get(name).unwrap();
        assert_eq!((info.stored, &info.shape), (stored, &shape));
    }
    assert_eq!(checkpoint.path(), Path::new("published"));
    let error = checkpoint.read("b", &mut [0; 12]).unwrap_err();
    assert!(matches!(error, CheckpointError::NoData { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "published: tensor `b` has no data: this is a table of names and shapes"
    );
    assert!(Checkpoint::from_table("nothing", []).unwrap().is_empty());
}

#[test]
fn a_table_that_no_file_could_hold_is_refused() {
    let huge = 1 << 32;
    type Case<'a> = (&'a [(&'a str, StoredType, &'a [usize])], &'a str);
    #[rustfmt::skip]
    let cases: &[Case<'_>] = &[
        (&[("a", StoredType::F32, &[huge, huge])], "t: tensor `a`: shape [4294967296, 4294967296] of type F32 is impossible"),
        (&[("a", StoredType::F32, &[huge, 0, huge])], "tensor `a`: shape [4294967296, 0, 4294967296] of type F32 is impossible"),
        (&[("a", StoredType::F64, &[1 << 61])], "tensor `a`: shape"),
        (&[("a", StoredType::F4, &[3])], "tensor `a`: shape [3] of type F4 does not fill whole bytes"),
        (&[("a", StoredType::Q8_0, &[64, 33])], "tensor `a`: shape [64, 33] of type q8_0 has rows of 33, which are not whole blocks of 32"),
        (&[("a", StoredType::Q8_0, &[])], "tensor `a`: shape [] of type q8_0 has rows of 1"),
        (&[("a", StoredType::Q1_0, &[8, 1 << 60])], "tensor `a`: shape [8, 1152921504606846976] of type q1_0 is impossible"),
        (&[("a", StoredType::Q8_0, &[1 << 61, 0, 32])], "is impossible"),
        (&[("a", StoredType::Q8_0, &[4, 0, 32]), ("b", StoredType::Iq4Nl, &[32])], ""),
        (&[("a", StoredType::U8, &[1; 65])], "tensor `a`: it has 65 dimensions, more than the 64"),
        (&[("a", StoredType::U8, &[1]), ("b", StoredType::U8, &[1]), ("a", StoredType::U8, &[1])], "tensor `a`: the table names it twice"),
        (&[("a", StoredType::U8, &[1 << 60]), ("b", StoredType::F4, &[1 << 61]), ("c", StoredType::F4, &[1 << 61])], ""),
    ];
    for (entries, expected) in cases {
        let table = entries
            .iter()
            .map(|&(name, stored, shape)| (name.to_owned(), stored, shape.to_vec()));
        match Checkpoint::from_table("t", table) {
            Ok(checkpoint) => assert!(expected.is_empty(), "{expected}: {checkpoint:?}"),
            Err(error) => assert!(
                !expected.is_empty() && error.to_string().contains(expected),
                "{error}"
            ),
        }
    }
    // Each tensor is possible, all together are not.
    let many = (0..16).map(|number| (format!("{number:02}"), StoredType::F4, vec![1 << 61]));
    let error = Checkpoint::from_table("t", many).unwrap_err().to_string();
    assert!(
        error.contains("tensor `07`: with it the size of all tensors together overflows 64 bits"),
        "{error}"
    );
}

#[test]
fn stored_types_have_the_names_of_the_format() {
    for stored in StoredType::ALL {
        assert_eq!(stored.name().parse(), Ok(*stored));
        assert_eq!(stored.name().to_lowercase().parse(), Ok(*stored));
        assert_eq!(format!("{stored:>6}"), format!("{:>6}", stored.name()));
    }
    let plain = StoredType::ALL
        .iter()
        .filter(|stored| !stored.is_quantized());
    assert_eq!(EVERY_TYPE.len(), plain.count());
    for &(_, dtype, _) in EVERY_TYPE {
        let stored: StoredType = dtype.to_string().parse().unwrap();
        assert_eq!(stored.bits(), Some(dtype.bitsize() as u32), "{stored}");
    }
    assert!("F31".parse::<StoredType>().is_err() && "".parse::<StoredType>().is_err());
    assert_eq!(StoredType::F4.bytes(3), None);
    assert_eq!(StoredType::F4.bytes(4), Some(2));
    assert_eq!(StoredType::F64.bytes(u64::MAX / 8), None);
    assert_eq!(StoredType::Q4K.bits(), None);
    assert_eq!(StoredType::Q4K.block(), Some((256, 144)));
    assert_eq!(StoredType::Q4K.bytes(512), Some(288));
    assert_eq!(StoredType::Q4K.bytes(511), None);
    assert_eq!(StoredType::Q8_0.bytes(u64::MAX / 32 * 32), None);
}
