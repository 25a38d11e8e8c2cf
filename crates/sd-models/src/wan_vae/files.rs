//! Latents in files, and pictures of a clip in a folder.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::clip::Clip;
use crate::error::{Error, Result};

/// Name of the tensor in a file of latents.
const LATENTS: &str = "latents";

impl Clip {
    /// Reads the tensor `latents`, F32 `[frames, channels, height, width]`, of a safetensors file.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Latents`] for a file that has no such tensor.
    pub fn read_latents(path: impl AsRef<Path>) -> Result<Clip> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| Error::Io {
            path: path.to_owned(),
            source,
        })?;
        Clip::from_bytes(&bytes).map_err(|reason| Error::Latents {
            path: path.to_owned(),
            reason,
        })
    }

    fn from_bytes(bytes: &[u8]) -> std::result::Result<Clip, String> {
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
        let words = tensor.data().as_chunks().0;
        Ok(Clip {
            frames,
            channels,
            height,
            width,
            values: words.iter().map(|&word| f32::from_le_bytes(word)).collect(),
        })
    }

    /// Writes a file for [`Clip::read_latents`]. It is written under another name in the same folder and renamed.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the reason.
    pub fn write_latents(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.write(path).map_err(|reason| Error::Write {
            path: path.to_owned(),
            reason,
        })
    }

    fn write(&self, path: &Path) -> std::result::Result<(), String> {
        let data: Vec<u8> = (self.values.iter())
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let shape = vec![self.frames, self.channels, self.height, self.width];
        let tensor =
            TensorView::new(Dtype::F32, shape, &data).map_err(|error| error.to_string())?;
        let bytes = safetensors::serialize([(LATENTS, tensor)], None::<HashMap<String, String>>)
            .map_err(|error| error.to_string())?;
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let mut file = tempfile::Builder::new()
            .prefix(".sd-")
            .suffix(".part")
            .tempfile_in(folder)
            .map_err(|error| error.to_string())?;
        file.write_all(&bytes).map_err(|error| error.to_string())?;
        crate::image::make_readable(file.as_file()).map_err(|error| error.to_string())?;
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
