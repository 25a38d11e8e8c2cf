//! Conversion between any two types.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sd_fuzz::convert::convert_bytes(bytes));
