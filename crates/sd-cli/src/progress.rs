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

    /// Shows how far something of known length is, beside the name of the stage and what of it that is.
    fn show(&self, of: &str, done: usize, total: usize) {
        let Some(bar) = &self.bar else {
            return;
        };
        bar.set_style(measured());
        bar.set_message(format!("{}{of}", self.stage));
        let is_new = bar.length() != Some(total as u64) || done as u64 <= bar.position();
        // At once: a position that is drawn beside the length of something else says nonsense.
        bar.update(|state| {
            state.set_len(total as u64);
            state.set_pos(done as u64);
        });
        if is_new {
            bar.reset_eta();
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
                    bar.set_style(unmeasured());
                    bar.set_message(*stage);
                    bar.update(|state| {
                        state.set_len(0);
                        state.set_pos(0);
                    });
                }
                self.line(stage);
            }
            Progress::Loading { done, total, .. } => {
                let of = match self.stage {
                    "load" => "",
                    _ => ", weights",
                };
                self.show(of, *done, *total);
            }
            Progress::Writing { bytes, of, .. } => {
                const MIB: u64 = 1 << 20;
                self.show("", (bytes / MIB) as usize, of.div_ceil(MIB) as usize);
            }
            Progress::Step { done, total } => {
                self.show("", *done, *total);
                self.line(&format!("{} {done}/{total}", self.stage));
            }
            Progress::Chunk { done, total } => {
                self.show("", *done, *total);
                // At most some twenty lines, however many chunks there are.
                const LINES: usize = 20;
                if done.is_multiple_of(total.div_ceil(LINES).max(1)) || done == total {
                    self.line(&format!("{} {done}/{total}", self.stage));
                }
            }
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
    bar.set_style(unmeasured());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Of what nobody knows the length of yet.
fn unmeasured() -> ProgressStyle {
    style("{msg:22} {spinner} {elapsed_precise}")
}

/// Of what is counted.
fn measured() -> ProgressStyle {
    style("{msg:22} [{bar:30}] {pos}/{len} {elapsed_precise} eta {eta}")
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template);
    style.map_or_else(
        |_| ProgressStyle::default_bar(),
        |style| style.progress_chars("=> "),
    )
}
