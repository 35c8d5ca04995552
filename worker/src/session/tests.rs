//! Calls that a rank may not make: they are refused by name, and nothing of them is sent but the reason.

mod threads;

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use cadre_exchange::{Buffer, Waker};
use cadre_kernels::{Engine, Threads};
use cadre_planner::{BundleId, RankId};
use cadre_protocol::{Peer, ServerId, TrainerId, Work};
use cadre_step::header::{Header, Member};

use super::call::Sizes;
use super::*;
use crate::compute::Compute;
use crate::heads::HeadByHead;
use crate::io::queues::{Outlet, Owed, notices};
use crate::io::whole::{Landed, Part, Values, Whole};
use crate::io::{Asked, Handle, Notice, Request};
use crate::launch::{AtOnce, PhaseRows};
use crate::memory::{Host, HostRows};
use crate::trace::Tracer;

/// A rank without an IO thread: what it asks for, and where notices go.
fn rank(first: u64) -> (Rank, Receiver<Asked<HostRows>>, Outlet<HostRows>) {
    rank_of(first, None)
}

/// The same, of a job of so many steps, if they are known.
fn rank_of(first: u64, steps: Option<u64>) -> (Rank, Receiver<Asked<HostRows>>, Outlet<HostRows>) {
    let waker = Waker::new().unwrap();
    let (handle, requests) = Handle::channel(waker.clone());
    let (outlet, told) = notices(waker);
    let launcher = AtOnce::new(Engine::cpu(Threads::ONE));
    let compute = Compute::new(launcher, "main", handle.clone(), Tracer::off());
    let using = ((handle, told), (compute, Threads::ONE));
    let places = [Host, Host];
    let Header { layers, seed, wire, .. } = planned(first).header.as_ref().clone();
    let begins = (Model { layers, seed, wire }, first, steps);
    let rank = Rank::new(TrainerId(0), using.0, using.1, places, begins, Tracer::off());
    (rank, requests, outlet)
}

/// One document of 300 rows on rank 0; servers compute it.
fn planned(step: u64) -> Arc<PlannedStep> {
    let any: Header = serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
    let member = Member::Server { index: 0, incarnation: 0, address: String::new() };
    let fillers = vec![Some(member)];
    Arc::new(PlannedStep::new(Arc::new(Header { step, fillers, ..any })).unwrap())
}

fn lengths(step: u64) -> Lengths {
    Lengths { step, turns: None, nanos: Vec::new() }
}

/// The one request that there is: the end of the job, for this reason, which is a mistake of the caller's.
fn mistaken(requests: &Receiver<Asked<HostRows>>) -> String {
    let Ok(Asked::For(Request::Refuse(reason))) = requests.try_recv() else {
        panic!("the job goes on, or is tried again")
    };
    assert!(requests.try_recv().is_err(), "something is sent behind the reason");
    reason
}

const QUERY: usize = 300 * 4 * 8;
const KV: usize = 300 * 2 * 8;

#[test]
fn a_refused_call_sends_nothing_but_its_reason() {
    let (rank, requests, mut outlet) = rank(3);
    let refused = rank.announce(lengths(4)).unwrap_err().to_string();
    assert_eq!(
        refused,
        "rank 0: lengths of step 4 were announced, but those of step 3 are next; \
         make the calls of a step in their order"
    );
    assert_eq!(mistaken(&requests), refused);
    rank.announce(lengths(3)).unwrap();
    assert!(
        matches!(requests.try_recv(), Ok(Asked::For(Request::Lengths(it, None))) if it.step == 3)
    );

    // Of a step that is not next: nothing is waited for.
    assert!(rank.await_step(5, Duration::MAX));
    let Next::End(Ending::Failed { reason, .. }) = rank.begin(5) else { panic!("it begins") };
    assert_eq!(mistaken(&requests), reason);
    assert!(rank.poll_begin(3).is_none());
    outlet.tell(Notice::Step(planned(3)));
    assert!(matches!(rank.begin(3), Next::Step(it) if it.header.step == 3));

    let (q, kv) = (vec![0.5; QUERY], vec![0.5; KV]);
    let at = PhaseAt { layer: 0, nano: 0, direction: Direction::Forward };
    let forward = |q, k, v| Inputs::Forward { q: Rows::f32(q), k: Rows::f32(k), v: Rows::f32(v) };
    for (phase, inputs, expected) in [
        (PhaseAt { layer: 1, ..at }, forward(&q, &kv, &kv), "layer 1, nano-batch 0, forward was"),
        (PhaseAt { layer: 9, ..at }, forward(&q, &kv, &kv), "layer 9, nano-batch 0, forward was"),
        (at, forward(&q, &kv, &kv[..7]), "V of step 3, layer 0, nano-batch 0, forward has 7 el"),
        (at, forward(&q[..0], &kv, &kv), "Q of step 3, layer 0, nano-batch 0, forward has 0 el"),
    ] {
        let refused = rank.submit(phase, inputs).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
        assert_eq!(mistaken(&requests), refused);
    }

    let ticket = rank.submit(at, forward(&q, &kv, &kv)).unwrap();
    assert!(matches!(requests.try_recv(), Ok(Asked::Submit(..))));
    assert!(!rank.await_ready(&ticket, Duration::ZERO));
    let (mut o, mut lse) = (vec![0.0; QUERY], vec![0.0; 7]);
    let room = Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) };
    let refused = rank.wait(ticket, room).unwrap_err().to_string();
    assert!(refused.contains("LSE of step 3, layer 0"), "{refused}");
    assert_eq!(mistaken(&requests), refused);
    let done = StepDone { step: 3, ..StepDone::default() };
    let refused = rank.done(done).unwrap_err().to_string();
    assert!(refused.contains("0 of its 4 phases were waited for"), "{refused}");
    assert_eq!(mistaken(&requests), refused);
}

/// LSE and dLSE side by side, and with other numbers between the rows.
#[test]
fn lse_and_its_gradient_lie_at_any_distance() {
    let planned = planned(3);
    let at = PhaseAt { layer: 0, nano: 0, direction: Direction::Backward };
    let sizes = Sizes::of(&planned, at, RankId(0));
    let form = HeadByHead::of(&planned.plans[planned.plan_index(at)], RankId(0));
    let numbers = |count, by| (0..count).map(|it| (it * by % 97) as f32).collect::<Vec<_>>();
    let (q, kv, dout) = (numbers(QUERY, 31), numbers(KV, 37), numbers(QUERY, 41));
    let heads = sizes.query_heads;
    let [lse, dlse] = [43, 47].map(|by| numbers(sizes.rows * heads, by));
    let apart = |of: &[f32]| -> Vec<f32> {
        let row = |it: &[f32]| [it, &[f32::NAN; 3]].concat();
        of.chunks(heads).flat_map(row).collect()
    };
    let held = |lse, dlse| {
        let [q, dout] = [&q, &dout].map(|it| Rows::f32(it));
        let kv = Rows::f32(&kv);
        let inputs = Inputs::Backward { q, k: kv, v: kv, o: q, lse, dout, dlse };
        inputs.check(&sizes).unwrap();
        let rows: PhaseRows<HostRows> = inputs.hold((&sizes, &form), &Host, Threads::ONE).unwrap();
        rows.gradients.unwrap().map(|it| it.f32s().to_vec())
    };
    let expected = held(PerHead::f32(&lse), Some(PerHead::f32(&dlse)));
    assert_ne!(expected, held(PerHead::f32(&lse), None), "dLSE is in Δ");
    let (far_lse, far_dlse) = (apart(&lse), apart(&dlse));
    let [far_lse, far_dlse] = [&far_lse, &far_dlse].map(|it| PerHead::f32(it).every(heads + 3));
    assert_eq!(held(far_lse, Some(far_dlse)), expected);
}

#[test]
fn a_rank_that_polls_for_its_next_header_or_waits_in_parts_has_waited_for_it() {
    let (rank, _requests, mut outlet) = rank(0);
    // All rows are of rank 1.
    let text = include_str!("../../../testing/header.json").replace("[[{", "[[],[{");
    let of: Header = serde_json::from_str(&text).unwrap();
    let begin = |outlet: &mut Outlet<HostRows>, step| {
        rank.announce(lengths(step)).unwrap();
        assert!(rank.poll_begin(step).is_none());
        let start = std::time::Instant::now();
        while start.elapsed().is_zero() || rank.poll_begin(step).is_some() {}
        let waited = start.elapsed();
        let header = Arc::new(Header { step, ..of.clone() });
        outlet.tell(Notice::Step(Arc::new(PlannedStep::new(header).unwrap())));
        rank.advance();
        assert!(matches!(rank.poll_begin(step), Some(Next::Step(_))));
        rank.done(StepDone { step, ..StepDone::default() }).unwrap();
        waited
    };
    let begin_in_parts = |outlet: &mut Outlet<HostRows>, step| {
        let part = Duration::from_millis(2);
        rank.announce(lengths(step)).unwrap();
        assert!(!rank.await_step(step, part) && !rank.await_step(step, part));
        let header = Arc::new(Header { step, ..of.clone() });
        outlet.tell(Notice::Step(Arc::new(PlannedStep::new(header).unwrap())));
        assert!(rank.await_step(step, Duration::MAX));
        assert!(matches!(rank.begin(step), Next::Step(_)));
        rank.done(StepDone { step, ..StepDone::default() }).unwrap();
        2 * part
    };
    begin(&mut outlet, 0);
    assert_eq!(
        rank.header_wait(),
        Duration::ZERO,
        "that of the first step is the start of the job"
    );
    for step in 1..5 {
        let waited = match step {
            1 | 2 => begin(&mut outlet, step),
            _ => begin_in_parts(&mut outlet, step),
        };
        let told = rank.header_wait();
        assert!(told >= waited, "{told:?} is less than {waited:?}");
    }
}

#[test]
fn turns_that_do_not_fit_are_refused_before_they_are_told() {
    let (rank, requests, _outlet) = rank(3);
    let nano = NanoLengths { documents: Vec::new(), stretches: Vec::new() };
    let announce = |layers: &[u16], nanos: usize| {
        let turn = |direction, layers| Turn { direction, nanos: vec![0], layers };
        let backward = turn(Direction::Backward, Which::Only(layers.to_vec()));
        let turns = vec![turn(Direction::Forward, Which::All), backward];
        let turns = Some(Turns::new(turns).unwrap());
        rank.announce(Lengths { step: 3, turns, nanos: vec![nano.clone(); nanos] })
    };
    for (layers, nanos, expected) in [
        (&[7][..], 1, "rank 0 announced step 3: turn 1 lists layer 7, and there are 2 with core"),
        (&[1][..], 2, "rank 0 announced step 3: turns take 1 nano-batches, and ranks announced"),
    ] {
        let refused = announce(layers, nanos).unwrap_err().to_string();
        assert!(refused.starts_with(expected), "{refused}");
        assert_eq!(mistaken(&requests), refused);
    }
    announce(&[1], 1).unwrap();
    assert!(
        matches!(requests.try_recv(), Ok(Asked::For(Request::Lengths(it, None))) if it.turns.is_some())
    );
}

#[test]
fn a_step_of_other_layers_than_the_ranks_is_refused_before_a_row_is_sent() {
    let (rank, requests, mut outlet) = rank(0);
    rank.announce(lengths(0)).unwrap();
    requests.try_recv().unwrap();
    let any = (*planned(0).header).clone();
    let causal = any.layers.kind_of(0);
    let wide = cadre_planner::Heads { dim: 16, ..causal.heads };
    let near = Kind { mask: cadre_planner::Mask::Window { left: 63 }, ..Kind::causal(wide) };
    let layers = Layers::new([near, causal]).unwrap();
    let header = Header { layers, costs: vec![any.costs[0]; 2], ..any };
    outlet.tell(Notice::Step(Arc::new(PlannedStep::new(Arc::new(header)).unwrap())));
    let Next::End(Ending::Failed { reason, .. }) = rank.begin(0) else { panic!("it begins") };
    assert_eq!(
        reason,
        "rank 0: its layers are 2 × causal heads 4/2 dim 8, those of step 0 are 1 × window:64 heads 4/2 dim 16, \
         1 × causal heads 4/2 dim 8; \
         give every rank the same model"
    );
    assert_eq!(mistaken(&requests), reason);
}

#[test]
fn a_ticket_of_another_session_or_step_is_refused_at_once() {
    let begin = || {
        let (rank, requests, mut outlet) = rank(0);
        rank.announce(lengths(0)).unwrap();
        outlet.tell(Notice::Step(planned(0)));
        assert!(matches!(rank.begin(0), Next::Step(_)));
        requests.try_recv().unwrap();
        (rank, requests, outlet)
    };
    let ((one, _requests, _outlet), (other, requests, _told)) = (begin(), begin());
    let (q, kv) = (vec![0.5; QUERY], vec![0.5; KV]);
    let (q, kv) = (Rows::f32(&q), Rows::f32(&kv));
    let at = PhaseAt { layer: 0, nano: 0, direction: Direction::Forward };
    let ticket = one.submit(at, Inputs::Forward { q, k: kv, v: kv }).unwrap();
    let (mut o, mut lse) = (vec![0.0; QUERY], vec![0.0; 1200]);
    let room = Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) };
    let refused = other.wait(ticket, room).unwrap_err().to_string();
    assert!(refused.contains("forward was waited for, but step 0 of this session"), "{refused}");
    assert_eq!(mistaken(&requests), refused);
}

#[test]
fn whoever_calls_out_of_turn_after_the_end_learns_why_it_ended() {
    let (rank, requests, mut outlet) = rank(0);
    let reason = || "server 3 burns".to_owned();
    outlet.tell(Notice::End(Ending::Failed { reason: reason(), bad_input: false }));
    for step in [0, 9] {
        let Next::End(Ending::Failed { reason: told, .. }) = rank.begin(step) else {
            panic!("it begins")
        };
        assert_eq!(told, reason());
    }
    assert!(requests.try_recv().is_err());
    assert!(rank.ending(Duration::MAX).is_some());
}

#[test]
fn a_part_that_nobody_took_holds_nobody_up() {
    let (rank, _requests, mut outlet) = rank(0);
    let planned = planned(0);
    let at = PhaseAt { layer: 0, nano: 0, direction: Direction::Backward };
    let phase = planned.order.index(at).unwrap();
    let values = [0; 2].map(|_| Arc::new(Buffer::zeroed(4 * KV)));
    let values = Values::Own(values);
    let part = Part { planned: Arc::clone(&planned), phase, bundle: BundleId(0), values };
    rank.announce(lengths(0)).unwrap();
    outlet.tell(Notice::Part(Box::new(part)));
    assert_eq!(
        outlet.owed(),
        Owed::Nothing,
        "the rank may wait for others until the phase is whole"
    );
    outlet.tell(Notice::Step(Arc::clone(&planned)));
    assert_eq!(outlet.owed(), Owed::Notices);
    assert!(matches!(rank.begin(0), Next::Step(_)));
    assert_eq!(outlet.owed(), Owed::Nothing, "it has taken both");
}

#[test]
fn results_that_are_not_finite_end_the_job_or_are_handed_over_and_named() {
    let (rank, requests, mut outlet) = rank(0);
    let planned = planned(0);
    rank.announce(lengths(0)).unwrap();
    outlet.tell(Notice::Step(Arc::clone(&planned)));
    assert!(matches!(rank.begin(0), Next::Step(_)));
    let (q, kv) = (vec![0.5; QUERY], vec![0.5; KV]);
    let (q, kv) = (Rows::f32(&q), Rows::f32(&kv));
    requests.try_recv().unwrap();
    let mut run = |layer| {
        let phase = PhaseAt { layer, nano: 0, direction: Direction::Forward };
        let ticket = rank.submit(phase, Inputs::Forward { q, k: kv, v: kv }).unwrap();
        requests.try_recv().unwrap();
        let [mut o, lse] = [QUERY, QUERY / 8].map(|it| Buffer::zeroed(4 * it));
        o.f32s_mut()[QUERY - 1] = f32::NAN;
        let maker = Peer::Server(ServerId { index: 3, incarnation: 1 });
        let makers = (0..9).map(|it| (Work(it), maker)).collect();
        let landed = Landed::Forward { o, lse, own: Vec::new() };
        outlet.tell(Notice::Whole(Box::new(Whole { at: ticket.at, landed, makers })));
        ticket
    };
    let told = |layer| {
        format!(
            "rank 0, step 0, layer {layer}, nano-batch 0, forward: O of layer {layer} is not finite \
             (task rows 0..300 of document 0, computed by server 3 (incarnation 1)); look at its inputs first"
        )
    };
    let (mut o, mut lse) = (vec![7.0; QUERY], vec![7.0; QUERY / 8]);
    let ticket = run(0);
    let room = Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) };
    let found = rank.wait_reporting(ticket, room).unwrap().unwrap().to_string();
    assert_eq!(found, told(0));
    let (last, others) = o.split_last().unwrap();
    assert!(last.is_nan() && others.iter().all(|it| it.to_bits() == 0), "they are written");
    assert!(requests.try_recv().is_err(), "the job goes on");
    let ticket = run(1);
    let room = Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) };
    let refused = rank.wait(ticket, room).unwrap_err().to_string();
    assert_eq!(refused, told(1));
    let Ok(Asked::For(Request::Fail(reason))) = requests.try_recv() else { panic!("it goes on") };
    assert_eq!(reason, refused);
}
