//! What the fuzz targets of configurations and pictures check, over their committed corpora.

use std::fs;
use std::path::Path;

use crate::fixtures::tiny;

#[path = "../../../../fuzz/src/configs.rs"]
#[allow(unreachable_pub)]
mod configs;
#[path = "../../../../fuzz/src/pictures.rs"]
#[allow(unreachable_pub)]
mod pictures;

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
