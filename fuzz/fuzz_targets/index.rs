//! The reader of indexes of sharded checkpoints.
#![no_main]

libfuzzer_sys::fuzz_target!(
    |bytes: &[u8]| sd_fuzz::in_folder(|folder| sd_fuzz::readers::index(folder, bytes))
);
