//! What is given up when memory runs out, and in which order.

use std::fmt::Display;

use crate::error::{Error, FailureKind};

/// Whoever runs graphs and holds memory that it could do without. What it does not hold it need not say.
///
/// Each function gives back what it speaks of and says whether there was any.
pub trait Relief {
    /// Plans that do not run now; they are built again when needed.
    fn release_plans(&mut self) -> bool {
        false
    }

    /// Weights that are not needed now and can be loaded again.
    fn evict_weights(&mut self) -> bool {
        false
    }

    /// What only saves time, [caches](crate::RunnerCache) of runs above all. From then on it is done without.
    fn drop_caches(&mut self) -> bool {
        false
    }
}

/// An error that tells memory that ran out from everything else.
pub trait Failure {
    /// What kind of failure it is.
    fn failure(&self) -> FailureKind;
}

impl Failure for Error {
    fn failure(&self) -> FailureKind {
        Error::failure(self)
    }
}

/// Does `work`. If memory runs out, gives up idle plans, then weights that can be loaded again, then caches, and does it once
/// more. If that runs out too, all is given up again, so that nothing of the attempt is held.
///
/// Other failures are not tried again: after them a device is not to be trusted. Neither is anything if there was nothing
/// to give up, so that ladders may stand within one another.
///
/// # Errors
/// The failure of `work`.
pub fn with_relief<R: Relief + ?Sized, T, E: Failure + Display>(
    holder: &mut R,
    mut work: impl FnMut(&mut R) -> Result<T, E>,
) -> Result<T, E> {
    let is_allocation = |error: &E| matches!(error.failure(), FailureKind::Allocation(_));
    match work(holder) {
        Err(error) if is_allocation(&error) => {
            let given_up = give_up(holder);
            if given_up.is_empty() {
                return Err(error);
            }
            tracing::warn!(
                "{error}; giving up {} and trying once more",
                given_up.join(", ")
            );
            let outcome = work(holder);
            if outcome.as_ref().is_err_and(is_allocation) {
                give_up(holder);
            }
            outcome
        }
        outcome => outcome,
    }
}

/// Gives up everything, what is had again soonest first, and says what there was.
fn give_up<R: Relief + ?Sized>(holder: &mut R) -> Vec<&'static str> {
    let rungs = [
        (holder.release_plans(), "idle plans"),
        (holder.evict_weights(), "idle weights"),
        (holder.drop_caches(), "caches"),
    ];
    let given_up = rungs.into_iter().filter(|(was_held, _)| *was_held);
    given_up.map(|(_, what)| what).collect()
}

#[cfg(test)]
mod tests {
    use sd_backend::{Device, Ledger};

    use super::*;

    /// Holds plans, weights and caches, a byte each, and writes down what it is told.
    struct Holder {
        held: [bool; 3],
        told: Vec<usize>,
        tries: usize,
    }

    impl Holder {
        fn give_up(&mut self, what: usize) -> bool {
            self.told.push(what);
            std::mem::take(&mut self.held[what])
        }
    }

    impl Relief for Holder {
        fn release_plans(&mut self) -> bool {
            self.give_up(0)
        }

        fn evict_weights(&mut self) -> bool {
            self.give_up(1)
        }

        fn drop_caches(&mut self) -> bool {
            self.give_up(2)
        }
    }

    fn out_of_memory() -> Error {
        Ledger::default().refused(Device::cpu().unwrap(), 1).into()
    }

    /// Work that takes memory for plans and caches again, and succeeds at the `nth` try.
    fn run(holder: &mut Holder, nth: usize, error: fn() -> Error) -> Result<usize, Error> {
        with_relief(holder, |holder| {
            holder.tries += 1;
            if holder.tries == nth {
                return Ok(nth);
            }
            holder.held = [true, holder.held[1], holder.held[2]];
            Err(error())
        })
    }

    #[test]
    fn everything_is_given_up_in_order_before_the_only_retry() {
        let holder = |held| Holder {
            held,
            told: Vec::new(),
            tries: 0,
        };
        let mut one = holder([true; 3]);
        assert_eq!(run(&mut one, 2, out_of_memory).unwrap(), 2);
        assert_eq!((one.told, one.held), (vec![0, 1, 2], [false; 3]));

        let mut two = holder([false, false, true]);
        assert!(
            run(&mut two, 3, out_of_memory)
                .unwrap_err()
                .is_out_of_memory()
        );
        assert_eq!((two.tries, two.held), (2, [false; 3]));
        assert_eq!(two.told, [0, 1, 2, 0, 1, 2]);

        // Nothing else is tried again, and nothing is given up for it.
        let other = || Error::NotAttached;
        let mut three = holder([true; 3]);
        assert!(run(&mut three, 2, other).is_err());
        assert_eq!((three.tries, three.told.len()), (1, 0));
    }

    #[test]
    fn ladders_within_one_another_try_again_once_in_all() {
        let mut outer = Holder {
            held: [true; 3],
            told: Vec::new(),
            tries: 0,
        };
        let outcome: Result<(), Error> = with_relief(&mut outer, |holder| {
            with_relief(holder, |holder| {
                holder.tries += 1;
                holder.held[0] = true;
                Err(out_of_memory())
            })
        });
        assert!(outcome.is_err());
        assert_eq!((outer.tries, outer.held), (2, [false; 3]));
    }
}
