//! Runs works of a plan on the kernels of this machine.
//!
//! In: works whose rows are all here ([`Work`]). Out: their results, in buffers that trainers pull from
//! ([`Results`]). A launch fuses works of one direction up to a cost that its engine bounds; on the CPU a backward
//! bundle that is dearer alone is split by key tiles, never by query rows.
//!
//! It waits for nothing. Invariant: what a work computes does not depend on what it was fused with.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_crds::Wire;
use cadre_exchange::Buffer;
use cadre_kernels::{
    Backward, BackwardRows, Engine, EngineError, Forward, Heads, Mask, Rows, RowsMut, key_tiles,
    wire as convert,
};
use cadre_planner::{BundleId, Task};
use cadre_protocol::Phase;

use crate::phases::Direction;
use crate::planned::{NanoPlan, PlannedStep, wire_bytes};

/// One trainer's rows of one phase, as peers may read them.
#[derive(Clone, Debug)]
pub struct PhaseRows {
    /// Queries, wire type.
    pub q: Arc<Buffer>,
    /// Keys, wire type.
    pub k: Arc<Buffer>,
    /// Values, wire type.
    pub v: Arc<Buffer>,
    /// Gradient of O (wire type), log-sum-exp and Δ (f32); backward only.
    pub gradients: Option<[Arc<Buffer>; 3]>,
}

/// All rows of one bundle in one place.
#[derive(Clone, Debug)]
pub enum BundleRows {
    /// In a landing, laid out as [`crate::lowering::Areas`] says.
    Landed(Arc<Buffer>),
    /// In the trainer's own rows, whole and side by side: nothing was copied.
    Home(PhaseRows),
}

/// A work that can run.
#[derive(Clone, Debug)]
pub struct Work {
    /// Its step.
    pub planned: Arc<PlannedStep>,
    /// Its phase.
    pub phase: Phase,
    /// Task (forward) or bundle (backward).
    pub work: u32,
    /// Rows of its bundle.
    pub rows: BundleRows,
}

/// What a work gave.
#[derive(Debug)]
pub enum Results {
    /// O (wire type) and LSE of a task.
    Forward([Arc<Buffer>; 2]),
    /// dQ (wire type), dK and dV part of a bundle.
    Backward([Arc<Buffer>; 3]),
}

/// A finished work.
#[derive(Debug)]
pub struct Done {
    /// Which.
    pub work: Work,
    /// What it gave.
    pub results: Results,
    /// Its share of the launch.
    pub busy: Duration,
}

impl Work {
    fn direction(&self) -> Direction {
        self.planned.nano_of(self.phase).1
    }

    /// Cost at which a launch of such works is long enough.
    fn launch_cost(&self, engine: &Engine) -> u64 {
        let heads = self.planned.nano_of(self.phase).0.problem.heads;
        let heads = Heads { query: heads.query.into(), kv: heads.kv.into(), dim: heads.dim.into() };
        engine.launch_cost(heads, matches!(self.planned.header.wire, Wire::Bf16))
    }

    /// Cost in the planner's unit, for fusing and reports.
    pub fn cost(&self) -> u64 {
        let (nano, direction) = self.planned.nano_of(self.phase);
        let dim = u64::from(nano.problem.heads.dim);
        match direction {
            Direction::Forward => {
                let task = &nano.plan.tasks()[self.work as usize];
                nano.plan.task_cost(&nano.problem, task) * dim
            }
            Direction::Backward => {
                nano.plan.bundle_cost(&nano.problem, BundleId(self.work)) * dim * 5 / 2
            }
        }
    }
}

/// Takes from the front of `queue` what fits one launch: at least one work, all of one phase.
pub fn fuse(queue: &mut Vec<Work>, engine: &Engine) -> Vec<Work> {
    let mut cost = 0;
    let most = queue.first().map_or(0, |it| it.launch_cost(engine));
    let first = queue.first().map(|it| (it.planned.header.step, it.phase));
    let fits = |work: &Work| {
        cost += work.cost();
        Some((work.planned.header.step, work.phase)) == first && cost <= most
    };
    let count = queue
        .iter()
        .map_while({
            let mut fits = fits;
            move |it| fits(it).then_some(())
        })
        .count();
    queue.drain(..count.max(1).min(queue.len())).collect()
}

/// Runs works of one phase together.
///
/// # Errors
///
/// The kernel refuses a shape; nothing was computed then. Or the GPU failed.
pub fn launch(works: Vec<Work>, engine: &mut Engine) -> Result<Vec<Done>, EngineError> {
    let Some(first) = works.first() else { return Ok(Vec::new()) };
    let start = Instant::now();
    let results = match first.direction() {
        Direction::Forward => launch_forward(&works, engine)?,
        Direction::Backward => launch_backward(&works, engine)?,
    };
    let total: u64 = works.iter().map(Work::cost).sum::<u64>().max(1);
    let elapsed = start.elapsed();
    let done = works.into_iter().zip(results).map(|(work, results)| {
        let busy = elapsed.mul_f64(work.cost() as f64 / total as f64);
        Done { work, results, busy }
    });
    Ok(done.collect())
}

/// A bundle's rows as the kernels want them.
struct View<'a> {
    rows: &'a BundleRows,
    nano: &'a NanoPlan,
    bundle: BundleId,
    direction: Direction,
    wire: Wire,
}

/// Tensors of the query side and of the key side.
#[derive(Clone, Copy)]
enum Part {
    Q,
    DOut,
    Lse,
    Delta,
    K,
    V,
}

impl<'a> View<'a> {
    fn of(work: &'a Work, bundle: BundleId) -> Self {
        let (nano, direction) = work.planned.nano_of(work.phase);
        let wire = work.planned.header.wire;
        Self { rows: &work.rows, nano, bundle, direction, wire }
    }

    fn heads(&self) -> Heads {
        let heads = self.nano.problem.heads;
        let kv_heads = &self.nano.plan.bundles()[self.bundle.0 as usize].kv_heads;
        let kv = usize::from(kv_heads.end - kv_heads.start);
        Heads { query: kv * usize::from(heads.query / heads.kv), kv, dim: heads.dim.into() }
    }

    fn scale(&self) -> f32 {
        1.0 / f32::from(self.nano.problem.heads.dim).sqrt()
    }

    fn document(&self) -> (Mask, u32) {
        let document = self.nano.plan.bundles()[self.bundle.0 as usize].document;
        let document = self.nano.problem.layout.documents()[document.0 as usize];
        let mask = match document.mask {
            cadre_planner::Mask::Causal => Mask::Causal,
            cadre_planner::Mask::Full => Mask::Full,
            cadre_planner::Mask::Window { left } => Mask::Window { left },
        };
        (mask, document.rows)
    }

    /// The buffer of a part and where the bundle's rows begin in it, in bytes, for `rows` counted from
    /// the bundle's first row (`base`) or from the document's (`position`).
    fn place(&self, part: Part, base: u32, position: u32) -> (&'a Buffer, usize) {
        let heads = self.heads();
        let wire = usize::from(wire_bytes(self.wire));
        let row = match part {
            Part::Q | Part::DOut => heads.query * heads.dim * wire,
            Part::K | Part::V => heads.kv * heads.dim * wire,
            Part::Lse | Part::Delta => heads.query * 4,
        };
        match self.rows {
            BundleRows::Landed(buffer) => {
                let areas = &self.nano.lists.inputs(self.bundle, self.direction).areas;
                let area = match part {
                    Part::Q => &areas.q,
                    Part::K => &areas.k,
                    Part::V => &areas.v,
                    Part::DOut => &areas.dout,
                    Part::Lse => &areas.lse,
                    Part::Delta => &areas.delta,
                };
                (buffer, area.start + base as usize * row)
            }
            BundleRows::Home(rows) => {
                let document = self.nano.plan.bundles()[self.bundle.0 as usize].document;
                let at = self.nano.problem.layout.locate(document, position..position + 1).next();
                let local = at.expect("a bundle at home has its rows in the layout").local.start;
                let gradients = || rows.gradients.as_ref().expect("backward rows carry gradients");
                let buffer = match part {
                    Part::Q => &rows.q,
                    Part::K => &rows.k,
                    Part::V => &rows.v,
                    Part::DOut => &gradients()[0],
                    Part::Lse => &gradients()[1],
                    Part::Delta => &gradients()[2],
                };
                (buffer, local as usize * row)
            }
        }
    }

    fn wire_rows(&self, part: Part, rows: &Range<u32>, base: u32) -> Rows<'a> {
        let heads = self.heads();
        let of_keys = matches!(part, Part::K | Part::V);
        let width = if of_keys { heads.kv } else { heads.query } * heads.dim;
        let count = (rows.end - rows.start) as usize * width;
        let (buffer, at) = self.place(part, base, rows.start);
        match self.wire {
            Wire::F32 => Rows::F32(&buffer.f32s()[at / 4..][..count]),
            Wire::Bf16 => Rows::Bf16(&buffer.bf16s()[at / 2..][..count]),
        }
    }

    fn scalars(&self, part: Part, rows: &Range<u32>, base: u32) -> &'a [f32] {
        let count = (rows.end - rows.start) as usize * self.heads().query;
        let (buffer, at) = self.place(part, base, rows.start);
        &buffer.f32s()[at / 4..][..count]
    }

    fn keys(&self) -> Range<u32> {
        self.nano.plan.bundles()[self.bundle.0 as usize].keys.clone()
    }
}

fn rows_mut(buffer: &mut Buffer, wire: Wire) -> RowsMut<'_> {
    match wire {
        Wire::F32 => RowsMut::F32(buffer.f32s_mut()),
        Wire::Bf16 => RowsMut::Bf16(buffer.bf16s_mut()),
    }
}

fn launch_forward(works: &[Work], engine: &mut Engine) -> Result<Vec<Results>, EngineError> {
    let mut buffers: Vec<(Buffer, Buffer)> = Vec::new();
    for work in works {
        let (view, task) = task_of(work);
        let heads = view.heads();
        let rows = (task.rows.end - task.rows.start) as usize;
        let o = rows * heads.query * heads.dim * usize::from(wire_bytes(view.wire));
        buffers.push((Buffer::zeroed(o), Buffer::zeroed(rows * heads.query * 4)));
    }
    let mut tasks: Vec<Forward<'_>> = Vec::new();
    for (work, (o, lse)) in works.iter().zip(&mut buffers) {
        let (view, task) = task_of(work);
        let (mask, document_rows) = view.document();
        let base = view.nano.lists.task_base(work.work as usize);
        let keys = task.keys.clone();
        let key_base = keys.start - view.keys().start;
        tasks.push(Forward {
            heads: view.heads(),
            mask,
            scale: view.scale(),
            document_rows,
            q: view.wire_rows(Part::Q, &task.rows, base),
            k: view.wire_rows(Part::K, &keys, key_base),
            v: view.wire_rows(Part::V, &keys, key_base),
            rows: task.rows.clone(),
            keys,
            out: rows_mut(o, view.wire),
            lse: lse.f32s_mut(),
        });
    }
    engine.forward(&mut tasks)?;
    drop(tasks);
    let results = |(o, lse)| Results::Forward([Arc::new(o), Arc::new(lse)]);
    Ok(buffers.into_iter().map(results).collect())
}

fn task_of(work: &Work) -> (View<'_>, &Task) {
    let (nano, _) = work.planned.nano_of(work.phase);
    let task = &nano.plan.tasks()[work.work as usize];
    (View::of(work, task.bundle), task)
}

/// What a bundle's launches write.
struct Sums {
    dq: Vec<f32>,
    dk: Buffer,
    dv: Buffer,
}

fn launch_backward(works: &[Work], engine: &mut Engine) -> Result<Vec<Results>, EngineError> {
    let view = |work: &'_ Work| BundleId(work.work);
    let mut sums: Vec<Sums> = Vec::new();
    for work in works {
        let view = View::of(work, view(work));
        let (heads, keys) = (view.heads(), view.keys());
        let query_rows = view.nano.lists.query_rows(view.bundle) as usize;
        let key_rows = (keys.end - keys.start) as usize * heads.kv * heads.dim * 4;
        let dq = vec![0.0_f32; query_rows * heads.query * heads.dim];
        let [dk, dv] = [0; 2].map(|_| Buffer::zeroed(key_rows));
        sums.push(Sums { dq, dk, dv });
    }
    // The CPU takes a dear bundle in parts, one after the other; what fits one launch goes together.
    let parts = |work: &Work, engine: &Engine| {
        let tiles = key_tiles(&View::of(work, view(work)).keys()).max(1);
        work.cost().div_ceil(work.launch_cost(engine)).clamp(1, tiles.into()) as u32
    };
    let on_gpu = works.first().is_some_and(|work| {
        let view = View::of(work, view(work));
        engine.is_on_gpu(view.heads(), matches!(view.wire, Wire::Bf16))
    });
    if on_gpu {
        let of = |(work, sums)| View::of(work, view(work)).backward(sums, 0, 1);
        let mut bundles: Vec<Backward<'_>> = works.iter().zip(&mut sums).map(of).collect();
        engine.backward(&mut bundles)?;
    } else {
        for (work, sums) in works.iter().zip(&mut sums) {
            let launches = parts(work, engine);
            for index in 0..launches {
                let bundle = View::of(work, view(work)).backward(sums, index, launches);
                engine.backward(&mut [bundle])?;
            }
        }
    }
    let rounded = |(work, Sums { dq, dk, dv }): (&Work, Sums)| {
        let dq = match work.planned.header.wire {
            Wire::F32 => Buffer::from(dq),
            Wire::Bf16 => {
                let mut rounded = Buffer::zeroed(dq.len() * 2);
                convert::to_bf16(rounded.bf16s_mut(), &dq);
                rounded
            }
        };
        Results::Backward([Arc::new(dq), Arc::new(dk), Arc::new(dv)])
    };
    Ok(works.iter().zip(sums).map(rounded).collect())
}

impl<'a> View<'a> {
    /// Launch `index` of `launches` that share out the bundle's key tiles.
    fn backward<'b>(&self, sums: &'b mut Sums, index: u32, launches: u32) -> Backward<'b>
    where
        'a: 'b,
    {
        let (heads, keys, (mask, document_rows)) = (self.heads(), self.keys(), self.document());
        let mut rest = &mut sums.dq[..];
        let mut parts = Vec::new();
        for (task, base) in tasks_of(self) {
            let count = (task.rows.end - task.rows.start) as usize * heads.query * heads.dim;
            let (own, behind) = rest.split_at_mut(count);
            rest = behind;
            parts.push(BackwardRows {
                rows: task.rows.clone(),
                q: self.wire_rows(Part::Q, &task.rows, base),
                dout: self.wire_rows(Part::DOut, &task.rows, base),
                lse: self.scalars(Part::Lse, &task.rows, base),
                delta: self.scalars(Part::Delta, &task.rows, base),
                dq: own,
            });
        }
        let tiles = key_tiles(&keys);
        let share = |index: u32| (u64::from(tiles) * u64::from(index) / u64::from(launches)) as u32;
        Backward {
            heads,
            mask,
            scale: self.scale(),
            document_rows,
            k: self.wire_rows(Part::K, &keys, 0),
            v: self.wire_rows(Part::V, &keys, 0),
            keys,
            parts,
            dk: sums.dk.f32s_mut(),
            dv: sums.dv.f32s_mut(),
            key_tiles: share(index)..share(index + 1),
        }
    }
}

/// Tasks of the view's bundle with their places among its query rows.
fn tasks_of<'a>(view: &View<'a>) -> impl Iterator<Item = (&'a Task, u32)> {
    let nano = view.nano;
    let tasks = nano.plan.bundles()[view.bundle.0 as usize].tasks.clone();
    tasks.map(move |task| (&nano.plan.tasks()[task as usize], nano.lists.task_base(task as usize)))
}
