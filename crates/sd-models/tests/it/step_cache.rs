//! Calls that are left out: how many, and what that does to pictures.

use sd_models::{Circular, Condition, Image, Pipeline, Request};

use crate::fixtures::{psnr, tiny};

fn pipeline() -> Pipeline {
    let builder = Pipeline::open(tiny()).unwrap().device("cpu").threads(2);
    builder.load().unwrap()
}

/// The picture, and how many calls were made and left out.
fn draw(pipeline: &mut Pipeline, request: &Request<'_>) -> (Image, usize, usize) {
    let quiet = &mut |_: &sd_graph::Progress| {};
    let (image, report) = pipeline.generate(request, quiet).unwrap();
    let made = report.calls - report.skipped_calls;
    (image, made, report.skipped_calls)
}

fn request(condition: &Condition) -> Request<'_> {
    Request::new(condition).size(128, 128).steps(20).seed(1)
}

#[test]
fn a_larger_threshold_saves_more_and_changes_more() {
    let mut pipeline = pipeline();
    // Calls that are made, of 20, and dB of the picture against the one without: measured, less 3 dB, and one call.
    for (prompt, guidance, cases) in [
        (
            "a large red circle on a blue background",
            3.0,
            [(0.05, 15, 48.0), (0.1, 11, 40.0), (0.2, 9, 35.0)],
        ),
        (
            "a yellow square on a black background",
            1.0,
            [(0.05, 12, 49.0), (0.1, 9, 41.0), (0.2, 8, 37.0)],
        ),
    ] {
        let condition = pipeline.encode(prompt).unwrap();
        let request = request(&condition).guidance(guidance);
        let (off, calls, left_out) = draw(&mut pipeline, &request);
        assert_eq!((calls, left_out), (20, 0));
        let (none, calls, left_out) = draw(&mut pipeline, &request.clone().step_cache(0.0));
        assert_eq!((none, calls, left_out), (off.clone(), 20, 0));
        for (threshold, most, least) in cases {
            let (on, made, left_out) = draw(&mut pipeline, &request.clone().step_cache(threshold));
            let quality = psnr(&on.to_planes(4), &off.to_planes(4));
            println!("{prompt}, {threshold}: {made} calls, {quality:.1} dB");
            assert_eq!(made + left_out, 20);
            assert!(made <= most, "{prompt}, {threshold}: {made} calls");
            assert!(quality >= least, "{prompt}, {threshold}: {quality:.1} dB");
        }
    }
}

#[test]
fn pictures_remember_nothing_of_each_other() {
    let draw_last = |before: &[Circular]| {
        let mut pipeline = pipeline();
        let condition = pipeline.encode("a large red circle").unwrap();
        let request = request(&condition)
            .size(96, 64)
            .steps(12)
            .step_cache(0.1)
            .keep_prefix(true);
        let mut last = None;
        for &circular in before {
            last = Some(draw(&mut pipeline, &request.clone().circular(circular)));
        }
        last.unwrap()
    };
    let alone = draw_last(&[Circular::XY]);
    assert!(alone.2 > 0);
    assert_eq!(draw_last(&[Circular::NONE, Circular::XY]).1, alone.1);
    let joined = draw_last(&[Circular::XY, Circular::XY]);
    assert_eq!((joined.1, joined.2), (alone.1, alone.2));
    for threshold in [f32::NAN, -0.1, f32::INFINITY] {
        let mut pipeline = pipeline();
        let condition = pipeline.encode("a circle").unwrap();
        let request = Request::new(&condition).step_cache(threshold);
        let quiet = &mut |_: &sd_graph::Progress| {};
        let error = pipeline.generate(&request, quiet).unwrap_err().to_string();
        assert!(error.contains("step cache threshold"), "{error}");
    }
}
