//! Element types as files name them.

use std::fmt;
use std::str::FromStr;

use safetensors::tensor::Dtype;

macro_rules! stored_types {
    ($($(#[$doc:meta])* $variant:ident = $dtype:ident, $name:literal, $bits:literal;)*) => {
        /// The type of a tensor's elements as its file stores them.
        ///
        /// This says what a file can hold, not what a device can compute with. Every type of the safetensors format
        /// is here, so that a checkpoint can be listed even where a type cannot be used.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum StoredType {
            $($(#[$doc])* $variant,)*
        }

        impl StoredType {
            /// Every type this crate knows, in the order of their declaration.
            pub const ALL: &[StoredType] = &[$(StoredType::$variant),*];

            /// The name that safetensors files use: `BF16`, `F8_E4M3`.
            pub const fn name(self) -> &'static str {
                match self { $(StoredType::$variant => $name,)* }
            }

            /// Bits of one element; below 8 for types that are packed across byte borders.
            pub const fn bits(self) -> u32 {
                match self { $(StoredType::$variant => $bits,)* }
            }

            /// The safetensors crate's type; `None` for one that a later release of it added.
            pub(super) fn from_safetensors(dtype: Dtype) -> Option<StoredType> {
                match dtype { $(Dtype::$dtype => Some(StoredType::$variant),)* _ => None }
            }
        }
    };
}

stored_types! {
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

impl StoredType {
    /// Bytes that `elements` elements take; `None` if that overflows or is no whole number of bytes.
    pub const fn bytes(self, elements: u64) -> Option<u64> {
        match elements.checked_mul(self.bits() as u64) {
            Some(bits) if bits.is_multiple_of(8) => Some(bits / 8),
            _ => None,
        }
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
