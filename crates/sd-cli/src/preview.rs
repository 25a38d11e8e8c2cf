//! Where previews go: a file, and the terminal.

use std::path::PathBuf;

use sd_models::Image;

use crate::args::Preview;
use crate::terminal::{Pixels, Protocol};

/// Pixels along the longer side of a preview's file, at least: small ones are enlarged.
const LEAST: usize = 256;

/// Shows previews.
#[derive(Debug, Default)]
pub(crate) struct Previews {
    file: Option<PathBuf>,
    terminal: Option<Protocol>,
    /// Whether the terminal shows one.
    is_shown: bool,
}

impl Previews {
    /// Where `arguments` want them; `terminal` is what standard error can show.
    pub(crate) fn new(arguments: &Preview, terminal: Option<Protocol>) -> Previews {
        Previews {
            file: arguments.preview_file.clone(),
            terminal: terminal.filter(|_| arguments.preview.is_some()),
            is_shown: false,
        }
    }

    /// Whether anybody would see them.
    pub(crate) fn is_anywhere(&self) -> bool {
        self.file.is_some() || self.terminal.is_some()
    }

    /// Another picture begins, whose previews stand by themselves.
    pub(crate) fn begin(&mut self) {
        self.is_shown = false;
    }

    /// Shows one. What cannot be written is not written again.
    pub(crate) fn show(&mut self, width: usize, height: usize, rgba: &[u8]) {
        let pixels = Pixels {
            width,
            height,
            rgba: rgba.to_vec(),
        };
        if let Some(file) = &self.file {
            let large = pixels.fitted((LEAST, usize::MAX));
            let size = (u32::try_from(large.width), u32::try_from(large.height));
            let image = match size {
                (Ok(width), Ok(height)) => Image::from_rgba(width, height, large.rgba),
                _ => None,
            };
            let saved = image.map(|image| image.save(file));
            if let Some(Err(error)) = saved {
                tracing::warn!("{error}; previews are not written any more");
                self.file = None;
            }
        }
        if let Some(terminal) = self.terminal {
            let shown = terminal.show(&mut std::io::stderr().lock(), &pixels, self.is_shown);
            self.is_shown = true;
            if shown.is_err() {
                self.terminal = None;
            }
        }
    }
}
