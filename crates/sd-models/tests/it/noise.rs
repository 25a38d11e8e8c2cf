//! Noise against PyTorch's.

use sd_models::noise;

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
