//! Element types as files name them.

use std::fmt;
use std::str::FromStr;

use safetensors::tensor::Dtype;
use sd_backend::DType;
use sd_ggml_sys as sys;

macro_rules! stored_types {
    (
        plain { $($(#[$doc:meta])* $variant:ident = $dtype:ident, $name:literal, $bits:literal;)* }
        blocks { $($(#[$block_doc:meta])* $block:ident = $ggml:ident, $block_name:literal, $len:literal, $bytes:literal;)* }
    ) => {
        /// The type of a tensor's elements as its file stores them.
        ///
        /// This says what a file can hold, not what a device can compute with. Every type of the safetensors format
        /// and every type of ggml is here, so that a checkpoint can be listed even where a type cannot be used. Types
        /// that ggml stores in blocks are called quantised here.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum StoredType {
            $($(#[$doc])* $variant,)*
            $($(#[$block_doc])* $block,)*
        }

        impl StoredType {
            /// Every type this crate knows, in the order of their declaration.
            pub const ALL: &[StoredType] = &[$(StoredType::$variant,)* $(StoredType::$block,)*];

            /// The name that files use: that of the safetensors format (`BF16`, `F8_E4M3`) or, for quantised types,
            /// that of ggml (`q8_0`, `q4_K`).
            pub const fn name(self) -> &'static str {
                match self {
                    $(StoredType::$variant => $name,)*
                    $(StoredType::$block => $block_name,)*
                }
            }

            /// Bits of one element; below 8 for types that are packed across byte borders. `None` for quantised types,
            /// where an element has no bits of its own.
            pub const fn bits(self) -> Option<u32> {
                match self {
                    $(StoredType::$variant => Some($bits),)*
                    $(StoredType::$block => None,)*
                }
            }

            /// Elements and bytes of one block of a quantised type; `None` for the others. A row is whole blocks.
            pub const fn block(self) -> Option<(u64, u64)> {
                match self {
                    $(StoredType::$variant => None,)*
                    $(StoredType::$block => Some(($len, $bytes)),)*
                }
            }

            /// The safetensors crate's type; `None` for one that a later release of it added.
            pub(super) fn from_safetensors(dtype: Dtype) -> Option<StoredType> {
                match dtype { $(Dtype::$dtype => Some(StoredType::$variant),)* _ => None }
            }

            /// ggml's number of this type, if ggml has it.
            pub(crate) const fn to_ggml(self) -> Option<sys::ggml_type> {
                Some(match self {
                    StoredType::F64 => sys::GGML_TYPE_F64,
                    StoredType::F32 => sys::GGML_TYPE_F32,
                    StoredType::F16 => sys::GGML_TYPE_F16,
                    StoredType::BF16 => sys::GGML_TYPE_BF16,
                    StoredType::I64 => sys::GGML_TYPE_I64,
                    StoredType::I32 => sys::GGML_TYPE_I32,
                    StoredType::I16 => sys::GGML_TYPE_I16,
                    StoredType::I8 => sys::GGML_TYPE_I8,
                    $(StoredType::$block => sys::$ggml,)*
                    _ => return None,
                })
            }
        }
    };
}

stored_types! {
    plain {
        /// IEEE double precision.
        F64 = F64, "F64", 64;
        /// IEEE single precision.
        F32 = F32, "F32", 32;
        /// IEEE half precision.
        F16 = F16, "F16", 16;
        /// The upper half of an IEEE single.
        BF16 = BF16, "BF16", 16;
        /// 8-bit float with 4 exponent and 3 fraction bits, without infinities.
        F8E4M3 = F8_E4M3, "F8_E4M3", 8;
        /// 8-bit float with 5 exponent and 2 fraction bits.
        F8E5M2 = F8_E5M2, "F8_E5M2", 8;
        /// 8-bit power of two, used as a scale.
        F8E8M0 = F8_E8M0, "F8_E8M0", 8;
        /// `F8E4M3` without negative zero and with one NaN.
        F8E4M3Fnuz = F8_E4M3FNUZ, "F8_E4M3FNUZ", 8;
        /// `F8E5M2` without negative zero and with one NaN.
        F8E5M2Fnuz = F8_E5M2FNUZ, "F8_E5M2FNUZ", 8;
        /// 6-bit float with 2 exponent and 3 fraction bits.
        F6E2M3 = F6_E2M3, "F6_E2M3", 6;
        /// 6-bit float with 3 exponent and 2 fraction bits.
        F6E3M2 = F6_E3M2, "F6_E3M2", 6;
        /// 4-bit float.
        F4 = F4, "F4", 4;
        /// Two IEEE singles: a complex number.
        C64 = C64, "C64", 64;
        /// Signed 64-bit integer.
        I64 = I64, "I64", 64;
        /// Signed 32-bit integer.
        I32 = I32, "I32", 32;
        /// Signed 16-bit integer.
        I16 = I16, "I16", 16;
        /// Signed 8-bit integer.
        I8 = I8, "I8", 8;
        /// Unsigned 64-bit integer.
        U64 = U64, "U64", 64;
        /// Unsigned 32-bit integer.
        U32 = U32, "U32", 32;
        /// Unsigned 16-bit integer.
        U16 = U16, "U16", 16;
        /// Unsigned 8-bit integer.
        U8 = U8, "U8", 8;
        /// One byte per truth value.
        Bool = BOOL, "BOOL", 8;
    }
    blocks {
        /// 1-bit blocks of 128 with a scale.
        Q1_0 = GGML_TYPE_Q1_0, "q1_0", 128, 18;
        /// 2-bit blocks of 64 with a scale.
        Q2_0 = GGML_TYPE_Q2_0, "q2_0", 64, 18;
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
        /// 8-bit blocks of 32 with a scale and a sum; ggml uses it for intermediate results.
        Q8_1 = GGML_TYPE_Q8_1, "q8_1", 32, 36;
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
        /// 8-bit super-blocks of 256; ggml uses it for intermediate results.
        Q8K = GGML_TYPE_Q8_K, "q8_K", 256, 292;
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
}

impl StoredType {
    /// Whether elements are stored in blocks that share a scale.
    pub const fn is_quantized(self) -> bool {
        self.block().is_some()
    }

    /// Bytes that `elements` elements take; `None` if that overflows or is no whole number of bytes or blocks.
    pub const fn bytes(self, elements: u64) -> Option<u64> {
        match (self.bits(), self.block()) {
            (Some(bits), _) => match elements.checked_mul(bits as u64) {
                Some(bits) if bits.is_multiple_of(8) => Some(bits / 8),
                _ => None,
            },
            (_, Some((len, bytes))) if elements.is_multiple_of(len) => {
                (elements / len).checked_mul(bytes)
            }
            _ => None,
        }
    }

    /// The type with ggml's number `number`.
    pub(super) fn from_ggml(number: u32) -> Option<StoredType> {
        let numbered = |stored: &&StoredType| stored.to_ggml() == Some(number);
        StoredType::ALL.iter().find(numbered).copied()
    }

    /// The same type in memory, if one can compute with it.
    pub(crate) fn in_memory(self) -> Option<DType> {
        self.to_ggml().and_then(DType::from_ggml)
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no [`StoredType`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the name of an element type")]
pub struct UnknownStoredType;

impl FromStr for StoredType {
    type Err = UnknownStoredType;

    /// Reads a [`StoredType::name`] in upper or lower case.
    fn from_str(text: &str) -> Result<StoredType, UnknownStoredType> {
        let named = |stored: &&StoredType| stored.name().eq_ignore_ascii_case(text);
        StoredType::ALL
            .iter()
            .find(named)
            .copied()
            .ok_or(UnknownStoredType)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_ggml_is_known_with_its_size() {
        let mut known = 0;
        for number in 0..sys::GGML_TYPE_COUNT {
            // SAFETY: these functions read a constant table, here at numbers below its length.
            let (len, bytes, name) = unsafe {
                (
                    sys::ggml_blck_size(number),
                    sys::ggml_type_size(number),
                    sys::ggml_type_name(number),
                )
            };
            let Some(stored) = StoredType::from_ggml(number) else {
                // Numbers of types that ggml took out again have no elements.
                assert_eq!((len, bytes), (0, 0), "{number}");
                continue;
            };
            known += 1;
            // SAFETY: a type with a size has a name, a constant text.
            let name = unsafe { std::ffi::CStr::from_ptr(name) };
            assert!(name.to_str().unwrap().eq_ignore_ascii_case(stored.name()));
            assert_eq!(stored.bytes(len as u64), Some(bytes as u64), "{stored}");
            assert_eq!(stored.is_quantized(), len > 1, "{stored}");
            if let Some(memory) = stored.in_memory() {
                assert_eq!(memory.to_ggml(), number);
            }
        }
        let ours = StoredType::ALL
            .iter()
            .filter(|stored| stored.to_ggml().is_some());
        assert_eq!(ours.count(), known);
        assert!(DType::ALL.iter().all(|dtype| {
            StoredType::from_ggml(dtype.to_ggml()).and_then(StoredType::in_memory) == Some(*dtype)
        }));
    }
}
