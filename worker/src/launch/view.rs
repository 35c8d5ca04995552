//! Where the rows of a work begin, in its bundle's landing or in the trainer's own rows.
//!
//! In: a [`Work`]. Out: heads, mask, scores and keys of its bundle, and for every [`Part`] the memory, the bytes and the first row.
//! It reads no row.
//!
//! Invariant: rows of one part follow one another as the lists of the plan say, whichever memory they are in.

use std::ops::Range;

use cadre_crds::Wire;
use cadre_kernels::{Heads, Mask};
use cadre_planner::{BundleId, Task};
use cadre_step::layers::{Factor, Kind};
use cadre_step::phases::Direction;
use cadre_step::planned::{NanoPlan, wire_bytes};

use super::{BundleRows, Work};
use crate::memory::Memory;

/// A bundle's rows as the kernels want them.
pub(super) struct View<'a> {
    rows: &'a BundleRows,
    pub(super) nano: &'a NanoPlan,
    pub(super) bundle: BundleId,
    direction: Direction,
    kind: Kind,
    pub(super) wire: Wire,
}

/// Tensors of the query side and of the key side.
#[derive(Clone, Copy)]
pub(super) enum Part {
    Q,
    DOut,
    Lse,
    Delta,
    K,
    V,
}

impl<'a> View<'a> {
    pub(super) fn of(work: &'a Work, bundle: BundleId) -> Self {
        let (nano, direction) = work.planned.nano_of(work.phase);
        let (kind, wire) = (work.planned.kind_of(work.phase), work.planned.header.wire);
        Self { rows: &work.rows, nano, bundle, direction, kind, wire }
    }

    pub(super) fn heads(&self) -> Heads {
        let heads = self.nano.problem.heads;
        let kv_heads = &self.nano.plan.bundles()[self.bundle.0 as usize].kv_heads;
        let kv = usize::from(kv_heads.end - kv_heads.start);
        Heads { query: kv * usize::from(heads.query / heads.kv), kv, dim: heads.dim.into() }
    }

    pub(super) fn scale(&self) -> f32 {
        self.kind.scale_of(self.nano.problem.heads.dim.into())
    }

    pub(super) fn softcap(&self) -> Option<f32> {
        self.kind.softcap.map(Factor::get)
    }

    pub(super) fn document(&self) -> (Mask, u32) {
        let document = self.nano.plan.bundles()[self.bundle.0 as usize].document;
        let document = self.nano.problem.layout.documents()[document.0 as usize];
        (mask(document.mask), document.rows)
    }

    /// Numbers in a row of a part.
    pub(super) fn width(&self, part: Part) -> usize {
        let heads = self.heads();
        match part {
            Part::Q | Part::DOut => heads.query * heads.dim,
            Part::K | Part::V => heads.kv * heads.dim,
            Part::Lse | Part::Delta => heads.query,
        }
    }

    /// Bytes of a row of a part.
    pub(super) fn row_bytes(&self, part: Part) -> usize {
        let number = match part {
            Part::Q | Part::DOut | Part::K | Part::V => usize::from(wire_bytes(self.wire)),
            Part::Lse | Part::Delta => 4,
        };
        self.width(part) * number
    }

    /// The memory that holds a part, and which bytes of it are the part's; all of them at home.
    pub(super) fn tensor(&self, part: Part) -> (&'a Memory, Option<Range<usize>>) {
        match self.rows {
            BundleRows::Landed(memory) => {
                let areas = &self.nano.lists.inputs(self.bundle, self.direction).areas;
                let area = match part {
                    Part::Q => &areas.q,
                    Part::K => &areas.k,
                    Part::V => &areas.v,
                    Part::DOut => &areas.dout,
                    Part::Lse => &areas.lse,
                    Part::Delta => &areas.delta,
                };
                (memory, Some(area.clone()))
            }
            BundleRows::Home(rows) => {
                let gradients = || rows.gradients.as_ref().expect("backward rows carry gradients");
                let memory = match part {
                    Part::Q => &rows.q,
                    Part::K => &rows.k,
                    Part::V => &rows.v,
                    Part::DOut => &gradients()[0],
                    Part::Lse => &gradients()[1],
                    Part::Delta => &gradients()[2],
                };
                (memory, None)
            }
        }
    }

    /// The row of a part at which rows begin that are `base` behind the bundle's first one and at `position` in the document.
    pub(super) fn first_row(&self, base: u32, position: u32) -> u32 {
        match self.rows {
            BundleRows::Landed(_) => base,
            BundleRows::Home(_) => {
                let document = self.nano.plan.bundles()[self.bundle.0 as usize].document;
                let at = self.nano.problem.layout.locate(document, position..position + 1).next();
                at.expect("a bundle at home has its rows in the layout").local.start
            }
        }
    }

    pub(super) fn keys(&self) -> Range<u32> {
        self.nano.plan.bundles()[self.bundle.0 as usize].keys.clone()
    }
}

/// A mask of the planner, as the kernels name it.
pub fn mask(planned: cadre_planner::Mask) -> Mask {
    match planned {
        cadre_planner::Mask::Causal => Mask::Causal,
        cadre_planner::Mask::Full => Mask::Full,
        cadre_planner::Mask::Window { left } => Mask::Window { left },
    }
}

/// The task of a forward work, and its bundle's rows.
pub(super) fn task_of(work: &Work) -> (View<'_>, &Task) {
    let (nano, _) = work.planned.nano_of(work.phase);
    let task = &nano.plan.tasks()[work.work as usize];
    (View::of(work, task.bundle), task)
}

/// Tasks of the view's bundle with their places among its query rows.
pub(super) fn tasks_of<'a>(view: &View<'a>) -> impl Iterator<Item = (&'a Task, u32)> {
    let nano = view.nano;
    let tasks = nano.plan.bundles()[view.bundle.0 as usize].tasks.clone();
    tasks.map(move |task| (&nano.plan.tasks()[task as usize], nano.lists.task_base(task as usize)))
}
