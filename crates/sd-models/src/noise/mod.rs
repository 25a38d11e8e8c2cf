//! Starting noise, the same for a seed as PyTorch makes on a processor or on a graphics card of NVIDIA.

mod mersenne;
mod philox;

pub use mersenne::normal;
pub use philox::philox;

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use crate::error::Error;
use mersenne::Mersenne;
use philox::Philox;

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
        self.start(seed).normal(count)
    }

    /// A generator for several draws one after the other, as PyTorch's generators go on.
    pub fn start(self, seed: u64) -> Generator {
        Generator(match self {
            Rng::Cpu => State::Cpu(Box::new(Mersenne::new(seed))),
            Rng::Cuda { threads } => State::Cuda(Philox::new(seed, threads)),
        })
    }
}

/// A generator of noise that goes on where the last draw ended.
#[derive(Debug, Clone)]
pub struct Generator(State);

#[derive(Debug, Clone)]
enum State {
    Cpu(Box<Mersenne>),
    Cuda(Philox),
}

impl Generator {
    /// The next `count` normally distributed numbers, as PyTorch draws a tensor of so many.
    pub fn normal(&mut self, count: usize) -> Vec<f32> {
        match &mut self.0 {
            State::Cpu(mersenne) => mersenne.normal(count),
            State::Cuda(philox) => philox.normal(count),
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
