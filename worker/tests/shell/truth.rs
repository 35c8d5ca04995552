//! The bits that are right: plain attention on whole documents, and the plan's bundles one by one.
//!
//! In: a job, a planned step. Out: rows of Q, K, V and dO at each trainer, and O, dQ, dK and dV as they have to come back. Nothing of
//! the worker computes them: no lists, no landings, no launches, no merging.
//!
//! On a wire of bf16, Q, K, V and dO are rounded on their way there, O and dQ on their way back; LSE, Δ, dK and dV travel in f32. A
//! trainer makes Δ of its own dO and the O that it got, less the gradient of the LSE where its loss depends on that.
//!
//! Invariant: O and dQ depend on the documents alone; dK and dV also on where the plan cuts. A bundle that has all rows of a chunk
//! has those of attention on the chunk.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::rc::Rc;

use cadre_crds::Wire;
use cadre_kernels::{
    Backward, BackwardRows, Heads, Mask, Pieces, PiecesBackward, Rows, Threads, backward, delta,
    key_tiles,
};
use cadre_planner::{BundleId, Layout, Stretch};
use cadre_step::layers::Factor;
use cadre_step::phases::{Direction, PhaseAt};
use cadre_step::planned::PlannedStep;

use crate::job::Job;
use crate::random::hash;

/// Which rows: step, layer, nano-batch.
type Of = (u64, usize, usize);

/// What becomes of the scores of a layer.
#[derive(Clone, Copy, Debug)]
struct Scores {
    mask: Mask,
    scale: f32,
    softcap: Option<f32>,
    /// Rows after which a document is cut.
    chunk: u32,
}

/// Rows of all documents of a nano-batch, one behind the other, as they travel: what attention reads and gives.
#[derive(Debug)]
struct Rowset {
    /// Where each document begins, and where the last one ends.
    edges: Vec<u32>,
    /// Q, K, V and dO as the trainers have them.
    given: [Vec<f32>; 4],
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    o: Vec<f32>,
    lse: Vec<f32>,
    /// Gradient of the LSE: zeros where a job has none.
    dlse: Vec<f32>,
    /// Row sums of dO ∘ O, less that gradient.
    delta: Vec<f32>,
    dq: Vec<f32>,
    /// As where nothing is cut.
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Rowset {
    /// The numbers of a stretch, of `width` a row.
    fn part(&self, it: &Stretch, width: usize) -> Range<usize> {
        let first = self.edges[it.document.0 as usize];
        (first + it.start) as usize * width..(first + it.end) as usize * width
    }

    /// What attends to itself alone: first and end of each chunk of each document, as a plan counts them.
    fn chunks(&self, chunk: u32) -> impl Iterator<Item = Range<u32>> {
        self.edges.array_windows().flat_map(move |&[first, end]| {
            let of = move |index: u32| {
                let start: u32 = first + index * chunk;
                start..end.min(start.saturating_add(chunk))
            };
            (0..(end - first).div_ceil(chunk)).map(of)
        })
    }
}

/// Rows of one trainer.
#[derive(Debug, Default)]
pub(crate) struct Own {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) o: Vec<f32>,
    pub(crate) lse: Vec<f32>,
    pub(crate) dout: Vec<f32>,
    pub(crate) dlse: Vec<f32>,
    pub(crate) dq: Vec<f32>,
}

/// Gradients of one trainer's rows.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
}

/// dK and dV of all documents.
type Sums = (Vec<f32>, Vec<f32>);

/// See the module.
#[derive(Debug)]
pub(crate) struct Truth {
    job: Job,
    layouts: BTreeMap<(u64, usize), Rc<Layout>>,
    documents: BTreeMap<Of, Rc<Rowset>>,
    /// By rank as well.
    owns: BTreeMap<(Of, u16), Rc<Own>>,
    /// By digest of the plan as well.
    sums: BTreeMap<(Of, u64), Rc<Sums>>,
}

impl Truth {
    pub(crate) fn new(job: Job) -> Self {
        let (layouts, documents) = (BTreeMap::new(), BTreeMap::new());
        Self { job, layouts, documents, owns: BTreeMap::new(), sums: BTreeMap::new() }
    }

    /// Of a layer.
    fn heads(&self, layer: usize) -> Heads {
        let heads = self.job.layers.kind_of(layer).heads;
        Heads { query: heads.query.into(), kv: heads.kv.into(), dim: heads.dim.into() }
    }

    /// Of a layer.
    fn scores(&self, layer: usize) -> Scores {
        let kind = self.job.layers.kind_of(layer);
        let mask = match kind.mask {
            cadre_planner::Mask::Causal => Mask::Causal,
            cadre_planner::Mask::Full => Mask::Full,
            cadre_planner::Mask::Window { left } => Mask::Window { left },
        };
        let scale = kind.scale.map_or(1.0 / f32::from(kind.heads.dim).sqrt(), Factor::get);
        Scores {
            mask,
            scale,
            softcap: kind.softcap.map(Factor::get),
            chunk: kind.chunk.map_or(u32::MAX, NonZeroU32::get),
        }
    }

    fn layout(&mut self, step: u64, nano: usize) -> Rc<Layout> {
        let job = &self.job;
        let make = || Rc::new(job.layout(step, nano));
        Rc::clone(self.layouts.entry((step, nano)).or_insert_with(make))
    }

    fn documents(&mut self, of: Of) -> Rc<Rowset> {
        if let Some(found) = self.documents.get(&of) {
            return Rc::clone(found);
        }
        let (scores, seed) = (self.scores(of.1), self.job.seed);
        let (heads, wire) = (self.heads(of.1), self.job.wire);
        let layout = self.layout(of.0, of.2);
        let rows = layout.documents().iter().map(|it| it.rows);
        let seed = hash(&[seed, of.0, of.1 as u64, of.2 as u64]);
        let made = Rc::new(rowset((heads, wire), scores, rows, (seed, self.job.uses_lse)));
        self.documents.insert(of, Rc::clone(&made));
        made
    }

    /// What a trainer has of a phase's rows, and what has to come back of them.
    pub(crate) fn own(&mut self, of: Of, rank: u16) -> Rc<Own> {
        if let Some(found) = self.owns.get(&(of, rank)) {
            return Rc::clone(found);
        }
        let (heads, documents) = (self.heads(of.1), self.documents(of));
        let (wide, narrow) = (heads.query * heads.dim, heads.kv * heads.dim);
        let mut own = Own::default();
        for it in &self.layout(of.0, of.2).ranks()[usize::from(rank)] {
            let part = |width| documents.part(it, width);
            let [q, k, v, dout] = &documents.given;
            own.q.extend(&q[part(wide)]);
            own.k.extend(&k[part(narrow)]);
            own.v.extend(&v[part(narrow)]);
            own.o.extend(&documents.o[part(wide)]);
            own.lse.extend(&documents.lse[part(heads.query)]);
            own.dout.extend(&dout[part(wide)]);
            own.dlse.extend(&documents.dlse[part(heads.query)]);
            own.dq.extend(&documents.dq[part(wide)]);
        }
        let own = Rc::new(own);
        self.owns.insert((of, rank), Rc::clone(&own));
        own
    }

    /// Gradients of a trainer's rows under a plan.
    pub(crate) fn gradients(&mut self, of: Of, rank: u16, planned: &PlannedStep) -> Gradients {
        let (sums, documents) = (self.sums(of, planned), self.documents(of));
        let heads = self.heads(of.1);
        let narrow = heads.kv * heads.dim;
        let (mut dk, mut dv) = (Vec::new(), Vec::new());
        for it in &self.layout(of.0, of.2).ranks()[usize::from(rank)] {
            let part = documents.part(it, narrow);
            dk.extend(&sums.0[part.clone()]);
            dv.extend(&sums.1[part]);
        }
        Gradients { dk, dv }
    }

    fn sums(&mut self, of: Of, planned: &PlannedStep) -> Rc<Sums> {
        if let Some(found) = self.sums.get(&(of, planned.digest)) {
            return Rc::clone(found);
        }
        let (heads, scores, documents) = (self.heads(of.1), self.scores(of.1), self.documents(of));
        let chunks: Vec<_> = documents.chunks(scores.chunk).collect();
        let group = heads.query / heads.kv;
        let mut sums: Sums = (vec![0.0; documents.k.len()], vec![0.0; documents.k.len()]);
        let at = PhaseAt { layer: of.1, nano: of.2, direction: Direction::Backward };
        let plan = &planned.plans[planned.plan_index(at)].plan;
        for (index, bundle) in (0..).map(BundleId).zip(plan.bundles()) {
            let Range { start: first, end } = chunks[bundle.document.0 as usize];
            let from = &*documents;
            let tasks = plan.tasks_of(index);
            let is_whole =
                tasks.iter().map(|it| it.rows.len()).sum::<usize>() == (end - first) as usize;
            for head in bundle.kv_heads.clone().map(usize::from) {
                // Of rows of a tensor with so many heads the part of this KV head, which `each` of them read.
                let part = |of: &[f32], rows: &Range<u32>, (each, dim): (usize, usize)| {
                    let (all, part) = (heads.kv * each * dim, each * dim);
                    let rows = (first + rows.start) as usize..(first + rows.end) as usize;
                    let mut taken = Vec::with_capacity(rows.len() * part);
                    rows.for_each(|row| {
                        taken.extend_from_slice(&of[row * all + head * part..][..part]);
                    });
                    taken
                };
                let add = |to: &mut [f32], from: &[f32]| {
                    let keys = (first + bundle.keys.start) as usize..;
                    for (key, from) in keys.zip(from.chunks_exact(heads.dim)) {
                        let to = &mut to[(key * heads.kv + head) * heads.dim..][..heads.dim];
                        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                    }
                };
                if is_whole {
                    add(&mut sums.0, &part(&from.dk, &bundle.keys, (1, heads.dim)));
                    add(&mut sums.1, &part(&from.dv, &bundle.keys, (1, heads.dim)));
                    continue;
                }
                let (wide, scalars) = ((group, heads.dim), (group, 1));
                let rows: Vec<_> = { tasks.iter() }
                    .map(|it| {
                        let [q, dout] = [&from.q, &from.dout].map(|of| part(of, &it.rows, wide));
                        let sums = [&from.lse, &from.delta].map(|of| part(of, &it.rows, scalars));
                        (vec![0.0; q.len()], [q, dout], sums)
                    })
                    .collect();
                let [k, v] = [&from.k, &from.v].map(|of| part(of, &bundle.keys, (1, heads.dim)));
                let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; v.len()]);
                let mut dqs: Vec<_> = rows.iter().map(|it| it.0.clone()).collect();
                let parts = tasks.iter().zip(&rows).zip(&mut dqs);
                let parts = parts.map(|((task, (_, [q, dout], [lse, delta])), dq)| BackwardRows {
                    rows: task.rows.clone(),
                    q: Rows::F32(q),
                    dout: Rows::F32(dout),
                    lse,
                    delta,
                    dq,
                });
                let whole = Backward {
                    heads: Heads { query: group, kv: 1, dim: heads.dim },
                    mask: scores.mask,
                    scale: scores.scale,
                    softcap: scores.softcap,
                    document_rows: end - first,
                    keys: bundle.keys.clone(),
                    k: Rows::F32(&k),
                    v: Rows::F32(&v),
                    parts: parts.collect(),
                    dk: &mut dk,
                    dv: &mut dv,
                    key_tiles: 0..key_tiles(&bundle.keys),
                };
                backward(&mut [whole], Threads::ONE).expect("a sound bundle");
                add(&mut sums.0, &dk);
                add(&mut sums.1, &dv);
            }
        }
        let sums = Rc::new(sums);
        self.sums.insert((of, planned.digest), Rc::clone(&sums));
        sums
    }
}

/// Numbers between -1 and 1 that depend on `seed` alone.
fn numbers(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    let mut state = seed;
    let next = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32) / ((1_u32 << 23) as f32) - 1.0
    };
    std::iter::repeat_with(next).take(count)
}

/// Rows of documents, and attention on each of them at once, or chunk by chunk.
fn rowset(
    (heads, wire): (Heads, Wire),
    scores: Scores,
    rows: impl Iterator<Item = u32>,
    (seed, uses_lse): (u64, bool),
) -> Rowset {
    let (wide, narrow) = (heads.query * heads.dim, heads.kv * heads.dim);
    let (mut edges, mut given) = (vec![0], [const { Vec::new() }; 4]);
    for (document, rows) in (0..).zip(rows) {
        edges.push(edges[document as usize] + rows);
        let widths = [wide, narrow, narrow, wide];
        for (part, to) in given.iter_mut().enumerate() {
            let seed = hash(&[seed, document, part as u64]);
            to.extend(numbers(seed, rows as usize * widths[part]));
        }
    }
    let [q, k, v, dout] = given.clone().map(|it| travelled(it, wire));
    let (lse, delta) = (vec![0.0; q.len() / heads.dim], Vec::new());
    let mut dlse = vec![0.0; lse.len()];
    if uses_lse {
        dlse = numbers(hash(&[seed, 4]), lse.len()).collect();
    }
    let (o, dq) = (vec![0.0; q.len()], vec![0.0; q.len()]);
    let (dk, dv) = (vec![0.0; k.len()], vec![0.0; v.len()]);
    let mut all = Rowset { edges, given, q, k, v, dout, o, lse, dlse, delta, dq, dk, dv };
    attend((heads, wire), scores, &mut all);
    all
}

/// Numbers after they went over the wire.
fn travelled(mut numbers: Vec<f32>, wire: Wire) -> Vec<f32> {
    if wire == Wire::Bf16 {
        // The nearest number that has 16 bits, of two the even one.
        for it in &mut numbers {
            let bits = it.to_bits();
            let up = 0x7fff + (bits >> 16 & 1);
            *it = f32::from_bits(bits.wrapping_add(up) & 0xffff_0000);
        }
    }
    numbers
}

/// Attention of the rows of each chunk to each other.
fn attend((heads, wire): (Heads, Wire), scores: Scores, all: &mut Rowset) {
    let Scores { mask, scale, softcap, chunk } = scores;
    let rows: Vec<_> = all.chunks(chunk).map(|it| it.end - it.start).collect();
    let pieces = Pieces { heads, mask, scale, softcap, rows: &rows, threads: Threads::ONE };
    let qkv = [&all.q, &all.k, &all.v].map(|it| Rows::F32(it));
    pieces.forward(qkv, &mut all.o, &mut all.lse).expect("sound documents");
    all.o = travelled(std::mem::take(&mut all.o), wire);
    all.delta = delta(Threads::ONE, heads.dim, &all.given[3], &all.o);
    all.delta.iter_mut().zip(&all.dlse).for_each(|(delta, dlse)| *delta -= dlse);
    let (lse, delta) = (&all.lse, &all.delta);
    let from = PiecesBackward { qkv, dout: Rows::F32(&all.dout), lse, delta };
    let to = [&mut all.dq, &mut all.dk, &mut all.dv].map(|it| &mut **it);
    pieces.backward(from, to).expect("sound documents");
    all.dq = travelled(std::mem::take(&mut all.dq), wire);
}
