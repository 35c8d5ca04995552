//! Launches on rows in the host's memory, on the CPU or through copies to the GPU.
//!
//! In: works of one direction. Out: their results in new buffers, head by head. A KV head of a work is a task or bundle of the
//! kernels'. On the CPU a backward bundle that is dearer than a launch is split by key tiles, never by query rows.
//!
//! It chooses no engine. Invariant: dQ is summed in f32 over all launches of a bundle, and rounded once.

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
use crate::memory::{self, HostRows};

/// A buffer's rows, `count` numbers after `count` numbers.
fn rows_mut(buffer: &mut Buffer, wire: Wire, count: usize) -> Vec<RowsMut<'_>> {
    let count = count.max(1);
    match wire {
        Wire::F32 => buffer.f32s_mut().chunks_exact_mut(count).map(RowsMut::F32).collect(),
        Wire::Bf16 => buffer.bf16s_mut().chunks_exact_mut(count).map(RowsMut::Bf16).collect(),
    }
}

pub(super) fn forward(
    works: &[Work<HostRows>],
    engine: &mut Engine,
) -> Result<Vec<Results<HostRows>>, EngineError> {
    let mut buffers: Vec<(Buffer, Buffer)> = Vec::new();
    for work in works {
        let (view, task) = task_of(work);
        let rows = task.rows.len() * view.kv_heads();
        let o = rows * view.width(Part::Q) * usize::from(wire_bytes(view.wire));
        let lse = rows * view.width(Part::Lse) * 4;
        buffers.push((memory::zeroed_rows(o), memory::zeroed_rows(lse)));
    }
    let mut tasks: Vec<Forward<'_>> = Vec::new();
    for (work, (o, lse)) in works.iter().zip(&mut buffers) {
        let (view, task) = task_of(work);
        let (mask, document_rows) = view.document();
        let (rows, keys) = (task.rows.clone(), task.keys.clone());
        let at = view.task_rows(task, view.nano.lists.task_base(work.work as usize));
        let at_keys = view.key_rows(&keys);
        let out = rows_mut(o, view.wire, rows.len() * view.width(Part::Q));
        let lse = lse.f32s_mut().chunks_exact_mut((rows.len() * view.width(Part::Lse)).max(1));
        for (head, (out, lse)) in out.into_iter().zip(lse).enumerate() {
            tasks.push(Forward {
                heads: view.heads(),
                mask,
                scale: view.scale(),
                softcap: view.softcap(),
                document_rows,
                q: view.wire_rows(Part::Q, at.of_head(head), rows.len()),
                k: view.wire_rows(Part::K, at_keys.of_head(head), keys.len()),
                v: view.wire_rows(Part::V, at_keys.of_head(head), keys.len()),
                rows: rows.clone(),
                keys: keys.clone(),
                out,
                lse,
            });
        }
    }
    engine.forward(&mut tasks)?;
    drop(tasks);
    let results = |(o, lse)| Results::Forward([Arc::new(o), Arc::new(lse)]);
    Ok(buffers.into_iter().map(results).collect())
}

/// What a bundle's launches write.
struct Sums {
    dq: Buffer,
    dk: Buffer,
    dv: Buffer,
}

pub(super) fn backward(
    works: &[Work<HostRows>],
    engine: &mut Engine,
) -> Result<Vec<Results<HostRows>>, EngineError> {
    let view = |work: &'_ Work<_>| BundleId(work.work);
    let mut sums: Vec<Sums> = Vec::new();
    for work in works {
        let view = View::of(work, view(work));
        let kv_heads = view.kv_heads();
        let query_rows = view.nano.lists.query_rows(view.bundle) as usize * kv_heads;
        let key_rows = view.keys().len() * kv_heads;
        let dq = memory::zeroed_rows(query_rows * view.width(Part::Q) * 4);
        let [dk, dv] = [0; 2].map(|_| memory::zeroed_rows(key_rows * view.width(Part::K) * 4));
        sums.push(Sums { dq, dk, dv });
    }
    // The CPU takes a dear bundle in parts, one after the other; what fits one launch goes together.
    let parts = |work: &Work<HostRows>, engine: &Engine| {
        let tiles = key_tiles(&View::of(work, view(work)).keys()).max(1);
        work.cost().div_ceil(work.launch_cost(engine)).clamp(1, tiles.into()) as u32
    };
    let on_gpu = works.first().is_some_and(|work| {
        let view = View::of(work, view(work));
        engine.is_on_gpu(view.heads(), matches!(view.wire, Wire::Bf16))
    });
    if on_gpu {
        let of = |(work, sums)| View::of(work, view(work)).backward(sums, 0, 1);
        let mut bundles: Vec<Backward<'_>> = works.iter().zip(&mut sums).flat_map(of).collect();
        engine.backward(&mut bundles)?;
    } else {
        for (work, sums) in works.iter().zip(&mut sums) {
            let launches = parts(work, engine);
            for index in 0..launches {
                let mut heads = View::of(work, view(work)).backward(sums, index, launches);
                engine.backward(&mut heads)?;
            }
        }
    }
    let rounded = |(work, Sums { dq, dk, dv }): (&Work<_>, Sums)| {
        let dq = match work.planned.header.wire {
            Wire::F32 => dq,
            Wire::Bf16 => {
                let mut rounded = memory::rows(dq.len_bytes() / 2);
                convert::to_bf16(rounded.bf16s_mut(), dq.f32s());
                rounded
            }
        };
        Results::Backward([dq, dk, dv].map(Arc::new))
    };
    Ok(works.iter().zip(sums).map(rounded).collect())
}

impl<'a> View<'a, HostRows> {
    /// The buffer of a part and the byte of it at which row `first` begins, counted in rows of one KV head.
    fn place(&self, part: Part, first: u64) -> (&'a Buffer, usize) {
        let (memory, area) = self.tensor(part);
        let first = first as usize * self.row_bytes(part);
        (memory, area.map_or(0, |it| it.start) + first)
    }

    fn wire_rows(&self, part: Part, first: u64, rows: usize) -> Rows<'a> {
        let count = rows * self.width(part);
        let (buffer, at) = self.place(part, first);
        match self.wire {
            Wire::F32 => Rows::F32(&buffer.f32s()[at / 4..][..count]),
            Wire::Bf16 => Rows::Bf16(&buffer.bf16s()[at / 2..][..count]),
        }
    }

    fn scalars(&self, part: Part, first: u64, rows: usize) -> &'a [f32] {
        let (buffer, at) = self.place(part, first);
        &buffer.f32s()[at / 4..][..rows * self.width(part)]
    }

    /// Launch `index` of `launches` that share out the bundle's key tiles: its KV heads, each a bundle of the kernels'.
    fn backward<'b>(&self, sums: &'b mut Sums, index: u32, launches: u32) -> Vec<Backward<'b>>
    where
        'a: 'b,
    {
        let (heads, keys, (mask, document_rows)) = (self.heads(), self.keys(), self.document());
        let mut rest = sums.dq.f32s_mut();
        let mut parts: Vec<Vec<_>> = (0..self.kv_heads()).map(|_| Vec::new()).collect();
        for (task, base) in tasks_of(self) {
            let (at, rows) = (self.task_rows(task, base), task.rows.len());
            for (head, parts) in parts.iter_mut().enumerate() {
                let (own, behind) = rest.split_at_mut(rows * self.width(Part::Q));
                rest = behind;
                let first = at.of_head(head);
                parts.push(BackwardRows {
                    rows: task.rows.clone(),
                    q: self.wire_rows(Part::Q, first, rows),
                    dout: self.wire_rows(Part::DOut, first, rows),
                    lse: self.scalars(Part::Lse, first, rows),
                    delta: self.scalars(Part::Delta, first, rows),
                    dq: own,
                });
            }
        }
        let tiles = key_tiles(&keys);
        let share = |index: u32| (u64::from(tiles) * u64::from(index) / u64::from(launches)) as u32;
        let (at, each) = (self.key_rows(&keys), keys.len() * self.width(Part::K));
        let (mut dk, mut dv) = (sums.dk.f32s_mut(), sums.dv.f32s_mut());
        let mut bundles = Vec::new();
        for (head, parts) in parts.into_iter().enumerate() {
            let ((own_dk, rest_dk), (own_dv, rest_dv)) =
                (dk.split_at_mut(each), dv.split_at_mut(each));
            (dk, dv) = (rest_dk, rest_dv);
            bundles.push(Backward {
                heads,
                mask,
                scale: self.scale(),
                softcap: self.softcap(),
                document_rows,
                k: self.wire_rows(Part::K, at.of_head(head), keys.len()),
                v: self.wire_rows(Part::V, at.of_head(head), keys.len()),
                keys: keys.clone(),
                parts,
                dk: own_dk,
                dv: own_dv,
                key_tiles: share(index)..share(index + 1),
            });
        }
        bundles
    }
}
