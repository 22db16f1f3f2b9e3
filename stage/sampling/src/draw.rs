//! Counter-based random numbers: a pure function of seed and position.

use crate::Position;

/// The finaliser of SplitMix64: a bijection in which every input bit moves every output bit.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number in [0, 1) for the token drawn at `position`.
pub(crate) fn uniform(seed: u64, position: Position) -> f64 {
    // The seed is mixed first: neighbouring seeds must not give shifted copies of one sequence.
    let key = mix(seed.wrapping_add(GOLDEN));
    let counter = u64::from(position as u32).wrapping_add(1).wrapping_mul(GOLDEN);
    let bits = mix(mix(key ^ counter).wrapping_add(key));
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// χ² of `counts` against a flat expectation.
    fn chi_square(counts: &[u32]) -> f64 {
        let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
        counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum()
    }

    #[test]
    fn flat_along_positions_and_along_seeds() {
        // 63 degrees of freedom: 110 is beyond the 99.97th percentile.
        for fixed in [0u64, 1, 42, u64::MAX] {
            let mut by_position = [0u32; 64];
            let mut by_seed = [0u32; 64];
            for i in 0..64_000u32 {
                by_position[(uniform(fixed, i as Position) * 64.0) as usize] += 1;
                by_seed[(uniform(u64::from(i), fixed as u32 as Position) * 64.0) as usize] += 1;
            }
            assert!(chi_square(&by_position) < 110.0, "seed {fixed}: {}", chi_square(&by_position));
            assert!(chi_square(&by_seed) < 110.0, "position {fixed}: {}", chi_square(&by_seed));
        }
    }

    #[test]
    fn neighbours_are_independent() {
        // Pairs (position, position + 1) and (seed, seed + 1) fill an 8 × 8 grid evenly.
        let mut positions = [0u32; 64];
        let mut seeds = [0u32; 64];
        for i in 0..64_000 {
            let cell = |a: f64, b: f64| (a * 8.0) as usize * 8 + (b * 8.0) as usize;
            positions[cell(uniform(7, i), uniform(7, i + 1))] += 1;
            seeds[cell(uniform(i as u64, 9), uniform(i as u64 + 1, 9))] += 1;
        }
        assert!(chi_square(&positions) < 110.0);
        assert!(chi_square(&seeds) < 110.0);
    }
}
