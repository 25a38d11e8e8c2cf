//! Pictures whose decoding does not fit: the pipeline chooses squares, says so, and decodes as if they had been asked for.

use sd_backend::fake::{FakeDevice, FakeOptions, MemoryStory};
use sd_backend::{Ledger, MemoryBudget, MemoryBudgets};
use sd_graph::Progress;
use sd_models::{Error, GenerateReport, Image, Pipeline};

use crate::fixtures::tiny;

const PROMPT: &str = "a large red circle on a blue background";
const SIZE: (usize, usize) = (192, 128);

fn on(fake: &FakeDevice, budget: MemoryBudget) -> (Ledger, sd_models::PipelineBuilder) {
    let ledger = Ledger::with_headroom(
        MemoryBudgets::default().with(&fake.device().name(), budget),
        0,
    );
    let builder = Pipeline::open(tiny()).unwrap().threads(2);
    (
        ledger.clone(),
        builder.device(fake.device()).ledger(&ledger),
    )
}

fn fake(name: &str, memory: usize) -> FakeDevice {
    FakeDevice::new(FakeOptions {
        name: name.to_owned(),
        memory,
        ..FakeOptions::default()
    })
}

fn draw(pipeline: &mut Pipeline, tile: Option<usize>) -> Result<(Image, GenerateReport), Error> {
    let condition = pipeline.encode(PROMPT)?;
    let request = sd_models::Request::new(&condition)
        .size(SIZE.0, SIZE.1)
        .steps(1);
    let request = match tile {
        Some(pixels) => request.vae_tile(pixels),
        None => request,
    };
    pipeline.generate(&request, &mut |_: &Progress| {})
}

#[test]
fn the_largest_squares_that_fit_are_decoded() {
    let ample = fake("Ample", 1 << 30);
    let (ledger, builder) = on(&ample, MemoryBudget::Automatic);
    let plan = builder.plan(Some(SIZE), 24).unwrap();
    assert_eq!(plan.vae_tile, None);
    let need = &plan.devices[0];
    let mut pipeline = builder.load().unwrap();
    let (whole, report) = draw(&mut pipeline, None).unwrap();
    assert_eq!(report.vae_tile, None);

    // From what all at once takes, with everything else coming and going, down to what the smallest squares do.
    let mut tiles = Vec::new();
    for part in [4, 1, 0] {
        let budget = need.smallest + (need.peak - need.smallest) * part / 4;
        let small = fake("Small", 1 << 30);
        let (_, builder) = on(&small, MemoryBudget::Bytes(budget));
        let plan = builder.plan(Some(SIZE), 24).unwrap();
        assert!(plan.fits(), "{plan:?}");
        assert_eq!(plan.devices[0].smallest, need.smallest);
        let mut small_pipeline = builder.load().unwrap();
        let (image, report) = draw(&mut small_pipeline, None).unwrap();
        assert!(small.counts().peak_bytes as u64 <= budget);
        assert_eq!(report.vae_tile, plan.vae_tile);
        match report.vae_tile {
            None => assert!(image == whole),
            Some(tile) => {
                assert!(image != whole);
                let (asked, _) = draw(&mut pipeline, Some(tile)).unwrap();
                assert!(image == asked, "{tile}");
            }
        }
        tiles.push(report.vae_tile);
        drop(small_pipeline);
        assert_eq!(small.counts().buffers, 0);
    }
    println!("{tiles:?}");
    assert_eq!(tiles[0], None);
    assert_eq!(tiles[2], Some(128));
    // What was asked for is kept, or refused.
    let (_, builder) = on(&fake("Least", 1 << 30), MemoryBudget::Bytes(need.smallest));
    let error = draw(&mut builder.load().unwrap(), Some(192)).unwrap_err();
    assert!(
        matches!(error, Error::TooLittleMemory { smallest, .. } if smallest > need.smallest),
        "{error}"
    );
    drop(pipeline);
    assert_eq!(ledger.report(ample.device()).used.total(), 0);
}

/// A device that refuses what was granted: squares half as large, as long as it does.
#[test]
fn a_device_that_lies_gets_smaller_squares() {
    let ample = fake("Honest", 1 << 30);
    let (_, builder) = on(&ample, MemoryBudget::Automatic);
    let need = builder.plan(Some(SIZE), 24).unwrap().devices[0].clone();
    let mut pipeline = builder.load().unwrap();
    let liar = fake(
        "Liar",
        (need.smallest + (need.peak - need.smallest) / 4) as usize,
    );
    liar.tell(MemoryStory::Of(1 << 30, 1 << 30));
    let (ledger, builder) = on(&liar, MemoryBudget::Automatic);
    let mut lied_to = builder.load().unwrap();
    let (image, report) = draw(&mut lied_to, None).unwrap();
    let tile = report.vae_tile.unwrap();
    assert_eq!(tile, 128);
    let (asked, _) = draw(&mut pipeline, Some(tile)).unwrap();
    assert!(image == asked);
    drop(lied_to);
    assert_eq!(ledger.report(liar.device()).used.total(), 0);
    assert_eq!(liar.counts().buffers, 0);
}
