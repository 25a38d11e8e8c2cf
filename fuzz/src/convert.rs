//! Conversion: whatever the bytes are, every byte is written or the reason why not is told.

use sd_backend::DType;
use sd_graph::{ConvertError, StoredType, convert, is_convertible};

/// Converts `bytes` after the first three, which choose the types and how far the slices are from alignment.
pub fn convert_bytes(bytes: &[u8]) {
    let [stored, memory, shift, from @ ..] = bytes else {
        return;
    };
    let stored = StoredType::ALL[usize::from(*stored) % StoredType::ALL.len()];
    let memory = DType::ALL[usize::from(*memory) % DType::ALL.len()];
    let (block, block_bytes) = match (stored.block(), stored.bits()) {
        (Some(block), _) => block,
        (None, bits) => (1, u64::from(bits.unwrap_or(8)).div_ceil(8)),
    };
    let elements = from.len() as u64 / block_bytes * block;
    let unit = (block as usize).max(memory.block_len());
    let elements = elements as usize / unit * unit;
    let Some(length) = stored.bytes(elements as u64) else {
        return;
    };
    let Some(room) = memory.row_bytes(elements) else {
        return;
    };
    let shift = usize::from(*shift) % 8;
    let shifted = [&[0; 8][..shift], &from[..length as usize]].concat();
    let outcomes = [0x00, 0xff].map(|fill| {
        let mut into = vec![fill; shift + room];
        let outcome = convert(&shifted[shift..], stored, memory, &mut into[shift..]);
        assert!(into[..shift].iter().all(|&byte| byte == fill));
        outcome.map(|()| into[shift..].to_vec())
    });
    match &outcomes {
        [Ok(one), Ok(other)] => {
            assert!(is_convertible(stored, memory));
            assert!(one == other, "{stored} to {memory}: not all was written");
            if memory.is_quantized() && stored.name() != memory.name() {
                let back = StoredType::ALL
                    .iter()
                    .copied()
                    .find(|back| back.name() == memory.name())
                    .unwrap();
                let mut numbers = vec![0; elements * 4];
                convert(one, back, DType::F32, &mut numbers).unwrap();
                let finite = |number: &[u8; 4]| f32::from_le_bytes(*number).is_finite();
                assert!(
                    numbers.as_chunks().0.iter().all(finite),
                    "{stored} to {memory} makes what is no number"
                );
            }
        }
        [Err(ConvertError::NoWay { .. }), Err(_)] => assert!(!is_convertible(stored, memory)),
        [Err(ConvertError::Value { value, .. }), Err(_)] => {
            assert!(is_convertible(stored, memory) && memory.is_quantized());
            assert!(value.is_nan() || value.abs() > 60000.0);
        }
        other => panic!("{stored} to {memory}: {other:?}"),
    }
    // A length that is no whole number of elements.
    let mut into = vec![0; room + 1];
    assert!(convert(&shifted[shift..], stored, memory, &mut into).is_err());
}
