//! `sd video`.

mod given;

use std::io::Write;
use std::time::Instant;

use sd_graph::{Cancel, Progress, Reporter};
use sd_models::minimax_h3::{FRAME_RATE, MOST_OF_EACH, Made, VideoReport};
use sd_models::{Error as ModelError, FrameRate, VideoPipeline, VideoRequest};
use serde::Serialize;

use crate::args::Video;
use crate::clips::{Output, check_writable};
use crate::error::{Error, refuse};
use crate::figures::{file_size, peak_resident, seconds, timed};
use crate::json;
use crate::makes::Makes;
use crate::preview::Previews;
use crate::progress::Display;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: String,
    device: String,
    prompt: &'a str,
    output: String,
    /// The file of what is heard, where it is one of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    sound_output: Option<String>,
    width: usize,
    height: usize,
    frames: usize,
    frame_rate: String,
    sound: Option<Heard>,
    steps: usize,
    /// How often the transformer was asked.
    calls: usize,
    seed: u64,
    rng: String,
    /// Rows of text that the transformer was given.
    text_rows: usize,
    /// What was changed of what was asked for, in words.
    adjustments: Vec<String>,
    seconds: Seconds,
    bytes: Bytes,
}

/// What is heard.
#[derive(Debug, Serialize)]
struct Heard {
    rate: u32,
    channels: usize,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Seconds {
    load: f64,
    /// Of pictures, clips and sounds from their files.
    read: f64,
    encode: f64,
    denoise: f64,
    decode: f64,
    save: f64,
    total: f64,
}

#[derive(Debug, Serialize)]
struct Bytes {
    /// Of loaded weights, those that are used where they lie in a file.
    mapped: u64,
    copied: u64,
    converted: u64,
    /// Weights that were brought to the device while the steps ran.
    streamed: u64,
    /// Of the output; 0 for a folder.
    file: u64,
    /// Most bytes of this process in memory at once, where the system tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_resident: Option<u64>,
}

pub(crate) fn run(arguments: &Video, is_quiet: bool, cancel: &Cancel) -> Result<(), Error> {
    let started = Instant::now();
    check(arguments)?;
    check_writable(&arguments.output, &arguments.ffmpeg)?;
    // Now rather than after all the work.
    Output::new(&arguments.output, 1, frame_rate(), &arguments.ffmpeg).map(drop)?;
    let mut display = Display::new(arguments.json || is_quiet, Previews::default());

    let parts = &arguments.loading.parts;
    let model = Makes::Clips.find(arguments.model.as_deref(), parts)?;
    let files = arguments.video_parts.add_to(parts.files(model.as_deref()));
    let builder = arguments.loading.apply(VideoPipeline::open(files)?);
    let builder = arguments.video_parts.apply(builder);
    let mut request = VideoRequest::new(&arguments.prompt)
        .seed(arguments.noise.seed)
        .rng(arguments.noise.rng);
    if let Some((width, height)) = arguments.size.sides() {
        request = request.size(width, height);
    }
    if let Some(frames) = arguments.frames {
        request = request.frames(frames);
    }
    if let Some(steps) = arguments.steps {
        request = request.steps(steps);
    }
    let (request, read) = timed(|| given::read(arguments, request))?;
    builder.check(&request)?;

    let (mut pipeline, load) = timed(|| builder.load_with(cancel, &mut display))?;
    for adjustment in pipeline.check(&request)? {
        display.warn(&adjustment.to_string());
    }
    let mut writing = Writing::default();
    let mut failure = None;
    let made = pipeline.generate_with(&request, &mut display, &mut |made| {
        let outcome = writing.take(arguments, made);
        outcome.map_err(|error| match error {
            Error::Model(error) => error,
            // What the model's crate knows nothing of is told behind it.
            error => {
                failure = Some(error);
                ModelError::Interrupted
            }
        })
    });
    if let Some(error) = failure {
        return Err(error);
    }
    let made = made?;
    display.report(&Progress::Stage("save"));
    let ((heard, sound_output), save) = timed(|| writing.finish())?;
    display.finish();

    let VideoReport {
        width,
        height,
        frames,
        ..
    } = made;
    let report = Report {
        model: model
            .as_ref()
            .or(parts.transformer.as_ref())
            .map(|path| path.display().to_string())
            .unwrap_or_default(),
        device: pipeline.device().name(),
        prompt: &arguments.prompt,
        output: arguments.output.display().to_string(),
        sound_output,
        width,
        height,
        frames,
        frame_rate: frame_rate().to_string(),
        sound: heard,
        steps: made.steps,
        calls: made.calls,
        seed: made.seed,
        rng: made.rng.to_string(),
        text_rows: made.text_rows,
        adjustments: made.adjustments.iter().map(ToString::to_string).collect(),
        seconds: Seconds {
            load: seconds(load),
            read: seconds(read),
            encode: seconds(made.encode),
            denoise: seconds(made.denoise),
            decode: seconds(made.decode),
            save: seconds(save),
            total: seconds(started.elapsed()),
        },
        bytes: Bytes {
            mapped: pipeline.loaded().mapped,
            copied: pipeline.loaded().copied,
            converted: pipeline.loaded().converted,
            streamed: made.streamed_bytes,
            file: match arguments.output.is_file() {
                true => file_size(&arguments.output),
                false => 0,
            },
            peak_resident: peak_resident(),
        },
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        json::print(&mut out, &report)?;
    } else if !is_quiet {
        let (output, steps, seed) = (&report.output, report.steps, report.seed);
        let total = report.seconds.total;
        writeln!(
            out,
            "{output}: {frames} frames of {width}x{height}, {steps} steps, seed {seed}, {total:.1} s"
        )?;
    }
    Ok(())
}

/// A clip that is written as it comes, and what is heard in it.
#[derive(Default)]
struct Writing(Option<(Output, Heard)>);

impl Writing {
    fn take(&mut self, arguments: &Video, made: Made) -> Result<(), Error> {
        match (made, &mut self.0) {
            (Made::Sound { sound, frames }, begun) => {
                let heard = Heard {
                    rate: sound.rate(),
                    channels: sound.channels().len(),
                    seconds: (sound.seconds() * 1e4).round() / 1e4,
                };
                let (path, ffmpeg) = (&arguments.output, &arguments.ffmpeg);
                let output = Output::new(path, frames, frame_rate(), ffmpeg)?.sound(sound);
                *begun = Some((output, heard));
                Ok(())
            }
            (Made::Frame(frame), Some((output, _))) => output.push(&frame, 3),
            // What is heard comes first.
            (Made::Frame(_), None) => Ok(()),
        }
    }

    /// Ends the file, and says what is heard, and where if that is a file of its own.
    fn finish(self) -> Result<(Option<Heard>, Option<String>), Error> {
        let Some((output, heard)) = self.0 else {
            return Ok((None, None));
        };
        let file = output.sound_file();
        output.finish()?;
        Ok((Some(heard), file.map(|file| file.display().to_string())))
    }
}

fn frame_rate() -> FrameRate {
    FrameRate::new(FRAME_RATE, 1).unwrap_or(FrameRate::USUAL)
}

/// Refuses what can be refused before a model is loaded.
fn check(arguments: &Video) -> Result<(), Error> {
    for (option, value) in [
        ("width", arguments.size.width),
        ("height", arguments.size.height),
        ("frames", arguments.frames),
    ] {
        if value == Some(0) {
            return refuse(option, 0, "at least 1 is needed");
        }
    }
    if let Some(steps) = arguments.steps.filter(|steps| !(2..=1000).contains(steps)) {
        let reason = "from 2 (one call of the transformer) to 1000 are possible";
        return refuse("steps", steps, reason);
    }
    let given = &arguments.given;
    let counts = [&given.ref_image, &given.ref_video, &given.ref_audio].map(Vec::len);
    let options = ["ref-image", "ref-video", "ref-audio"];
    for ((option, count), most) in options.into_iter().zip(counts).zip(MOST_OF_EACH) {
        if count > most {
            let reason = format!("at most {most} are possible");
            return refuse(option, format!("({count} files)"), reason);
        }
    }
    if let [sound, ..] = &given.ref_audio[..]
        && given.ref_image.is_empty()
        && given.ref_video.is_empty()
    {
        let reason = "sound needs a picture (--ref-image) or a clip (--ref-video) beside it";
        return refuse("ref-audio", sound.display(), reason);
    }
    let folder = arguments.output.parent();
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        let reason = format!("there is no folder {}", folder.display());
        return refuse("output", arguments.output.display(), reason);
    }
    Ok(())
}
