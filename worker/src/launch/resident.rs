//! Launches on rows that live on the GPU: kernels read them in the landing, results stay there.
//!
//! In: works of one direction. Out: their [`Flight`]s, with results in room that trainers pull from. Works whose rows are in one
//! memory (a bundle's landing, or the trainer's own rows) are one launch; launches go to two streams by turns, so that one's tail
//! is filled by the next. A launch is enqueued behind the copies to its rows that were enqueued before, on whichever stream; the
//! host waits for none of them.
//!
//! ```text
//! copy stream:  pull ─ pull ─ pull ─┐
//! launch stream:                    └ kernels ─ joined dQ ─ over
//! ```
//!
//! Nothing goes through the host but lists, once a step. Invariant: every launch ends, since all that it waits for is on a stream.

use std::collections::BTreeMap;
use std::ops::Range;

use cadre_crds::Wire;
use cadre_kernels::Engine;
use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, CopyPiece, Error, Event, ForwardPlan,
    ForwardTask, ForwardTensors, Keys, Order, Part as Rows, QueryGradients, Refusal, Rooms,
    Scratch, Shape, Stream, TaskRows,
};
use cadre_planner::{BundleId, Task};
use cadre_step::phases::Direction;

use super::plans::{Key, Made, Plan, Plans, Slices};
use super::view::{Part, View, task_of, tasks_of};
use super::{Flight, Results, Work, device_error_of};
use crate::memory::{GpuRows, OnGpu};

/// See the module.
#[derive(Debug)]
pub struct Resident {
    /// Streams, and what the launches of each need one after the other.
    streams: [(Stream, Scratch); 2],
    turn: usize,
    rooms: Rooms,
    order: Order,
    plans: Plans,
    made: u64,
}

/// Lists of plans that are kept for the next layer take at most one part in this many of the GPU's
/// memory.
const PLANS_SHARE: u64 = 16;

impl Resident {
    /// For rows that live in `place`, with the order of dQ that `engine` keeps.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(engine: &Engine, place: &OnGpu) -> Result<Self, Error> {
        let rooms = place.rooms();
        let gpu = rooms.gpu();
        let stream = || Ok::<_, Error>((Stream::new(gpu)?, Scratch::new(gpu)?));
        let streams = [stream()?, stream()?];
        let plans = Plans::new(gpu.memory()?.1 as u64 / PLANS_SHARE);
        let (rooms, order) = (rooms.clone(), engine.order());
        Ok(Self { streams, turn: 0, rooms, order, plans, made: 0 })
    }

    /// Misses of the plan cache so far: one for each launch whose works no launch of the step had before, while memory lasts.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// Puts works of one phase on streams. What memory is short for goes in halves, without the plans of other launches.
    ///
    /// # Errors
    ///
    /// A shape that the kernels cannot do, memory that is short for a single work, or the GPU's. What was put is waited for.
    pub fn put(&mut self, works: Vec<Work<GpuRows>>) -> Result<Vec<Flight>, Error> {
        if works.iter().any(|it| it.planned.header.wire == Wire::F32) {
            return Err(Refusal::Dtype { task: 0, field: "q" }.into());
        }
        let mut groups: BTreeMap<(u64, u64), Vec<Work<GpuRows>>> = BTreeMap::new();
        for work in works {
            let rows = rows_of(&view(&work), Part::Q);
            groups.entry((rows.memory().arena().number(), rows.at())).or_default().push(work);
        }
        let mut flights = Vec::new();
        for works in groups.into_values() {
            self.put_group(&works, &mut flights)?;
        }
        Ok(flights)
    }

    fn put_group(
        &mut self,
        works: &[Work<GpuRows>],
        flights: &mut Vec<Flight>,
    ) -> Result<(), Error> {
        match self.launch(works) {
            Err(error) if error.is_out_of_memory() && self.plans.clear() => {
                for (_, scratch) in &self.streams {
                    scratch.release()?;
                }
                self.put_group(works, flights)
            }
            Err(error) if error.is_out_of_memory() && works.len() > 1 => {
                let (first, second) = works.split_at(works.len() / 2);
                self.put_group(first, flights)?;
                self.put_group(second, flights)
            }
            done => match works {
                [work] => done.map_err(|it| device_error_of(&work.name(), it)),
                _ => done,
            }
            .map(|it| flights.extend(it)),
        }
    }

    /// One launch of works whose rows are in one memory; none without works.
    fn launch(&mut self, works: &[Work<GpuRows>]) -> Result<Option<Flight>, Error> {
        let Some(key) = Key::of(works) else { return Ok(None) };
        let mut made = match self.plans.take(&key) {
            Some(made) => made,
            None => self.make(works)?,
        };
        let flight = self.run(works, &mut made)?;
        self.plans.keep(key, made);
        Ok(Some(flight))
    }

    fn make(&mut self, works: &[Work<GpuRows>]) -> Result<Made, Error> {
        self.turn = (self.turn + 1) % self.streams.len();
        self.made += 1;
        match works[0].direction() {
            Direction::Forward => self.make_forward(works),
            Direction::Backward => self.make_backward(works),
        }
    }

    /// Tasks whose rows are in one memory.
    fn make_forward(&self, works: &[Work<GpuRows>]) -> Result<Made, Error> {
        let first = view(&works[0]);
        let shape = shape(&first);
        let placed: Vec<_> = works.iter().map(placed).collect();
        let span = span(placed.iter().flat_map(|it| &it.1));
        let mut tasks = Vec::new();
        for ((view, heads), work) in placed.iter().zip(works) {
            let task = task_of(work).1;
            let (mask, document_rows) = view.document();
            for (head, at) in heads.iter().enumerate() {
                let keys = keys_of(view, &task.keys, document_rows, head);
                let rows =
                    TaskRows { rows: task.rows.clone(), q_row: number(at.start - span.start) };
                tasks.push(ForwardTask { mask, keys, rows });
            }
        }
        let row = [Part::Q, Part::Lse].map(|it| first.row_bytes(it) as u64);
        let length = span.end - span.start;
        let bytes = row.map(|row| length * row);
        let slices = |heads: &[Range<u64>]| {
            let of = |row| heads.iter().map(|it| bytes_of(it, &span, row)).collect();
            Slices::Forward(row.map(of))
        };
        let slices = placed.iter().map(|it| slices(&it.1)).collect();
        let (stream, scratch) = &self.streams[self.turn];
        let plan = ForwardPlan::with(stream, shape, &tasks, scratch)?;
        Ok(Made {
            weight: plan.list_bytes(),
            plan: Plan::Forward(plan),
            stream: self.turn,
            slices,
            bytes: [bytes[0], bytes[1], 0],
            span,
        })
    }

    /// Bundles whose rows are in one memory.
    fn make_backward(&self, works: &[Work<GpuRows>]) -> Result<Made, Error> {
        let first = view(&works[0]);
        let mut all = Vec::new();
        for work in works {
            let view = view(work);
            let tasks = tasks_of(&view).map(|(task, base)| (task, heads_of(&view, task, base)));
            let tasks: Vec<_> = tasks.collect();
            all.push((view, tasks));
        }
        let span = span(all.iter().flat_map(|it| &it.1).flat_map(|it| &it.1));
        let (q_row, dk_row) = (first.row_bytes(Part::Q) as u64, first.width(Part::K) as u64 * 4);
        let (mut bundles, mut slices, mut dkv_row) = (Vec::new(), Vec::new(), 0_u64);
        for (view, tasks) in &all {
            let (mask, document_rows) = view.document();
            let (keys, start) = (view.keys(), dkv_row);
            for head in 0..view.kv_heads() {
                let part = |(task, heads): &(&Task, Vec<Range<u64>>)| TaskRows {
                    rows: task.rows.clone(),
                    q_row: number(heads[head].start - span.start),
                };
                let parts = tasks.iter().map(part).collect();
                let held = keys_of(view, &keys, document_rows, head);
                bundles.push(BackwardBundle { mask, keys: held, dkv_row: number(dkv_row), parts });
                dkv_row += keys.len() as u64;
            }
            let heads = tasks.iter().flat_map(|it| &it.1);
            let dq = heads.map(|it| bytes_of(it, &span, q_row)).collect();
            slices.push(Slices::Backward(dq, bytes_of(&(start..dkv_row), &(0..0), dk_row)));
        }
        let shape = shape(&first);
        let (stream, scratch) = &self.streams[self.turn];
        let plan = BackwardPlan::with(stream, shape, &bundles, (self.order, 1), scratch)?;
        let (dq, dkv) = ((span.end - span.start) * q_row, dkv_row * dk_row);
        Ok(Made {
            weight: plan.list_bytes(),
            plan: Plan::Backward(plan),
            stream: self.turn,
            span,
            bytes: [dq, dkv, dkv],
            slices,
        })
    }

    /// Puts a made plan on its stream, for the rows of `works`.
    fn run(&self, works: &[Work<GpuRows>], made: &mut Made) -> Result<Flight, Error> {
        let Made { plan, stream, span, bytes, slices, weight: _ } = made;
        let (first, stream) = (view(&works[0]), &self.streams[*stream].0);
        let rows = |part| rows_of(&first, part);
        let spanned = |part| span_of(&first, &rows(part), part, span);
        let (q, k, v) = (spanned(Part::Q), rows(Part::K), rows(Part::V));
        let mut out = self.rooms.take(bytes[0])?;
        let (start, outputs) = match plan {
            Plan::Forward(plan) => {
                let mut lse = self.rooms.take(bytes[1])?;
                let start = behind(stream, &[&q, &k, &v])?;
                let (to, numbers) = (out.slice_mut(), lse.slice_mut());
                let (q, k, v) = (q.slice(), k.slice(), v.slice());
                let tensors = ForwardTensors { q, k, v, out: to, lse: numbers };
                settled(stream, plan.run(stream, tensors))?;
                (start, vec![out.share(), lse.share()])
            }
            Plan::Backward(plan) => {
                let (mut dk, mut dv) = (self.rooms.take(bytes[1])?, self.rooms.take(bytes[2])?);
                let (dout, lse) = (spanned(Part::DOut), spanned(Part::Lse));
                let delta = spanned(Part::Delta);
                let start = behind(stream, &[&q, &k, &v, &dout, &lse, &delta])?;
                let (q, dout, k, v) = (q.slice(), dout.slice(), k.slice(), v.slice());
                let (lse, delta, dq) = (lse.slice(), delta.slice(), out.slice_mut());
                let (to_dk, to_dv) = (dk.slice_mut(), dv.slice_mut());
                let dq = QueryGradients::Bf16(dq);
                let tensors =
                    BackwardTensors { q, dout, k, v, lse, delta, dq, dk: to_dk, dv: to_dv };
                settled(stream, plan.run(stream, tensors))?;
                (start, vec![out.share(), dk.share(), dv.share()])
            }
        };
        let results = slices.iter().map(|it| self.results(stream, &outputs, it));
        let results = settled(stream, results.collect::<Result<Vec<_>, _>>())?;
        Flight::new(stream, start, works.iter().cloned().zip(results).collect())
    }

    /// The part of one work in the outputs of its launch.
    fn results(
        &self,
        stream: &Stream,
        outputs: &[Rows],
        of: &Slices,
    ) -> Result<Results<GpuRows>, Error> {
        let slice = |of: &Rows, it: &Range<u64>| of.part(it.start, it.end - it.start);
        Ok(match (outputs, of) {
            ([o, lse], Slices::Forward([o_at, lse_at])) => {
                let (o, lse) = (self.joined(stream, o, o_at)?, self.joined(stream, lse, lse_at)?);
                Results::Forward([o, lse])
            }
            ([dq, dk, dv], Slices::Backward(rows, keys)) => {
                let dq = self.joined(stream, dq, rows)?;
                Results::Backward([dq, slice(dk, keys), slice(dv, keys)])
            }
            (_, _) => unreachable!("a launch has the outputs of its direction"),
        })
    }

    /// Rows one after the other, task by task and head by head. At home there are gaps between tasks that are apart, and between
    /// heads of a task that is not a whole stretch.
    fn joined(&self, stream: &Stream, of: &Rows, rows: &[Range<u64>]) -> Result<Rows, Error> {
        let (start, end) = (rows.first().map_or(0, |it| it.start), rows.last());
        let end = end.map_or(start, |it| it.end);
        if rows.windows(2).all(|it| it[0].end == it[1].start) {
            return Ok(of.part(start, end - start));
        }
        let mut room = self.rooms.take(rows.iter().map(|it| it.end - it.start).sum())?;
        let (mut pieces, mut to) = (Vec::new(), 0);
        for it in rows {
            let bytes = it.end - it.start;
            pieces.push(CopyPiece { from: it.start, to, bytes });
            to += bytes;
        }
        room.copy(stream, of, &pieces)?;
        Ok(room.share())
    }
}

/// Makes `stream` wait for the copies to `rows`; returns the event behind them.
fn behind(stream: &Stream, rows: &[&Rows]) -> Result<Event, Error> {
    for (index, it) in rows.iter().enumerate() {
        // Once for parts of one room.
        if rows[..index].iter().all(|before| !before.is_of_room_of(it)) {
            it.ready_on(stream)?;
        }
    }
    Event::timed(stream)
}

/// A launch that was put in part writes to room that is about to be dropped: it is waited for.
fn settled<T>(stream: &Stream, run: Result<T, Error>) -> Result<T, Error> {
    run.inspect_err(|_| drop(stream.wait()))
}

fn view(work: &Work<GpuRows>) -> View<'_, GpuRows> {
    match work.direction() {
        Direction::Forward => task_of(work).0,
        Direction::Backward => View::of(work, BundleId(work.work)),
    }
}

/// Heads and scores of a launch.
fn shape(view: &View<'_, GpuRows>) -> Shape {
    Shape { softcap: view.softcap(), ..Shape::new(view.heads(), view.scale()) }
}

/// A task and its rows in the memory of its bundle, head by head.
fn placed(work: &Work<GpuRows>) -> (View<'_, GpuRows>, Vec<Range<u64>>) {
    let (view, task) = task_of(work);
    let heads = heads_of(&view, task, view.nano.lists.task_base(work.work as usize));
    (view, heads)
}

/// Rows of a task under each KV head.
fn heads_of(view: &View<'_, GpuRows>, task: &Task, base: u32) -> Vec<Range<u64>> {
    let at = view.task_rows(task, base);
    let of = |head| at.of_head(head)..at.of_head(head) + task.rows.len() as u64;
    (0..view.kv_heads()).map(of).collect()
}

/// From the first of all rows to the last.
fn span<'a>(rows: impl Iterator<Item = &'a Range<u64>> + Clone) -> Range<u64> {
    let start = rows.clone().map(|it| it.start).min().unwrap_or(0);
    start..rows.map(|it| it.end).max().unwrap_or(start)
}

/// Bytes of rows of `row` bytes, counted from where `span` begins.
fn bytes_of(rows: &Range<u64>, span: &Range<u64>, row: u64) -> Range<u64> {
    (rows.start - span.start) * row..(rows.end - span.start) * row
}

/// The number of a row as lists hold it; plans refuse numbers that are too large.
fn number(row: u64) -> u32 {
    u32::try_from(row).unwrap_or(u32::MAX)
}

/// All rows of a part.
fn rows_of(view: &View<'_, GpuRows>, part: Part) -> Rows {
    let (memory, area) = view.tensor(part);
    match area {
        Some(area) => memory.part(area.start as u64, area.len() as u64),
        None => memory.clone(),
    }
}

/// The rows `span` of a part.
fn span_of(view: &View<'_, GpuRows>, rows: &Rows, part: Part, span: &Range<u64>) -> Rows {
    let row = view.row_bytes(part) as u64;
    rows.part(span.start * row, (span.end - span.start) * row)
}

/// Keys of a work under one KV head, in the memory of its bundle.
fn keys_of(view: &View<'_, GpuRows>, keys: &Range<u32>, document_rows: u32, head: usize) -> Keys {
    let kv_row = number(view.key_rows(keys).of_head(head));
    Keys { document_rows, keys: keys.clone(), kv_row }
}
