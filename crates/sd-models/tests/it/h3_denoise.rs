//! MiniMax H3 from noise to latents: schedules and loop against diffusers, and what is computed how often wherever weights live.

use sd_backend::fake::{FakeDevice, FakeOptions};
use sd_backend::{
    Backend, BackendOptions, DType, Device, Ledger, Mapping, MemoryBudget, MemoryBudgets, Residence,
};
use sd_graph::{Cancel, LoadOptions, Progress};
use sd_models::Error;
use sd_models::minimax_h3::{
    ClipLatents, Denoiser, Denoising, DenoisingReport, Prepared, QkvOrder, Schedule, Shifts, Stage,
    Start, distinct_times,
};

use crate::fixtures::{Case, cases, devices, folder, max_error, relative_l2};
use crate::h3_transformer::layout;

fn open() -> Denoiser {
    let options = LoadOptions::default().weight_type(DType::F32);
    let path = folder("minimax_h3_transformer");
    Denoiser::open(&path, QkvOrder::Stacked, &[], &options).unwrap()
}

/// Says where all weights live, and brings them there.
fn live(model: &mut Denoiser, backend: &Backend, residence: Residence, is_streamed: bool) {
    for stage in [Stage::Preparation, Stage::Steps] {
        let weights = model.weights_mut(stage);
        weights.live(residence, Mapping::Never);
        weights.stream(is_streamed);
    }
    let quiet = &mut |_: &Progress| {};
    model.load(backend, &Cancel::new(), quiet).unwrap();
}

fn schedules(case: &Case) -> [Schedule; 2] {
    let points = case.meta["points"].as_u64().unwrap() as usize;
    let Shifts { video, sound } = Shifts::default();
    [video, sound].map(|shift| Schedule::new(shift, points).unwrap())
}

/// All of a case: prepared once, then step by step.
fn run(
    model: &mut Denoiser,
    backend: &mut Backend,
    case: &Case,
) -> Result<(ClipLatents, Prepared, DenoisingReport), Error> {
    let (layout, [video, sound]) = (layout(case), schedules(case));
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    let schedules = [&video, &sound];
    let mut run = Denoising::new(model, backend, &cancel, None);
    let prepared = run.prepare(&case.get("in.text").f32, schedules, quiet)?;
    let start = Start {
        layout: &layout,
        seen: &case.get("in.condition_rows").f32,
        heard: &case.get("in.heard_rows").f32,
        video: &case.get("in.latents").f32,
        sound: &case.get("in.sound").f32,
        schedules,
    };
    let latents = run.denoise(&prepared, start, quiet)?;
    Ok((latents, prepared, run.took()))
}

fn backend(device: Device) -> Backend {
    Backend::new(device, &BackendOptions::default().threads(2)).unwrap()
}

#[test]
fn schedules_are_the_references() {
    let file = Case::read(&folder("minimax_h3_scheduler").join("schedules.safetensors"));
    let (sample, velocity) = (&file.get("in.sample").f32, &file.get("in.velocity").f32);
    let names = file.meta.as_object().unwrap();
    assert_eq!(names.len(), 12);
    for (name, case) in names {
        let shift = case["shift"].as_f64().unwrap() as f32;
        let points = case["points"].as_u64().unwrap() as usize;
        let schedule = Schedule::new(shift, points).unwrap();
        assert_eq!(schedule.steps(), points - 1);
        let out = |what: &str| &file.get(&format!("out.{name}.{what}")).f32;
        assert_eq!(schedule.sigmas(), out("sigmas"), "{name}");
        let mut x = sample.clone();
        for step in 0..schedule.steps() {
            assert_eq!(schedule.time(step), out("timesteps")[step], "{name}");
            schedule.advance(step, &mut x, velocity);
            if step == 0 {
                // The reference's vectors may fuse a product and a sum.
                assert!(max_error(&x, out("first")) <= 2e-7, "{name}");
            }
        }
        assert!(max_error(&x, out("last")) <= 2e-6, "{name}");
    }
    for points in [0, 1, 1002] {
        assert!(matches!(Schedule::new(3.0, points), Err(Error::Steps(_))));
    }
    // Four times are no more than two where nothing is shown, and the first step begins with noise for both.
    let [video, sound] = [12.0, 3.0].map(|shift| Schedule::new(shift, 3).unwrap());
    assert_eq!(distinct_times([&video, &sound]).len(), 5);
}

/// Four evaluations with a keyframe, and with references of every kind. On a processor errors of single calls (8e-6) add up to less than
/// this; elsewhere products may pass through half precision.
#[test]
fn denoising_ends_where_the_references_does() {
    for device in devices() {
        let (mut model, mut backend) = (open(), backend(device));
        live(&mut model, &backend, Residence::Device, false);
        for (name, case) in cases("minimax_h3_denoise") {
            let (latents, prepared, took) = run(&mut model, &mut backend, &case).unwrap();
            for (what, is) in [("latents", latents.video), ("sound", latents.sound)] {
                let should = &case.get(&format!("out.{what}")).f32;
                let (error, relative) = (max_error(&is, should), relative_l2(&is, should));
                println!("{name} {what} on {device}: {error:e}, relative {relative:e}");
                let is_processor = device.kind() == sd_backend::DeviceKind::Cpu;
                assert!(if is_processor {
                    error <= 2e-5
                } else {
                    relative <= 0.02
                });
            }
            // Text was refined and modulations were made once for all four steps.
            assert_eq!(prepared.cache().commits(), 1);
            assert_eq!((took.preparations, took.calls), (1, 4));
        }
    }
}

/// A device that must let weights pass through gives the same bits, and moves those of the preparation once.
#[test]
fn streamed_weights_give_the_same_latents() {
    let (_, case) = cases("minimax_h3_denoise").remove(1);
    let (mut model, mut processor) = (open(), backend(Device::cpu().unwrap()));
    live(&mut model, &processor, Residence::Device, false);
    let (expected, ..) = run(&mut model, &mut processor, &case).unwrap();
    drop((model, processor));
    let mut moved = Vec::new();
    // Room for all, for some, and for little more than the largest segment.
    for budget in [8 << 20, 900 << 10, 600 << 10] {
        let fake = FakeDevice::new(FakeOptions {
            memory: 64 << 20,
            ..FakeOptions::default()
        });
        let budgets = MemoryBudgets::every(MemoryBudget::Bytes(budget));
        let ledger = Ledger::with_headroom(budgets, 0);
        let options = BackendOptions::default().threads(2).ledger(&ledger);
        let mut backend = Backend::new(fake.device(), &options).unwrap();
        let mut model = open();
        live(&mut model, &backend, Residence::Disk, true);
        let (latents, _, took) = run(&mut model, &mut backend, &case).unwrap();
        assert!(latents == expected, "budget {budget}");
        println!("budget {budget}: {took:?}");
        // What prepares is needed once, what computes steps four times.
        let [once, each] =
            [Stage::Preparation, Stage::Steps].map(|stage| model.weights(stage).bytes());
        assert!(took.streamed_bytes <= once + 4 * each + (64 << 10));
        moved.push(took.streamed_bytes);
        drop(model);
        assert_eq!(fake.counts().bytes, 0);
    }
    assert!(
        moved[0] == 0 && moved[1] > 0 && moved[2] > moved[1],
        "{moved:?}"
    );
}

/// A run either says that memory ran out or, with what can be had again given up, ends where it should; the next one does.
#[test]
fn whatever_allocation_fails_the_latents_are_right() {
    let (_, case) = cases("minimax_h3_denoise").remove(0);
    let fake = FakeDevice::new(FakeOptions {
        memory: 64 << 20,
        ..FakeOptions::default()
    });
    let ledger = Ledger::with_headroom(MemoryBudgets::every(MemoryBudget::Automatic), 0);
    let options = BackendOptions::default().threads(2).ledger(&ledger);
    let mut backend = Backend::new(fake.device(), &options).unwrap();
    let mut model = open();
    live(&mut model, &backend, Residence::Disk, false);
    let (expected, ..) = run(&mut model, &mut backend, &case).unwrap();
    model.evict(Stage::Steps);
    let before = fake.counts().allocations;
    run(&mut model, &mut backend, &case).unwrap();
    let allocations = fake.counts().allocations - before;
    assert!(allocations >= 5, "{allocations}");
    let (mut refused, mut survived) = (0, 0);
    for nth in 1..=allocations {
        model.evict(Stage::Steps);
        fake.fail_allocation(nth);
        match run(&mut model, &mut backend, &case) {
            Ok((latents, ..)) => {
                assert!(latents == expected, "{nth}");
                survived += 1;
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{nth}: {error}");
                refused += 1;
            }
        }
        fake.fail_allocation(0);
        let (latents, ..) = run(&mut model, &mut backend, &case).unwrap();
        assert!(latents == expected, "{nth}");
    }
    println!("{refused} refused, {survived} survived");
    assert!(survived > 0);
    drop(model);
    assert_eq!(ledger.report(fake.device()).used.total(), 0);
}

/// Text and times must be those that were prepared, and rows as many as the layout says.
#[test]
fn what_was_not_prepared_is_refused() {
    let (_, case) = cases("minimax_h3_denoise").remove(0);
    let mut backend_of_twin = backend(Device::cpu().unwrap());
    let (mut model, mut backend) = (open(), backend(Device::cpu().unwrap()));
    live(&mut model, &backend, Residence::Device, false);
    let (_, prepared, _) = run(&mut model, &mut backend, &case).unwrap();
    let (layout, [video, sound]) = (layout(&case), schedules(&case));
    let (cancel, quiet) = (Cancel::new(), &mut |_: &Progress| {});
    let start = Start {
        layout: &layout,
        seen: &case.get("in.condition_rows").f32,
        heard: &[],
        video: &case.get("in.latents").f32,
        sound: &case.get("in.sound").f32,
        schedules: [&video, &sound],
    };
    let mut run = Denoising::new(&mut model, &mut backend, &cancel, None);
    let other = Schedule::new(12.0, 4).unwrap();
    let others = Start {
        schedules: [&other, &Schedule::new(3.0, 4).unwrap()],
        ..start
    };
    let error = run.denoise(&prepared, others, quiet).unwrap_err();
    assert!(matches!(error, Error::NotPrepared), "{error}");
    // What another transformer of the same sizes prepared is not this one's.
    let mut twin = open();
    live(&mut twin, &backend_of_twin, Residence::Device, false);
    let mut of_twin = Denoising::new(&mut twin, &mut backend_of_twin, &cancel, None);
    let error = of_twin.denoise(&prepared, start, quiet).unwrap_err();
    assert!(matches!(error, Error::NotPrepared), "{error}");
    prepared.cache().clear();
    let error = run.denoise(&prepared, start, quiet).unwrap_err();
    assert!(matches!(error, Error::NotPrepared), "{error}");
    for wrong in [
        Start { seen: &[], ..start },
        Start {
            heard: &[0.0],
            ..start
        },
        Start {
            sound: &[],
            ..start
        },
        Start {
            video: &start.video[1..],
            ..start
        },
        Start {
            schedules: [&video, &other],
            ..start
        },
    ] {
        let error = run.denoise(&prepared, wrong, quiet).unwrap_err();
        assert!(matches!(error, Error::Clip { .. }), "{error}");
    }
    let error = run
        .prepare(&[0.0; 95], [&video, &sound], quiet)
        .unwrap_err();
    assert!(matches!(error, Error::Clip { .. }), "{error}");
    let stopped = Cancel::new();
    stopped.cancel();
    let mut run = Denoising::new(&mut model, &mut backend, &stopped, None);
    assert!(
        run.denoise(&prepared, start, quiet)
            .unwrap_err()
            .is_cancelled()
    );
}
