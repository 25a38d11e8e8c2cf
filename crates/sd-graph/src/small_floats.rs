//! What the 256 codes of types with one byte stand for.

/// Where a floating-point type of 8 bits puts what is no number.
#[derive(Clone, Copy)]
enum Special {
    /// The largest exponent: infinities and NaN, as IEEE has it.
    Ieee,
    /// All ones but the sign: NaN. There are no infinities.
    AllOnes,
    /// Negative zero: NaN. There are no infinities, and only one zero.
    NegativeZero,
}

/// 4 exponent and 3 fraction bits, up to 448.
pub(crate) static F8_E4M3: [f32; 256] = floats(3, 7, Special::AllOnes);
/// 5 exponent and 2 fraction bits, up to 57344 and infinity.
pub(crate) static F8_E5M2: [f32; 256] = floats(2, 15, Special::Ieee);
/// 4 exponent and 3 fraction bits, up to 240.
pub(crate) static F8_E4M3FNUZ: [f32; 256] = floats(3, 8, Special::NegativeZero);
/// 5 exponent and 2 fraction bits, up to 57344.
pub(crate) static F8_E5M2FNUZ: [f32; 256] = floats(2, 16, Special::NegativeZero);
/// Powers of two from 2^-127 to 2^127, and NaN.
pub(crate) static F8_E8M0: [f32; 256] = powers();
/// Signed numbers.
pub(crate) static I8: [f32; 256] = integers(true);
/// Unsigned numbers.
pub(crate) static U8: [f32; 256] = integers(false);
/// Everything but 0 is true, as in PyTorch.
pub(crate) static BOOL: [f32; 256] = {
    let mut table = [1.0; 256];
    table[0] = 0.0;
    table
};

/// The numbers of a type with a sign, so many fraction bits, and the rest of 8 bits for an exponent less `bias`.
const fn floats(fraction_bits: u32, bias: u32, special: Special) -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let size = code & 0x7f;
        let exponent = size >> fraction_bits;
        let fraction = size & ((1 << fraction_bits) - 1);
        // Subnormals have the smallest exponent and no leading one.
        let (significand, exponent) = if exponent == 0 {
            (fraction, 1)
        } else {
            (fraction | (1 << fraction_bits), exponent)
        };
        // The unit of the significand is a normal number in single precision for each of these types.
        let unit = f32::from_bits((127 + exponent - bias - fraction_bits) << 23);
        let number = match special {
            Special::Ieee if size == 0x7f >> fraction_bits << fraction_bits => f32::INFINITY,
            Special::Ieee if size > 0x7f >> fraction_bits << fraction_bits => f32::NAN,
            Special::AllOnes if size == 0x7f => f32::NAN,
            Special::NegativeZero if code == 0x80 => f32::NAN,
            _ => significand as f32 * unit,
        };
        let sign = if code > size { 1 << 31 } else { 0 };
        table[code as usize] = f32::from_bits(number.to_bits() ^ sign);
        code += 1;
    }
    table
}

const fn powers() -> [f32; 256] {
    let mut table = [f32::NAN; 256];
    // A subnormal number in single precision: half of the smallest normal one.
    table[0] = f32::from_bits(1 << 22);
    let mut exponent = 1;
    while exponent < 255 {
        table[exponent] = f32::from_bits((exponent as u32) << 23);
        exponent += 1;
    }
    table
}

const fn integers(signed: bool) -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = if signed {
            code as u8 as i8 as f32
        } else {
            code as f32
        };
        code += 1;
    }
    table
}
