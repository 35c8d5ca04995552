//! Rows that a caller lends to a session: f32 or bf16, at any distance in memory.
//!
//! In: slices of the caller. Out: one copy into memory that peers may read, head by head in the job's wire type, or one copy
//! out of results, with whether they are finite. Nothing of the caller's is kept.
//!
//! Invariant: a row is rounded by its own values alone, and rows that are in the wire type already are not, so the same rows
//! give the same bits whenever they are submitted.

use std::borrow::Cow;

use cadre_crds::Wire;
use cadre_exchange::Buffer;
use cadre_kernels::wire;
use half::bf16;

use crate::heads::HeadByHead;
use crate::memory;
use crate::wire::{Values as Travelled, copy, copy_bf16, narrow, widen};

/// Elements of rows, in the caller's type.
#[derive(Clone, Copy, Debug)]
enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

/// Rows to read: row-major, the elements of a row side by side.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    values: Values<'a>,
    distance: Option<usize>,
}

/// Rows to write.
#[derive(Debug)]
pub struct RowsMut<'a> {
    values: ValuesMut<'a>,
    distance: Option<usize>,
}

#[derive(Debug)]
enum ValuesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

impl<'a> Rows<'a> {
    /// Rows of f32, one behind the other.
    pub fn f32(values: &'a [f32]) -> Self {
        Self { values: Values::F32(values), distance: None }
    }

    /// Rows of bf16, one behind the other.
    pub fn bf16(values: &'a [bf16]) -> Self {
        Self { values: Values::Bf16(values), distance: None }
    }

    /// The same rows, each beginning `elements` behind the one before.
    #[must_use]
    pub fn every(self, elements: usize) -> Self {
        Self { distance: Some(elements), ..self }
    }

    fn len(&self) -> usize {
        match self.values {
            Values::F32(it) => it.len(),
            Values::Bf16(it) => it.len(),
        }
    }

    /// Refuses memory that does not hold exactly `rows` rows of `width` elements; says what it holds.
    pub(super) fn check(&self, rows: usize, width: usize) -> Result<(), String> {
        check(self.len(), self.distance, rows, width)
    }

    /// The rows in wire type, head by head, in memory that peers may read.
    pub(super) fn to_wire(self, kind: Wire, form: &HeadByHead, width: usize) -> Buffer {
        let rows = form.rows();
        let distance = self.distance.unwrap_or(width);
        let numbers = rows * width;
        match kind {
            Wire::F32 => {
                let mut turned = memory::rows(numbers * 4);
                let to = turned.f32s_mut();
                match self.values {
                    Values::F32(values) => {
                        let from = each(values, rows, width, distance);
                        form.turn(from, to, width, <[f32]>::copy_from_slice);
                    }
                    Values::Bf16(values) => {
                        let from = each(values, rows, width, distance);
                        form.turn(from, to, width, wire::to_f32);
                    }
                }
                turned
            }
            Wire::Bf16 => {
                let mut turned = memory::rows(numbers * 2);
                let to = turned.bf16s_mut();
                match self.values {
                    Values::F32(values) => {
                        let from = each(values, rows, width, distance);
                        form.turn(from, to, width, wire::to_bf16);
                    }
                    Values::Bf16(values) => {
                        let from = each(values, rows, width, distance);
                        form.turn(from, to, width, <[bf16]>::copy_from_slice);
                    }
                }
                turned
            }
        }
    }

    /// The rows as f32, one behind the other; without a copy where they are that.
    pub(super) fn to_f32s(self, rows: usize, width: usize) -> Cow<'a, [f32]> {
        match self.values {
            Values::F32(values) if self.distance.is_none_or(|it| it == width) => {
                Cow::Borrowed(&values[..rows * width])
            }
            Values::F32(values) => {
                let distance = self.distance.unwrap_or(width);
                Cow::Owned(each(values, rows, width, distance).flatten().copied().collect())
            }
            Values::Bf16(values) => {
                let mut packed = vec![0.0; rows * width];
                let distance = self.distance.unwrap_or(width);
                let to = packed.chunks_exact_mut(width.max(1));
                for (to, row) in to.zip(each(values, rows, width, distance)) {
                    wire::to_f32(to, row);
                }
                Cow::Owned(packed)
            }
        }
    }
}

impl<'a> RowsMut<'a> {
    /// Rows of f32, one behind the other.
    pub fn f32(values: &'a mut [f32]) -> Self {
        Self { values: ValuesMut::F32(values), distance: None }
    }

    /// Rows of bf16, one behind the other.
    pub fn bf16(values: &'a mut [bf16]) -> Self {
        Self { values: ValuesMut::Bf16(values), distance: None }
    }

    /// The same rows, each beginning `elements` behind the one before; what lies between is left alone.
    #[must_use]
    pub fn every(self, elements: usize) -> Self {
        Self { distance: Some(elements), ..self }
    }

    /// As [`Rows::check`].
    pub(super) fn check(&self, rows: usize, width: usize) -> Result<(), String> {
        let length = match &self.values {
            ValuesMut::F32(it) => it.len(),
            ValuesMut::Bf16(it) => it.len(),
        };
        check(length, self.distance, rows, width)
    }

    /// Writes rows that lie one behind the other, as wide as those here; whether all of them are finite.
    pub(super) fn write(self, from: &[f32], width: usize) -> bool {
        let distance = self.distance.unwrap_or(width).max(1);
        let from = from.chunks_exact(width.max(1));
        match self.values {
            ValuesMut::F32(to) => to
                .chunks_mut(distance)
                .zip(from)
                .fold(true, |all, (to, from)| copy(&mut to[..width], from) && all),
            ValuesMut::Bf16(to) => to
                .chunks_mut(distance)
                .zip(from)
                .fold(true, |all, (to, from)| narrow(&mut to[..width], from) && all),
        }
    }

    /// As [`Self::write`], of rows that lie head by head.
    pub(super) fn write_turned(self, from: Travelled<'_>, form: &HeadByHead, width: usize) -> bool {
        let distance = self.distance.unwrap_or(width).max(1);
        match (self.values, from) {
            (ValuesMut::F32(to), Travelled::F32(from)) => {
                form.back(from, to.chunks_mut(distance), width, copy)
            }
            (ValuesMut::F32(to), Travelled::Bf16(from)) => {
                form.back(from, to.chunks_mut(distance), width, widen)
            }
            (ValuesMut::Bf16(to), Travelled::F32(from)) => {
                form.back(from, to.chunks_mut(distance), width, narrow)
            }
            (ValuesMut::Bf16(to), Travelled::Bf16(from)) => {
                form.back(from, to.chunks_mut(distance), width, copy_bf16)
            }
        }
    }
}

/// Numbers to read, f32, one for each query head of a row: those of a row side by side.
#[derive(Clone, Copy, Debug)]
pub struct PerHead<'a>(pub(super) Rows<'a>);

/// Such numbers to write.
#[derive(Debug)]
pub struct PerHeadMut<'a>(pub(super) RowsMut<'a>);

impl<'a> PerHead<'a> {
    /// Those of one row behind those of the one before.
    pub fn f32(values: &'a [f32]) -> Self {
        Self(Rows::f32(values))
    }

    /// The same numbers, those of each row beginning `elements` behind those of the one before.
    #[must_use]
    pub fn every(self, elements: usize) -> Self {
        Self(self.0.every(elements))
    }
}

impl<'a> PerHeadMut<'a> {
    /// As [`PerHead::f32`].
    pub fn f32(values: &'a mut [f32]) -> Self {
        Self(RowsMut::f32(values))
    }

    /// As [`PerHead::every`]; what lies between is left alone.
    #[must_use]
    pub fn every(self, elements: usize) -> Self {
        Self(self.0.every(elements))
    }
}

fn check(length: usize, distance: Option<usize>, rows: usize, width: usize) -> Result<(), String> {
    match distance {
        None if length == rows * width => Ok(()),
        None => Err(format!("has {length} elements, not {rows} rows of {width}")),
        Some(distance) if distance < width => {
            Err(format!("has rows {distance} elements apart, which are {width} wide"))
        }
        Some(distance) => {
            // The last row needs nothing behind it.
            let before = rows.saturating_sub(1).checked_mul(distance);
            let least =
                if rows == 0 { Some(0) } else { before.and_then(|it| it.checked_add(width)) };
            let most = rows.saturating_mul(distance);
            if least.is_some_and(|least| (least..=most).contains(&length)) {
                Ok(())
            } else {
                Err(format!(
                    "has {length} elements, not {rows} rows of {width} every {distance} elements"
                ))
            }
        }
    }
}

/// `rows` rows of `width` elements, each `distance` behind the one before.
fn each<T>(values: &[T], rows: usize, width: usize, distance: usize) -> impl Iterator<Item = &[T]> {
    values.chunks(distance.max(1)).take(rows).map(move |row| &row[..width])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_apart_are_packed_and_written_back_apart() {
        let values: Vec<f32> = (0..11).map(|it| it as f32).collect();
        let rows = Rows::f32(&values).every(4);
        rows.check(3, 3).unwrap();
        let packed = [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 8.0, 9.0, 10.0];
        // Of one head, and of three in a stretch of one row and one of two.
        for (kv_heads, turned) in [(1, packed), (3, [0.0, 1.0, 2.0, 4.0, 8.0, 5.0, 9.0, 6.0, 10.0])]
        {
            let form = HeadByHead::new(vec![1, 2], kv_heads);
            for kind in [Wire::F32, Wire::Bf16] {
                let wire = rows.to_wire(kind, &form, 3);
                let back = Rows {
                    values: match kind {
                        Wire::F32 => Values::F32(wire.f32s()),
                        Wire::Bf16 => Values::Bf16(wire.bf16s()),
                    },
                    distance: None,
                };
                assert_eq!(*back.to_f32s(3, 3), turned);
            }
            let mut to = [-1.0; 11];
            let travelled = Travelled::F32(&turned);
            assert!(RowsMut::f32(&mut to).every(4).write_turned(travelled, &form, 3));
            assert_eq!(to[..], [0.0, 1.0, 2.0, -1.0, 4.0, 5.0, 6.0, -1.0, 8.0, 9.0, 10.0][..]);
            let mut halves = [bf16::from_f32(-1.0); 9];
            assert!(RowsMut::bf16(&mut halves).write_turned(travelled, &form, 3));
            assert_eq!(halves.map(bf16::to_f32)[..], packed[..]);
        }
        assert_eq!(*rows.to_f32s(3, 3), packed);
        let mut to = [-1.0; 11];
        assert!(RowsMut::f32(&mut to).every(4).write(&packed, 3));
        assert_eq!(to[..], [0.0, 1.0, 2.0, -1.0, 4.0, 5.0, 6.0, -1.0, 8.0, 9.0, 10.0][..]);
        let mut halves = [bf16::from_f32(-1.0); 9];
        assert!(RowsMut::bf16(&mut halves).write(&packed, 3));
        assert_eq!(halves.map(bf16::to_f32)[..], packed[..]);
    }

    #[test]
    fn memory_of_another_size_is_refused_in_numbers() {
        let values = [0.0; 12];
        let refuse = |rows: Rows<'_>, (count, width), expected: &str| {
            assert_eq!(rows.check(count, width).unwrap_err(), expected);
        };
        refuse(Rows::f32(&values), (3, 3), "has 12 elements, not 3 rows of 3");
        refuse(Rows::f32(&values).every(2), (6, 3), "has rows 2 elements apart, which are 3 wide");
        let apart = "has 12 elements, not 4 rows of 3 every 4 elements";
        refuse(Rows::f32(&values).every(4), (4, 3), apart);
        refuse(
            Rows::f32(&values).every(4),
            (2, 3),
            "has 12 elements, not 2 rows of 3 every 4 elements",
        );
        for far in [usize::MAX, usize::MAX / 2] {
            Rows::f32(&values[..2]).every(far).check(2, 3).unwrap_err();
            Rows::f32(&values[..6]).every(far).check(2, 3).unwrap_err();
        }
        Rows::f32(&[]).check(0, 3).unwrap();
        Rows::f32(&[]).every(4).check(0, 3).unwrap();
        let none = HeadByHead::new(Vec::new(), 3);
        let nothing = Rows::bf16(&[]).every(4).to_wire(Wire::F32, &none, 3);
        assert!(nothing.is_empty());
    }
}
