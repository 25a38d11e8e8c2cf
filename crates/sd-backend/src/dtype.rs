//! Element types of tensors.

use sd_ggml_sys as sys;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $ggml:ident, $name:literal, $block:literal, $bytes:literal;)*) => {
        /// The element type of a tensor, as ggml stores it.
        ///
        /// Quantised types store whole blocks of [`DType::block_len`] elements of a row.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $variant,)*
        }

        impl DType {
            /// Every type this crate knows.
            pub const ALL: &[DType] = &[$(DType::$variant),*];

            /// The name ggml and its files use, in lower case: `f16`, `q8_0`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// Elements in one block; 1 for plain types.
            pub const fn block_len(self) -> usize {
                match self { $(DType::$variant => $block,)* }
            }

            /// Bytes of one block.
            pub const fn block_bytes(self) -> usize {
                match self { $(DType::$variant => $bytes,)* }
            }

            /// ggml's number for this type.
            pub const fn to_ggml(self) -> sys::ggml_type {
                match self { $(DType::$variant => sys::$ggml,)* }
            }

            /// The type with ggml's number `ggml`, if it is one of ours.
            pub fn from_ggml(ggml: sys::ggml_type) -> Option<DType> {
                match ggml { $(sys::$ggml => Some(DType::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    /// IEEE single precision.
    F32 = GGML_TYPE_F32, "f32", 1, 4;
    /// IEEE half precision.
    F16 = GGML_TYPE_F16, "f16", 1, 2;
    /// The upper half of an IEEE single.
    BF16 = GGML_TYPE_BF16, "bf16", 1, 2;
    /// IEEE double precision.
    F64 = GGML_TYPE_F64, "f64", 1, 8;
    /// Signed 8-bit integer.
    I8 = GGML_TYPE_I8, "i8", 1, 1;
    /// Signed 16-bit integer.
    I16 = GGML_TYPE_I16, "i16", 1, 2;
    /// Signed 32-bit integer.
    I32 = GGML_TYPE_I32, "i32", 1, 4;
    /// Signed 64-bit integer.
    I64 = GGML_TYPE_I64, "i64", 1, 8;
    /// 4-bit blocks of 32 with a scale.
    Q4_0 = GGML_TYPE_Q4_0, "q4_0", 32, 18;
    /// 4-bit blocks of 32 with a scale and a minimum.
    Q4_1 = GGML_TYPE_Q4_1, "q4_1", 32, 20;
    /// 5-bit blocks of 32 with a scale.
    Q5_0 = GGML_TYPE_Q5_0, "q5_0", 32, 22;
    /// 5-bit blocks of 32 with a scale and a minimum.
    Q5_1 = GGML_TYPE_Q5_1, "q5_1", 32, 24;
    /// 8-bit blocks of 32 with a scale.
    Q8_0 = GGML_TYPE_Q8_0, "q8_0", 32, 34;
    /// 2-bit super-blocks of 256.
    Q2K = GGML_TYPE_Q2_K, "q2_K", 256, 84;
    /// 3-bit super-blocks of 256.
    Q3K = GGML_TYPE_Q3_K, "q3_K", 256, 110;
    /// 4-bit super-blocks of 256.
    Q4K = GGML_TYPE_Q4_K, "q4_K", 256, 144;
    /// 5-bit super-blocks of 256.
    Q5K = GGML_TYPE_Q5_K, "q5_K", 256, 176;
    /// 6-bit super-blocks of 256.
    Q6K = GGML_TYPE_Q6_K, "q6_K", 256, 210;
    /// 1-bit blocks of 128 with a scale.
    Q1_0 = GGML_TYPE_Q1_0, "q1_0", 128, 18;
    /// 2-bit blocks of 64 with a scale.
    Q2_0 = GGML_TYPE_Q2_0, "q2_0", 64, 18;
    /// Codebook with 2.06 bits per element.
    Iq2Xxs = GGML_TYPE_IQ2_XXS, "iq2_xxs", 256, 66;
    /// Codebook with 2.31 bits per element.
    Iq2Xs = GGML_TYPE_IQ2_XS, "iq2_xs", 256, 74;
    /// Codebook with 2.56 bits per element.
    Iq2S = GGML_TYPE_IQ2_S, "iq2_s", 256, 82;
    /// Codebook with 3.06 bits per element.
    Iq3Xxs = GGML_TYPE_IQ3_XXS, "iq3_xxs", 256, 98;
    /// Codebook with 3.44 bits per element.
    Iq3S = GGML_TYPE_IQ3_S, "iq3_s", 256, 110;
    /// Codebook with 1.56 bits per element.
    Iq1S = GGML_TYPE_IQ1_S, "iq1_s", 256, 50;
    /// Codebook with 1.75 bits per element.
    Iq1M = GGML_TYPE_IQ1_M, "iq1_m", 256, 56;
    /// 4-bit blocks of 32 over uneven steps.
    Iq4Nl = GGML_TYPE_IQ4_NL, "iq4_nl", 32, 18;
    /// 4-bit super-blocks of 256 over uneven steps.
    Iq4Xs = GGML_TYPE_IQ4_XS, "iq4_xs", 256, 136;
    /// Ternary super-blocks of 256, five elements a byte.
    Tq1_0 = GGML_TYPE_TQ1_0, "tq1_0", 256, 54;
    /// Ternary super-blocks of 256, four elements a byte.
    Tq2_0 = GGML_TYPE_TQ2_0, "tq2_0", 256, 66;
    /// 4-bit floats in blocks of 32 that share a power of two.
    Mxfp4 = GGML_TYPE_MXFP4, "mxfp4", 32, 17;
    /// 4-bit floats in blocks of 64 with a scale for every 16.
    Nvfp4 = GGML_TYPE_NVFP4, "nvfp4", 64, 36;
}

impl DType {
    /// Whether elements are stored in blocks that share a scale.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// The type of this [`DType::name`], in upper or lower case.
    pub fn from_name(name: &str) -> Option<DType> {
        let named = |dtype: &&DType| dtype.name().eq_ignore_ascii_case(name);
        DType::ALL.iter().find(named).copied()
    }

    /// Whether this is an unquantised floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
    }

    /// Bytes of a row of `len` elements; `None` if `len` is no whole number of blocks or the product overflows.
    pub const fn row_bytes(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_ggml() {
        for &dtype in DType::ALL {
            // SAFETY: these functions read a constant table indexed by a type number that ggml defines.
            let (block, bytes, name) = unsafe {
                (
                    sys::ggml_blck_size(dtype.to_ggml()),
                    sys::ggml_type_size(dtype.to_ggml()),
                    std::ffi::CStr::from_ptr(sys::ggml_type_name(dtype.to_ggml())),
                )
            };
            assert_eq!(block as usize, dtype.block_len(), "{dtype}");
            assert_eq!(bytes, dtype.block_bytes(), "{dtype}");
            assert_eq!(name.to_str(), Ok(dtype.name()));
            assert_eq!(DType::from_ggml(dtype.to_ggml()), Some(dtype));
            assert_eq!(DType::from_name(&dtype.name().to_uppercase()), Some(dtype));
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(DType::F32.row_bytes(3), Some(12));
        assert_eq!(DType::Q8_0.row_bytes(64), Some(68));
        assert_eq!(DType::Q8_0.row_bytes(63), None);
        assert_eq!(DType::F64.row_bytes(usize::MAX), None);
    }
}
