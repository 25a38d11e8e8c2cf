//! Leaving out calls of the model whose answer would hardly differ from the last one.
//!
//! The rule is that of Zhou and others, Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive
//! Caching (EasyCache, 2025): how fast an answer changes with its input changes little from step to step, so the change of
//! the next answer is estimated from that of its input. Estimates are summed over the calls that are left out; a call is made
//! when the sum would reach the threshold.

use crate::error::{Error, Result};

/// Calls at the beginning that are always made: as a part of all, and at least so many. Two tell how fast answers change.
const FIRST: (f64, usize) = (0.15, 2);

/// Calls at the end that are always made.
const LAST: (f64, usize) = (0.05, 1);

/// What is remembered of the conditions of a picture.
#[derive(Debug, Clone)]
pub(crate) struct StepCache {
    threshold: f64,
    /// The calls that may be left out.
    open: std::ops::Range<usize>,
    call: usize,
    /// One for each condition: they change at their own pace.
    memories: Vec<Memory>,
}

/// What is remembered of one condition.
#[derive(Debug, Clone, Default)]
struct Memory {
    /// What the last call was given and what it answered, if there was one.
    last: Option<(Vec<f32>, Vec<f32>)>,
    /// By how much answers changed for a change of the input, in the last two calls that were made.
    rate: Option<f64>,
    /// The estimated change, as a part of the last answer, since it.
    drift: f64,
    /// The input of the last call, whether it was made or not.
    seen: Vec<f32>,
}

impl StepCache {
    /// For a run of `calls` calls under so many `conditions`.
    pub(crate) fn new(threshold: f32, calls: usize, conditions: usize) -> StepCache {
        let part = |(part, least): (f64, usize)| ((calls as f64 * part).ceil() as usize).max(least);
        StepCache {
            threshold: threshold.into(),
            open: part(FIRST)..calls.saturating_sub(part(LAST)),
            call: 0,
            memories: vec![Memory::default(); conditions],
        }
    }

    /// Refuses thresholds that mean nothing.
    pub(crate) fn check(threshold: f32) -> Result<()> {
        if threshold.is_finite() && threshold >= 0.0 {
            Ok(())
        } else {
            Err(Error::StepCache(threshold))
        }
    }

    /// The answers of all conditions to `input` without asking, if all of them would hardly change.
    pub(crate) fn guess(&mut self, input: &[f32]) -> Option<Vec<Vec<f32>>> {
        let is_open = self.open.contains(&self.call);
        self.call += 1;
        if self.threshold == 0.0 {
            return None;
        }
        for memory in &mut self.memories {
            memory.look(input);
        }
        let is_near = |memory: &Memory| memory.drift < self.threshold && memory.rate.is_some();
        if !(is_open && self.memories.iter().all(is_near)) {
            return None;
        }
        let answers = self.memories.iter().map(|memory| {
            let (_, answer) = memory.last.as_ref()?;
            Some(answer.clone())
        });
        answers.collect()
    }

    /// Takes what the conditions answered to `input`, one after the other.
    pub(crate) fn learn(&mut self, input: &[f32], answers: &[Vec<f32>]) {
        if self.threshold == 0.0 {
            return;
        }
        for (memory, answer) in self.memories.iter_mut().zip(answers) {
            memory.learn(input, answer);
        }
    }
}

impl Memory {
    /// Adds what the answer is estimated to change by, now that the input is this.
    fn look(&mut self, input: &[f32]) {
        if let (Some((_, answer)), Some(rate)) = (&self.last, self.rate) {
            self.drift += rate * difference(input, &self.seen) / size(answer);
        }
        self.seen.clear();
        self.seen.extend_from_slice(input);
    }

    fn learn(&mut self, input: &[f32], answer: &[f32]) {
        if let Some((before, answered)) = &self.last {
            let moved = difference(input, before);
            // An input that did not move says nothing about how fast answers do.
            if moved > 0.0 {
                self.rate = Some(difference(answer, answered) / moved);
            }
        }
        self.last = Some((input.to_vec(), answer.to_vec()));
        self.drift = 0.0;
    }
}

/// The sum of absolute differences.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let pairs = a.iter().zip(b);
    pairs.map(|(a, b)| f64::from((a - b).abs())).sum()
}

/// The sum of absolute values; never 0, so that parts of it are numbers.
fn size(a: &[f32]) -> f64 {
    let sum: f64 = a.iter().map(|a| f64::from(a.abs())).sum();
    sum.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of `calls` calls are left out where the condition `index` answers `answer(index, call)` to an input that moves
    /// by 1 each time.
    fn left_out(
        threshold: f32,
        calls: usize,
        conditions: usize,
        answer: impl Fn(usize, usize) -> f32,
    ) -> Vec<usize> {
        let mut cache = StepCache::new(threshold, calls, conditions);
        let is_left_out = |&call: &usize| {
            let input = [call as f32, 0.0];
            let guessed = cache.guess(&input);
            if guessed.is_none() {
                let answers: Vec<Vec<f32>> = (0..conditions)
                    .map(|index| vec![answer(index, call)])
                    .collect();
                cache.learn(&input, &answers);
            }
            guessed.is_some()
        };
        (0..calls).filter(is_left_out).collect()
    }

    #[test]
    fn first_and_last_calls_are_made() {
        let constant = |_: usize, _: usize| 5.0;
        for (calls, open) in [(20, 3..19), (100, 15..95), (5, 2..4), (3, 2..2), (1, 2..2)] {
            let found = left_out(1e-3, calls, 1, constant);
            assert_eq!(found, open.collect::<Vec<_>>(), "{calls}");
        }
        assert!(left_out(0.0, 20, 1, constant).is_empty());
    }

    #[test]
    fn calls_are_left_out_until_the_sum_reaches_the_threshold() {
        // Answers of 100 that change by 1 a call: a hundredth each.
        let slow = |_: usize, call: usize| 100.0 + call as f32;
        assert_eq!(left_out(0.025, 12, 1, slow), [2, 3, 5, 6, 8, 9]);
        assert!(left_out(0.005, 12, 1, slow).is_empty());
    }

    #[test]
    fn a_condition_that_changes_keeps_the_others_company() {
        // What alternates: by 2 of 1 a call. Neither condition learns of the other.
        let mixed = |index: usize, call: usize| match index {
            0 => 5.0,
            _ => 1.0 - 2.0 * (call % 2) as f32,
        };
        let alone = |_: usize, call: usize| mixed(0, call);
        assert_eq!(left_out(0.5, 20, 1, alone).len(), 16);
        assert!(left_out(0.5, 20, 2, mixed).is_empty());
        let swapped = |index: usize, call: usize| mixed(1 - index, call);
        assert!(left_out(0.5, 20, 2, swapped).is_empty());
    }
}
