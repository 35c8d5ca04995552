//! Random numbers below a bound, the same everywhere.
//!
//! In: a first number, bounds. Out: numbers. To draw one takes a few cycles, where a division takes dozens.

/// Random numbers, always the same.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, it: &Below) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        it.of(self.0 >> 11) as usize
    }
}

/// Remainders of one divisor, in a few cycles each.
pub(super) struct Below {
    divisor: u64,
    inverse: u64,
}

impl Below {
    pub(super) fn new(divisor: usize) -> Self {
        let divisor = divisor.max(1) as u64;
        // Rounded up; of 1 it would be 2^64.
        Self { divisor, inverse: (u64::MAX / divisor).wrapping_add(1) }
    }

    /// Of a number below 2^53, by a divisor below 2^11: what the inverse is too large by does not reach the next quotient.
    fn of(&self, number: u64) -> u64 {
        if self.inverse == 0 {
            return 0;
        }
        let quotient = (u128::from(number) * u128::from(self.inverse)) >> 64;
        number - quotient as u64 * self.divisor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remainders_are_those_of_a_division() {
        let mut random = 1_u64;
        for divisor in 1..=200 {
            let below = Below::new(divisor);
            let ends = [0, 1, divisor as u64 - 1, divisor as u64, (1 << 53) - 1];
            let drawn = (0..500).map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                random >> 11
            });
            for number in ends.into_iter().chain(drawn) {
                assert_eq!(below.of(number), number % divisor as u64, "{number} by {divisor}");
            }
        }
    }
}
