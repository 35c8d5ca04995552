//! Rows that lie on a GPU, handed to a rank: the same requests and results, bit for bit, as of the same rows of the host.
//!
//! In: two ranks without IO threads, one of which is lent rows. Out: what both ask for, and what both write, in either kind of memory,
//! wire type and type of the caller's rows. The lender's stream is lazy: nothing has run on it when a call is made, and rows change as
//! soon as they may.

mod order;

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use cadre_crds::Wire;
use cadre_exchange::{Buffer as Bytes, Waker};
use cadre_kernels::device::{Buffer, Elements, Gpu, Lent, Rooms, Spread, Stream};
use cadre_kernels::{Choice, Engine, Threads};
use cadre_planner::BundleId;
use cadre_protocol::{At, Phase, TrainerId};
use cadre_step::header::{Header, Member};
use cadre_step::phases::{Direction, PhaseAt};
use cadre_step::planned::PlannedStep;
use cadre_worker::compute::Compute;
use cadre_worker::io::queues::{Outlet, notices};
use cadre_worker::io::rows::tensors;
use cadre_worker::io::whole::{Landed, Part, Values, Whole};
use cadre_worker::io::{Asked, Handle, Notice, Request};
use cadre_worker::launch::Launcher;
use cadre_worker::memory::{Host, Memory, OnGpu, Place};
use cadre_worker::session::{
    Inputs, Lengths, LentInputs, LentOutputs, Model, Next, Outputs, PerHead, PerHeadMut, Rank,
    Rows, RowsMut, Ticket,
};
use cadre_worker::trace::Tracer;
use half::bf16;

const ROWS: usize = 300;
const QUERY_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;
const QUERY: usize = QUERY_HEADS * DIM;
const KV: usize = KV_HEADS * DIM;
/// Elements between two rows of the lender.
const GAP: usize = 5;

/// A number of the caller's rows.
trait Number: Elements {
    fn of(it: f32) -> Self;
    fn rows(of: &[Self]) -> Rows<'_>;
    fn rows_mut(of: &mut [Self]) -> RowsMut<'_>;
}

impl Number for f32 {
    fn of(it: f32) -> Self {
        it
    }

    fn rows(of: &[Self]) -> Rows<'_> {
        Rows::f32(of)
    }

    fn rows_mut(of: &mut [Self]) -> RowsMut<'_> {
        RowsMut::f32(of)
    }
}

impl Number for bf16 {
    fn of(it: f32) -> Self {
        Self::from_f32(it)
    }

    fn rows(of: &[Self]) -> Rows<'_> {
        Rows::bf16(of)
    }

    fn rows_mut(of: &mut [Self]) -> RowsMut<'_> {
        RowsMut::bf16(of)
    }
}

/// A rank without an IO thread.
struct Side<M: Memory> {
    rank: Rank,
    requests: Receiver<Asked<M>>,
    outlet: Outlet<M>,
}

/// One document on rank 0, which a server computes.
fn planned(wire: Wire) -> Arc<PlannedStep> {
    let any: Header =
        serde_json::from_str(include_str!("../../../../testing/header.json")).expect("a header");
    let member = Member::Server { index: 0, incarnation: 0, address: String::new() };
    let fillers = vec![Some(member)];
    Arc::new(PlannedStep::new(Arc::new(Header { wire, fillers, ..any })).expect("one slot"))
}

impl<M: Memory> Side<M> {
    /// Has begun step 0.
    fn new(place: &M::Place, planned: &Arc<PlannedStep>, engine: Choice) -> Self {
        let waker = Waker::new().expect("an event counter");
        let (handle, requests) = Handle::channel(waker.clone());
        let (mut outlet, told) = notices(waker);
        let engine = Engine::choose(engine, Threads::ONE).expect("the engine that is asked for");
        let launcher = M::Launcher::new(engine, place).expect("streams");
        let compute = Compute::new(launcher, "main", handle.clone(), Tracer::off());
        let places = [0; 2].map(|_| place.another().expect("a stream"));
        let Header { layers, seed, wire, .. } = planned.header.as_ref().clone();
        let model = (Model { layers, seed, wire }, 0, None);
        let using = (compute, Threads::ONE);
        let rank = Rank::new(TrainerId(0), (handle, told), using, places, model, Tracer::off());
        rank.announce(Lengths { step: 0, turns: None, nanos: Vec::new() }).expect("in turn");
        outlet.tell(Notice::Step(Arc::clone(planned)));
        assert!(matches!(rank.begin(0), Next::Step(_)));
        assert!(matches!(requests.recv(), Ok(Asked::For(Request::Lengths(..)))));
        Self { rank, requests, outlet }
    }

    /// The bytes of what was submitted, by tensor.
    fn submitted(&self, place: &M::Place) -> Vec<Vec<u8>> {
        let asked = self.requests.recv().expect("the rank is there");
        let Asked::Submit(_, rows) = asked else { panic!("no rows: {asked:?}") };
        let bytes = |it: &M| place.read(it).expect("a copy").bytes().to_vec();
        tensors(&rows).map(|it| bytes(it.1)).collect()
    }

    /// As if servers had computed a phase.
    fn whole(&mut self, place: &M::Place, planned: &Arc<PlannedStep>, at: At) {
        let (nano, direction) = planned.nano_of(at.phase);
        let wide = if planned.header.wire == Wire::F32 { 4 } else { 2 };
        let room = |seed: usize, numbers: usize, bytes: usize| {
            let memory = place.hold(filled(seed, numbers, bytes)).expect("memory");
            let mut room = place.room(numbers * bytes).expect("memory");
            let piece =
                cadre_exchange::Piece { remote: 0, local: 0, bytes: (numbers * bytes) as u64 };
            place.copy(&memory, &[piece], &mut room).expect("a copy");
            room
        };
        let landed = match direction {
            Direction::Forward => Landed::Forward {
                o: room(1, ROWS * QUERY, wide),
                lse: room(2, ROWS * QUERY_HEADS, 4),
                own: Vec::new(),
            },
            Direction::Backward => {
                for (bundle, of) in (0..).map(BundleId).zip(nano.plan.bundles()) {
                    let numbers = of.keys.len() * of.kv_heads.len() * DIM;
                    let part = |seed| place.hold(filled(seed, numbers, 4)).expect("memory");
                    let values = Values::Own([part(3), part(4)]);
                    let planned = Arc::clone(planned);
                    let part = Part { planned, phase: at.phase, bundle, values };
                    self.outlet.tell(Notice::Part(Box::new(part)));
                }
                Landed::Backward { dq: room(5, ROWS * QUERY, wide), own: Vec::new() }
            }
        };
        let makers = std::collections::BTreeMap::new();
        self.outlet.tell(Notice::Whole(Box::new(Whole { at, landed, makers })));
    }
}

fn number(seed: usize, at: usize) -> f32 {
    ((at * 2_654_435 + seed * 97) % 2003) as f32 / 1000.0 - 1.0
}

/// Numbers of 4 bytes or 2.
fn filled(seed: usize, numbers: usize, bytes: usize) -> Bytes {
    let mut buffer = Bytes::zeroed(numbers * bytes);
    if bytes == 4 {
        buffer.f32s_mut().iter_mut().enumerate().for_each(|it| *it.1 = number(seed, it.0));
    } else {
        let halves = buffer.bf16s_mut().iter_mut().enumerate();
        halves.for_each(|it| *it.1 = bf16::from_f32(number(seed, it.0)));
    }
    buffer
}

/// A tensor of the caller's, on the host and, at another distance of rows, on the GPU: there once its stream has come to it.
struct Tensor<T: Number> {
    host: Vec<T>,
    gpu: Buffer<T>,
    spread: Spread,
}

impl<T: Number> Tensor<T> {
    fn new(stream: &Stream, seed: usize, width: usize) -> Self {
        let host: Vec<T> = (0..ROWS * width).map(|it| T::of(number(seed, it))).collect();
        let spread = Spread { rows: ROWS, width, distance: width + GAP };
        let mut apart = vec![T::of(f32::NAN); ROWS * spread.distance];
        for (to, from) in apart.chunks_mut(spread.distance).zip(host.chunks(width)) {
            to[..width].copy_from_slice(from);
        }
        Self { host, gpu: Buffer::of(stream, &apart, "rows").expect("memory"), spread }
    }

    fn lend(&self) -> Lent<'_> {
        self.gpu.lend(0, self.spread)
    }

    /// The caller uses its rows for something else.
    fn spoil(&mut self, stream: &Stream) {
        let other = vec![T::of(77.0); self.gpu.len()];
        self.gpu.write(stream, 0, &other).expect("a copy");
    }
}

/// The results of a phase: those of the host, and those on the GPU with what lies between.
struct Room<T: Number> {
    host: Vec<T>,
    gpu: Buffer<T>,
    spread: Spread,
}

impl<T: Number + PartialEq + std::fmt::Debug> Room<T> {
    fn new(stream: &Stream, width: usize) -> Self {
        let spread = Spread { rows: ROWS, width, distance: width + GAP };
        let before = vec![T::of(55.0); ROWS * spread.distance];
        let gpu = Buffer::of(stream, &before, "results").expect("memory");
        Self { host: vec![T::of(0.0); ROWS * width], gpu, spread }
    }

    fn compare(&self, stream: &Stream, name: &str) {
        let mut all = vec![T::of(0.0); self.gpu.len()];
        self.gpu.read(stream, 0, &mut all).expect("a copy");
        let rows = all.chunks(self.spread.distance).zip(self.host.chunks(self.spread.width));
        for (row, (gpu, host)) in rows.enumerate() {
            let (gpu, between) = gpu.split_at(self.spread.width);
            assert_eq!(gpu, host, "row {row} of {name}");
            assert!(between.iter().all(|it| *it == T::of(55.0)), "{name}: {between:?}");
        }
    }
}

/// Two ranks go through all phases of a step.
fn same<T: Number + PartialEq + std::fmt::Debug, P: Place>(place: &P, wire: Wire, engine: Choice) {
    let planned = planned(wire);
    let [mut host, mut lent] = [0; 2].map(|_| Side::<P::Memory>::new(place, &planned, engine));
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let caller = Stream::new(&gpu).expect("a stream");
    for phase in (0..planned.order.count() as u32).map(Phase) {
        let (at, of) = (At { step: 0, phase }, planned.order.at(phase));
        let tensor = |seed, width| Tensor::<T>::new(&caller, seed + phase.0 as usize, width);
        let [mut q, mut k, mut v] = [(10, QUERY), (20, KV), (30, KV)].map(|it| tensor(it.0, it.1));
        let [mut o, mut dout] = [(40, QUERY), (50, QUERY)].map(|it| tensor(it.0, it.1));
        let scalars = |seed| Tensor::<f32>::new(&caller, seed, QUERY_HEADS);
        let (mut lse, mut dlse) = (scalars(60), scalars(70));
        let (of_host, of_gpu) = match of.direction {
            Direction::Forward => {
                let [q_host, k_host, v_host] = [&q, &k, &v].map(|it| T::rows(&it.host));
                let [q, k, v] = [&q, &k, &v].map(Tensor::lend);
                (
                    host.rank.submit(of, Inputs::Forward { q: q_host, k: k_host, v: v_host }),
                    lent.rank.submit_lent(of, LentInputs::Forward { q, k, v }, &caller),
                )
            }
            Direction::Backward => {
                let [q_host, k_host, v_host] = [&q, &k, &v].map(|it| T::rows(&it.host));
                let [o_host, dout_host] = [&o, &dout].map(|it| T::rows(&it.host));
                let inputs = Inputs::Backward {
                    q: q_host,
                    k: k_host,
                    v: v_host,
                    o: o_host,
                    lse: PerHead::f32(&lse.host),
                    dout: dout_host,
                    dlse: Some(PerHead::f32(&dlse.host)),
                };
                let ([q, k, v], [o, dout]) =
                    ([&q, &k, &v].map(Tensor::lend), [&o, &dout].map(Tensor::lend));
                let (lse, dlse) = (lse.lend(), Some(dlse.lend()));
                let lent_inputs = LentInputs::Backward { q, k, v, o, lse, dout, dlse };
                (host.rank.submit(of, inputs), lent.rank.submit_lent(of, lent_inputs, &caller))
            }
        };
        let (of_host, (of_gpu, over)) = (of_host.expect("in turn"), of_gpu.expect("in turn"));
        // From here on the rows are the caller's.
        over.wait().expect("nothing went wrong");
        for it in [&mut q, &mut k, &mut v, &mut o, &mut dout] {
            it.spoil(&caller);
        }
        for it in [&mut lse, &mut dlse] {
            it.spoil(&caller);
        }
        caller.wait().expect("nothing went wrong");
        let expected = host.submitted(place);
        assert!(lent.submitted(place) == expected, "rows of {of:?} of {wire:?} differ");
        host.whole(place, &planned, at);
        lent.whole(place, &planned, at);
        results::<T, _>((&host, of_host), (&lent, of_gpu), of, &caller);
    }
}

fn results<T: Number + PartialEq + std::fmt::Debug, M: Memory>(
    (host, of_host): (&Side<M>, Ticket),
    (lent, of_gpu): (&Side<M>, Ticket),
    of: PhaseAt,
    caller: &Stream,
) {
    match of.direction {
        Direction::Forward => {
            let mut o = Room::<T>::new(caller, QUERY);
            let mut lse = Room::<f32>::new(caller, QUERY_HEADS);
            let outputs = Outputs::Forward {
                o: T::rows_mut(&mut o.host),
                lse: PerHeadMut::f32(&mut lse.host),
            };
            host.rank.wait(of_host, outputs).expect("whole");
            let (to_o, to_lse) = (o.gpu.lend_mut(0, o.spread), lse.gpu.lend_mut(0, lse.spread));
            let outputs = LentOutputs::Forward { o: to_o, lse: to_lse };
            let over = lent.rank.wait_lent(of_gpu, outputs, caller).expect("whole");
            caller.wait_for(&over).expect("the same GPU");
            o.compare(caller, "O");
            lse.compare(caller, "LSE");
        }
        Direction::Backward => {
            let [mut dq, mut dk, mut dv] = [QUERY, KV, KV].map(|it| Room::<T>::new(caller, it));
            let outputs = Outputs::Backward {
                dq: T::rows_mut(&mut dq.host),
                dk: T::rows_mut(&mut dk.host),
                dv: T::rows_mut(&mut dv.host),
            };
            host.rank.wait(of_host, outputs).expect("whole");
            let outputs = LentOutputs::Backward {
                dq: dq.gpu.lend_mut(0, dq.spread),
                dk: dk.gpu.lend_mut(0, dk.spread),
                dv: dv.gpu.lend_mut(0, dv.spread),
            };
            let over = lent.rank.wait_lent(of_gpu, outputs, caller).expect("whole");
            caller.wait_for(&over).expect("the same GPU");
            for (it, name) in [(dq, "dQ"), (dk, "dK"), (dv, "dV")] {
                it.compare(caller, name);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU; the other test runs it over the emulated one"]
fn lent() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let rooms = Rooms::new(&gpu, 1 << 20);
    let on_gpu = OnGpu::new(&rooms).expect("a stream");
    for wire in [Wire::F32, Wire::Bf16] {
        same::<f32, _>(&Host, wire, Choice::Cpu);
        same::<bf16, _>(&Host, wire, Choice::Cpu);
        same::<f32, _>(&on_gpu, wire, Choice::Gpu);
        same::<bf16, _>(&on_gpu, wire, Choice::Gpu);
    }
    order::in_order(&gpu);
    order::refusals(&gpu);
}
