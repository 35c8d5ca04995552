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
use cadre_planner::BundleId;
use cadre_step::phases::Direction;

use super::plans::{Key, Made, Plan, Plans, Slices};
use super::view::{Part, View, task_of, tasks_of};
use super::{Flight, Results, Work};
use crate::memory::{Memory, Place};

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

/// Of the GPU's memory, lists of plans that wait for the next layer take one part in so many at most.
const PLANS_SHARE: u64 = 16;

impl Resident {
    /// For rows that live in `place`, with the order of dQ that `engine` keeps; none where they live on the host.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(engine: &Engine, place: &Place) -> Result<Option<Self>, Error> {
        let Some(rooms) = place.rooms() else { return Ok(None) };
        let gpu = rooms.gpu();
        let stream = || Ok::<_, Error>((Stream::new(gpu)?, Scratch::new(gpu)?));
        let streams = [stream()?, stream()?];
        let plans = Plans::new(gpu.memory()?.1 as u64 / PLANS_SHARE);
        let (rooms, order) = (rooms.clone(), engine.order());
        Ok(Some(Self { streams, turn: 0, rooms, order, plans, made: 0 }))
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
    pub fn put(&mut self, works: Vec<Work>) -> Result<Vec<Flight>, Error> {
        if works.iter().any(|it| it.planned.header.wire == Wire::F32) {
            return Err(Refusal::Dtype { task: 0, field: "q" }.into());
        }
        let mut groups: BTreeMap<(u64, u64), Vec<Work>> = BTreeMap::new();
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

    fn put_group(&mut self, works: &[Work], flights: &mut Vec<Flight>) -> Result<(), Error> {
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
            done => done.map(|it| flights.extend(it)),
        }
    }

    /// One launch for works whose rows are in one memory; none for none.
    fn launch(&mut self, works: &[Work]) -> Result<Option<Flight>, Error> {
        let Some(key) = Key::of(works) else { return Ok(None) };
        let mut made = match self.plans.take(&key) {
            Some(made) => made,
            None => self.make(works)?,
        };
        let flight = self.run(works, &mut made)?;
        self.plans.keep(key, made);
        Ok(Some(flight))
    }

    fn make(&mut self, works: &[Work]) -> Result<Made, Error> {
        self.turn = (self.turn + 1) % self.streams.len();
        self.made += 1;
        match works[0].direction() {
            Direction::Forward => self.make_forward(works),
            Direction::Backward => self.make_backward(works),
        }
    }

    /// Tasks whose rows are in one memory.
    fn make_forward(&self, works: &[Work]) -> Result<Made, Error> {
        let first = view(&works[0]);
        let shape = shape(&first);
        let placed: Vec<_> = works.iter().map(placed).collect();
        let span = span(placed.iter().map(|it| &it.1));
        let mut tasks = Vec::new();
        for ((view, rows), work) in placed.iter().zip(works) {
            let task = task_of(work).1;
            let (mask, document_rows) = view.document();
            let keys = keys_of(view, &task.keys, document_rows);
            let rows = TaskRows { rows: task.rows.clone(), q_row: rows.start - span.start };
            tasks.push(ForwardTask { mask, keys, rows });
        }
        let row = [Part::Q, Part::Lse].map(|it| first.row_bytes(it) as u64);
        let bytes = row.map(|row| span.len() as u64 * row);
        let slices = |rows: &Range<u32>| Slices::Forward(row.map(|row| bytes_of(rows, &span, row)));
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
    fn make_backward(&self, works: &[Work]) -> Result<Made, Error> {
        let first = view(&works[0]);
        let mut all = Vec::new();
        for work in works {
            let view = view(work);
            let tasks = tasks_of(&view).map(|(task, base)| {
                let start = view.first_row(base, task.rows.start);
                (task.rows.clone(), start..start + task.rows.len() as u32)
            });
            let tasks: Vec<_> = tasks.collect();
            all.push((view, tasks));
        }
        let span = span(all.iter().flat_map(|it| &it.1).map(|it| &it.1));
        let (q_row, dk_row) = (first.row_bytes(Part::Q) as u64, first.width(Part::K) as u64 * 4);
        let (mut bundles, mut slices, mut dkv_row) = (Vec::new(), Vec::new(), 0_u32);
        for (view, tasks) in &all {
            let (mask, document_rows) = view.document();
            let keys = view.keys();
            let end = dkv_row + keys.len() as u32;
            let part = |(rows, at): &(Range<u32>, Range<u32>)| TaskRows {
                rows: rows.clone(),
                q_row: at.start - span.start,
            };
            let parts = tasks.iter().map(part).collect();
            let keys = keys_of(view, &keys, document_rows);
            bundles.push(BackwardBundle { mask, keys, dkv_row, parts });
            let dq = tasks.iter().map(|it| bytes_of(&it.1, &span, q_row)).collect();
            slices.push(Slices::Backward(dq, bytes_of(&(dkv_row..end), &(0..0), dk_row)));
            dkv_row = end;
        }
        let shape = shape(&first);
        let (stream, scratch) = &self.streams[self.turn];
        let plan = BackwardPlan::with(stream, shape, &bundles, (self.order, 1), scratch)?;
        let (dq, dkv) = (span.len() as u64 * q_row, u64::from(dkv_row) * dk_row);
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
    fn run(&self, works: &[Work], made: &mut Made) -> Result<Flight, Error> {
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
                let tensors = BackwardTensors {
                    q: q.slice(),
                    dout: dout.slice(),
                    k: k.slice(),
                    v: v.slice(),
                    lse: lse.slice(),
                    delta: delta.slice(),
                    dq: QueryGradients::Bf16(out.slice_mut()),
                    dk: dk.slice_mut(),
                    dv: dv.slice_mut(),
                };
                settled(stream, plan.run(stream, tensors))?;
                (start, vec![out.share(), dk.share(), dv.share()])
            }
        };
        let results = slices.iter().map(|it| self.results(stream, &outputs, it));
        let results = settled(stream, results.collect::<Result<Vec<_>, _>>())?;
        Flight::new(stream, start, works.iter().cloned().zip(results).collect())
    }

    /// The part of one work in the outputs of its launch.
    fn results(&self, stream: &Stream, outputs: &[Rows], of: &Slices) -> Result<Results, Error> {
        let slice = |of: &Rows, it: &Range<u64>| of.part(it.start, it.end - it.start);
        Ok(match (outputs, of) {
            ([o, lse], Slices::Forward([o_at, lse_at])) => {
                Results::Forward([slice(o, o_at), slice(lse, lse_at)].map(Memory::Gpu))
            }
            ([dq, dk, dv], Slices::Backward(tasks, keys)) => {
                let dq = self.joined(stream, dq, tasks)?;
                Results::Backward([dq, slice(dk, keys), slice(dv, keys)].map(Memory::Gpu))
            }
            (_, _) => unreachable!("a launch has the outputs of its direction"),
        })
    }

    /// Rows of dQ one after the other, task by task. A bundle at home whose tasks are apart has gaps between them.
    fn joined(&self, stream: &Stream, dq: &Rows, tasks: &[Range<u64>]) -> Result<Rows, Error> {
        let (start, end) = (tasks.first().map_or(0, |it| it.start), tasks.last());
        let end = end.map_or(start, |it| it.end);
        if tasks.windows(2).all(|it| it[0].end == it[1].start) {
            return Ok(dq.part(start, end - start));
        }
        let mut room = self.rooms.take(tasks.iter().map(|it| it.end - it.start).sum())?;
        let (mut pieces, mut to) = (Vec::new(), 0);
        for task in tasks {
            let bytes = task.end - task.start;
            pieces.push(CopyPiece { from: task.start, to, bytes });
            to += bytes;
        }
        room.copy(stream, dq, &pieces)?;
        Ok(room.share())
    }
}

/// What follows on `stream` is behind the copies to `rows`; gives the moment.
fn behind(stream: &Stream, rows: &[&Rows]) -> Result<Event, Error> {
    for (index, it) in rows.iter().enumerate() {
        // Once for parts of one room.
        if rows[..index].iter().all(|before| !before.is_of_room_of(it)) {
            it.ready_on(stream)?;
        }
    }
    Event::record(stream)
}

/// A launch that was put in part writes to room that is about to be dropped: it is waited for.
fn settled<T>(stream: &Stream, run: Result<T, Error>) -> Result<T, Error> {
    run.inspect_err(|_| drop(stream.wait()))
}

fn view(work: &Work) -> View<'_> {
    match work.direction() {
        Direction::Forward => task_of(work).0,
        Direction::Backward => View::of(work, BundleId(work.work)),
    }
}

/// Heads and scores of a launch.
fn shape(view: &View<'_>) -> Shape {
    Shape { softcap: view.softcap(), ..Shape::new(view.heads(), view.scale()) }
}

/// A task and its rows in the memory of its bundle.
fn placed(work: &Work) -> (View<'_>, Range<u32>) {
    let (view, task) = task_of(work);
    let base = view.nano.lists.task_base(work.work as usize);
    let start = view.first_row(base, task.rows.start);
    (view, start..start + task.rows.len() as u32)
}

/// From the first of all rows to the last.
fn span<'a>(rows: impl Iterator<Item = &'a Range<u32>> + Clone) -> Range<u32> {
    let start = rows.clone().map(|it| it.start).min().unwrap_or(0);
    start..rows.map(|it| it.end).max().unwrap_or(start)
}

/// Bytes of rows of `row` bytes, counted from where `span` begins.
fn bytes_of(rows: &Range<u32>, span: &Range<u32>, row: u64) -> Range<u64> {
    u64::from(rows.start - span.start) * row..u64::from(rows.end - span.start) * row
}

/// All rows of a part.
fn rows_of(view: &View<'_>, part: Part) -> Rows {
    let (memory, area) = view.tensor(part);
    let rows = memory.on_gpu().expect("works whose rows live on the GPU come here");
    match area {
        Some(area) => rows.part(area.start as u64, area.len() as u64),
        None => rows.clone(),
    }
}

/// The rows `span` of a part.
fn span_of(view: &View<'_>, rows: &Rows, part: Part, span: &Range<u32>) -> Rows {
    let row = view.row_bytes(part) as u64;
    rows.part(u64::from(span.start) * row, span.len() as u64 * row)
}

/// Keys of a work in the memory of its bundle.
fn keys_of(view: &View<'_>, keys: &Range<u32>, document_rows: u32) -> Keys {
    let base = keys.start - view.keys().start;
    // Rows without keys: their place is nobody's.
    let kv_row = if keys.is_empty() { 0 } else { view.first_row(base, keys.start) };
    Keys { document_rows, keys: keys.clone(), kv_row }
}
