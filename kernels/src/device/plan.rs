//! The nouns of a GPU launch: which rows, which keys, how.
//!
//! In and out: nothing but types, and the tables that they become. Rows are counted in packed tensors `[rows, heads, dim]`
//! that the launch gets, positions in documents.
//!
//! Nothing here talks to the GPU: [`super::forward`] and [`super::backward`] do.

use std::ffi::c_void;
use std::ops::Range;

use cudarc::driver::sys::{self, CUtensorMap};

use super::check::{self, Refusal};
use super::driver::call;
use super::error::Error;
use super::family::Family;
use super::tables::{Bundle, Task, Tensor};
use super::tiles::distances;
use crate::{Heads, Mask};

/// Query rows of a document, and where they lie in Q, O, dO, LSE, Δ and dQ.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TaskRows {
    /// Positions in the document.
    pub rows: Range<u32>,
    /// Row of the tensors that holds the first of `rows`.
    pub q_row: u32,
}

/// Keys of a document, and where they lie in K and V.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Keys {
    /// Rows of the whole document.
    pub document_rows: u32,
    /// Positions held: all that the mask keeps for the rows, or none.
    pub keys: Range<u32>,
    /// Row of K and V that holds the first of `keys`.
    pub kv_row: u32,
}

/// A task of a forward launch.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ForwardTask {
    /// Which keys a row attends to.
    pub mask: Mask,
    /// Keys that it reads.
    pub keys: Keys,
    /// Query rows of the task; no two tasks of a launch share one.
    pub rows: TaskRows,
}

/// A bundle of a backward launch.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct BackwardBundle {
    /// Which keys a row attends to.
    pub mask: Mask,
    /// Keys that it reads.
    pub keys: Keys,
    /// Row of its first key in dK and dV; no two bundles share one.
    pub dkv_row: u32,
    /// All its query rows, ascending.
    pub parts: Vec<TaskRows>,
}

/// Heads and scale of a launch, and how it is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Heads of the tensors; `dim` is one that the GPU's [`Family`] takes.
    pub heads: Heads,
    /// Factor of the scores, above 0, mostly `dim^-½`.
    pub scale: f32,
    /// Bound of the scores, above 0: softcap · tanh(score / softcap), before the mask. It has kernels of its own, so that
    /// launches without a softcap pay nothing for it.
    pub softcap: Option<f32>,
    /// Maximum blocks. With fewer than the GPU's processors, the others stay free for other work.
    pub blocks: Option<u32>,
    /// Keys of a canonical segment, a multiple of 128; O and LSE depend on it.
    pub segment: u32,
}

impl Shape {
    /// No softcap, all processors, and the segments of every job.
    pub fn new(heads: Heads, scale: f32) -> Self {
        let segment = super::lists::SEGMENT as u32;
        Self { heads, scale, softcap: None, blocks: None, segment }
    }

    pub(super) fn check(&self, family: Family) -> Result<(), Refusal> {
        check::common(family, self.heads, self.scale, self.softcap)?;
        if self.segment == 0 || !self.segment.is_multiple_of(128) || self.segment > 1 << 29 {
            let (field, rows, most) =
                ("a segment of no multiple of 128", self.segment.into(), 1 << 29);
            return Err(Refusal::Long { field, rows, most });
        }
        Ok(())
    }

    pub(super) fn blocks(&self, processors: u32, units: usize) -> u32 {
        let most = u32::try_from(units).unwrap_or(u32::MAX).min(processors).max(1);
        self.blocks.unwrap_or(most).clamp(1, most)
    }

    /// Factor that turns scores, or with a softcap their tanh, into exponents of 2.
    pub(super) fn scale_log2(&self) -> f32 {
        self.softcap.unwrap_or(self.scale) * std::f32::consts::LOG2_E
    }

    /// Factor of the scores inside tanh; 0 without a softcap.
    pub(super) fn inner_scale(&self) -> f32 {
        self.softcap.map_or(0.0, |softcap| self.scale / softcap)
    }

    /// One of `kernels`, which are those for dims up to 64, 128 and 256, without and with a softcap.
    pub(super) fn kernel(&self, kernels: [[&'static str; 3]; 2]) -> &'static str {
        kernels[usize::from(self.softcap.is_some())][match self.heads.dim {
            ..=64 => 0,
            65..=128 => 1,
            _ => 2,
        }]
    }
}

pub(super) fn task(mask: Mask, rows: &TaskRows, keys: &Keys, bundle: usize) -> Task {
    let (left, right) = distances(mask);
    Task {
        q_row: rows.q_row as i32,
        q_rows: rows.rows.len() as i32,
        q_offset: rows.rows.start as i32,
        kv_row: keys.kv_row as i32,
        kv_rows: keys.keys.len() as i32,
        kv_offset: keys.keys.start as i32,
        left,
        right,
        bundle: bundle as i32,
        dq_tile: 0,
    }
}

pub(super) fn bundle(it: &BackwardBundle, first_task: usize) -> Bundle {
    Bundle {
        kv_row: it.keys.kv_row as i32,
        kv_rows: it.keys.keys.len() as i32,
        kv_offset: it.keys.keys.start as i32,
        first_task: first_task as i32,
        tasks: it.parts.len() as i32,
        dkv_row: it.dkv_row as i32,
        first_key_tile: 0,
    }
}

/// Rows that a tensor must have, to hold all of `rows` (first row, count).
pub(super) fn reach(rows: impl Iterator<Item = (u32, usize)>) -> usize {
    rows.filter(|it| it.1 > 0).map(|(first, count)| first as usize + count).max().unwrap_or(0)
}

/// The form in which a kernel gets a tensor `[rows, heads, dim]` of bf16.
pub(super) enum TensorArgument {
    /// A tensor map, for the copy engine.
    Map(CUtensorMap),
    /// Address and shape, for threads.
    Plain(Tensor),
}

impl TensorArgument {
    /// The argument for a tensor at `place`, for a kernel of `family` that reads `box_rows` rows at once.
    pub(super) fn new(
        family: Family,
        place: (u64, usize),
        (heads, dim): (usize, usize),
        box_rows: i32,
    ) -> Result<Self, Error> {
        Ok(match family {
            Family::Hopper => Self::Map(tensor_map(place, heads, dim, box_rows)?),
            Family::Portable => {
                Self::Plain(Tensor { data: place.0, heads: heads as i32, dim: dim as i32 })
            }
        })
    }

    /// Pointer to the argument, for a launch.
    pub(super) fn pointer(&mut self) -> *mut c_void {
        match self {
            Self::Map(it) => (&raw mut *it).cast(),
            Self::Plain(it) => (&raw mut *it).cast(),
        }
    }
}

/// How the copy engine reads boxes of [64 numbers, 1 head, `box_rows` rows] of `[rows, heads, dim]` bf16 at `address`.
fn tensor_map(
    (address, numbers): (u64, usize),
    heads: usize,
    dim: usize,
    box_rows: i32,
) -> Result<CUtensorMap, Error> {
    let mut map = CUtensorMap { opaque: [0; 16] };
    let row_bytes = (heads * dim * 2) as u64;
    // The kernel never reads a tensor without rows, but the driver demands an address and a row.
    let rows = (numbers / (heads * dim)).max(1) as u64;
    let address = if address == 0 { 1 << 12 } else { address };
    let dims = [dim as u64, heads as u64, rows];
    let strides = [(dim * 2) as u64, row_bytes];
    let (boxes, steps) = ([64_u32, 1, box_rows as u32], [1_u32; 3]);
    // SAFETY: all arrays have as many entries as the rank wants; the driver reads them and writes the map. It does not look
    // at the tensor.
    #[allow(unsafe_code)]
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            address as *mut c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    call("cuTensorMapEncodeTiled", || format!(", {rows} rows of {heads} heads"), code)?;
    Ok(map)
}
