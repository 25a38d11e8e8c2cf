//! How much memory a caller grants, as values and as text.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::device::Device;
use crate::error::Error;

/// What may be used of one device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryBudget {
    /// What is free, less some head-room for the driver.
    #[default]
    Automatic,
    /// This many bytes in all, as long as they are free.
    Bytes(u64),
    /// What is free, less this many bytes.
    FreeMinus(u64),
}

/// Budgets by device: what front ends pass on.
///
/// As text: one budget for every device (`8GiB`, `auto`, `free-2GiB`), or budgets by device name in any case
/// (`cuda0=8GiB,cpu=free-4GiB`); devices that are not named are automatic.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryBudgets {
    every: MemoryBudget,
    /// By lower-case name.
    named: BTreeMap<String, MemoryBudget>,
}

impl MemoryBudgets {
    /// The same budget for every device.
    pub fn every(budget: MemoryBudget) -> MemoryBudgets {
        MemoryBudgets {
            every: budget,
            named: BTreeMap::new(),
        }
    }

    /// Sets the budget of the device called `name`.
    #[must_use]
    pub fn with(mut self, name: &str, budget: MemoryBudget) -> MemoryBudgets {
        self.named.insert(name.to_lowercase(), budget);
        self
    }

    /// The budget of `device`.
    pub fn of(&self, device: Device) -> MemoryBudget {
        self.of_name(&device.name())
    }

    fn of_name(&self, name: &str) -> MemoryBudget {
        self.named
            .get(&name.to_lowercase())
            .copied()
            .unwrap_or(self.every)
    }
}

impl FromStr for MemoryBudgets {
    type Err = Error;

    fn from_str(text: &str) -> Result<MemoryBudgets, Error> {
        if !text.contains('=') {
            return text.parse().map(MemoryBudgets::every);
        }
        let mut budgets = MemoryBudgets::default();
        for entry in text.split(',') {
            let Some((name, budget)) = entry.split_once('=') else {
                return Err(wrong(
                    entry,
                    "a list of budgets has the form cuda0=8GiB,cpu=4GiB",
                ));
            };
            let name = name.trim().to_lowercase();
            if name.is_empty() {
                return Err(wrong(entry, "the name of a device is missing"));
            }
            if budgets.named.insert(name, budget.trim().parse()?).is_some() {
                return Err(wrong(entry, "the device has two budgets"));
            }
        }
        Ok(budgets)
    }
}

impl FromStr for MemoryBudget {
    type Err = Error;

    fn from_str(text: &str) -> Result<MemoryBudget, Error> {
        let lower = text.trim().to_lowercase();
        match lower.strip_prefix("free-") {
            Some(less) => bytes(text, less).map(MemoryBudget::FreeMinus),
            None if lower == "auto" => Ok(MemoryBudget::Automatic),
            None => bytes(text, &lower).map(MemoryBudget::Bytes),
        }
    }
}

/// `8gib`, `512mib`, `1.5gb`, `1000000`; `whole` is the text that an error shows.
fn bytes(whole: &str, lower: &str) -> Result<u64, Error> {
    const UNITS: &[(&str, u64)] = &[
        ("kib", 1 << 10),
        ("mib", 1 << 20),
        ("gib", 1 << 30),
        ("tib", 1 << 40),
        ("kb", 1_000),
        ("mb", 1_000_000),
        ("gb", 1_000_000_000),
        ("tb", 1_000_000_000_000),
        ("b", 1),
    ];
    let lower = lower.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|&(suffix, unit)| lower.strip_suffix(suffix).map(|number| (number, unit)))
        .unwrap_or((lower, 1));
    let number = number.trim();
    let whole_number = number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    let fraction = || {
        let value = number.parse::<f64>().ok()? * unit as f64;
        (value.is_finite() && (0.0..u64::MAX as f64).contains(&value)).then_some(value as u64)
    };
    match whole_number.or_else(fraction) {
        Some(0) => Err(wrong(whole, "nothing runs in no memory")),
        Some(bytes) => Ok(bytes),
        None => Err(wrong(
            whole,
            "expected a number of bytes such as 8GiB, `auto`, or `free-2GiB`",
        )),
    }
}

fn wrong(text: &str, reason: &'static str) -> Error {
    Error::Budget {
        text: text.trim().to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_write_budgets_in_many_ways() {
        for (text, budget) in [
            ("auto", MemoryBudget::Automatic),
            ("8GiB", MemoryBudget::Bytes(8 << 30)),
            (" 1.5 gib ", MemoryBudget::Bytes(3 << 29)),
            ("2GB", MemoryBudget::Bytes(2_000_000_000)),
            ("1000", MemoryBudget::Bytes(1000)),
            ("12b", MemoryBudget::Bytes(12)),
            ("free-512MiB", MemoryBudget::FreeMinus(512 << 20)),
        ] {
            assert_eq!(text.parse(), Ok(budget), "{text}");
        }
        for text in [
            "", "lots", "-3GiB", "8 apples", "0", "1e30", "nan", "inf", "free-", "free", "8GiBB",
        ] {
            assert!(text.parse::<MemoryBudget>().is_err(), "{text}");
        }
    }

    #[test]
    fn devices_have_budgets_of_their_own() {
        let budgets: MemoryBudgets = "CUDA0=8GiB, cpu=auto".parse().unwrap();
        assert_eq!(budgets.of_name("CUDA0"), MemoryBudget::Bytes(8 << 30));
        assert_eq!(budgets.of_name("Vulkan0"), MemoryBudget::Automatic);
        let budgets: MemoryBudgets = "1GiB".parse().unwrap();
        assert_eq!(budgets.of_name("anything"), MemoryBudget::Bytes(1 << 30));
        for text in ["cuda0=8GiB,", "=8GiB", "a=1,a=2", "a=b", "a=1,2"] {
            assert!(text.parse::<MemoryBudgets>().is_err(), "{text}");
        }
    }
}
