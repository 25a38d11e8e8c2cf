//! Making GGUF files, right and wrong ones, from their parts.

/// Type numbers of metadata values.
pub(crate) mod kind {
    pub(crate) const U8: u32 = 0;
    pub(crate) const U32: u32 = 4;
    pub(crate) const F32: u32 = 6;
    pub(crate) const BOOL: u32 = 7;
    pub(crate) const TEXT: u32 = 8;
    pub(crate) const ARRAY: u32 = 9;
    pub(crate) const U64: u32 = 10;
}

/// A tensor to be written: name, shape with the outermost side first, ggml's type number, data.
pub(crate) type Given<'a> = (&'a str, &'a [usize], u32, Vec<u8>);

pub(crate) fn head(version: u32, tensors: u64, entries: u64) -> Vec<u8> {
    let counts = [tensors.to_le_bytes(), entries.to_le_bytes()].concat();
    [b"GGUF", version.to_le_bytes().as_slice(), &counts].concat()
}

pub(crate) fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

pub(crate) fn entry(key: impl AsRef<[u8]>, kind: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    [&text(key), kind.to_le_bytes().as_slice(), value.as_ref()].concat()
}

/// An array's value: type and number of its elements, and their bytes.
pub(crate) fn array(kind: u32, count: u64, elements: impl AsRef<[u8]>) -> Vec<u8> {
    let count = count.to_le_bytes();
    [&kind.to_le_bytes(), count.as_slice(), elements.as_ref()].concat()
}

/// A line of the list of tensors; `dims` stand as in the file, innermost first.
pub(crate) fn info(name: impl AsRef<[u8]>, dims: &[u64], number: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name);
    bytes.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
    bytes.extend(number.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

pub(crate) fn padded(mut bytes: Vec<u8>, alignment: usize) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
    bytes
}

/// A whole, right file. An alignment other than 32 must stand among the entries.
pub(crate) fn written(
    version: u32,
    alignment: usize,
    entries: &[Vec<u8>],
    given: &[Given<'_>],
) -> Vec<u8> {
    let mut bytes = head(version, given.len() as u64, entries.len() as u64);
    bytes.extend(entries.concat());
    let mut all = Vec::new();
    for (name, shape, number, data) in given {
        let dims: Vec<u64> = shape.iter().rev().map(|&side| side as u64).collect();
        bytes.extend(info(name, &dims, *number, all.len() as u64));
        all.extend_from_slice(data);
        all = padded(all, alignment);
    }
    [padded(bytes, alignment), all].concat()
}
