//! The configurations of a model folder.
#![no_main]

use std::path::Path;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sd_fuzz::in_folder(|folder| {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-qwen-image-2.1");
    sd_fuzz::configs::config(folder, &tiny, bytes);
}));
