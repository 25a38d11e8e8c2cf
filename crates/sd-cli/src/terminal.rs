//! Pictures in the terminal, where it can show them.

use std::io::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// How a terminal shows pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// [Kitty's](https://sw.kovidgoyal.net/kitty/graphics-protocol/), which others have too.
    Kitty,
    /// Sixels of DEC's terminals.
    #[cfg(feature = "sixel")]
    Sixel,
}

/// The pixels of a picture: red, green, blue and alpha, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pixels {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) rgba: Vec<u8>,
}

/// Pixels along the longer side of what is shown, at least and at most.
const SHOWN: (usize, usize) = (256, 512);

/// Lines of text that a picture of kitty's takes.
const LINES: usize = 16;

/// Bytes of base64 in one of kitty's commands.
const CHUNK: usize = 4096;

impl Protocol {
    /// What the terminal of an environment can do, as far as variables tell. Programs between it and us keep pictures to
    /// themselves.
    pub(crate) fn detect(variable: impl Fn(&str) -> Option<String>) -> Option<Protocol> {
        let terminal = variable("TERM").unwrap_or_default();
        let program = variable("TERM_PROGRAM").unwrap_or_default();
        let is_between = ["screen", "tmux"]
            .iter()
            .any(|name| terminal.starts_with(name));
        if is_between || program == "tmux" {
            return None;
        }
        let has = |name: &str| variable(name).is_some_and(|value| !value.is_empty());
        let is_kitty = terminal.contains("kitty") || terminal.contains("ghostty");
        let is_like_it = ["WezTerm", "ghostty"].contains(&program.as_str());
        if is_kitty || is_like_it || has("KITTY_WINDOW_ID") || has("KONSOLE_VERSION") {
            return Some(Protocol::Kitty);
        }
        #[cfg(feature = "sixel")]
        {
            let mut known = ["foot", "mlterm", "contour", "yaft"].iter();
            if program == "mintty" || known.any(|name| terminal.starts_with(name)) {
                return Some(Protocol::Sixel);
            }
        }
        None
    }

    /// Writes a picture. One of kitty's takes the place of the one before, where `is_again` says that there was one.
    pub(crate) fn show(
        self,
        out: &mut impl Write,
        picture: &Pixels,
        is_again: bool,
    ) -> std::io::Result<()> {
        let picture = picture.fitted(SHOWN);
        match self {
            Protocol::Kitty => {
                if !is_again {
                    write!(out, "{}", "\n".repeat(LINES))?;
                }
                write!(out, "\x1b[{LINES}A")?;
                kitty(out, &picture)?;
                write!(out, "\x1b[{LINES}B\r")
            }
            #[cfg(feature = "sixel")]
            Protocol::Sixel => {
                let Pixels {
                    width,
                    height,
                    rgba,
                } = picture;
                let image = icy_sixel::SixelImage::try_from_rgba(rgba, width, height);
                let sixels = image.and_then(|image| image.encode());
                writeln!(out, "{}", sixels.map_err(std::io::Error::other)?)
            }
        }?;
        out.flush()
    }
}

/// Kitty's commands for a picture where the cursor is, which stays there.
fn kitty(out: &mut impl Write, picture: &Pixels) -> std::io::Result<()> {
    let text = STANDARD.encode(&picture.rgba);
    let mut chunks = text.as_bytes().chunks(CHUNK).peekable();
    let mut keys = format!(
        "a=T,f=32,s={},v={},i=1,p=1,r={LINES},C=1,q=2,",
        picture.width, picture.height
    );
    while let Some(chunk) = chunks.next() {
        let has_more = u8::from(chunks.peek().is_some());
        write!(out, "\x1b_G{keys}m={has_more};")?;
        out.write_all(chunk)?;
        write!(out, "\x1b\\")?;
        keys.clear();
    }
    Ok(())
}

impl Pixels {
    /// The longer side at least `least` and at most `most` pixels, by whole factors.
    pub(crate) fn fitted(&self, (least, most): (usize, usize)) -> Pixels {
        let longest = self.width.max(self.height).max(1);
        if longest < least {
            self.enlarged(least.div_ceil(longest))
        } else {
            self.reduced(longest.div_ceil(most.max(1)))
        }
    }

    /// Each pixel as a square of `factor` pixels.
    fn enlarged(&self, factor: usize) -> Pixels {
        let (width, height) = (self.width * factor, self.height * factor);
        let (rows, _) = self.rgba.as_chunks::<4>();
        let pixel = |x: usize, y: usize| rows[y / factor * self.width + x / factor];
        let pixels = (0..height).flat_map(|y| (0..width).map(move |x| pixel(x, y)));
        Pixels {
            width,
            height,
            rgba: pixels.flatten().collect(),
        }
    }

    /// The mean of each square of `factor` pixels; what makes no whole square is left out.
    fn reduced(&self, factor: usize) -> Pixels {
        if factor <= 1 {
            return self.clone();
        }
        let (width, height) = (self.width / factor, self.height / factor);
        let (pixels, _) = self.rgba.as_chunks::<4>();
        let mean = |x: usize, y: usize, channel: usize| {
            let rows = pixels
                .chunks_exact(self.width)
                .skip(y * factor)
                .take(factor);
            let square = rows.flat_map(|row| &row[x * factor..(x + 1) * factor]);
            let sum: usize = square.map(|pixel| usize::from(pixel[channel])).sum();
            (sum / (factor * factor)) as u8
        };
        let places = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
        let rgba = places
            .flat_map(|(x, y)| [0, 1, 2, 3].map(|channel| mean(x, y, channel)))
            .collect();
        Pixels {
            width,
            height,
            rgba,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn terminals_are_known_by_their_variables() {
        let detect = |variables: &[(&str, &str)]| {
            Protocol::detect(|name| {
                let mut variables = variables.iter();
                let found = variables.find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(detect(&[("TERM", "xterm-kitty")]), Some(Protocol::Kitty));
        assert_eq!(
            detect(&[("TERM", "xterm-256color"), ("TERM_PROGRAM", "WezTerm")]),
            Some(Protocol::Kitty)
        );
        assert_eq!(detect(&[("TERM", "xterm-256color")]), None);
        assert_eq!(detect(&[]), None);
        let inside = [("TERM", "tmux-256color"), ("KITTY_WINDOW_ID", "1")];
        assert_eq!(detect(&inside), None);
        #[cfg(feature = "sixel")]
        assert_eq!(detect(&[("TERM", "foot-extra")]), Some(Protocol::Sixel));
    }

    #[test]
    fn pictures_are_enlarged_reduced_and_written() {
        let small = Pixels {
            width: 2,
            height: 1,
            rgba: vec![1, 2, 3, 4, 5, 6, 7, 8],
        };
        let large = small.fitted((256, 512));
        assert_eq!((large.width, large.height), (256, 128));
        assert_eq!(large.rgba[127 * 4..129 * 4], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(large.reduced(128), small);
        assert_eq!(large.fitted((1, 512)), large);

        let mut out = Vec::new();
        Protocol::Kitty.show(&mut out, &small, false).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with(&"\n".repeat(LINES)));
        let commands: Vec<&str> = text.split("\x1b_G").skip(1).collect();
        assert!(
            commands[0].starts_with("a=T,f=32,s=256,v=128,"),
            "{}",
            commands[0]
        );
        // All pixels, in pieces that say whether more follow.
        let pieces = commands.iter().map(|command| {
            let (keys, rest) = command.split_once(';').unwrap();
            (keys.ends_with("m=1"), rest.split_once('\x1b').unwrap().0)
        });
        let pieces: Vec<(bool, &str)> = pieces.collect();
        assert!(pieces.iter().all(|(_, piece)| piece.len() <= CHUNK));
        let more: Vec<bool> = pieces.iter().map(|(more, _)| *more).collect();
        assert_eq!(more.iter().filter(|more| !**more).count(), 1);
        assert_eq!(more.last(), Some(&false));
        let all: String = pieces.iter().map(|(_, piece)| *piece).collect();
        assert_eq!(STANDARD.decode(all).unwrap(), large.rgba);

        #[cfg(feature = "sixel")]
        {
            let mut out = Vec::new();
            Protocol::Sixel.show(&mut out, &small, false).unwrap();
            assert!(out.starts_with(b"\x1bP"));
        }
    }
}
