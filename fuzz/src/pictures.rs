//! Pictures of other programs: whatever is in a file, it is a picture or an error says why not.

use std::fs;
use std::path::Path;

use sd_models::Image;

/// Reads `bytes`, put into a file in `folder`, as a picture; a small one is resized and written too.
pub fn picture(folder: &Path, bytes: &[u8]) {
    let path = folder.join("picture");
    fs::write(&path, bytes).expect("the folder can be written to");
    match Image::open(&path) {
        Ok(image) => {
            let pixels = image.width() as usize * image.height() as usize;
            assert_eq!(image.pixels().as_raw().len(), 4 * pixels);
            if pixels <= 1 << 16 {
                assert_eq!(image.resized(7, 5).pixels().len(), 4 * 35);
                image.save(&path).expect("what was read can be written");
                assert!(Image::open(&path).expect("what was written can be read") == image);
            }
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.len() < bytes.len() + 4096,
                "an error that nobody reads: {text}"
            );
        }
    }
}
