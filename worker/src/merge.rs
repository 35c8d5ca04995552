//! Merges what came from servers into a trainer's tensors, and looks whether it is finite.
//!
//! In: landed results and those of the own process. Out: O, LSE and dQ as the model wants them; `sums` has dK and dV.
//! Invariant: what is not finite is named with its task and whoever computed it.

use std::collections::BTreeMap;

use cadre_kernels::device;
use cadre_planner::{BundleId, RankId};
use cadre_protocol::{At, Peer, Work};
use cadre_step::planned::{NanoPlan, PlannedStep};

use crate::heads::HeadByHead;
use crate::memory::{Memory, Place as _};

/// NaN or infinity in a result.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{tensor} of layer {layer} is not finite (task {task}, computed by {server})")]
pub struct NotFinite {
    /// Layer of the phase.
    pub layer: usize,
    /// `O`, `LSE`, `dQ`, `dK` or `dV`.
    pub tensor: &'static str,
    /// Description of the task.
    pub task: String,
    /// Description of the server that computed it.
    pub server: String,
}

/// Copies a task's own rows of O and LSE to where they belong.
///
/// # Errors
///
/// Those of memory on the GPU.
pub fn own_forward<M: Memory>(
    place: &M::Place,
    nano: &NanoPlan,
    (task, rank): (usize, RankId),
    (o, lse): (&M, &M),
    (to_o, to_lse): (&mut M::Room, &mut M::Room),
) -> Result<(), device::Error> {
    let (o_pieces, lse_pieces) = nano.lists.forward_result(&nano.problem, &nano.plan, task, rank);
    place.copy(o, &o_pieces, to_o)?;
    place.copy(lse, &lse_pieces, to_lse)
}

/// Copies a bundle's own rows of dQ to where they belong.
///
/// # Errors
///
/// Those of memory on the GPU.
pub fn own_backward<M: Memory>(
    place: &M::Place,
    nano: &NanoPlan,
    (bundle, rank): (BundleId, RankId),
    dq: &M,
    to: &mut M::Room,
) -> Result<(), device::Error> {
    let result = nano.lists.backward_result(&nano.problem, &nano.plan, bundle, rank);
    place.copy(dq, &result.dq, to)
}

/// Refuses NaN and infinity in O, and in LSE but for −∞; both lie head by head.
///
/// # Errors
///
/// [`NotFinite`] names task and server.
pub fn check_forward(
    planned: &PlannedStep,
    at: At,
    rank: RankId,
    [o, lse]: [&[f32]; 2],
    makers: &BTreeMap<Work, Peer>,
) -> Result<(), NotFinite> {
    let heads = planned.kind_of(at.phase).heads;
    let query = usize::from(heads.query);
    let wrong = first_not_finite(o).map(|it| ("O", it, query * usize::from(heads.dim)));
    let wrong = wrong.or_else(|| {
        let bad = |it: &f32| it.is_nan() || *it == f32::INFINITY;
        lse.iter().position(bad).map(|it| ("LSE", it, query))
    });
    match wrong {
        Some((tensor, number, width)) => {
            let place = HeadByHead::of(planned.nano_of(at.phase).0, rank).place_of(number, width);
            Err(not_finite(planned, at, rank, (tensor, place), makers))
        }
        None => Ok(()),
    }
}

/// Refuses NaN and infinity in dQ (head by head) and in dK and dV (row by row).
///
/// # Errors
///
/// [`NotFinite`] names task and server.
pub fn check_backward(
    planned: &PlannedStep,
    at: At,
    rank: RankId,
    [dq, dk, dv]: [&[f32]; 3],
    makers: &BTreeMap<Work, Peer>,
) -> Result<(), NotFinite> {
    let heads = planned.kind_of(at.phase).heads;
    let dim = usize::from(heads.dim);
    let (query, kv) = (usize::from(heads.query) * dim, usize::from(heads.kv) * dim);
    let turned = |number| HeadByHead::of(planned.nano_of(at.phase).0, rank).place_of(number, query);
    let by_row = |number| (number / kv, number % kv / dim);
    let wrong = first_not_finite(dq).map(|it| ("dQ", turned(it)));
    let wrong = wrong.or_else(|| first_not_finite(dk).map(|it| ("dK", by_row(it))));
    match wrong.or_else(|| first_not_finite(dv).map(|it| ("dV", by_row(it)))) {
        Some(place) => Err(not_finite(planned, at, rank, place, makers)),
        None => Ok(()),
    }
}

fn first_not_finite(values: &[f32]) -> Option<usize> {
    const EXPONENT: u32 = 0x7f80_0000;
    let bad = |it: f32| u32::from(it.to_bits() & EXPONENT == EXPONENT);
    let any = |chunk: &[f32]| chunk.iter().fold(0, |sum, &it| sum | bad(it)) != 0;
    let chunk = values.chunks(4096).position(any)?;
    values[chunk * 4096..].iter().position(|it| !it.is_finite()).map(|it| chunk * 4096 + it)
}

/// Describes the task that covers a row of this trainer's stream under a KV head, and its server.
fn not_finite(
    planned: &PlannedStep,
    at: At,
    rank: RankId,
    (tensor, (row, head)): (&'static str, (usize, usize)),
    makers: &BTreeMap<Work, Peer>,
) -> NotFinite {
    let (nano, direction) = planned.nano_of(at.phase);
    let of_keys = matches!(tensor, "dK" | "dV");
    let covers = |task: &cadre_planner::Task| {
        let rows = if of_keys { task.keys.clone() } else { task.rows.clone() };
        let mut pieces = nano.problem.layout.locate(task.document, rows);
        task.kv_heads.contains(&(head as u16))
            && pieces.any(|it| it.rank == rank && it.local.contains(&(row as u32)))
    };
    // A row of dK or dV is a sum of parts, so any server that made a part may be at fault.
    let (mut tasks, mut servers) = (Vec::new(), Vec::new());
    for (index, task) in nano.plan.tasks().iter().enumerate().filter(|it| covers(it.1)) {
        let work = match direction {
            cadre_step::phases::Direction::Forward => Work(index as u32),
            cadre_step::phases::Direction::Backward => Work(task.bundle.0),
        };
        let of = planned.order.at(at.phase).nano;
        let origin = planned.header.nanos[of].origin(planned.kind_of(at.phase), task.document);
        let (document, first) = origin.expect("a task is of a document that was planned");
        let (start, end) = (first + task.rows.start, first + task.rows.end);
        tasks.push(format!("rows {start}..{end} of document {}", document.0));
        let server = makers.get(&work).map_or("an unknown server".into(), ToString::to_string);
        if !servers.contains(&server) {
            servers.push(server);
        }
    }
    let (task, server) = (tasks.join(" or "), servers.join(" or "));
    let layer = planned.order.at(at.phase).layer;
    NotFinite { layer, tensor, task, server }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;
    use std::ops::Range;
    use std::sync::Arc;

    use cadre_crds::Wire;
    use cadre_planner::{Costs, Document, Heads, Layout, Links, Mask, Slot, Tolerance};
    use cadre_protocol::ServerId;
    use cadre_step::header::{Header, KvHeads, Placement, ViewNumber};
    use cadre_step::layers::{Kind, Layers};
    use cadre_step::packing::Packing;
    use cadre_step::phases::{Direction, PhaseAt};
    use cadre_step::turns::Turns;

    use super::*;

    const HEADS: Heads = Heads { query: 2, kv: 1, dim: 4 };

    /// Documents of 300 and 212 rows over two trainers of 256; forward tasks of 128 rows, two servers.
    fn planned() -> PlannedStep {
        let document = |rows| Document { rows, mask: Mask::Causal };
        let layout = Layout::end_to_end(vec![document(300), document(212)], 256).unwrap();
        let slot = Slot { weight: 100, head_start: 0, home: None, memory: 1 << 30 };
        let header = Header {
            step: 5,
            layers: Layers::alike(Kind::causal(HEADS), 3).unwrap(),
            kv_heads: KvHeads::Together,
            wire: Wire::F32,
            seed: 0,
            numerics: "test".into(),
            placement: Placement::Pool,
            slots: vec![slot, slot],
            costs: vec![Costs { task_rows: 128, ..Costs::default() }],
            tolerance: Tolerance::USUAL,
            links: Links::equal(),
            turns: Turns::together(NonZeroU16::MIN),
            nanos: vec![Packing::from(&layout)],
            view: ViewNumber::default(),
            fillers: vec![None, None],
        };
        PlannedStep::new(Arc::new(header)).unwrap()
    }

    fn at(planned: &PlannedStep, layer: usize, direction: Direction) -> At {
        let at = PhaseAt { layer, nano: 0, direction };
        At { step: 5, phase: planned.order.index(at).unwrap() }
    }

    /// Each work made by the server of its number.
    fn makers(planned: &PlannedStep, at: At) -> BTreeMap<Work, Peer> {
        let server = |index| Peer::Server(ServerId { index: index as u16, incarnation: 2 });
        (0..planned.works(at.phase) as u32).map(|it| (Work(it), server(it))).collect()
    }

    /// The work of the task that has a row of a document.
    fn task_with(planned: &PlannedStep, document: u32, row: u32) -> (usize, Range<u32>) {
        let tasks = planned.plans[0].plan.tasks().iter();
        let found =
            tasks.enumerate().find(|(_, it)| it.document.0 == document && it.rows.contains(&row));
        let (index, task) = found.unwrap();
        (index, task.rows.clone())
    }

    #[test]
    fn a_result_that_is_not_finite_names_layer_tensor_task_and_server() {
        let planned = planned();
        let at = at(&planned, 2, Direction::Forward);
        let width = usize::from(HEADS.query) * usize::from(HEADS.dim);
        // Row 200 of trainer 1 is row 156 of document 1: 44 rows of document 0 come before it.
        let (task, rows) = task_with(&planned, 1, 156);
        let check = |value: f32, in_o: bool, expected: Option<&str>| {
            let mut o = vec![0.0; 256 * width];
            let mut lse = vec![0.0; 256 * usize::from(HEADS.query)];
            if in_o {
                o[200 * width + 3] = value;
            } else {
                lse[200 * usize::from(HEADS.query) + 1] = value;
            }
            let makers = makers(&planned, at);
            let result = check_forward(&planned, at, RankId(1), [&o, &lse], &makers);
            let expected = expected.map(|tensor| {
                let (start, end) = (rows.start, rows.end);
                format!(
                    "{tensor} of layer 2 is not finite (task rows {start}..{end} of document 1, \
                     computed by server {task} (incarnation 2))"
                )
            });
            assert_eq!(result.err().map(|it| it.to_string()), expected);
        };
        check(f32::NAN, true, Some("O"));
        check(f32::INFINITY, true, Some("O"));
        check(f32::NEG_INFINITY, true, Some("O"));
        check(f32::NAN, false, Some("LSE"));
        check(f32::INFINITY, false, Some("LSE"));
        // A row that keeps no key.
        check(f32::NEG_INFINITY, false, None);
        check(f32::MAX, true, None);
    }

    #[test]
    fn a_gradient_that_is_not_finite_names_the_bundle_of_its_task() {
        let planned = planned();
        let at = at(&planned, 1, Direction::Backward);
        let (task, rows) = task_with(&planned, 0, 130);
        let bundle = planned.plans[0].plan.tasks()[task].bundle;
        let query = usize::from(HEADS.query) * usize::from(HEADS.dim);
        let kv = usize::from(HEADS.kv) * usize::from(HEADS.dim);
        let zeros = || [query, kv, kv].map(|width| vec![0.0; 256 * width]);
        let check = |gradients: &[Vec<f32>; 3]| {
            let makers = makers(&planned, at);
            let gradients = gradients.each_ref().map(|it| &it[..]);
            let result = check_backward(&planned, at, RankId(0), gradients, &makers);
            result.err().map(|it| it.to_string())
        };
        assert_eq!(check(&zeros()), None);
        let mut gradients = zeros();
        gradients[0][130 * query] = f32::NAN;
        let Range { start, end } = rows;
        let expected = format!(
            "dQ of layer 1 is not finite (task rows {start}..{end} of document 0, \
             computed by server {} (incarnation 2))",
            bundle.0
        );
        assert_eq!(check(&gradients), Some(expected));
        for (name, tensor) in [("dK", 1), ("dV", 2)] {
            let mut gradients = zeros();
            gradients[tensor][130 * kv + 1] = f32::INFINITY;
            let message = check(&gradients).unwrap();
            assert!(message.starts_with(&format!("{name} of layer 1 is not finite")), "{message}");
            for (index, bundle) in planned.plans[0].plan.bundles().iter().enumerate() {
                let adds = bundle.document.0 == 0 && bundle.keys.contains(&130);
                let server = format!("server {index} (incarnation 2)");
                assert_eq!(message.contains(&server), adds, "{message}");
            }
        }
    }
}
