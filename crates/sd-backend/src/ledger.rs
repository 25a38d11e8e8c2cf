//! Who holds how much of which device, and what may still be taken.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::budget::{MemoryBudget, MemoryBudgets};
use crate::device::{Device, DeviceKind, Memory};
use crate::error::{Bytes, Error, Result};

/// What memory is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Parameters.
    Weights,
    /// What is kept between runs to save work.
    Cache,
    /// What graphs compute in, inputs and constants included.
    Compute,
    /// Buffers that data passes through.
    Staging,
    /// Files mapped into a device's memory.
    Mapping,
}

/// Bytes held on one device, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    bytes: [u64; 5],
}

/// A device's memory as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryReport {
    /// What the device says, if it says something that can be.
    pub memory: Option<Memory>,
    /// What was granted.
    pub budget: MemoryBudget,
    /// What is held through this ledger.
    pub used: Usage,
    /// What may still be reserved; `None` if nothing is known and nothing was granted in numbers.
    pub available: Option<u64>,
}

/// Keeps what was granted: every allocation asks it first. Clones share one account, which a caller owns; models that
/// should share a device's memory are given the same one.
#[derive(Debug, Clone)]
pub struct Ledger(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    budgets: MemoryBudgets,
    headroom: u64,
    accounts: Mutex<Accounts>,
}

#[derive(Debug, Default)]
struct Accounts {
    used: HashMap<Device, Usage>,
    /// By number: who watches which device, and the most that was held meanwhile.
    watches: HashMap<u64, (Device, Usage)>,
    next_watch: u64,
}

/// Remembers the most that is held on one device, by kind, from [`Ledger::watch`] until it is dropped.
#[derive(Debug)]
pub struct Watch {
    ledger: Ledger,
    number: u64,
}

/// Memory that was granted; given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    ledger: Ledger,
    device: Device,
    kind: MemoryKind,
    bytes: u64,
}

/// What drivers of graphics cards allocate for themselves while computing, and abort without: pools, pipelines, contexts.
const HEADROOM: u64 = 512 << 20;

impl Default for Ledger {
    fn default() -> Self {
        Ledger::new(MemoryBudgets::default())
    }
}

impl Ledger {
    /// An empty account with these budgets.
    pub fn new(budgets: MemoryBudgets) -> Ledger {
        Ledger::with_headroom(budgets, HEADROOM)
    }

    /// An empty account that always leaves `headroom` bytes of each graphics card's memory free, whatever was granted;
    /// [`Ledger::default`] leaves 512 MiB.
    pub fn with_headroom(budgets: MemoryBudgets, headroom: u64) -> Ledger {
        Ledger(Arc::new(Inner {
            budgets,
            headroom,
            accounts: Mutex::default(),
        }))
    }

    /// Takes `bytes` of `device` into account. What is free is read anew.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the budget or the device has less left; the figures are logged too.
    pub fn reserve(&self, device: Device, bytes: u64, kind: MemoryKind) -> Result<Reservation> {
        let mut accounts = self.lock();
        let account = accounts.used.entry(device).or_default();
        let report = self.report_of(device, *account);
        if report.available.is_some_and(|available| bytes > available) {
            let error = self.error(bytes, device, &report);
            tracing::warn!("{error}");
            return Err(error);
        }
        account.bytes[kind as usize] += bytes;
        let held = *account;
        for (watched, most) in accounts.watches.values_mut() {
            if *watched == device {
                *most = most.most(&held);
            }
        }
        Ok(Reservation {
            ledger: self.clone(),
            device,
            kind,
            bytes,
        })
    }

    /// Whether `other` is the same account.
    pub fn is_same(&self, other: &Ledger) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The error of an allocation of `bytes` that a driver refused although it had been granted:
    /// [`Error::OutOfMemory`], or [`Error::DeviceLost`] where that is the reason.
    pub fn refused(&self, device: Device, bytes: u64) -> Error {
        if let Err(lost) = device.check_connection() {
            return lost;
        }
        self.error(bytes, device, &self.report(device))
    }

    /// Remembers the most that is held on `device` from now on.
    pub fn watch(&self, device: Device) -> Watch {
        let mut accounts = self.lock();
        let number = accounts.next_watch;
        accounts.next_watch += 1;
        let held = accounts.used.get(&device).copied().unwrap_or_default();
        accounts.watches.insert(number, (device, held));
        Watch {
            ledger: self.clone(),
            number,
        }
    }

    /// A device's figures now.
    pub fn report(&self, device: Device) -> MemoryReport {
        let used = self.lock().used.get(&device).copied().unwrap_or_default();
        self.report_of(device, used)
    }

    fn report_of(&self, device: Device, used: Usage) -> MemoryReport {
        // No more can be free than what is there less what we hold, whatever a device says.
        let memory = device.memory().map(|memory| Memory {
            free: memory.free.min(memory.total.saturating_sub(used.total())),
            total: memory.total,
        });
        let budget = self.0.budgets.of(device);
        let headroom = match device.kind() {
            DeviceKind::Gpu | DeviceKind::IntegratedGpu => self.0.headroom,
            _ => 0,
        };
        MemoryReport {
            memory,
            budget,
            used,
            available: available(
                memory.map(|memory| memory.free),
                budget,
                used.total(),
                headroom,
            ),
        }
    }

    fn error(&self, requested: u64, device: Device, report: &MemoryReport) -> Error {
        Error::OutOfMemory {
            device: device.name(),
            requested,
            free: report.memory.map(|memory| memory.free),
            total: report.memory.map(|memory| memory.total),
            budget: match report.budget {
                MemoryBudget::Bytes(bytes) => Some(bytes),
                _ => None,
            },
            used: Box::new(report.used),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Accounts> {
        // Counters are right after every statement that changes them, so a panic elsewhere does no harm.
        self.0
            .accounts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that may still be taken: the least of what was granted and what is there less the head-room.
fn available(free: Option<u64>, budget: MemoryBudget, used: u64, headroom: u64) -> Option<u64> {
    let spare = match budget {
        MemoryBudget::FreeMinus(less) => less.max(headroom),
        _ => headroom,
    };
    let there = free.map(|free| free.saturating_sub(spare));
    match budget {
        MemoryBudget::Automatic | MemoryBudget::FreeMinus(_) => there,
        MemoryBudget::Bytes(bytes) => {
            let granted = bytes.saturating_sub(used);
            Some(there.map_or(granted, |there| there.min(granted)))
        }
    }
}

impl Usage {
    /// Bytes of one kind.
    pub fn of(&self, kind: MemoryKind) -> u64 {
        self.bytes[kind as usize]
    }

    /// Bytes of all kinds.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// The larger of both for each kind.
    pub fn most(&self, other: &Usage) -> Usage {
        let mut most = *self;
        for (bytes, other) in most.bytes.iter_mut().zip(other.bytes) {
            *bytes = other.max(*bytes);
        }
        most
    }
}

impl Watch {
    /// The most that was held so far, for each kind by itself: kinds may have had their most at different times.
    pub fn most(&self) -> Usage {
        let accounts = self.ledger.lock();
        let watched = accounts.watches.get(&self.number);
        watched.map(|(_, most)| *most).unwrap_or_default()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ledger.lock().watches.remove(&self.number);
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 5] = ["weights", "cache", "compute", "staging", "mapping"];
        let mut held = NAMES.iter().zip(self.bytes).filter(|&(_, bytes)| bytes > 0);
        let Some((name, bytes)) = held.next() else {
            return f.write_str("nothing");
        };
        write!(f, "{name} {}", Bytes(bytes))?;
        held.try_for_each(|(name, bytes)| write!(f, ", {name} {}", Bytes(bytes)))
    }
}

impl Reservation {
    /// Bytes that are held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What they are held for.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(account) = self.ledger.lock().used.get_mut(&self.device) {
            let held = &mut account.bytes[self.kind as usize];
            *held = held.saturating_sub(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_the_least_of_grant_and_fact() {
        for (free, budget, used, left) in [
            (Some(100), MemoryBudget::Automatic, 50, Some(90)),
            (Some(5), MemoryBudget::Automatic, 50, Some(0)),
            (None, MemoryBudget::Automatic, 50, None),
            (Some(100), MemoryBudget::Bytes(80), 50, Some(30)),
            (Some(20), MemoryBudget::Bytes(80), 50, Some(10)),
            (None, MemoryBudget::Bytes(80), 90, Some(0)),
            (Some(100), MemoryBudget::FreeMinus(30), 50, Some(70)),
            (Some(10), MemoryBudget::FreeMinus(30), 50, Some(0)),
            (Some(100), MemoryBudget::FreeMinus(3), 50, Some(90)),
        ] {
            assert_eq!(
                available(free, budget, used, 10),
                left,
                "{free:?} {budget:?} {used}"
            );
        }
    }

    #[test]
    fn reservations_hold_until_they_are_dropped() {
        let cpu = Device::cpu().unwrap();
        let ledger = Ledger::new(MemoryBudgets::every(MemoryBudget::Bytes(1000)));
        let weights = ledger.reserve(cpu, 600, MemoryKind::Weights).unwrap();
        let compute = ledger.reserve(cpu, 400, MemoryKind::Compute).unwrap();
        assert_eq!(ledger.report(cpu).available, Some(0));
        let Err(Error::OutOfMemory {
            requested,
            budget,
            used,
            ..
        }) = ledger.reserve(cpu, 1, MemoryKind::Cache)
        else {
            panic!()
        };
        assert_eq!((requested, budget, used.total()), (1, Some(1000), 1000));
        assert_eq!(used.to_string(), "weights 600 B, compute 400 B");
        drop(weights);
        let report = ledger.report(cpu);
        assert_eq!(
            (report.used.of(MemoryKind::Compute), report.used.total()),
            (400, 400)
        );
        // A clone is the same account.
        let more = ledger.clone().reserve(cpu, 600, MemoryKind::Cache).unwrap();
        assert!(ledger.reserve(cpu, 1, MemoryKind::Cache).is_err());
        drop((compute, more));
        assert_eq!(ledger.report(cpu).used.total(), 0);
    }

    #[test]
    fn a_watch_keeps_the_most_of_each_kind() {
        let cpu = Device::cpu().unwrap();
        let ledger = Ledger::default();
        let held = ledger.reserve(cpu, 10, MemoryKind::Weights).unwrap();
        let watch = ledger.watch(cpu);
        drop(held);
        let held = ledger.reserve(cpu, 20, MemoryKind::Staging).unwrap();
        drop(held);
        drop(ledger.reserve(cpu, 5, MemoryKind::Staging).unwrap());
        let most = watch.most();
        assert_eq!(most.of(MemoryKind::Weights), 10);
        assert_eq!(most.of(MemoryKind::Staging), 20);
        assert_eq!(ledger.watch(cpu).most().total(), 0);
    }

    #[test]
    fn two_threads_share_one_account() {
        let cpu = Device::cpu().unwrap();
        let ledger = Ledger::new(MemoryBudgets::every(MemoryBudget::Bytes(1000)));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let held = ledger.reserve(cpu, 500, MemoryKind::Compute).unwrap();
                        assert!(ledger.report(cpu).used.total() <= 1000);
                        drop(held);
                    }
                });
            }
        });
        assert_eq!(ledger.report(cpu).used.total(), 0);
    }
}
