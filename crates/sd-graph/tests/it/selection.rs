//! Checkpoints put together from tensors of others.

use safetensors::tensor::{Dtype, TensorView};
use sd_graph::{Checkpoint, CheckpointError, Rows, Selection, StoredType};

/// A file with one tensor of bytes that count up.
fn file(
    at: &std::path::Path,
    name: &str,
    tensor: &str,
    dtype: Dtype,
    shape: &[usize],
) -> Checkpoint {
    let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    let data: Vec<u8> = (0..bytes).map(|at| (at * 7 + tensor.len()) as u8).collect();
    let view = TensorView::new(dtype, shape.to_vec(), &data).unwrap();
    let path = at.join(name);
    std::fs::write(
        &path,
        safetensors::serialize([(tensor, view)], None).unwrap(),
    )
    .unwrap();
    Checkpoint::open(path).unwrap()
}

fn bytes(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let mut bytes = vec![0; checkpoint.get(name).unwrap().bytes as usize];
    checkpoint.read(name, &mut bytes).unwrap();
    bytes
}

#[test]
fn rows_of_several_files_are_read_where_they_lie() {
    let at = tempfile::tempdir().unwrap();
    let one = file(at.path(), "one.safetensors", "fused", Dtype::F16, &[6, 5]);
    let two = file(at.path(), "two.safetensors", "x", Dtype::F32, &[3]);
    let mut selection = Selection::new(&one);
    for part in 0..3 {
        let rows = Rows { part, of: 3 };
        selection
            .add(format!("part.{part}"), &one, "fused", rows)
            .unwrap();
    }
    selection.add("all", &one, "fused", Rows::ALL).unwrap();
    selection.add("x", &two, "x", Rows::ALL).unwrap();
    let selection = selection.finish().unwrap();
    let whole = bytes(&one, "fused");
    for part in 0..3 {
        let name = format!("part.{part}");
        let info = selection.get(&name).unwrap();
        assert_eq!((&info.shape[..], info.bytes), (&[2, 5][..], 20));
        assert_eq!(bytes(&selection, &name), whole[part * 20..(part + 1) * 20]);
        // Parts are bounded by themselves, not by what they are parts of.
        let mut more = [0; 2];
        let error = selection.read_at(&name, 19, &mut more).unwrap_err();
        assert!(
            matches!(error, CheckpointError::OutOfRange { bytes: 20, .. }),
            "{error}"
        );
    }
    assert_eq!(bytes(&selection, "all"), whole);
    assert_eq!(bytes(&selection, "x"), bytes(&two, "x"));
    assert_eq!((selection.files().len(), selection.path()), (2, one.path()));
    // A selection of a selection.
    let below = selection.below("part.").unwrap();
    assert_eq!(below.len(), 3);
    assert_eq!(bytes(&below, "1"), whole[20..40]);
    let mut again = Selection::new(&below);
    again
        .add("half", &below, "2", Rows { part: 1, of: 2 })
        .unwrap();
    assert_eq!(bytes(&again.finish().unwrap(), "half"), whole[50..60]);
}

#[test]
fn tensors_in_pieces_are_read_as_if_they_lay_together() {
    let at = tempfile::tempdir().unwrap();
    let kernel = [2_usize, 3, 4];
    let frames = ["a", "bb", "ccc"].map(|name| file(at.path(), name, name, Dtype::F16, &kernel));
    let mut all = Selection::new(&frames[0]);
    for (frame, name) in frames.iter().zip(["a", "bb", "ccc"]) {
        all.add(name, frame, name, Rows::ALL).unwrap();
    }
    let all = all.finish().unwrap();
    for axis in 0..=3 {
        let mut selection = Selection::new(&all);
        selection
            .stack("kernel", &all, &["a", "bb", "ccc"], axis)
            .unwrap();
        let selection = selection.finish().unwrap();
        let info = selection.get("kernel").unwrap();
        let mut shape = kernel.to_vec();
        shape.insert(axis, 3);
        assert_eq!((&info.shape, info.bytes), (&shape, 144));
        // What numpy calls `stack`.
        let length = 2 * kernel[axis..].iter().product::<usize>();
        let parts = ["a", "bb", "ccc"].map(|name| bytes(&all, name));
        let wanted: Vec<u8> = (0..48 / length)
            .flat_map(|turn| parts.iter().map(move |part| (turn, part)))
            .flat_map(|(turn, part)| part[turn * length..][..length].to_vec())
            .collect();
        assert_eq!(bytes(&selection, "kernel"), wanted, "axis {axis}");
        for (from, count) in [(0, 1), (1, 50), (47, 3), (90, 54), (143, 1), (10, 0)] {
            let mut some = vec![0; count];
            selection.read_at("kernel", from as u64, &mut some).unwrap();
            assert_eq!(some, wanted[from..from + count], "axis {axis}, from {from}");
        }
        // It may be selected again as a whole, and no rows of it.
        let mut again = Selection::new(&frames[2]);
        again.add("k", &selection, "kernel", Rows::ALL).unwrap();
        assert!(
            again
                .add("r", &selection, "kernel", Rows { part: 0, of: 2 })
                .is_err()
                || axis > 0
        );
        assert_eq!(bytes(&again.finish().unwrap(), "k"), wanted);
    }

    // Queries, keys and values of two heads of two channels, head by head.
    let fused = file(at.path(), "qkv", "qkv", Dtype::F32, &[12, 5]);
    let whole = bytes(&fused, "qkv");
    for part in 0..3 {
        let mut selection = Selection::new(&fused);
        selection
            .add_grouped("q", &fused, "qkv", 2, Rows { part, of: 3 })
            .unwrap();
        let selection = selection.finish().unwrap();
        assert_eq!(selection.get("q").unwrap().shape, [4, 5]);
        let rows = |from: usize| &whole[from * 20..(from + 2) * 20];
        let wanted = [rows(2 * part), rows(6 + 2 * part)].concat();
        assert_eq!(bytes(&selection, "q"), wanted);
    }
    let mut selection = Selection::new(&all);
    let refused = |outcome: Result<(), CheckpointError>, part: &str| {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(part), "`{part}` in {text}");
    };
    let rows = Rows { part: 0, of: 3 };
    refused(
        selection.add_grouped("q", &fused, "qkv", 5, rows),
        "are not 5 groups of 3 equal parts",
    );
    refused(
        selection.add_grouped("q", &fused, "qkv", 0, rows),
        "are not 0 groups",
    );
    refused(
        selection.stack("k", &all, &["a", "none"], 0),
        "no tensor `none`",
    );
    refused(selection.stack("k", &all, &[], 0), "no tensors");
    refused(selection.stack("k", &all, &["a"], 4), "do not fit");
}

#[test]
fn what_is_no_part_is_refused() {
    let table = |stored, shape: &[usize]| {
        Checkpoint::from_table("table", [("t".to_owned(), stored, shape.to_vec())]).unwrap()
    };
    let add = |checkpoint: &Checkpoint, rows| -> String {
        let mut selection = Selection::new(checkpoint);
        match selection.add("part", checkpoint, "t", rows) {
            Ok(()) => "accepted".to_owned(),
            Err(error) => error.to_string(),
        }
    };
    let thirds = |part| Rows { part, of: 3 };
    let plain = table(StoredType::F32, &[6, 2]);
    assert_eq!(add(&plain, thirds(2)), "accepted");
    assert!(add(&plain, thirds(3)).contains("its 6 rows are not 3 equal parts"));
    assert!(add(&plain, Rows { part: 0, of: 4 }).contains("not 4 equal parts"));
    assert!(add(&plain, Rows { part: 0, of: 0 }).contains("not 0 equal parts"));
    assert!(add(&table(StoredType::F32, &[]), thirds(0)).contains("equal parts"));
    // A row of blocks is whole blocks; a vector of blocks is one row, whose elements are not.
    assert_eq!(
        add(&table(StoredType::Q8_0, &[6, 64]), thirds(1)),
        "accepted"
    );
    assert!(add(&table(StoredType::Q8_0, &[96]), thirds(1)).contains("accepted"));
    assert!(add(&table(StoredType::Q8_0, &[96]), Rows { part: 0, of: 2 }).contains("whole blocks"));
    // Elements of half a byte.
    assert!(add(&table(StoredType::F4, &[2, 3]), Rows { part: 0, of: 2 }).contains("whole bytes"));

    let mut selection = Selection::new(&plain);
    assert!(matches!(
        selection.add("a", &plain, "none", Rows::ALL),
        Err(CheckpointError::NoSuchTensor { .. })
    ));
    selection.add("a", &plain, "t", Rows::ALL).unwrap();
    let error = selection.add("a", &plain, "t", Rows::ALL).unwrap_err();
    assert!(
        error.to_string().contains("a second tensor called a"),
        "{error}"
    );
}
