//! Keys and values of text and reference pictures, which do not change from step to step.
//!
//! The prefix is modulated as at timestep 0 and sees nothing of the target, so all that the target takes from it are its
//! keys and values in each block. The first call of a condition stores them, later calls read them and compute the
//! target's tokens alone.

use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_backend::{DType, Device};
use sd_graph::RunnerCache;

use crate::error::Error;
use crate::rope::Circular;

/// Whether keys and values of the prefix are kept between steps, and in which type.
///
/// In F32 the numbers are those that would be computed again; velocities differ by no more than the rounding of products
/// of other sizes. F16 and Q8_0 take a half and a little more than a quarter of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefixCache {
    /// They are computed at every step.
    Off,
    /// As they are.
    #[default]
    F32,
    /// Rounded to 11 bits.
    F16,
    /// Rounded to 8 bits in blocks of 32.
    Q8_0,
}

impl PrefixCache {
    /// The element type, if they are kept.
    pub fn dtype(self) -> Option<DType> {
        match self {
            PrefixCache::Off => None,
            PrefixCache::F32 => Some(DType::F32),
            PrefixCache::F16 => Some(DType::F16),
            PrefixCache::Q8_0 => Some(DType::Q8_0),
        }
    }
}

/// Options of single models by name, as `KEY=VALUE` with commas between them: `qwen_image_2_1_prefix_cache` (`true` or
/// `false`) and `qwen_image_2_1_prefix_cache_type` (`f32`, `f16` or `q8_0`). What is not named stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ModelArgs {
    is_cached: Option<bool>,
    dtype: Option<PrefixCache>,
}

const CACHE: &str = "qwen_image_2_1_prefix_cache";
const CACHE_TYPE: &str = "qwen_image_2_1_prefix_cache_type";

impl ModelArgs {
    /// These, and where they say nothing `other`.
    pub fn or(self, other: ModelArgs) -> ModelArgs {
        ModelArgs {
            is_cached: self.is_cached.or(other.is_cached),
            dtype: self.dtype.or(other.dtype),
        }
    }

    /// Whether the prefix is cached, and in which type.
    pub fn prefix_cache(self) -> PrefixCache {
        match self.is_cached {
            Some(false) => PrefixCache::Off,
            _ => self.dtype.unwrap_or_default(),
        }
    }
}

impl FromStr for ModelArgs {
    type Err = Error;

    /// # Errors
    /// [`Error::ModelArgs`] for a key that is not known or a value that it cannot have; it lists what is possible.
    fn from_str(text: &str) -> Result<ModelArgs, Error> {
        let wrong = |part: &str| Error::ModelArgs(part.to_owned());
        let mut args = ModelArgs::default();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| wrong(part))?;
            match (key.trim(), value.trim()) {
                (CACHE, "true") => args.is_cached = Some(true),
                (CACHE, "false") => args.is_cached = Some(false),
                (CACHE_TYPE, "f32") => args.dtype = Some(PrefixCache::F32),
                (CACHE_TYPE, "f16") => args.dtype = Some(PrefixCache::F16),
                (CACHE_TYPE, "q8_0") => args.dtype = Some(PrefixCache::Q8_0),
                _ => return Err(wrong(part)),
            }
        }
        Ok(args)
    }
}

/// What a forward pass does about keys and values of the prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefix {
    /// They are computed and forgotten.
    Compute,
    /// They are computed, and stored in the cache of the run in this type.
    Store(DType),
    /// They are read from the cache of the run, in this type; only the target's tokens are computed.
    Read(DType),
}

/// Names of what a block stores: its keys after turning, and its values, `[prefix, heads, channels]` each.
pub(crate) fn names(block: usize) -> [String; 2] {
    [
        format!("block {block}.keys"),
        format!("block {block}.values"),
    ]
}

/// What tells one model from another that computes other keys, by identity: never used again while somebody holds it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ModelIdentity(Arc<()>);

impl PartialEq for ModelIdentity {
    fn eq(&self, other: &ModelIdentity) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Everything that keys and values depend on beside the condition itself.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PrefixKey {
    pub model: ModelIdentity,
    pub device: Device,
    /// Joined sides turn the keys of pictures at other frequencies.
    pub circular: Circular,
    pub dtype: DType,
}

/// The caches of one condition. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Prefixes(Arc<Mutex<Vec<(PrefixKey, RunnerCache)>>>);

impl PartialEq for Prefixes {
    /// What is kept to save time does not tell conditions apart.
    fn eq(&self, _: &Prefixes) -> bool {
        true
    }
}

impl Prefixes {
    fn lock(&self) -> MutexGuard<'_, Vec<(PrefixKey, RunnerCache)>> {
        // The list is whole after every statement that changes it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cache for `key`, a new one if there is none. Whoever holds the result keeps it, whatever is released meanwhile.
    pub(crate) fn cache(&self, key: &PrefixKey) -> RunnerCache {
        let mut caches = self.lock();
        if let Some((_, cache)) = caches.iter().find(|(known, _)| known == key) {
            return cache.clone();
        }
        let cache = RunnerCache::new();
        caches.push((key.clone(), cache.clone()));
        cache
    }

    /// Gives up the caches of `model`, or all, and says whether they held anything.
    pub(crate) fn release(&self, model: Option<&ModelIdentity>) -> bool {
        let is_meant =
            |(key, _): &(PrefixKey, RunnerCache)| model.is_none_or(|model| key.model == *model);
        let mut caches = self.lock();
        let (released, kept): (Vec<_>, Vec<_>) = caches.drain(..).partition(is_meant);
        *caches = kept;
        drop(caches);
        // Freed without the lock.
        released.iter().any(|(_, cache)| !cache.is_empty())
    }

    /// Bytes of `device` that they hold.
    pub(crate) fn bytes(&self, device: Device) -> u64 {
        let caches = self.lock();
        caches
            .iter()
            .map(|(_, cache)| cache.resident_bytes(device))
            .sum()
    }

    /// A handle that keeps nothing.
    pub(crate) fn downgrade(&self) -> WeakPrefixes {
        WeakPrefixes(Arc::downgrade(&self.0))
    }
}

/// The caches of a condition that may be gone.
#[derive(Debug, Clone)]
pub(crate) struct WeakPrefixes(std::sync::Weak<Mutex<Vec<(PrefixKey, RunnerCache)>>>);

impl WeakPrefixes {
    pub(crate) fn upgrade(&self) -> Option<Prefixes> {
        self.0.upgrade().map(Prefixes)
    }

    pub(crate) fn is_of(&self, prefixes: &Prefixes) -> bool {
        // The allocation behind a weak handle is not used again while the handle lives.
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&prefixes.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_strictly() {
        let read = |text: &str| text.parse::<ModelArgs>().map(ModelArgs::prefix_cache);
        for (text, wanted) in [
            ("qwen_image_2_1_prefix_cache=true", PrefixCache::F32),
            ("qwen_image_2_1_prefix_cache=false", PrefixCache::Off),
            ("qwen_image_2_1_prefix_cache_type=f16", PrefixCache::F16),
            (
                "qwen_image_2_1_prefix_cache=true, qwen_image_2_1_prefix_cache_type=q8_0",
                PrefixCache::Q8_0,
            ),
            (
                "qwen_image_2_1_prefix_cache_type=q8_0,qwen_image_2_1_prefix_cache=false",
                PrefixCache::Off,
            ),
        ] {
            assert_eq!(read(text).unwrap(), wanted, "{text}");
        }
        for text in [
            "",
            "qwen_image_2_1_prefix_cache",
            "qwen_image_2_1_prefix_cache=1",
            "qwen_image_2_1_prefix_cache=True",
            "qwen_image_2_1_prefix_cache_type=q4_0",
            "qwen_image_prefix_cache=true",
            "qwen_image_2_1_prefix_cache=true,",
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(
                error.contains(CACHE) && error.contains(CACHE_TYPE),
                "{error}"
            );
        }
        let both = |one: &str, other: &str| {
            let one: ModelArgs = one.parse().unwrap();
            one.or(other.parse().unwrap()).prefix_cache()
        };
        assert_eq!(
            both(
                "qwen_image_2_1_prefix_cache=true",
                "qwen_image_2_1_prefix_cache_type=f16"
            ),
            PrefixCache::F16
        );
    }
}
