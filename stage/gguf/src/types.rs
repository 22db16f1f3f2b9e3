//! Tensor types of ggml: names, block and byte sizes.

use serde::{Deserialize, Serialize};

macro_rules! tensor_types {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $text:literal, $block:literal, $bytes:literal;)*) => {
        /// A tensor type that ggml can load.
        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum TensorType { $($(#[$doc])* $name,)* }

        impl TensorType {
            /// Every type, in the order of ids.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The type with ggml's number `id`; `None` for removed and unknown ones.
            #[must_use]
            pub const fn from_id(id: u32) -> Option<Self> {
                match id { $($id => Some(Self::$name),)* _ => None }
            }

            /// ggml's number.
            #[must_use]
            pub const fn id(self) -> u32 {
                match self { $(Self::$name => $id,)* }
            }

            /// ggml's name, as in `q4_K`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Elements in a block.
            #[must_use]
            pub const fn block_elements(self) -> u64 {
                match self { $(Self::$name => $block,)* }
            }

            /// Bytes of a block.
            #[must_use]
            pub const fn block_bytes(self) -> u64 {
                match self { $(Self::$name => $bytes,)* }
            }
        }
    };
}

tensor_types! {
    /// 32-bit float.
    F32 = 0, "f32", 1, 4;
    /// 16-bit float.
    F16 = 1, "f16", 1, 2;
    /// 4 bits, scale per 32.
    Q4_0 = 2, "q4_0", 32, 18;
    /// 4 bits, scale and minimum per 32.
    Q4_1 = 3, "q4_1", 32, 20;
    /// 5 bits, scale per 32.
    Q5_0 = 6, "q5_0", 32, 22;
    /// 5 bits, scale and minimum per 32.
    Q5_1 = 7, "q5_1", 32, 24;
    /// 8 bits, scale per 32.
    Q8_0 = 8, "q8_0", 32, 34;
    /// 8 bits, scale and sum per 32.
    Q8_1 = 9, "q8_1", 32, 36;
    /// 2 bits, super-blocks.
    Q2_K = 10, "q2_K", 256, 84;
    /// 3 bits, super-blocks.
    Q3_K = 11, "q3_K", 256, 110;
    /// 4 bits, super-blocks.
    Q4_K = 12, "q4_K", 256, 144;
    /// 5 bits, super-blocks.
    Q5_K = 13, "q5_K", 256, 176;
    /// 6 bits, super-blocks.
    Q6_K = 14, "q6_K", 256, 210;
    /// 8 bits, super-blocks.
    Q8_K = 15, "q8_K", 256, 292;
    /// 2.06 bits, codebook.
    IQ2_XXS = 16, "iq2_xxs", 256, 66;
    /// 2.31 bits, codebook.
    IQ2_XS = 17, "iq2_xs", 256, 74;
    /// 3.06 bits, codebook.
    IQ3_XXS = 18, "iq3_xxs", 256, 98;
    /// 1.56 bits, codebook.
    IQ1_S = 19, "iq1_s", 256, 50;
    /// 4 bits, non-linear.
    IQ4_NL = 20, "iq4_nl", 32, 18;
    /// 3.44 bits, codebook.
    IQ3_S = 21, "iq3_s", 256, 110;
    /// 2.56 bits, codebook.
    IQ2_S = 22, "iq2_s", 256, 82;
    /// 4.25 bits, non-linear.
    IQ4_XS = 23, "iq4_xs", 256, 136;
    /// 8-bit integer.
    I8 = 24, "i8", 1, 1;
    /// 16-bit integer.
    I16 = 25, "i16", 1, 2;
    /// 32-bit integer.
    I32 = 26, "i32", 1, 4;
    /// 64-bit integer.
    I64 = 27, "i64", 1, 8;
    /// 64-bit float.
    F64 = 28, "f64", 1, 8;
    /// 1.75 bits, codebook.
    IQ1_M = 29, "iq1_m", 256, 56;
    /// bfloat16.
    BF16 = 30, "bf16", 1, 2;
    /// Ternary, 1.69 bits.
    TQ1_0 = 34, "tq1_0", 256, 54;
    /// Ternary, 2.06 bits.
    TQ2_0 = 35, "tq2_0", 256, 66;
    /// OCP microscaling 4-bit float.
    MXFP4 = 39, "mxfp4", 32, 17;
    /// 4-bit float with E4M3 scales.
    NVFP4 = 40, "nvfp4", 64, 36;
    /// 1 bit, scale per 128.
    Q1_0 = 41, "q1_0", 128, 18;
    /// 2 bits, scale per 64.
    Q2_0 = 42, "q2_0", 64, 18;
}

impl TensorType {
    /// Bytes of a row of `elements`; `None` when they are no whole number of blocks, or too many.
    #[must_use]
    pub const fn row_bytes(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_found_again() {
        for &t in TensorType::ALL {
            assert_eq!(TensorType::from_id(t.id()), Some(t), "{}", t.name());
            assert_eq!(t.row_bytes(t.block_elements() * 3), Some(t.block_bytes() * 3));
        }
        for removed in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(TensorType::from_id(removed), None);
        }
    }

    #[test]
    fn rows_of_part_blocks_are_refused() {
        assert_eq!(TensorType::Q4_K.row_bytes(255), None);
        assert_eq!(TensorType::F64.row_bytes(u64::MAX), None);
    }
}
