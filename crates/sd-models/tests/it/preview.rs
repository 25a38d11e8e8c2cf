//! Pictures that are shown while steps are taken.

use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{Component, Ledger, Mapping, MemoryBudget, MemoryBudgets, Placement, Residence};
use sd_graph::Progress;
use sd_models::{GenerateReport, Image, Pipeline, PipelineBuilder, PreviewBy, Request, Sampler};

use crate::fixtures::{psnr, tiny};

fn open() -> PipelineBuilder {
    Pipeline::open(tiny()).unwrap().threads(2)
}

/// An account of all memory there is.
fn free() -> Ledger {
    Ledger::with_headroom(MemoryBudgets::every(MemoryBudget::Automatic), 0)
}

/// A preview: behind which step, and the picture.
type Shown = (usize, Image);

fn draw(pipeline: &mut Pipeline, request: &Request<'_>) -> (Image, GenerateReport, Vec<Shown>) {
    let mut shown = Vec::new();
    let (image, report) = pipeline
        .generate(request, &mut |progress: &Progress| {
            if let Progress::Preview {
                step,
                width,
                height,
                rgba,
                ..
            } = progress
            {
                let image = Image::from_rgba(*width as u32, *height as u32, rgba.clone());
                shown.push((*step, image.unwrap()));
            }
        })
        .unwrap();
    assert_eq!(report.previews, shown.len());
    (image, report, shown)
}

/// A picture averaged over squares of `scale` pixels, `[4, height / scale, width / scale]`.
fn averaged(image: &Image, scale: usize) -> Vec<f32> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let planes = image.to_planes(4);
    let mut small = Vec::new();
    for plane in planes.chunks_exact(width * height) {
        for top in (0..height).step_by(scale) {
            for left in (0..width).step_by(scale) {
                let lines = plane.chunks_exact(width).skip(top).take(scale);
                let sum: f32 = lines.flat_map(|line| &line[left..left + scale]).sum();
                small.push(sum / (scale * scale) as f32);
            }
        }
    }
    small
}

#[test]
fn previews_come_nearer_to_the_picture_and_do_not_change_it() {
    let mut pipeline = open().device("cpu").load().unwrap();
    let condition = pipeline
        .encode("a large red circle on a blue background")
        .unwrap();
    let request = Request::new(&condition).size(128, 96).steps(10).seed(3);
    let (plain, _, none) = draw(&mut pipeline, &request);
    assert!(none.is_empty());
    // dB of the last preview against the picture. The decoder's is the picture but for one step (56 measured); a linear map
    // shows colours and where they are (19 measured; a map fitted to pictures themselves has 25).
    for (by, scale, least) in [(PreviewBy::Linear, 16, 16.0), (PreviewBy::Decoder, 1, 45.0)] {
        let (image, _, shown) = draw(&mut pipeline, &request.clone().preview(3, by));
        assert_eq!(image, plain, "{by:?}");
        let steps: Vec<usize> = shown.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, [3, 6, 9], "{by:?}");
        let wanted = averaged(&plain, scale);
        let quality = shown.iter().map(|(_, preview)| {
            let size = (preview.width() as usize, preview.height() as usize);
            assert_eq!(size, (128 / scale, 96 / scale));
            psnr(&averaged(preview, 1), &wanted)
        });
        let quality: Vec<f64> = quality.collect();
        println!("{by:?}: {quality:.1?} dB");
        assert!(quality[2] >= least, "{by:?}: {quality:?}");
        assert!(quality[0] < quality[2], "{by:?}: {quality:?}");
    }
    // Behind whole steps alone, whatever is between, and not behind the last, which is the picture.
    let heun = request.clone().steps(3).sampler(Sampler::Heun);
    let (_, report, shown) = draw(&mut pipeline, &heun.preview(1, PreviewBy::Linear));
    assert_eq!((report.calls, shown.len()), (5, 2));
    let (_, _, none) = draw(&mut pipeline, &request.preview(0, PreviewBy::Decoder));
    assert!(none.is_empty());
}

#[test]
fn a_preview_that_does_not_fit_is_not_shown() {
    let fake = || {
        FakeDevice::new(FakeOptions {
            memory: 64 << 20,
            ..FakeOptions::default()
        })
    };
    let planned = {
        let builder = open().device(fake().device()).ledger(&free());
        builder
            .mapping(Mapping::Never)
            .plan(Some((96, 96)), 12)
            .unwrap()
    };
    let (most, least) = (planned.devices[0].peak * 3 / 2, planned.devices[0].smallest);
    let mut expected = None;
    let mut counts = Vec::new();
    for part in (0..=4).rev() {
        let budget = least + (most - least) * part / 4;
        for by in [PreviewBy::Linear, PreviewBy::Decoder] {
            let fake = fake();
            let budgets = MemoryBudgets::default().with("Fake0", MemoryBudget::Bytes(budget));
            let ledger = Ledger::with_headroom(budgets, 0);
            let builder = open().device(fake.device()).mapping(Mapping::Never);
            let mut pipeline = builder.ledger(&ledger).load().unwrap();
            let condition = pipeline.encode("a small green star").unwrap();
            let request = Request::new(&condition).size(96, 96).steps(3);
            let (image, report, _) = draw(&mut pipeline, &request.preview(1, by));
            // Rounding, where products of other sizes sum in another order.
            let pixels = image.pixels().as_raw().clone();
            let wanted = expected.get_or_insert_with(|| pixels.clone());
            let worst = pixels
                .iter()
                .zip(wanted.iter())
                .map(|(a, b)| a.abs_diff(*b))
                .max();
            assert!(worst <= Some(1), "{budget} {by:?}: {worst:?}");
            assert!(fake.counts().peak_bytes as u64 <= budget);
            counts.push((by, report.previews));
            drop((pipeline, condition));
            assert_eq!(ledger.report(fake.device()).used.total(), 0);
            assert_eq!(fake.counts().buffers, 0);
        }
    }
    println!("{counts:?}");
    assert!(
        counts[..2].iter().all(|(_, shown)| *shown == 2),
        "{counts:?}"
    );
    // The map is fitted before the steps are taken, when nothing else has to be there. With the smallest budget squares are
    // decoded that are smaller than what it is fitted to.
    let mut fitted = counts[..8]
        .iter()
        .filter(|(by, _)| *by == PreviewBy::Linear);
    assert!(fitted.all(|(_, shown)| *shown == 2), "{counts:?}");
    let is_without = |(by, shown): &(PreviewBy, usize)| *by == PreviewBy::Decoder && *shown == 0;
    assert!(counts.iter().any(is_without), "{counts:?}");
}

#[test]
fn the_decoder_may_be_elsewhere_and_come_and_go() {
    let fake = FakeDevice::new(FakeOptions {
        memory: 64 << 20,
        ..FakeOptions::default()
    });
    for by in [PreviewBy::Linear, PreviewBy::Decoder] {
        let placement = Placement::default()
            .device(Component::Diffusion, fake.device())
            .device(Component::Vae, "cpu")
            .residence(Component::Vae, Residence::Disk);
        let builder = open().device("cpu").placement(placement);
        let mut pipeline = builder.ledger(&free()).load().unwrap();
        let condition = pipeline.encode("a small green star").unwrap();
        let request = Request::new(&condition).size(64, 64).steps(4);
        let (plain, ..) = draw(&mut pipeline, &request);
        let (image, report, _) = draw(&mut pipeline, &request.preview(1, by));
        assert_eq!((image, report.previews), (plain, 3), "{by:?}");
    }
}
