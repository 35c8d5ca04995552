//! What a session takes of a rank's thread for a phase, beside what must be done with its rows: submit and wait.
//!
//! A rank whose IO thread is played here: the results of each phase are there before they are waited for, so neither pulls nor
//! kernels count. A document of one row, of which all is overhead; and one of 2,048 rows, less what no session can do without,
//! by plain loops: forward the copies, which turn rows head by head on the way in and back on the way out; backward also Δ, and
//! the sum of dK and dV. Before each of the two the caches are filled with something else. What remains is what the session
//! does beside: it looks for numbers that are not finite, and hands phases over. Prints medians, and the 99th percentile of one
//! row; writes `target/bench/session.json` beside the bar of 15 µs.

#![allow(clippy::wildcard_enum_match_arm, reason = "a bench picks one of many")]

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use cadre_exchange::{Buffer, Pool, Waker};
use cadre_kernels::{Engine, delta};
use cadre_planner::{BundleId, DocumentId, Heads, RankId, Stretch};
use cadre_protocol::{At, Peer, Phase, ServerId, TrainerId, Work};
use cadre_step::header::{Header, Member};
use cadre_step::layers::{Kind, Layers};
use cadre_step::packing::Packing;
use cadre_step::planned::PlannedStep;
use cadre_worker::Threads;
use cadre_worker::compute::Compute;
use cadre_worker::io::queues::notices;
use cadre_worker::io::whole::{Landed, Part, Values, Whole};
use cadre_worker::io::{Asked, Handle, Notice, Request};
use cadre_worker::launch::AtOnce;
use cadre_worker::memory::{Host, HostRows};
use cadre_worker::session::{
    Direction, Inputs, Lengths, Model, Next, Outputs, PerHead, PerHeadMut, Rank, Rows, RowsMut,
};
use cadre_worker::trace::Tracer;

/// Larger than the caches: what one case has read is no advantage of the next.
const SWEPT: usize = 64 << 20;
const HEADS: Heads = Heads { query: 8, kv: 2, dim: 64 };
const BAR_MICROS: f64 = 15.0;

fn main() {
    let mut list = Vec::new();
    let mut one = phases(1, 2000);
    let mut many = phases(2048, 200);
    for (name, direction) in [("forward", Direction::Forward), ("backward", Direction::Backward)] {
        let of = |it: &mut Times| [50, 99].map(|percent| percentile(it.of(direction), percent));
        let [[median, p99], [whole, _]] = [of(&mut one.ours), of(&mut many.ours)];
        let [[needed, _], [least, _]] = [&mut many.needed, &mut many.least].map(of);
        let beside = whole - needed;
        println!(
            "submit and wait of one row, {name}: median {median:.1} us, p99 {p99:.1} us, bar {BAR_MICROS} us; of 2048 rows: \
             {whole:.0} us, {needed:.0} us by plain loops ({least:.0} us if rows were not turned), so {beside:.1} us beside, bar \
             {BAR_MICROS} us"
        );
        let case = |what: &str, ours: f64, peer: f64, peer_name: &str| {
            serde_json::json!({
                "case": format!("submit and wait, {name}, {what}"), "ours": ours, "unit": "us",
                "peer": peer, "peer_name": peer_name, "ratio": peer / ours,
            })
        };
        list.extend([
            case("1 row, median", median, BAR_MICROS, "bar"),
            case("1 row, p99", p99, BAR_MICROS, "bar"),
            case("2048 rows with their copies, median", whole, needed, "plain loops"),
            case("2048 rows less those loops, median", beside, BAR_MICROS, "bar"),
            case(
                "2048 rows with their copies, turned, median",
                whole,
                least,
                "copies that turn nothing",
            ),
        ]);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let text = serde_json::to_string_pretty(&list).expect("plain data");
    std::fs::write(folder.join("session.json"), text).expect("the target folder can be written");
}

fn percentile(times: &mut [f64], percent: usize) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() * percent / 100]
}

/// Microseconds of phases of each direction.
#[derive(Default)]
struct Times {
    forward: Vec<f64>,
    backward: Vec<f64>,
}

impl Times {
    fn of(&mut self, direction: Direction) -> &mut Vec<f64> {
        match direction {
            Direction::Forward => &mut self.forward,
            Direction::Backward => &mut self.backward,
        }
    }
}

/// What phases took, and what cannot be done without took by plain loops.
#[derive(Default)]
struct Taken {
    ours: Times,
    needed: Times,
    /// The same, but that rows are not turned: whole tensors are copied.
    least: Times,
}

/// Submits and waits for all phases of a step, and runs the plain loops beside each.
fn phases(rows: u32, layers: u16) -> Taken {
    let waker = Waker::new().expect("an event counter");
    let (handle, requests) = Handle::<HostRows>::channel(waker.clone());
    let (mut outlet, told) = notices(waker);
    let compute =
        Compute::new(AtOnce::new(Engine::cpu(Threads::ONE)), "main", handle.clone(), Tracer::off());
    let planned = planned(rows, layers);
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

    let mut theirs = Plain::new(rows);
    let [query, kv, each] = theirs.numbers;
    let tensors = Tensors::new([query, kv, each]);
    let mut rooms = Tensors::new([query, kv, each]);
    let server = Peer::Server(ServerId { index: 0, incarnation: 0 });
    // Landings come from a pool and go back to it.
    let landings = Pool::new();
    let mut taken = Taken::default();
    let mut swept = vec![0_u8; if rows > 1 { SWEPT } else { 0 }];
    for index in 0..planned.order.count() {
        let phase = planned.order.at(Phase(index as u32));
        let mut ours = || {
            let Tensors { wide: q, other_wide: o, narrow: k, scalars: lse, .. } = &tensors;
            let (q, o, k, lse) = (Rows::f32(q), Rows::f32(o), Rows::f32(k), PerHead::f32(lse));
            let inputs = match phase.direction {
                Direction::Forward => Inputs::Forward { q, k, v: k },
                Direction::Backward => Inputs::Backward { q, k, v: k, o, lse, dout: q, dlse: None },
            };
            let start = Instant::now();
            let ticket = rank.submit(phase, inputs);
            let mut took = start.elapsed();
            let ticket = ticket.expect("its turn");
            let Ok(Asked::Submit(at, held)) = requests.try_recv() else { panic!("rows") };
            let landed = match phase.direction {
                Direction::Forward => {
                    let [o, lse] = [query, each].map(|it| landing(&landings, it));
                    Landed::Forward { o, lse, own: Vec::new() }
                }
                Direction::Backward => {
                    outlet.tell(Notice::Part(part(&planned, at, landing(&landings, 2 * kv))));
                    Landed::Backward { dq: landing(&landings, query), own: Vec::new() }
                }
            };
            let makers = [(Work(0), server)].into();
            outlet.tell(Notice::Whole(Box::new(Whole { at, landed, makers })));
            let Tensors { wide, narrow, other_narrow, scalars, .. } = &mut rooms;
            let to = match phase.direction {
                Direction::Forward => {
                    Outputs::Forward { o: RowsMut::f32(wide), lse: PerHeadMut::f32(scalars) }
                }
                Direction::Backward => {
                    let [dk, dv] = [narrow, other_narrow].map(|it| RowsMut::f32(it));
                    Outputs::Backward { dq: RowsMut::f32(wide), dk, dv }
                }
            };
            let start = Instant::now();
            let whole = rank.wait(ticket, to);
            took += start.elapsed();
            whole.expect("it is whole");
            drop(held);
            took.as_secs_f64() * 1e6
        };
        let mut sweep = || std::hint::black_box(&mut swept).iter_mut().for_each(|it| *it ^= 1);
        sweep();
        taken.ours.of(phase.direction).push(ours());
        let mut by = |ways| theirs.run(phase.direction, ways, (&tensors, &landings));
        sweep();
        taken.needed.of(phase.direction).push(by([Way::In, Way::Out]));
        sweep();
        taken.least.of(phase.direction).push(by([Way::AsTheyAre; 2]));
    }
    taken
}

/// Memory that results of a server would have landed in.
fn landing(pool: &Arc<Pool>, numbers: usize) -> Buffer {
    let mut memory = pool.take(4 * numbers);
    memory.f32s_mut().fill(0.25);
    memory
}

/// dK and dV of all rows, as they land.
fn part(planned: &Arc<PlannedStep>, at: At, room: Buffer) -> Box<Part<HostRows>> {
    let (nano, bundle) = (planned.nano_of(at.phase).0, BundleId(0));
    let result = nano.lists.backward_result(&nano.problem, &nano.plan, bundle, RankId(0));
    let (planned, values) = (Arc::clone(planned), Values::Landed(room, result));
    Box::new(Part { planned, phase: at.phase, bundle, values })
}

/// Tensors of a rank, of as many numbers as queries, keys and scalars have.
struct Tensors {
    wide: Vec<f32>,
    other_wide: Vec<f32>,
    narrow: Vec<f32>,
    other_narrow: Vec<f32>,
    scalars: Vec<f32>,
    other_scalars: Vec<f32>,
}

impl Tensors {
    fn new([query, kv, each]: [usize; 3]) -> Self {
        let of = |numbers| vec![0.5; numbers];
        Self {
            wide: of(query),
            other_wide: of(query),
            narrow: of(kv),
            other_narrow: of(kv),
            scalars: of(each),
            other_scalars: of(each),
        }
    }
}

/// What no session can do without, by plain loops: rows turned head by head on the way in and back on the way out, Δ, and a sum
/// of dK and dV that parts can be added to.
struct Plain {
    rows: usize,
    numbers: [usize; 3],
    sent: Tensors,
    fetched: Tensors,
    /// Of dK or dV: parts come before the caller says where it wants them.
    sum: Vec<f32>,
}

impl Plain {
    fn new(rows: u32) -> Self {
        let rows = rows as usize;
        let [query, kv, dim] = [HEADS.query, HEADS.kv, HEADS.dim].map(usize::from);
        let numbers = [rows * query * dim, rows * kv * dim, rows * query];
        let [sent, fetched] = [numbers; 2].map(Tensors::new);
        Self { rows, numbers, sent, fetched, sum: vec![0.0; numbers[1]] }
    }

    /// Microseconds that it takes.
    fn run(
        &mut self,
        direction: Direction,
        [way_in, way_out]: [Way; 2],
        (from, landings): (&Tensors, &Arc<Pool>),
    ) -> f64 {
        let ([query, kv, each], rows) = (self.numbers, self.rows);
        let Tensors { wide: q, other_wide: o, narrow: k, scalars: lse, .. } = from;
        let start = Instant::now();
        let sent = &mut self.sent;
        turned(q, &mut sent.wide, rows, way_in);
        turned(k, &mut sent.narrow, rows, way_in);
        turned(k, &mut sent.other_narrow, rows, way_in);
        if direction == Direction::Backward {
            turned(q, &mut sent.other_wide, rows, way_in);
            turned(lse, &mut sent.scalars, rows, way_in);
            let delta = delta(Threads::ONE, HEADS.dim.into(), q, o);
            turned(&delta, &mut sent.other_scalars, rows, way_in);
        }
        let mut took = start.elapsed();
        std::hint::black_box(&self.sent);
        let to = &mut self.fetched;
        match direction {
            Direction::Forward => {
                let [o, lse] = [query, each].map(|it| landing(landings, it));
                let start = Instant::now();
                turned(o.f32s(), &mut to.wide, rows, way_out);
                turned(lse.f32s(), &mut to.scalars, rows, way_out);
                took += start.elapsed();
            }
            Direction::Backward => {
                let (part, dq) = (landing(landings, 2 * kv), landing(landings, query));
                let start = Instant::now();
                let rooms = [&mut to.narrow, &mut to.other_narrow];
                for (part, to) in part.f32s().chunks(kv).zip(rooms) {
                    let sum = &mut self.sum;
                    sum.fill(0.0);
                    added(part, sum, rows);
                    to.copy_from_slice(sum);
                }
                turned(dq.f32s(), &mut to.wide, rows, way_out);
                took += start.elapsed();
            }
        }
        std::hint::black_box(&self.fetched);
        took.as_secs_f64() * 1e6
    }
}

/// Which of two memories lies head by head.
#[derive(Clone, Copy)]
enum Way {
    /// The one that is written.
    In,
    /// The one that is read.
    Out,
    /// None.
    AsTheyAre,
}

/// Copies rows of one stretch, and turns them head by head or back.
fn turned(from: &[f32], to: &mut [f32], rows: usize, way: Way) {
    let heads = usize::from(HEADS.kv);
    let width = from.len() / rows;
    let part = width / heads;
    for row in 0..rows {
        for head in 0..heads {
            let (by_row, by_head) = (row * width + head * part, (head * rows + row) * part);
            let (read, write) = match way {
                Way::In => (by_row, by_head),
                Way::Out => (by_head, by_row),
                Way::AsTheyAre => return to.copy_from_slice(from),
            };
            to[write..][..part].copy_from_slice(&from[read..][..part]);
        }
    }
}

/// Adds rows that lie head by head to rows that do not.
fn added(from: &[f32], to: &mut [f32], rows: usize) {
    let heads = usize::from(HEADS.kv);
    let part = from.len() / rows / heads;
    for (head, from) in from.chunks_exact(rows * part).enumerate() {
        for (to, from) in to.chunks_exact_mut(heads * part).zip(from.chunks_exact(part)) {
            let to = &mut to[head * part..][..part];
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }
}

/// One document on one rank; a server computes it, in each of many layers.
fn planned(rows: u32, layers: u16) -> Arc<PlannedStep> {
    let any: Header = serde_json::from_str(include_str!("../../testing/header.json"))
        .expect("the header of the tests");
    let stretch = Stretch { document: DocumentId(0), start: 0, end: rows };
    let header = Header {
        layers: Layers::alike(Kind::causal(HEADS), layers).expect("phases are layers"),
        nanos: vec![Packing::new(&[rows], vec![vec![stretch]]).expect("one document on one rank")],
        fillers: vec![Some(Member::Server { index: 0, incarnation: 0, address: String::new() })],
        ..any
    };
    Arc::new(PlannedStep::new(Arc::new(header)).expect("one document on one slot"))
}
