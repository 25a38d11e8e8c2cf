//! What the fuzz targets check, over the committed corpus: what fuzzing found stays found without its toolchain.

use std::fs;
use std::path::Path;

#[path = "../../../../fuzz/src/convert.rs"]
#[allow(unreachable_pub)]
mod convert;
#[path = "../../../../fuzz/src/readers.rs"]
#[allow(unreachable_pub)]
mod readers;
#[path = "../../../../fuzz/src/texts.rs"]
#[allow(unreachable_pub)]
mod texts;

/// Calls `check` with every input of a target.
fn each_input(target: &str, mut check: impl FnMut(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus.join(target)).unwrap() {
        let path = entry.unwrap().path();
        // The name of the input that fails is the last one printed.
        println!("{}", path.display());
        check(&fs::read(path).unwrap());
        inputs += 1;
    }
    assert!(inputs > 5, "{target} has {inputs} inputs");
}

#[test]
fn readers_stand_every_file() {
    let folder = tempfile::tempdir().unwrap();
    each_input("safetensors", |bytes| {
        readers::safetensors(folder.path(), bytes);
    });
    each_input("gguf", |bytes| readers::gguf(folder.path(), bytes));
    each_input("index", |bytes| readers::index(folder.path(), bytes));
}

#[test]
fn texts_are_read_or_refused() {
    each_input("budget", texts::budget);
    each_input("rules", texts::rules);
}

#[test]
fn every_conversion_writes_all_or_says_why_not() {
    each_input("convert", convert::convert_bytes);
}
