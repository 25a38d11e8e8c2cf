//! Video files through the program `ffmpeg`: raw pictures through pipes, sound beside them in a WAV file.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;

use sd_models::{FrameRate, Image, Sound};

use crate::error::Error;

/// Endings of files that are left to ffmpeg.
const ENDINGS: [&str; 8] = ["mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "gif"];

/// What nothing can be heard in.
const SILENT: &str = "gif";

/// Most bytes of what ffmpeg says that are kept.
const MOST_TEXT: u64 = 1 << 16;

/// Whether the name of `path` ends as those of video files do.
pub(crate) fn is_video(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    ending.is_some_and(|ending| {
        ENDINGS
            .iter()
            .any(|known| ending.eq_ignore_ascii_case(known))
    })
}

/// Refuses a video file where ffmpeg is needed to write it and not there: better now than after all the work.
pub(crate) fn check_writable(path: &Path, program: &Path) -> Result<(), Error> {
    let is_own = path
        .extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("avi"));
    if is_own || !is_video(path) {
        return Ok(());
    }
    Running::start(program, path, &arguments(["-version"]), false)?.finish()
}

/// A running ffmpeg. Stopped when dropped.
struct Running {
    child: Child,
    /// What it says.
    text: Option<JoinHandle<String>>,
    file: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may be over already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(
        program: &Path,
        file: &Path,
        arguments: &[OsString],
        takes_pictures: bool,
    ) -> Result<Running, Error> {
        let pipe = |wanted: bool| {
            if wanted {
                Stdio::piped()
            } else {
                Stdio::null()
            }
        };
        let mut child = Command::new(program)
            .args(["-nostdin", "-v", "error", "-y"])
            .args(arguments)
            .stdin(pipe(takes_pictures))
            .stdout(pipe(!takes_pictures))
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| Error::NoFfmpeg {
                program: program.to_owned(),
                file: file.to_owned(),
                source,
            })?;
        let said = |stderr: ChildStderr| {
            std::thread::spawn(move || {
                let (mut text, mut stderr) = (Vec::new(), stderr);
                let _ = (&mut stderr).take(MOST_TEXT).read_to_end(&mut text);
                // It must not wait for somebody to listen.
                let _ = std::io::copy(&mut stderr, &mut std::io::sink());
                String::from_utf8_lossy(&text).into_owned()
            })
        };
        Ok(Running {
            text: child.stderr.take().map(said),
            child,
            file: file.to_owned(),
        })
    }

    /// Waits until it ends, which is an error unless it ends well.
    fn finish(&mut self) -> Result<(), Error> {
        let status = self.child.wait()?;
        if status.success() {
            return Ok(());
        }
        let text = self.text.take().and_then(|text| text.join().ok());
        let text = text.unwrap_or_default();
        let last = text
            .lines()
            .rev()
            .map(str::trim)
            .find(|line| !line.is_empty());
        Err(self.error(last.map_or(format!("it ended with {status}"), str::to_owned)))
    }

    fn error(&self, reason: String) -> Error {
        Error::Ffmpeg {
            file: self.file.clone(),
            reason,
        }
    }
}

/// The name of a file that is no address of another kind, whatever it looks like.
fn file_name(path: &Path) -> OsString {
    let mut name = OsString::from("file:");
    name.push(path);
    name
}

fn arguments<const N: usize>(words: [&str; N]) -> Vec<OsString> {
    words.map(OsString::from).to_vec()
}

/// The pictures of a video file as they come.
pub(crate) struct VideoReader {
    running: Running,
    pixels: ChildStdout,
    size: (u32, u32),
    rate: FrameRate,
    is_over: bool,
}

impl VideoReader {
    /// Opens a video file with `program`, of which at most so many seconds are read.
    pub(crate) fn open(
        program: &Path,
        path: &Path,
        seconds: Option<f64>,
    ) -> Result<VideoReader, Error> {
        let input = [arguments(["-i"]), vec![file_name(path)]].concat();
        // A picture in a format whose first line says the size and the rate.
        let first = arguments(["-map", "0:v:0", "-frames:v", "1", "-pix_fmt", "yuv420p"]);
        let header = arguments(["-f", "yuv4mpegpipe", "pipe:1"]);
        let all = [&input[..], &first, &header].concat();
        let mut running = Running::start(program, path, &all, false)?;
        let mut told = Vec::new();
        if let Some(mut stdout) = running.child.stdout.take() {
            stdout.read_to_end(&mut told)?;
        }
        running.finish()?;
        let (size, rate) = stream(&told)
            .ok_or_else(|| running.error("it does not say what the video is".to_owned()))?;

        let raw = arguments([
            "-map", "0:v:0", "-pix_fmt", "rgba", "-f", "rawvideo", "pipe:1",
        ]);
        let limit = seconds.map_or(Vec::new(), |seconds| {
            vec!["-t".into(), seconds.to_string().into()]
        });
        let mut running = Running::start(program, path, &[input, limit, raw].concat(), false)?;
        let pixels = running.child.stdout.take();
        let pixels = pixels.ok_or_else(|| running.error("it has no output".to_owned()))?;
        Ok(VideoReader {
            running,
            pixels,
            size,
            rate,
            is_over: false,
        })
    }

    /// Pictures a second.
    pub(crate) fn frame_rate(&self) -> FrameRate {
        self.rate
    }

    fn advance(&mut self) -> Result<Option<Image>, Error> {
        let (width, height) = self.size;
        let bytes = u64::from(width) * u64::from(height) * 4;
        let mut pixels = Vec::new();
        (&mut self.pixels).take(bytes).read_to_end(&mut pixels)?;
        if pixels.is_empty() {
            self.running.finish()?;
            return Ok(None);
        }
        let image = Image::from_rgba(width, height, pixels);
        let short = || {
            self.running
                .error("the video ends within a picture".to_owned())
        };
        image.map(Some).ok_or_else(short)
    }
}

impl Iterator for VideoReader {
    type Item = Result<Image, Error>;

    fn next(&mut self) -> Option<Result<Image, Error>> {
        if self.is_over {
            return None;
        }
        let outcome = self.advance();
        self.is_over = !matches!(outcome, Ok(Some(_)));
        outcome.transpose()
    }
}

/// The sound of a video or sound file, if it has any.
pub(crate) fn read_sound(program: &Path, path: &Path) -> Result<Option<Sound>, Error> {
    let input = [arguments(["-i"]), vec![file_name(path)]].concat();
    // A format whose first lines say what streams there are; that of sound need not be there.
    let streams = arguments(["-map", "0:v:0?", "-map", "0:a:0?", "-t", "0.1"]);
    let told = arguments(["-f", "framecrc", "pipe:1"]);
    let all = [&input[..], &streams, &told].concat();
    let mut running = Running::start(program, path, &all, false)?;
    let mut told = Vec::new();
    if let Some(mut stdout) = running.child.stdout.take() {
        stdout.read_to_end(&mut told)?;
    }
    running.finish()?;
    let told = String::from_utf8_lossy(&told);
    let mut media = told.lines().filter(|line| line.starts_with("#media_type"));
    if !media.any(|line| line.ends_with("audio")) {
        return Ok(None);
    }
    let file = tempfile::Builder::new().suffix(".wav").tempfile()?;
    let heard = arguments(["-map", "0:a:0", "-c:a", "pcm_f32le"]);
    let all = [&input[..], &heard, &[file_name(file.path())]].concat();
    Running::start(program, path, &all, false)?.finish()?;
    let sound = Sound::open(file.path()).map_err(|error| match error {
        // Under the name that the caller knows.
        sd_models::Error::Sound { reason, .. } => Error::Ffmpeg {
            file: path.to_owned(),
            reason,
        },
        error => error.into(),
    })?;
    Ok(Some(sound))
}

/// Temporary files belong to their owner alone; a video is an ordinary file.
#[cfg(unix)]
fn make_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn make_readable(_path: &Path) -> std::io::Result<()> {
    Ok(())
}

/// Size and rate from the first line of a YUV4MPEG2 stream: `YUV4MPEG2 W64 H48 F25:1 ...`.
fn stream(bytes: &[u8]) -> Option<((u32, u32), FrameRate)> {
    let line = bytes.split(|&byte| byte == b'\n').next()?;
    let text = std::str::from_utf8(line).ok()?;
    let mut words = text.split(' ');
    if words.next() != Some("YUV4MPEG2") {
        return None;
    }
    let words: Vec<&str> = words.collect();
    let word = |letter: char| words.iter().find_map(|word| word.strip_prefix(letter));
    let number = |letter: char| word(letter)?.parse().ok().filter(|&side: &u32| side > 0);
    let (numerator, denominator) = word('F')?.split_once(':')?;
    let rate = FrameRate::new(numerator.parse().ok()?, denominator.parse().ok()?)?;
    Some(((number('W')?, number('H')?), rate))
}

/// A video file that is being written: under another name until it is finished.
pub(crate) struct VideoWriter {
    path: PathBuf,
    running: Running,
    pixels: Option<ChildStdin>,
    part: tempfile::TempPath,
    /// Removed when ffmpeg has read it.
    _sound: Option<tempfile::TempPath>,
}

impl VideoWriter {
    /// Begins a video of pictures of this width and height with `program`; `sound` begins with the first. Pictures and sound are
    /// encoded as this ffmpeg does by default in such a file.
    pub(crate) fn create(
        program: &Path,
        path: &Path,
        (width, height): (u32, u32),
        rate: FrameRate,
        sound: Option<&Sound>,
    ) -> Result<VideoWriter, Error> {
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // ffmpeg looks at the ending.
        let ending = path.extension().unwrap_or_default().to_string_lossy();
        let part = tempfile::Builder::new()
            .prefix(".sd-")
            .suffix(&format!(".part.{ending}"))
            .tempfile_in(folder)
            .map_err(|source| {
                Error::Model(sd_models::Error::Write {
                    path: path.to_owned(),
                    reason: source.to_string(),
                })
            })?
            .into_temp_path();
        let (size, rate) = (format!("{width}x{height}"), rate.to_string());
        let input = [
            "-f", "rawvideo", "-pix_fmt", "rgba", "-s", &size, "-r", &rate,
        ];
        let mut words = arguments(input);
        words.extend(arguments(["-i", "pipe:0"]));
        let is_silent = ending.eq_ignore_ascii_case(SILENT);
        let heard = sound.filter(|_| !is_silent).map(|sound| {
            let file = tempfile::Builder::new()
                .prefix(".sd-")
                .suffix(".part.wav")
                .tempfile_in(folder)?
                .into_temp_path();
            Ok::<_, std::io::Error>((sound, file))
        });
        let heard = heard.transpose()?;
        if let Some((sound, file)) = &heard {
            sound.save(file)?;
            words.extend([OsString::from("-i"), file_name(file)]);
            words.extend(arguments(["-map", "0:v:0", "-map", "1:a:0"]));
        }
        if !is_silent {
            // What every player can show.
            words.extend(arguments(["-pix_fmt", "yuv420p"]));
        }
        words.push(file_name(&part));
        let mut running = Running::start(program, path, &words, true)?;
        Ok(VideoWriter {
            path: path.to_owned(),
            pixels: running.child.stdin.take(),
            running,
            part,
            _sound: heard.map(|(_, file)| file),
        })
    }

    /// Writes the next picture.
    pub(crate) fn push(&mut self, image: &Image) -> Result<(), Error> {
        let pixels = image.pixels().as_raw();
        let outcome = self.pixels.as_mut().map(|pipe| pipe.write_all(pixels));
        match outcome {
            Some(Ok(())) => Ok(()),
            // It has ended, and said why.
            Some(Err(error)) => {
                self.pixels = None;
                self.running.finish()?;
                Err(self.running.error(error.to_string()))
            }
            None => Err(self.running.error("it has ended".to_owned())),
        }
    }

    /// Waits until all is written and gives the file its name.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        self.pixels = None;
        self.running.finish()?;
        let path = &self.path;
        let written = |source: std::io::Error| {
            Error::Model(sd_models::Error::Write {
                path: path.clone(),
                reason: source.to_string(),
            })
        };
        make_readable(&self.part).map_err(written)?;
        self.part
            .persist(path)
            .map_err(|error| written(error.error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_says_what_it_is() {
        let rate = FrameRate::new(30000, 1001).unwrap();
        let line = b"YUV4MPEG2 W64 H48 F30000:1001 Ip A1:1 C420jpeg\nFRAME\n\xff\x00";
        assert_eq!(stream(line), Some(((64, 48), rate)));
        for line in [
            "",
            "RIFF W64 H48 F25:1",
            "YUV4MPEG2 W64 F25:1",
            "YUV4MPEG2 W64 H0 F25:1",
            "YUV4MPEG2 W64 H48 F0:0",
        ] {
            assert_eq!(stream(line.as_bytes()), None, "{line}");
        }
    }
}
