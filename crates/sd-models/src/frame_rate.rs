//! Pictures a second.

use std::fmt;
use std::str::FromStr;

/// How many pictures a clip shows in a second: a fraction, such as 30000/1001.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameRate {
    numerator: u32,
    denominator: u32,
}

impl FrameRate {
    /// What a clip has where nothing says otherwise: 16, as WAN 2.1 makes them.
    pub const USUAL: FrameRate = FrameRate {
        numerator: 16,
        denominator: 1,
    };

    /// `numerator` pictures in `denominator` seconds, in lowest terms; none if one of them is 0.
    pub fn new(numerator: u32, denominator: u32) -> Option<FrameRate> {
        let mut rest = (numerator, denominator);
        while rest.1 > 0 {
            rest = (rest.1, rest.0 % rest.1);
        }
        (numerator > 0 && denominator > 0).then(|| FrameRate {
            numerator: numerator / rest.0,
            denominator: denominator / rest.0,
        })
    }

    /// Pictures, and in how many seconds.
    pub fn parts(self) -> (u32, u32) {
        (self.numerator, self.denominator)
    }

    /// Pictures in a second.
    pub fn per_second(self) -> f64 {
        f64::from(self.numerator) / f64::from(self.denominator)
    }

    /// Seconds from one picture to the next as a fraction of small numbers, as animated PNGs have it; to a thousandth of a
    /// second where it has none.
    pub(crate) fn delay(self) -> (u16, u16) {
        match (
            u16::try_from(self.denominator),
            u16::try_from(self.numerator),
        ) {
            (Ok(numerator), Ok(denominator)) => (numerator, denominator),
            _ => {
                let thousandths = f64::from(self.denominator) / f64::from(self.numerator) * 1e3;
                (thousandths.round().clamp(1.0, 65535.0) as u16, 1000)
            }
        }
    }
}

impl fmt::Display for FrameRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.denominator {
            1 => write!(f, "{}", self.numerator),
            denominator => write!(f, "{}/{denominator}", self.numerator),
        }
    }
}

impl FromStr for FrameRate {
    type Err = String;

    /// `24`, `30000/1001` or `23.976`.
    fn from_str(text: &str) -> Result<FrameRate, String> {
        let wrong =
            || format!("`{text}` is no number of pictures a second, such as 24 or 30000/1001");
        let whole = |text: &str| text.trim().parse::<u32>().ok();
        let rate = match (text.split_once('/'), text.split_once('.')) {
            (Some((numerator, denominator)), _) => whole(numerator).zip(whole(denominator)),
            (None, Some((before, after))) if after.len() <= 4 => {
                let scale = 10_u32.pow(after.len() as u32);
                let sum = |before: u32, after: u32| before.checked_mul(scale)?.checked_add(after);
                whole(before)
                    .zip(whole(after))
                    .and_then(|(before, after)| sum(before, after))
                    .map(|numerator| (numerator, scale))
            }
            (None, Some(_)) => None,
            (None, None) => whole(text).map(|numerator| (numerator, 1)),
        };
        rate.and_then(|(numerator, denominator)| FrameRate::new(numerator, denominator))
            .ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_fractions() {
        for (text, shown, delay) in [
            ("24", "24", (1, 24)),
            ("30000/1001", "30000/1001", (1001, 30000)),
            ("48/2", "24", (1, 24)),
            ("23.976", "2997/125", (125, 2997)),
            ("100000/3001", "100000/3001", (30, 1000)),
        ] {
            let rate: FrameRate = text.parse().unwrap();
            assert_eq!((rate.to_string().as_str(), rate.delay()), (shown, delay));
        }
        for text in [
            "",
            "0",
            "24/0",
            "-1",
            "1.23456",
            "many",
            "9999999999",
            "4294967295.9",
        ] {
            assert!(text.parse::<FrameRate>().is_err(), "{text}");
        }
    }
}
