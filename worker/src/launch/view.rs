//! Where the rows of a work begin, in its bundle's landing or in the trainer's own rows.
//!
//! In: a [`Work`]. Out: heads, mask, scores and keys of its bundle, and for every [`Part`] the memory, the bytes and, under each KV
//! head, the first row. It reads no row.
//!
//! Rows lie head by head ([`HeadRows`]), so each KV head of a work is a task of the kernels', whose rows lie side by side.
//!
//! Invariant: rows of one part follow one another as the lists of the plan say, whichever memory they are in.

use std::ops::Range;

use cadre_crds::Wire;
use cadre_kernels::{Heads, Mask};
use cadre_planner::{Bundle, BundleId, Task};
use cadre_step::layers::{Factor, Kind};
use cadre_step::lowering::HeadRows;
use cadre_step::phases::Direction;
use cadre_step::planned::{NanoPlan, wire_bytes};

use super::{BundleRows, Work};

/// A bundle's rows as the kernels want them.
pub(super) struct View<'a, M> {
    rows: &'a BundleRows<M>,
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

impl<'a, M> View<'a, M> {
    pub(super) fn of(work: &'a Work<M>, bundle: BundleId) -> Self {
        let (nano, direction) = work.planned.nano_of(work.phase);
        let (kind, wire) = (work.planned.kind_of(work.phase), work.planned.header.wire);
        Self { rows: &work.rows, nano, bundle, direction, kind, wire }
    }

    /// Heads of a task of the kernels': one of the bundle's KV heads.
    pub(super) fn heads(&self) -> Heads {
        let heads = self.kind.heads;
        Heads { query: (heads.query / heads.kv).into(), kv: 1, dim: heads.dim.into() }
    }

    /// How many KV heads the bundle has.
    pub(super) fn kv_heads(&self) -> usize {
        self.whole().kv_heads.len()
    }

    fn whole(&self) -> &'a Bundle {
        &self.nano.plan.bundles()[self.bundle.0 as usize]
    }

    pub(super) fn scale(&self) -> f32 {
        self.kind.scale_of()
    }

    pub(super) fn softcap(&self) -> Option<f32> {
        self.kind.softcap.map(Factor::get)
    }

    pub(super) fn document(&self) -> (Mask, u32) {
        let document = self.whole().document;
        let document = self.nano.problem.layout.documents()[document.0 as usize];
        (mask(document.mask), document.rows)
    }

    /// Numbers in a row of a part, under one KV head.
    pub(super) fn width(&self, part: Part) -> usize {
        let heads = self.heads();
        match part {
            Part::Q | Part::DOut => heads.query * heads.dim,
            Part::K | Part::V => heads.dim,
            Part::Lse | Part::Delta => heads.query,
        }
    }

    /// Bytes of a row of a part, under one KV head.
    pub(super) fn row_bytes(&self, part: Part) -> usize {
        let number = match part {
            Part::Q | Part::DOut | Part::K | Part::V => usize::from(wire_bytes(self.wire)),
            Part::Lse | Part::Delta => 4,
        };
        self.width(part) * number
    }

    /// The memory that holds a part, and which bytes of it are the part's; all of them at home.
    pub(super) fn tensor(&self, part: Part) -> (&'a M, Option<Range<usize>>) {
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

    /// Where the rows of a task begin in the parts of the query side; tasks of the bundle before it have `base` rows.
    pub(super) fn task_rows(&self, task: &Task, base: u32) -> HeadRows {
        match self.rows {
            BundleRows::Landed(_) => {
                HeadRows::in_task(base, task.rows.len() as u32, self.kv_heads(), 0)
            }
            BundleRows::Home(_) => self.at_home(task.rows.start),
        }
    }

    /// Where some of the bundle's keys begin in K and V. The result for an empty range is not used.
    pub(super) fn key_rows(&self, keys: &Range<u32>) -> HeadRows {
        let all = self.keys();
        match self.rows {
            _ if keys.is_empty() => HeadRows::in_keys(0, 0),
            BundleRows::Landed(_) => HeadRows::in_keys(all.len() as u32, keys.start - all.start),
            BundleRows::Home(_) => self.at_home(keys.start),
        }
    }

    fn at_home(&self, row: u32) -> HeadRows {
        let whole = self.whole();
        let at = self.nano.problem.layout.locate(whole.document, row..row + 1).next();
        let at = at.expect("a bundle at home has its rows in the layout");
        self.nano.lists.stretches().home(&at, &whole.kv_heads)
    }

    pub(super) fn keys(&self) -> Range<u32> {
        self.whole().keys.clone()
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

/// Heads of the planner, as the kernels name them.
pub fn heads(planned: cadre_planner::Heads) -> Heads {
    Heads { query: planned.query.into(), kv: planned.kv.into(), dim: planned.dim.into() }
}

/// The task of a forward work, and its bundle's rows.
pub(super) fn task_of<M>(work: &Work<M>) -> (View<'_, M>, &Task) {
    let (nano, _) = work.planned.nano_of(work.phase);
    let task = &nano.plan.tasks()[work.work as usize];
    (View::of(work, task.bundle), task)
}

/// Tasks of the view's bundle with their places among its query rows.
pub(super) fn tasks_of<'a, M>(view: &View<'a, M>) -> impl Iterator<Item = (&'a Task, u32)> {
    let nano = view.nano;
    let tasks = nano.plan.bundles()[view.bundle.0 as usize].tasks.clone();
    tasks.map(move |task| (&nano.plan.tasks()[task as usize], nano.lists.task_base(task as usize)))
}
