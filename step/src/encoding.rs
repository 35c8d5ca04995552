//! Bytes of postcard, for what is long.
//!
//! In: plain data. Out: what `postcard::to_stdvec` gives. A header of a large step is a million numbers of one to three bytes: copied
//! as slices of any length they take several times as long.

use postcard::ser_flavors::Flavor;
use serde::Serialize;

/// The bytes so far.
struct Bytes(Vec<u8>);

impl Flavor for Bytes {
    type Output = Vec<u8>;

    #[inline]
    fn try_push(&mut self, data: u8) -> postcard::Result<()> {
        self.0.push(data);
        Ok(())
    }

    #[inline]
    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        match *data {
            [one] => self.0.push(one),
            [one, two] => self.0.extend_from_slice(&[one, two]),
            [one, two, three] => self.0.extend_from_slice(&[one, two, three]),
            _ => self.0.extend_from_slice(data),
        }
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}

/// See the module.
///
/// # Errors
///
/// Those of postcard: what is given is no plain data.
pub fn encoded(what: &impl Serialize) -> postcard::Result<Vec<u8>> {
    postcard::serialize_with_flavor(what, Bytes(Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_postcard() {
        let numbers: Vec<u64> = (0..64).flat_map(|it| [1 << it, (1 << it) - 1]).collect();
        let what = (numbers, "a text", true, 1.5_f64, Some(-3_i32), [7_u8; 9]);
        assert_eq!(encoded(&what).unwrap(), postcard::to_stdvec(&what).unwrap());
    }
}
