/// SplitMix64: the same numbers on every machine.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// About normal, mean 0 and deviation 1: the sum of four uniform numbers. No `libm`, whose results differ by machine.
    pub(super) fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: f32 = (0..4).map(|i| f32::from((bits >> (16 * i)) as u16) / 65536.0).sum();
        (sum - 2.0) * 3f32.sqrt()
    }
}
