//! Rules that give weights types, as text.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sd_fuzz::texts::rules(bytes));
