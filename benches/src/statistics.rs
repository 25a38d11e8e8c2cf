//! Small things, measured often: criterion decides how often, and what it found becomes cases.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use criterion::Criterion;
use serde_json::Value;

use crate::results::{Case, Seconds};

/// Runs `measure` with a criterion, and returns a case of `group` for each function that it measured, by name.
///
/// # Errors
/// Where criterion's files cannot be written or read.
pub fn cases(
    group: &str,
    is_quick: bool,
    measure: impl FnOnce(&mut Criterion),
) -> Result<Vec<Case>> {
    let folder = tempfile::tempdir()?;
    let mut criterion = Criterion::default()
        .output_directory(folder.path())
        .without_plots();
    if is_quick {
        criterion = criterion
            .sample_size(10)
            .warm_up_time(Duration::from_millis(100))
            .measurement_time(Duration::from_millis(300));
    }
    measure(&mut criterion);
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(folder.path())? {
        let found = entry?.path().join("new");
        if found.is_dir() {
            cases.push(case(group, &found)?);
        }
    }
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(cases)
}

/// What criterion left in a folder: a median in nanoseconds, and times of so many iterations each.
fn case(group: &str, folder: &Path) -> Result<Case> {
    let read = |name: &str| -> Result<Value> {
        let text = std::fs::read_to_string(folder.join(name)).with_context(|| name.to_owned())?;
        Ok(serde_json::from_str(&text)?)
    };
    let name = read("benchmark.json")?;
    let name = name["full_id"].as_str().context("full_id")?.to_owned();
    let median = read("estimates.json")?;
    let median = median["median"]["point_estimate"]
        .as_f64()
        .context("median")?;
    let sample = read("sample.json")?;
    let of = |key: &str| -> Result<Vec<f64>> { Ok(serde_json::from_value(sample[key].clone())?) };
    let each: Vec<f64> = of("times")?
        .iter()
        .zip(of("iters")?)
        .map(|(time, count)| time / count / 1e9)
        .collect();
    let mut seconds = Seconds::of(&each).context("no sample")?;
    seconds.median = median / 1e9;
    Ok(Case::new(group, name, seconds))
}
