//! Progress on standard error: a bar on a terminal, plain lines otherwise.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use sd_graph::{Progress, Reporter};

use crate::preview::Previews;

/// Shows what a run does.
pub(crate) struct Display {
    bar: Option<ProgressBar>,
    lines: bool,
    stage: &'static str,
    previews: Previews,
}

impl Display {
    /// A display on standard error; silent where `quiet` says so.
    pub(crate) fn new(quiet: bool, previews: Previews) -> Display {
        let terminal = std::io::stderr().is_terminal();
        Display {
            bar: (terminal && !quiet).then(new_bar),
            lines: !terminal && !quiet,
            stage: "",
            previews,
        }
    }

    /// Says which of several pictures is begun.
    pub(crate) fn begin(&mut self, number: u64, count: u64, seed: u64) {
        self.previews.begin();
        let text = format!("picture {number}/{count}, seed {seed}");
        match &self.bar {
            Some(bar) => bar.println(text),
            None => self.line(&text),
        }
    }

    /// Takes the bar away, so that what is printed next stands alone.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Warns of something, without a bar in between.
    pub(crate) fn warn(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tracing::warn!("{text}")),
            None => tracing::warn!("{text}"),
        }
    }

    fn show(&self, done: usize, total: usize) {
        if let Some(bar) = &self.bar {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        }
    }

    fn line(&self, text: &str) {
        if self.lines {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }
}

impl Reporter for Display {
    fn report(&mut self, progress: &Progress) {
        match progress {
            Progress::Stage(stage) => {
                self.stage = stage;
                if let Some(bar) = &self.bar {
                    bar.set_message(*stage);
                    bar.set_length(0);
                    bar.set_position(0);
                }
                self.line(stage);
            }
            Progress::Loading { done, total, .. } => self.show(*done, *total),
            Progress::Writing { bytes, of, .. } => {
                const MIB: u64 = 1 << 20;
                self.show((bytes / MIB) as usize, of.div_ceil(MIB) as usize);
            }
            Progress::Step { done, total } => {
                self.show(*done, *total);
                self.line(&format!("{} {done}/{total}", self.stage));
            }
            Progress::Chunk { done, total } => self.show(*done, *total),
            Progress::Preview {
                width,
                height,
                rgba,
                ..
            } => {
                let previews = &mut self.previews;
                match &self.bar {
                    Some(bar) => bar.suspend(|| previews.show(*width, *height, rgba)),
                    None => previews.show(*width, *height, rgba),
                }
            }
            Progress::Segment { done, total, .. } => {
                if let Some(bar) = &self.bar {
                    bar.set_message(format!("{} ({done}/{total})", self.stage));
                }
            }
            _ => {}
        }
    }
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) =
        ProgressStyle::with_template("{msg:>8} [{bar:40}] {pos}/{len} {elapsed_precise} eta {eta}")
    {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
