//! Launches on rows that live on the GPU: kernels read them in the landing, results stay there.
//!
//! In: works of one direction. Out: their results, in room that their trainers pull from. Works whose rows are in one memory (a
//! bundle's landing, or the trainer's own rows) are one launch; launches go to two streams by turns, so that one's tail is
//! filled by the next, and none waits for pulls: those are copies on other streams.
//!
//! Nothing goes through the host but lists. Invariant: room that a launch writes is dropped or handed on only after its stream
//! was waited for.

use std::collections::BTreeMap;
use std::ops::Range;

use cadre_crds::Wire;
use cadre_kernels::Engine;
use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, CopyPiece, Error, ForwardPlan, ForwardTask,
    ForwardTensors, Keys, Order, Part as Rows, QueryGradients, Refusal, Room, Rooms, Shape, Stream,
    TaskRows,
};
use cadre_planner::BundleId;

use super::view::{Part, View, task_of, tasks_of};
use super::{Results, Work};
use crate::memory::{Memory, Place};
use crate::phases::Direction;

/// See the module.
#[derive(Debug)]
pub struct Resident {
    streams: [Stream; 2],
    rooms: Rooms,
    order: Order,
}

/// A launch that was put on a stream, with what it uses until it is done.
struct Put {
    plan: Plan,
    /// The works, as they were handed in, and where the rows of each begin among those of the launch.
    works: Vec<(usize, Slices)>,
    outputs: Outputs,
}

/// Lists that the launch reads.
enum Plan {
    Forward { _plan: ForwardPlan },
    Backward { _plan: BackwardPlan },
}

enum Outputs {
    Forward { o: Room, lse: Room },
    Backward { dq: Room, dk: Room, dv: Room },
}

/// Bytes of a work in the outputs of its launch.
enum Slices {
    /// Of O and LSE.
    Forward([Range<u64>; 2]),
    /// Of dQ, task by task, and of dK and dV.
    Backward(Vec<Range<u64>>, Range<u64>),
}

impl Resident {
    /// For rows that live in `place`, with the order of dQ that `engine` keeps; none where they live on the host.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(engine: &Engine, place: &Place) -> Result<Option<Self>, Error> {
        let Some(rooms) = place.rooms() else { return Ok(None) };
        let gpu = rooms.gpu();
        let streams = [Stream::new(gpu)?, Stream::new(gpu)?];
        Ok(Some(Self { streams, rooms: rooms.clone(), order: engine.order() }))
    }

    /// Runs works of one phase; what memory is short for goes in halves.
    ///
    /// # Errors
    ///
    /// A shape that the kernels cannot do, memory that is short for a single work, or the GPU's.
    pub(super) fn run(
        &mut self,
        works: &[Work],
        direction: Direction,
    ) -> Result<Vec<Results>, Error> {
        match self.launch(works, direction) {
            Err(error) if error.is_out_of_memory() && works.len() > 1 => {
                let (first, second) = works.split_at(works.len() / 2);
                let mut results = self.run(first, direction)?;
                results.extend(self.run(second, direction)?);
                Ok(results)
            }
            done => done,
        }
    }

    fn launch(&self, works: &[Work], direction: Direction) -> Result<Vec<Results>, Error> {
        if works.iter().any(|it| it.planned.header.wire == Wire::F32) {
            return Err(Refusal::Dtype { task: 0, field: "q" }.into());
        }
        let mut groups: BTreeMap<(u64, u64), Vec<usize>> = BTreeMap::new();
        for (index, work) in works.iter().enumerate() {
            let rows = rows_of(&view(work, direction), Part::Q);
            groups.entry((rows.memory().arena().number(), rows.at())).or_default().push(index);
        }
        let mut put = Vec::new();
        let mut failed = None;
        for (group, stream) in groups.into_values().zip(self.streams.iter().cycle()) {
            let done = match direction {
                Direction::Forward => self.forward(works, &group, stream),
                Direction::Backward => self.backward(works, &group, stream),
            };
            match done {
                Ok(it) => put.push(it),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        // Before anything is dropped, whatever came of it.
        let waited = self.streams.iter().map(Stream::wait).fold(Ok(()), Result::and);
        match failed {
            Some(error) => Err(error),
            None => waited.and_then(|()| self.collect(works.len(), put)),
        }
    }

    /// One launch for tasks whose rows are in one memory.
    fn forward(&self, works: &[Work], group: &[usize], stream: &Stream) -> Result<Put, Error> {
        let first = view(&works[group[0]], Direction::Forward);
        let (heads, scale) = (first.heads(), first.scale());
        let placed: Vec<_> = group.iter().map(|&it| placed(&works[it])).collect();
        let span = span(placed.iter().map(|it| &it.1));
        let mut tasks = Vec::new();
        for (view, rows) in &placed {
            let task = task_of(&works[group[tasks.len()]]).1;
            let (mask, document_rows) = view.document();
            let keys = keys_of(view, &task.keys, document_rows);
            let rows = TaskRows { rows: task.rows.clone(), q_row: rows.start - span.start };
            tasks.push(ForwardTask { mask, keys, rows });
        }
        let (o_row, lse_row) = (first.row_bytes(Part::Q), first.row_bytes(Part::Lse));
        let mut o = self.rooms.take((span.len() * o_row) as u64)?;
        let mut lse = self.rooms.take((span.len() * lse_row) as u64)?;
        let [q, k, v] = [Part::Q, Part::K, Part::V].map(|it| rows_of(&first, it));
        let q = span_of(&first, &q, Part::Q, &span);
        let mut plan = ForwardPlan::new(stream, Shape::new(heads, scale), &tasks)?;
        for rows in [&q, &k, &v] {
            rows.ready_on(stream)?;
        }
        let (out, numbers) = (o.slice_mut(), lse.slice_mut());
        let tensors =
            ForwardTensors { q: q.slice(), k: k.slice(), v: v.slice(), out, lse: numbers };
        settled(stream, plan.run(stream, tensors))?;
        let slices = |rows: &Range<u32>| {
            [o_row, lse_row].map(|row| {
                let row = row as u64;
                u64::from(rows.start - span.start) * row..u64::from(rows.end - span.start) * row
            })
        };
        let works = group.iter().zip(&placed);
        let works = works.map(|(&it, (_, rows))| (it, Slices::Forward(slices(rows)))).collect();
        let outputs = Outputs::Forward { o, lse };
        Ok(Put { plan: Plan::Forward { _plan: plan }, works, outputs })
    }

    /// One launch for bundles whose rows are in one memory.
    fn backward(&self, works: &[Work], group: &[usize], stream: &Stream) -> Result<Put, Error> {
        let first = view(&works[group[0]], Direction::Backward);
        let (heads, scale) = (first.heads(), first.scale());
        let mut all = Vec::new();
        for &work in group {
            let view = view(&works[work], Direction::Backward);
            let tasks = tasks_of(&view).map(|(task, base)| {
                let start = view.first_row(base, task.rows.start);
                (task.rows.clone(), start..start + task.rows.len() as u32)
            });
            let tasks: Vec<_> = tasks.collect();
            all.push((view, tasks));
        }
        let span = span(all.iter().flat_map(|it| &it.1).map(|it| &it.1));
        let (q_row, dk_row) = (first.row_bytes(Part::Q) as u64, first.width(Part::K) as u64 * 4);
        let (mut bundles, mut placed, mut dkv_row) = (Vec::new(), Vec::new(), 0_u32);
        for ((view, tasks), &work) in all.iter().zip(group) {
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
            let bytes = |it: &Range<u32>| {
                u64::from(it.start - span.start) * q_row..u64::from(it.end - span.start) * q_row
            };
            let dq = tasks.iter().map(|it| bytes(&it.1)).collect();
            let dkv = u64::from(dkv_row) * dk_row..u64::from(end) * dk_row;
            placed.push((work, Slices::Backward(dq, dkv)));
            dkv_row = end;
        }
        let mut dq = self.rooms.take(span.len() as u64 * q_row)?;
        let mut dk = self.rooms.take(u64::from(dkv_row) * dk_row)?;
        let mut dv = self.rooms.take(u64::from(dkv_row) * dk_row)?;
        let rows = |part| rows_of(&first, part);
        let spanned = |part| span_of(&first, &rows(part), part, &span);
        let (q, dout) = (spanned(Part::Q), spanned(Part::DOut));
        let (lse, delta) = (spanned(Part::Lse), spanned(Part::Delta));
        let (k, v) = (rows(Part::K), rows(Part::V));
        let shape = Shape::new(heads, scale);
        let mut plan = BackwardPlan::new(stream, shape, &bundles, self.order, 1)?;
        for rows in [&q, &dout, &lse, &delta, &k, &v] {
            rows.ready_on(stream)?;
        }
        let tensors = BackwardTensors {
            q: q.slice(),
            dout: dout.slice(),
            k: k.slice(),
            v: v.slice(),
            lse: lse.slice(),
            delta: delta.slice(),
            dq: QueryGradients::Bf16(dq.slice_mut()),
            dk: dk.slice_mut(),
            dv: dv.slice_mut(),
        };
        settled(stream, plan.run(stream, tensors))?;
        let outputs = Outputs::Backward { dq, dk, dv };
        Ok(Put { plan: Plan::Backward { _plan: plan }, works: placed, outputs })
    }

    /// The results of launches that are done, in the order of the works.
    fn collect(&self, count: usize, put: Vec<Put>) -> Result<Vec<Results>, Error> {
        let mut results: BTreeMap<usize, Results> = BTreeMap::new();
        for Put { plan, works, outputs } in put {
            drop(plan);
            let slice = |of: &Rows, it: &Range<u64>| of.part(it.start, it.end - it.start);
            let outputs: Vec<Rows> = match outputs {
                Outputs::Forward { o, lse } => vec![o.share(), lse.share()],
                Outputs::Backward { dq, dk, dv } => vec![dq.share(), dk.share(), dv.share()],
            };
            for (work, slices) in works {
                let result = match (&outputs[..], slices) {
                    ([o, lse], Slices::Forward([o_at, lse_at])) => {
                        Results::Forward([slice(o, &o_at), slice(lse, &lse_at)].map(Memory::Gpu))
                    }
                    ([dq, dk, dv], Slices::Backward(tasks, keys)) => {
                        let dq = self.joined(dq, &tasks)?;
                        let parts = [dq, slice(dk, &keys), slice(dv, &keys)];
                        Results::Backward(parts.map(Memory::Gpu))
                    }
                    (_, _) => unreachable!("a launch has the outputs of its direction"),
                };
                results.insert(work, result);
            }
        }
        assert_eq!(results.len(), count, "every work is in one launch");
        Ok(results.into_values().collect())
    }

    /// Rows of dQ one after the other, task by task. A bundle at home whose tasks are apart has gaps between them.
    fn joined(&self, dq: &Rows, tasks: &[Range<u64>]) -> Result<Rows, Error> {
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
        room.copy(&self.streams[0], dq, &pieces)?;
        room.settle()?;
        Ok(room.share())
    }
}

/// A launch that was put in part writes to room that is about to be dropped: it is waited for.
fn settled(stream: &Stream, run: Result<(), Error>) -> Result<(), Error> {
    run.inspect_err(|_| drop(stream.wait()))
}

fn view(work: &Work, direction: Direction) -> View<'_> {
    match direction {
        Direction::Forward => task_of(work).0,
        Direction::Backward => View::of(work, BundleId(work.work)),
    }
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
