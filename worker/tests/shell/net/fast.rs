//! Maps by small keys, without an order.
//!
//! Nothing that happens may depend on the order of such a map: whoever goes over one sorts.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// See the module.
pub(crate) type Fast<K, V> = HashMap<K, V, BuildHasherDefault<Mixed>>;

/// Good enough for numbers that nobody chose against it.
#[derive(Default)]
pub(crate) struct Mixed(u64);

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        // The upper bits are the mixed ones; a table takes the lower.
        self.0 ^ (self.0 >> 32)
    }
}
