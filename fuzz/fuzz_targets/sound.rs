//! Sound of other programs.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sd_fuzz::in_folder(|folder| {
    sd_fuzz::sounds::sound(folder, bytes);
}));
