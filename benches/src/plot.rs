//! Results as drawings in SVG: the time of a call by tokens, and by the budget for weights.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use plotters::prelude::*;

use crate::results::Results;
use crate::table::peer;

/// A line of a drawing: its name, and points from left to right.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// Draws what of `results` can be drawn into `folder`, and returns the files: `NAME-step.svg` and `NAME-stream.svg`.
///
/// # Errors
/// Results without steps and without budgets; a folder that cannot be written to.
pub fn draw(results: &Results, name: &str, folder: &Path) -> Result<Vec<PathBuf>> {
    let title = format!("One call on {}", results.machine.description);
    let mut files = Vec::new();
    let by_tokens = by_tokens(results);
    if !by_tokens.is_empty() {
        let path = folder.join(format!("{name}-step.svg"));
        let corner = SeriesLabelPosition::UpperLeft;
        chart(
            &path,
            (&title, "tokens of the sequence", corner),
            &by_tokens,
        )?;
        files.push(path);
    }
    let by_budget = by_budget(results);
    if !by_budget.is_empty() {
        let path = folder.join(format!("{name}-stream.svg"));
        let corner = SeriesLabelPosition::UpperRight;
        chart(&path, (&title, "GiB of memory granted", corner), &by_budget)?;
        files.push(path);
    }
    ensure!(
        !files.is_empty(),
        "there are no results of the groups step, prefix or stream"
    );
    Ok(files)
}

/// A line for each type, one with the prefix kept for each size of the picture, and the same for each peer.
fn by_tokens(results: &Results) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut programs: Vec<&str> = results.peers.iter().map(|peer| &*peer.program).collect();
    programs.sort_unstable();
    programs.dedup();
    for case in &results.cases {
        let text = |key: &str| case.parameters.get(key).and_then(|value| value.as_str());
        let tokens = case.parameters.get("tokens").and_then(|n| n.as_f64());
        let (Some(tokens), Some(dtype), Some(prefix)) = (tokens, text("type"), text("prefix"))
        else {
            continue;
        };
        // Of what is kept nothing is computed: those of one picture size are a line.
        let size = case.parameters.get("size").and_then(|n| n.as_u64());
        let kept = match (prefix, size) {
            ("off", _) => String::new(),
            (_, Some(size)) => format!(", prefix kept, {size}"),
            (_, None) => ", prefix kept".to_owned(),
        };
        let point = (tokens, case.seconds.median);
        add(&mut lines, &format!("sd {dtype}{kept}"), point);
        for program in &programs {
            if let Some(seconds) = peer(results, program, case) {
                add(&mut lines, &format!("{program}{kept}"), (tokens, seconds));
            }
        }
    }
    sorted(lines)
}

/// A line for each place that weights come from; that all are on the device is the right end of each.
fn by_budget(results: &Results) -> Vec<Line> {
    let (mut lines, mut resident) = (Vec::new(), None);
    for case in results.cases.iter().filter(|case| case.group == "stream") {
        let budget = case.parameters.get("budget").and_then(|n| n.as_f64());
        let from = case.parameters.get("from").and_then(|from| from.as_str());
        let (Some(budget), Some(from)) = (budget, from) else {
            continue;
        };
        let point = (budget / f64::from(1 << 30), case.seconds.median);
        match from {
            "device" => resident = Some(point),
            _ => add(&mut lines, &format!("other weights on {from}"), point),
        }
    }
    for line in &mut lines {
        line.points.extend(resident);
    }
    sorted(lines)
}

/// One point more. What is measured in two groups, or for two of our types, is one point.
fn add(lines: &mut Vec<Line>, name: &str, point: (f64, f64)) {
    let at = match lines.iter().position(|line| line.name == name) {
        Some(at) => at,
        None => {
            lines.push(Line {
                name: name.to_owned(),
                points: Vec::new(),
            });
            lines.len() - 1
        }
    };
    if let Some(line) = lines.get_mut(at)
        && line.points.iter().all(|(x, _)| *x != point.0)
    {
        line.points.push(point);
    }
}

fn sorted(mut lines: Vec<Line>) -> Vec<Line> {
    for line in &mut lines {
        line.points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    }
    lines
}

/// Title, what the axis means, and where nothing is drawn.
type Words<'w> = (&'w str, &'w str, SeriesLabelPosition);

fn chart(path: &Path, words: Words<'_>, lines: &[Line]) -> Result<()> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let right = points().map(|(x, _)| *x).fold(0.0, f64::max);
    let top = points().map(|(_, y)| *y).fold(0.0, f64::max);
    ensure!(right > 0.0 && top > 0.0, "there is nothing to draw");
    // Errors of plotters borrow what it draws to, and so are told as text.
    paint(path, words, (right * 1.05, top * 1.1), lines)
        .map_err(|error| anyhow!(error.to_string()))
        .with_context(|| path.display().to_string())
}

fn paint(
    path: &Path,
    (title, across, corner): Words<'_>,
    (right, top): (f64, f64),
    lines: &[Line],
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(path, (720, 440)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    chart
        .configure_mesh()
        .x_desc(across)
        .x_label_formatter(&|x| x.to_string())
        .y_desc("seconds")
        .max_light_lines(0)
        .draw()?;
    for (number, line) in lines.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        let series = LineSeries::new(line.points.iter().copied(), colour.stroke_width(2));
        chart
            .draw_series(series.point_size(3))?
            .label(line.name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(corner)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}
