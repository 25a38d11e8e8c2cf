//! Noise against PyTorch's.

use sd_models::{Rng, noise};

use crate::fixtures::{Case, folder, max_error};

/// PyTorch's vector units compute logarithm, sine and cosine by polynomials of their own; its plain build differs from
/// its own vectorised one by up to 2.4e-6.
const TOLERANCE: f32 = 4e-6;

#[test]
fn a_seed_gives_the_noise_of_pytorch() {
    let case = Case::read(&folder("noise").join("randn.safetensors"));
    let mut compared = 0;
    for name in case.names() {
        let (seed, size) = name
            .strip_prefix("out.seed")
            .unwrap()
            .split_once('.')
            .unwrap();
        let seed: u64 = seed.parse().unwrap();
        let (size, part) = size.split_once('.').unwrap_or((size, ""));
        let count: usize = size
            .split('x')
            .map(|n| n.parse::<usize>().unwrap())
            .product();
        let should = &case.get(name).f32;
        let is = noise::normal(seed, count);
        let is = match part {
            "first" => &is[..should.len()],
            "last" => &is[is.len() - should.len()..],
            _ => &is[..],
        };
        let error = max_error(is, should);
        assert!(error <= TOLERANCE, "{name}: off by {error:e}");
        compared += 1;
    }
    assert!(compared >= 30, "{compared}");
}

#[test]
fn no_numbers_are_no_numbers() {
    assert!(noise::normal(1, 0).is_empty());
    assert_eq!(noise::normal(5, 7), noise::normal((1 << 32) + 5, 7));
}

/// The vectors of the generator's authors:
/// <https://github.com/DEShawResearch/random123/blob/v1.14.0/tests/kat_vectors>, counter, key and numbers.
#[test]
fn philox_gives_the_known_answers() {
    for (counter, key, numbers) in [
        (
            [0; 4],
            [0; 2],
            [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8],
        ),
        (
            [u32::MAX; 4],
            [u32::MAX; 2],
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd],
        ),
        (
            [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
            [0xa4093822, 0x299f31d0],
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
        ),
    ] {
        assert_eq!(noise::philox(counter, key), numbers, "{counter:x?}");
    }
}

#[test]
fn a_seed_gives_the_noise_of_a_graphics_card() {
    // What torch.randn((3, 4), device="cuda") gives for the seed 0, as recorded in
    // https://github.com/AUTOMATIC1111/stable-diffusion-webui/blob/v1.10.1/modules/rng_philox.py.
    let should: [f64; 12] = [
        -0.92466259,
        -0.42534415,
        -2.6438457,
        0.14518388,
        -0.12086647,
        -0.57972564,
        -0.62285122,
        -0.32838709,
        -1.07454231,
        -0.36314407,
        -1.67105067,
        2.26550497,
    ];
    let should = should.map(|value| value as f32);
    let cuda: Rng = "cuda".parse().unwrap();
    // Single precision: a few rounding errors of the radius and the angle.
    let error = max_error(&cuda.normal(0, 12), &should);
    assert!(error <= 2e-6, "{error:e}");

    // A card with fewer threads: the first numbers are those, the others come of the same four numbers of each thread, and
    // after four rounds of new ones.
    let few: Rng = "cuda:3".parse().unwrap();
    let (all, found) = (cuda.normal(7, 8), few.normal(7, 17));
    assert_eq!(found[..3], all[..3]);
    let mut values = found.clone();
    values.sort_by(f32::total_cmp);
    values.dedup();
    assert_eq!(values.len(), 17);
    for (thread, &first) in all.iter().enumerate().take(3) {
        // Sine and cosine of one angle: squares sum to the radius' square, -2 ln(u).
        let [a, _, c, _] = noise::philox([0, 0, thread as u32, 0], [7, 0]);
        for (number, pair) in [
            (a, [first, found[thread + 3]]),
            (c, [found[thread + 6], found[thread + 9]]),
        ] {
            let square = -2.0 * ((f64::from(number) + 0.5) / 4294967296.0).ln();
            let sum: f64 = pair.iter().map(|&value| f64::from(value).powi(2)).sum();
            assert!((sum - square).abs() <= 1e-5, "{thread}: {sum} {square}");
        }
    }
    // Enough threads for one number each, and all bits of a seed.
    assert_eq!("cuda:8".parse::<Rng>().unwrap().normal(7, 8), all);
    assert_ne!(cuda.normal(5, 8), cuda.normal((1 << 32) + 5, 8));

    // A mean and a deviation, four standard errors wide.
    let many = cuda.normal(1, 1 << 16);
    let mean = many.iter().map(|&x| f64::from(x)).sum::<f64>() / many.len() as f64;
    let variance = many.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / many.len() as f64;
    assert!(mean.abs() <= 4.0 / 256.0, "{mean}");
    assert!(
        (variance - 1.0).abs() <= 4.0 * 2_f64.sqrt() / 256.0,
        "{variance}"
    );

    for text in ["gpu", "cuda:", "cuda:0", "cuda:-1", "CPU"] {
        let error = text.parse::<Rng>().unwrap_err().to_string();
        assert!(error.contains("cpu, cuda, cuda:THREADS"), "{error}");
    }
    for text in ["cpu", "cuda", "cuda:196608"] {
        assert_eq!(text.parse::<Rng>().unwrap().to_string(), text);
    }
}
