//! What the fuzz targets of configurations, pictures and sound check, over their committed corpora.

use std::fs;
use std::path::Path;

use crate::fixtures::tiny;

#[path = "../../../../fuzz/src/configs.rs"]
#[allow(unreachable_pub)]
mod configs;
#[path = "../../../../fuzz/src/pictures.rs"]
#[allow(unreachable_pub)]
mod pictures;
#[path = "../../../../fuzz/src/sounds.rs"]
#[allow(unreachable_pub)]
mod sounds;

#[test]
fn every_configuration_opens_or_says_why_not() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/config");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        configs::config(folder.path(), &tiny(), &fs::read(path).unwrap());
        inputs += 1;
    }
    assert!(inputs > 5, "{inputs} inputs");
}

#[test]
fn every_file_is_a_picture_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/picture");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        pictures::picture(folder.path(), &fs::read(path).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 8, "{inputs} inputs");
}

#[test]
fn every_file_is_sound_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/sound");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        let bytes = fs::read(&path).unwrap();
        sounds::sound(folder.path(), &bytes);
        assert!(sd_models::Sound::open(&path).is_ok());
        // Cut short anywhere, and with any byte turned over.
        for at in 0..bytes.len() {
            sounds::sound(folder.path(), &bytes[..at]);
            let mut other = bytes.clone();
            other[at] ^= 0xff;
            sounds::sound(folder.path(), &other);
        }
        inputs += 1;
    }
    assert!(inputs >= 8, "{inputs} inputs");
}
