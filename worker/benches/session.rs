//! What a session takes of a rank's thread for a phase, beside the copies of its rows: submit and wait, forward.
//!
//! A rank whose IO thread is played here: the results of each phase are there before they are waited for, so neither pulls nor
//! kernels count. A document of one row, of which all is overhead; and one of 2,048 rows, less the copies that it cannot do
//! without: plain loops that turn rows head by head on the way in and back on the way out, between memory that is as warm. Each
//! of the two comes first in every other phase. What remains is what the session does beside: it looks for numbers that are not
//! finite, and hands phases over. Prints medians, and the 99th percentile of one row; writes `target/bench/session.json` beside
//! the bar of 15 µs.

#![allow(clippy::wildcard_enum_match_arm, reason = "a bench picks one of many")]

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use cadre_exchange::{Pool, Waker};
use cadre_kernels::Engine;
use cadre_planner::{DocumentId, Heads, Stretch};
use cadre_protocol::{Peer, ServerId, TrainerId, Work};
use cadre_step::header::{Header, Member};
use cadre_step::layers::{Kind, Layers};
use cadre_step::packing::Packing;
use cadre_step::planned::PlannedStep;
use cadre_worker::Threads;
use cadre_worker::compute::Compute;
use cadre_worker::io::queues::notices;
use cadre_worker::io::whole::{Landed, Whole};
use cadre_worker::io::{Asked, Handle, Notice, Request};
use cadre_worker::launch::AtOnce;
use cadre_worker::memory::{Host, HostRows};
use cadre_worker::session::{
    Direction, Inputs, Lengths, Model, Next, Outputs, PerHeadMut, PhaseAt, Rank, Rows, RowsMut,
};
use cadre_worker::trace::Tracer;

const PHASES: u16 = 2000;
const HEADS: Heads = Heads { query: 8, kv: 2, dim: 64 };
const BAR_MICROS: f64 = 15.0;

fn main() {
    let at = |times: &mut Vec<f64>, percent: usize| {
        times.sort_by(f64::total_cmp);
        times[times.len() * percent / 100]
    };
    let (mut one, _) = phases(1);
    let (median, p99) = (at(&mut one, 50), at(&mut one, 99));
    let (mut many, mut copies) = phases(2048);
    let (whole, copied) = (at(&mut many, 50), at(&mut copies, 50));
    let beside = whole - copied;
    println!(
        "submit and wait of one row: median {median:.1} us, p99 {p99:.1} us, bar {BAR_MICROS} us; of 2048 rows: {whole:.0} us, \
         {copied:.0} us of them copies that turn rows, so {beside:.1} us beside, bar {BAR_MICROS} us"
    );
    let case = |name: &str, ours: f64, peer: f64, peer_name: &str| {
        serde_json::json!({
            "case": format!("submit and wait, forward, {name}"), "ours": ours, "unit": "us",
            "peer": peer, "peer_name": peer_name, "ratio": peer / ours,
        })
    };
    let list = [
        case("1 row, median", median, BAR_MICROS, "bar"),
        case("1 row, p99", p99, BAR_MICROS, "bar"),
        case("2048 rows with their copies, median", whole, copied, "copies that turn rows"),
        case("2048 rows less those copies, median", beside, BAR_MICROS, "bar"),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let text = serde_json::to_string_pretty(&list).expect("plain data");
    std::fs::write(folder.join("session.json"), text).expect("the target folder can be written");
}

/// Microseconds of submit and wait of each phase, and of the copies that it cannot do without.
fn phases(rows: u32) -> (Vec<f64>, Vec<f64>) {
    let waker = Waker::new().expect("an event counter");
    let (handle, requests) = Handle::<HostRows>::channel(waker.clone());
    let (mut outlet, told) = notices(waker);
    let compute =
        Compute::new(AtOnce::new(Engine::cpu(Threads::ONE)), "main", handle.clone(), Tracer::off());
    let planned = planned(rows);
    let Header { layers, seed, wire, .. } = planned.header.as_ref().clone();
    let begins = (Model { layers, seed, wire }, 0, None);
    let using = ((handle, told), (compute, Threads::ONE));
    let places = [Host; 2];
    let rank = Rank::new(TrainerId(0), using.0, using.1, places, begins, Tracer::off());
    rank.announce(Lengths { step: 0, turns: None, nanos: Vec::new() }).expect("its turn");
    outlet.tell(Notice::Step(Arc::clone(&planned)));
    assert!(matches!(rank.begin(0), Next::Step(_)), "the step begins");
    let asked = requests.try_recv();
    assert!(matches!(asked, Ok(Asked::For(Request::Lengths(..)))), "lengths were announced");

    let numbers = |heads: u16| rows as usize * usize::from(heads) * usize::from(HEADS.dim);
    let (query, kv, each) =
        (numbers(HEADS.query), numbers(HEADS.kv), rows as usize * usize::from(HEADS.query));
    let (q, k) = (vec![0.5_f32; query], vec![0.5_f32; kv]);
    let (mut o, mut lse) = (vec![0.0; query], vec![0.0; each]);
    let (mut other_o, mut other_lse) = (o.clone(), lse.clone());
    let server = Peer::Server(ServerId { index: 0, incarnation: 0 });
    // Landings come from a pool and go back to it.
    let landings = Pool::new();
    let landing = |numbers: usize| {
        let mut memory = landings.take(4 * numbers);
        memory.f32s_mut().fill(0.25);
        memory
    };
    let mut copied = [query, kv, kv].map(|it| vec![0.0; it]);
    let (mut times, mut plain) = (Vec::new(), Vec::new());
    for layer in 0..usize::from(PHASES) {
        let phase = PhaseAt { layer, nano: 0, direction: Direction::Forward };
        let mut ours = || {
            let (from, to) = (Rows::f32(&q), Rows::f32(&k));
            let start = Instant::now();
            let ticket = rank.submit(phase, Inputs::Forward { q: from, k: to, v: to });
            let mut took = start.elapsed();
            let ticket = ticket.expect("its turn");
            let Ok(Asked::Submit(at, held)) = requests.try_recv() else { panic!("rows") };
            let [made, sums] = [query, each].map(landing);
            let landed = Landed::Forward { o: made, lse: sums, own: Vec::new() };
            let makers = [(Work(0), server)].into();
            outlet.tell(Notice::Whole(Box::new(Whole { at, landed, makers })));
            let start = Instant::now();
            let whole = rank.wait(
                ticket,
                Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) },
            );
            took += start.elapsed();
            whole.expect("it is whole");
            drop(held);
            took.as_secs_f64() * 1e6
        };
        let mut theirs = || {
            let start = Instant::now();
            for (to, from) in copied.iter_mut().zip([&q, &k, &k]) {
                turned(from, to, rows, Way::In);
            }
            let mut took = start.elapsed();
            let results = [query, each].map(landing);
            let start = Instant::now();
            for (from, to) in results.iter().zip([&mut other_o, &mut other_lse]) {
                turned(from.f32s(), to, rows, Way::Out);
            }
            took += start.elapsed();
            std::hint::black_box(&copied);
            took.as_secs_f64() * 1e6
        };
        // Who comes second finds the caller's rows in the caches.
        if layer.is_multiple_of(2) {
            times.push(ours());
            plain.push(theirs());
        } else {
            plain.push(theirs());
            times.push(ours());
        }
    }
    (times, plain)
}

/// Which of two memories lies head by head.
#[derive(Clone, Copy)]
enum Way {
    /// The one that is written.
    In,
    /// The one that is read.
    Out,
}

/// Copies rows of one stretch, and turns them head by head or back.
fn turned(from: &[f32], to: &mut [f32], rows: u32, way: Way) {
    let (rows, heads) = (rows as usize, usize::from(HEADS.kv));
    let width = from.len() / rows;
    let part = width / heads;
    for row in 0..rows {
        for head in 0..heads {
            let (by_row, by_head) = (row * width + head * part, (head * rows + row) * part);
            let (read, write) = match way {
                Way::In => (by_row, by_head),
                Way::Out => (by_head, by_row),
            };
            to[write..][..part].copy_from_slice(&from[read..][..part]);
        }
    }
}

/// One document on one rank; a server computes it, in each of many layers.
fn planned(rows: u32) -> Arc<PlannedStep> {
    let any: Header = serde_json::from_str(include_str!("../../testing/header.json"))
        .expect("the header of the tests");
    let stretch = Stretch { document: DocumentId(0), start: 0, end: rows };
    let header = Header {
        layers: Layers::alike(Kind::causal(HEADS), PHASES).expect("phases are layers"),
        nanos: vec![Packing::new(&[rows], vec![vec![stretch]]).expect("one document on one rank")],
        fillers: vec![Some(Member::Server { index: 0, incarnation: 0, address: String::new() })],
        ..any
    };
    Arc::new(PlannedStep::new(Arc::new(header)).expect("one document on one slot"))
}
