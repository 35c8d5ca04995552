//! The calibration that was measured on an H200, written by `bench/gpu/merge.py`; none where none was.
//!
//! In and out: numbers. Nothing here is written by hand.

use super::Profile;

/// None was measured yet.
pub(super) fn h200() -> Option<Profile> {
    None
}
