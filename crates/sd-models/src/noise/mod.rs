//! Starting noise, the same for a seed as PyTorch makes on a processor or on a graphics card of NVIDIA.

mod mersenne;
mod philox;

pub use mersenne::normal;
pub use philox::philox;

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use crate::error::Error;

/// Whose random numbers a seed stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Rng {
    /// PyTorch's on a processor: Mersenne Twister. Only a seed's lower 32 bits matter.
    #[default]
    Cpu,
    /// PyTorch's on a graphics card of NVIDIA: Philox. All bits of a seed matter.
    ///
    /// PyTorch draws one number in each thread that the card runs at once, and comes back to the first thread for what
    /// remains. So pictures with more numbers than threads differ between cards: 262144 numbers (1024x1024 pixels with 64
    /// channels) are more than the 196608 threads of an RTX 4090 and less than the 270336 of an H100. The card's threads are
    /// its multiprocessors times the multiple of 256 threads that each runs at once.
    Cuda {
        /// Threads of the card whose numbers are wanted; as many as there are numbers if none, which is what other programs
        /// mean by the numbers of a graphics card.
        threads: Option<NonZeroU64>,
    },
}

impl Rng {
    /// `count` normally distributed numbers from `seed`.
    pub fn normal(self, seed: u64, count: usize) -> Vec<f32> {
        match self {
            Rng::Cpu => mersenne::normal(seed, count),
            Rng::Cuda { threads } => philox::normal(seed, count, threads),
        }
    }
}

impl fmt::Display for Rng {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rng::Cpu => write!(f, "cpu"),
            Rng::Cuda { threads: None } => write!(f, "cuda"),
            Rng::Cuda {
                threads: Some(threads),
            } => write!(f, "cuda:{threads}"),
        }
    }
}

impl FromStr for Rng {
    type Err = Error;

    /// `cpu`, `cuda`, or `cuda:THREADS`.
    ///
    /// # Errors
    /// [`Error::UnknownName`], with what is possible.
    fn from_str(text: &str) -> Result<Rng, Error> {
        let threads = |text: &str| text.parse().ok();
        match (text, text.strip_prefix("cuda:").and_then(threads)) {
            ("cpu", _) => Ok(Rng::Cpu),
            ("cuda", _) => Ok(Rng::Cuda { threads: None }),
            (_, Some(threads)) => Ok(Rng::Cuda {
                threads: Some(threads),
            }),
            _ => Err(Error::UnknownName {
                what: "generator of noise",
                name: text.to_owned(),
                known: vec!["cpu", "cuda", "cuda:THREADS"],
            }),
        }
    }
}
