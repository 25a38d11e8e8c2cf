//! Latents in files, and pictures of a clip in a folder.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::clip::Clip;
use crate::error::{Error, Result};
use crate::frame_rate::FrameRate;
use crate::image::{make_readable, part_file};

/// Name of the tensor in a file of latents.
const LATENTS: &str = "latents";

/// Key of the frame rate in a file's metadata.
const FRAME_RATE: &str = "frame_rate";

/// Latents of a picture or clip, as files have them.
#[derive(Debug, Clone, PartialEq)]
pub struct Latents {
    /// The latents, `[frames, channels, height, width]`.
    pub clip: Clip,
    /// Pictures a second of the clip that they were made from, where that is known.
    pub frame_rate: Option<FrameRate>,
}

impl Latents {
    /// Reads the tensor `latents`, F32 `[frames, channels, height, width]`, of a safetensors file, and `frame_rate` of its
    /// metadata.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Latents`] for a file that has no such tensor.
    pub fn read(path: impl AsRef<Path>) -> Result<Latents> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| Error::Io {
            path: path.to_owned(),
            source,
        })?;
        Latents::from_bytes(&bytes).map_err(|reason| Error::Latents {
            path: path.to_owned(),
            reason,
        })
    }

    fn from_bytes(bytes: &[u8]) -> std::result::Result<Latents, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        let tensor = file.tensor(LATENTS).map_err(|error| error.to_string())?;
        let (Dtype::F32, &[frames, channels, height, width]) = (tensor.dtype(), tensor.shape())
        else {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            return Err(format!(
                "`{LATENTS}` is {dtype:?} {shape:?}, not F32 [frames, channels, height, width]"
            ));
        };
        if tensor.data().is_empty() {
            return Err(format!("`{LATENTS}` is empty"));
        }
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let text = metadata.metadata().as_ref();
        let frame_rate = text.and_then(|text| text.get(FRAME_RATE));
        let words = tensor.data().as_chunks().0;
        Ok(Latents {
            clip: Clip {
                frames,
                channels,
                height,
                width,
                values: words.iter().map(|&word| f32::from_le_bytes(word)).collect(),
            },
            frame_rate: frame_rate.map(|text| text.parse()).transpose()?,
        })
    }

    /// Writes a file for [`Latents::read`]. It is written under another name in the same folder and renamed.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the reason.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.write_to(path).map_err(|reason| Error::Write {
            path: path.to_owned(),
            reason,
        })
    }

    fn write_to(&self, path: &Path) -> std::result::Result<(), String> {
        let clip = &self.clip;
        let data: Vec<u8> = (clip.values.iter())
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let shape = vec![clip.frames, clip.channels, clip.height, clip.width];
        let tensor =
            TensorView::new(Dtype::F32, shape, &data).map_err(|error| error.to_string())?;
        let metadata = self
            .frame_rate
            .map(|rate| HashMap::from([(FRAME_RATE.to_owned(), rate.to_string())]));
        let bytes = safetensors::serialize([(LATENTS, tensor)], metadata)
            .map_err(|error| error.to_string())?;
        let mut file = part_file(path)?;
        file.write_all(&bytes).map_err(|error| error.to_string())?;
        make_readable(file.as_file()).map_err(|error| error.to_string())?;
        file.persist(path)
            .map_err(|error| error.error.to_string())?;
        Ok(())
    }
}

/// The picture files that `path` names: itself, or the PNGs of a folder in the order of their names.
///
/// # Errors
/// [`Error::Io`], or [`Error::Missing`] for a folder without pictures.
pub fn picture_files(path: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let path = path.as_ref();
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let io = |source| Error::Io {
        path: path.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        let is_png = |extension: &std::ffi::OsStr| extension.eq_ignore_ascii_case("png");
        if file.extension().is_some_and(is_png) {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(Error::Missing {
            path: path.to_owned(),
            what: "PNG files",
        });
    }
    files.sort();
    Ok(files)
}
