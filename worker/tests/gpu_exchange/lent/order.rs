//! Whose turn lent rows are, and which are refused.
//!
//! In: a rank without an IO thread, that is lent rows. Out: what it asks for, and its words.

use std::sync::Arc;

use cadre_exchange::Buffer as Bytes;
use cadre_kernels::Choice;
use cadre_kernels::device::{Buffer, Gate, Gpu, Graph, Spread, Stream};
use cadre_protocol::Phase;
use cadre_step::phases::{Direction, PhaseAt};
use cadre_worker::io::{Asked, Request};
use cadre_worker::memory::Host;
use cadre_worker::session::{Inputs, LentInputs, Rows};

use super::{KV, QUERY, ROWS, Side, Tensor, planned};
use cadre_crds::Wire;

/// Rows of the host do not overtake those that are still being made on the GPU.
pub(super) fn in_order(gpu: &Gpu) {
    let planned = planned(Wire::F32);
    let side = Side::<Arc<Bytes>>::new(&Host, &planned, Choice::Cpu);
    let caller = Stream::new(gpu).expect("a stream");
    let [q, k, v] = [QUERY, KV, KV].map(|it| Tensor::<f32>::new(&caller, 0, it));
    let (gate, opener) = Gate::new(gpu).expect("a word");
    gate.hold(&caller).expect("the driver has gates");
    let at = |layer| PhaseAt { layer, nano: 0, direction: Direction::Forward };
    let inputs = LentInputs::Forward { q: q.lend(), k: k.lend(), v: v.lend() };
    let _first = side.rank.submit_lent(at(0), inputs, &caller).expect("in turn");
    let [q, k, v] = [&q, &k, &v].map(|it| Rows::f32(&it.host));
    let _second = side.rank.submit(at(1), Inputs::Forward { q, k, v }).expect("in turn");
    assert!(side.requests.try_recv().is_err(), "the second phase has overtaken the first");
    opener.open(Gate::DONE);
    for phase in [0, 1] {
        let asked = side.requests.recv().expect("the rank is there");
        assert!(matches!(asked, Asked::Submit(at, _) if at.phase == Phase(phase)), "{asked:?}");
    }
}

/// By rank, phase, tensor and remedy; and nothing of the phase is sent.
pub(super) fn refusals(gpu: &Gpu) {
    let planned = planned(Wire::F32);
    let side = Side::<Arc<Bytes>>::new(&Host, &planned, Choice::Cpu);
    let caller = Stream::new(gpu).expect("a stream");
    let [q, k, v] = [QUERY, KV, KV].map(|it| Tensor::<f32>::new(&caller, 0, it));
    let [q_rows, k_rows, v_rows] = [&q, &k, &v].map(Tensor::lend);
    let at = PhaseAt { layer: 0, nano: 0, direction: Direction::Forward };
    let refuse = |inputs: LentInputs<'_>, expected: &str| {
        let refused = side.rank.submit_lent(at, inputs, &caller).expect_err("refused").to_string();
        assert_eq!(refused, format!("rank 0: {expected}"));
        let asked = side.requests.try_recv();
        assert!(matches!(asked, Ok(Asked::For(Request::Refuse(it))) if it == refused));
        assert!(side.requests.try_recv().is_err(), "something is sent behind the reason");
    };
    let phase = "of step 0, layer 0, nano-batch 0, forward";
    let near = k.gpu.lend(0, Spread { distance: 2, ..k.spread });
    let words =
        "has rows 2 elements apart, which are 16 wide; give the distance from a row to the next";
    let expected = format!("K {phase} {words}");
    refuse(LentInputs::Forward { q: q_rows, k: near, v: v_rows }, &expected);
    let few = v.gpu.lend(0, Spread { rows: 7, ..v.spread });
    let words =
        "has 7 rows of 16 elements, not 300 of 16; hand over the rows that were announced for it";
    let expected = format!("V {phase} {words}");
    refuse(LentInputs::Forward { q: q_rows, k: k_rows, v: few }, &expected);
    let words = "is handed over while its stream is recorded for a graph; leave attention out of the recording";
    // Of nothing, which a driver may refuse.
    let _recorded = Graph::record(&caller, "nothing", |_| {
        let inputs = LentInputs::Forward { q: q_rows, k: k_rows, v: v_rows };
        refuse(inputs, &format!("Q {phase} {words}"));
        Ok(())
    });
    if let Some(bytes) = std::env::var_os("CADRE_EMULATED_ELSEWHERE") {
        let bytes: usize = bytes.to_string_lossy().parse().expect("a number");
        let there = Buffer::<f32>::new(gpu, bytes / 4, "rows").expect("memory");
        let there = there.lend(0, Spread::dense(ROWS, QUERY));
        let words = "lies on GPU 1 of this process, and its rank is on GPU 0; copy it there first";
        let expected = format!("Q {phase} {words}");
        refuse(LentInputs::Forward { q: there, k: k_rows, v: v_rows }, &expected);
    }
}
