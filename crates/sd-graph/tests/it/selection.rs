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
