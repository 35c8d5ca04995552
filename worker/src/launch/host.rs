//! Launches on rows in the host's memory, on the CPU or through copies to the GPU.
//!
//! In: works of one direction. Out: their results in new buffers. On the CPU a backward bundle that is dearer than a launch is
//! split by key tiles, never by query rows.
//!
//! It chooses no engine. Invariant: dQ is summed in f32 over all launches of a bundle, and rounded once.

use std::ops::Range;
use std::sync::Arc;

use cadre_crds::Wire;
use cadre_exchange::Buffer;
use cadre_kernels::{
    Backward, BackwardRows, Engine, EngineError, Forward, Rows, RowsMut, key_tiles, wire as convert,
};
use cadre_planner::BundleId;
use cadre_step::planned::wire_bytes;

use super::view::{Part, View, task_of, tasks_of};
use super::{Results, Work};
use crate::memory::{self, Memory};

fn rows_mut(buffer: &mut Buffer, wire: Wire) -> RowsMut<'_> {
    match wire {
        Wire::F32 => RowsMut::F32(buffer.f32s_mut()),
        Wire::Bf16 => RowsMut::Bf16(buffer.bf16s_mut()),
    }
}

pub(super) fn forward(works: &[Work], engine: &mut Engine) -> Result<Vec<Results>, EngineError> {
    let mut buffers: Vec<(Buffer, Buffer)> = Vec::new();
    for work in works {
        let (view, task) = task_of(work);
        let heads = view.heads();
        let rows = (task.rows.end - task.rows.start) as usize;
        let o = rows * heads.query * heads.dim * usize::from(wire_bytes(view.wire));
        buffers.push((memory::zeroed_rows(o), memory::zeroed_rows(rows * heads.query * 4)));
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
            softcap: view.softcap(),
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
    let held = |it| Memory::Host(Arc::new(it));
    let results = |(o, lse)| Results::Forward([held(o), held(lse)]);
    Ok(buffers.into_iter().map(results).collect())
}

/// What a bundle's launches write.
struct Sums {
    dq: Buffer,
    dk: Buffer,
    dv: Buffer,
}

pub(super) fn backward(works: &[Work], engine: &mut Engine) -> Result<Vec<Results>, EngineError> {
    let view = |work: &'_ Work| BundleId(work.work);
    let mut sums: Vec<Sums> = Vec::new();
    for work in works {
        let view = View::of(work, view(work));
        let (heads, keys) = (view.heads(), view.keys());
        let query_rows = view.nano.lists.query_rows(view.bundle) as usize;
        let key_rows = (keys.end - keys.start) as usize * heads.kv * heads.dim * 4;
        let dq = memory::zeroed_rows(query_rows * heads.query * heads.dim * 4);
        let [dk, dv] = [0; 2].map(|_| memory::zeroed_rows(key_rows));
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
            Wire::F32 => dq,
            Wire::Bf16 => {
                let mut rounded = memory::rows(dq.len_bytes() / 2);
                convert::to_bf16(rounded.bf16s_mut(), dq.f32s());
                rounded
            }
        };
        Results::Backward([dq, dk, dv].map(|it| Memory::Host(Arc::new(it))))
    };
    Ok(works.iter().zip(sums).map(rounded).collect())
}

impl<'a> View<'a> {
    /// The buffer of a part and the byte of it at which rows begin.
    fn place(&self, part: Part, base: u32, position: u32) -> (&'a Buffer, usize) {
        let (memory, area) = self.tensor(part);
        let first = self.first_row(base, position) as usize * self.row_bytes(part);
        (memory.on_host(), area.map_or(0, |it| it.start) + first)
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

    /// Launch `index` of `launches` that share out the bundle's key tiles.
    fn backward<'b>(&self, sums: &'b mut Sums, index: u32, launches: u32) -> Backward<'b>
    where
        'a: 'b,
    {
        let (heads, keys, (mask, document_rows)) = (self.heads(), self.keys(), self.document());
        let mut rest = sums.dq.f32s_mut();
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
            softcap: self.softcap(),
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
