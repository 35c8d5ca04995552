//! A rank whose rows lie on a GPU, as a framework has them, and the same rank with rows of the host.
//!
//! In: the environment of the supervisor, and which of both. Out: a line for each result with a digest of its bits.
//!
//! Two nano-batches are under way at once, each on a stream of its own. A layer's queries are the results of the layer before, which
//! the host never sees; K and V lie in the rows of one tensor. Nobody waits for the GPU before the end of a step.

mod framework;

use std::process::ExitCode;
use std::time::Duration;

use cadre_control::proto::finished::Outcome as Kind;
use cadre_planner::{DocumentId, Heads, Mask, Stretch};
use cadre_worker::session::{
    Contract, Direction, Ending, Join, Kind as Layer, KvHeads, Layers, LeaveError, Lengths,
    NanoLengths, Next, Outcome, PhaseAt, Session, StepDone,
};
use cadre_worker::{Choice, ExchangeChoice, Threads};
use xxhash_rust::xxh3::xxh3_64;

use self::framework::{Framework, OnGpu, OnHost};

type Failure = Box<dyn std::error::Error>;

const STEPS: u64 = 3;
/// Longer than a conductor stays to say its last words, where a rank takes its time.
const SLOW: Duration = Duration::from_secs(3);
/// A line of a rank that says that a stopped job is complete, and is told better.
pub(crate) const TOLD_STOP: &str = "step 1 was never run";
/// Why a rank fails.
pub(crate) const DISK: &str = "my disk is away";
/// Of which all go forward, then all backward.
const NANOS: usize = 2;
const LAYERS: [Layer; 2] =
    [Layer { mask: Mask::Window { left: 49 }, ..Layer::causal(HEADS) }, Layer::causal(HEADS)];
const HEADS: Heads = Heads { query: 4, kv: 2, dim: 16 };
const ROWS: usize = 96;
const QUERY: usize = (HEADS.query * HEADS.dim) as usize;
const KV: usize = (HEADS.kv * HEADS.dim) as usize;
const QUERY_HEADS: usize = HEADS.query as usize;

/// How a rank ends its job.
#[derive(Clone, Copy)]
pub(crate) enum Ends {
    /// When it is told the end.
    InOrder,
    /// In the middle of the first step.
    Midway,
    /// As soon as all is done here, while this rank takes its time.
    AtOnce(u16),
    /// So, and as one that has failed.
    Fails(u16),
    /// Rank 0 is asked to end in the first step, and leaves before rank 1 has done it.
    Stops,
}

impl Ends {
    /// As the name of a test's act says it.
    pub(crate) fn of(act: &str) -> Self {
        let rank = |word: &str| act.split(word).nth(1).and_then(|it| it.parse().ok());
        match (rank(", slow rank "), rank(", fails but rank ")) {
            (Some(rank), _) => Self::AtOnce(rank),
            (None, Some(rank)) => Self::Fails(rank),
            (None, None) if act.ends_with(", leaves midway") => Self::Midway,
            (None, None) if act.ends_with(", is stopped") => Self::Stops,
            (None, None) => Self::InOrder,
        }
    }

    /// The rank that takes its time before it says that its last step is done; the others leave at once.
    fn slow(self) -> Option<u16> {
        match self {
            Self::AtOnce(rank) | Self::Fails(rank) => Some(rank),
            Self::InOrder | Self::Midway | Self::Stops => None,
        }
    }
}

pub(crate) fn main(is_lent: bool, ends: Ends) -> Result<ExitCode, Failure> {
    cadre_worker::process::arm_parent_death()?;
    let session = Session::join(
        &Contract::from_env()?,
        Join {
            layers: Layers::new(LAYERS)?,
            kv_heads: KvHeads::Apart,
            steps: Some(STEPS),
            wire: None,
            seed: 0,
            engine: Choice::Cpu,
            gpu: None,
            threads: Threads::ONE,
            memory: 1 << 28,
            exchange: ExchangeChoice::Auto,
            address: String::new(),
            resume: None,
            first: Box::new(|_, _| Ok(0)),
        },
    )?;
    let done = if is_lent {
        steps(&session, &mut OnGpu::new()?, ends)
    } else {
        steps(&session, &mut OnHost, ends)
    };
    let failed = |message: &str, exit_code| {
        let (kind, message) = (Kind::Failed, message.to_owned());
        Outcome { kind, message, exit_code, sample: String::new() }
    };
    match (ends, session.rank()) {
        (Ends::Fails(slow), rank) if rank != slow => session.leave(failed(DISK, 1))?,
        (Ends::Fails(_), _) => {
            // What it has learnt is said by its exit code.
            let code = if done.is_ok() { 3 } else { 2 };
            session.leave(failed("another one failed", code))?;
            return Ok(ExitCode::from(code));
        }
        (Ends::Stops, 0) => match session.leave(Outcome::completed()) {
            Err(LeaveError::Stopped { .. }) => println!("{TOLD_STOP}"),
            other => return Err(format!("the job was stopped: {other:?}").into()),
        },
        (Ends::Stops, _) => {
            done?;
            session.leave(Outcome { kind: Kind::Stopped, ..Outcome::completed() })?;
        }
        (Ends::InOrder | Ends::Midway | Ends::AtOnce(_), _) => {
            done?;
            session.leave(Outcome::completed())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A document that goes on in the other rank, and two that do not.
fn lengths(session: &Session, step: u64) -> Lengths {
    let (rank, ranks) = (u32::from(session.rank()), u32::from(session.settings().trainers));
    let rows = ROWS as u32;
    let all = Stretch { document: DocumentId(0), start: rank * rows, end: (rank + 1) * rows };
    let first = NanoLengths { documents: vec![(0, ranks * rows)], stretches: vec![all] };
    let documents = vec![(rank, 40), (rank + ranks, rows - 40)];
    let whole = |&(it, end): &(u32, u32)| Stretch { document: DocumentId(it), start: 0, end };
    let stretches = documents.iter().map(whole).collect();
    let nanos = vec![first, NanoLengths { documents, stretches }];
    Lengths { step, turns: None, nanos }
}

fn steps(session: &Session, framework: &mut impl Framework, ends: Ends) -> Result<(), Failure> {
    session.announce(lengths(session, 0))?;
    for step in 0..STEPS {
        match session.begin(step) {
            Next::Step(_) => (),
            Next::End(ending) => return Err(format!("before step {step}: {ending:?}").into()),
        }
        let is_late = matches!(ends, Ends::Stops) && session.rank() == 1;
        if step + 1 < STEPS && !is_late {
            session.announce(lengths(session, step + 1))?;
        }
        if let Ends::Midway = ends {
            let [q, kv] = [QUERY, 2 * KV].map(|it| vec![0.5; ROWS * it]);
            let (q, kv) = (framework.tensor(0, &q)?, framework.tensor(0, &kv)?);
            let phase = PhaseAt { layer: 0, nano: 0, direction: Direction::Forward };
            drop(framework.forward(session, phase, &q, kv)?);
            return Ok(());
        }
        run(session, framework, step)?;
        if is_late || ends.slow() == Some(session.rank()) && step + 1 == STEPS {
            std::thread::sleep(SLOW);
        }
        session.done(StepDone { step, tokens: 1, ..StepDone::default() })?;
        if let Ends::Stops = ends {
            if !is_late {
                session.ender()();
                return Ok(());
            }
            return match session.ending(Duration::MAX) {
                Some(Ending::Stopped { .. }) => Ok(()),
                other => Err(format!("the job was stopped: {other:?}").into()),
            };
        }
    }
    if ends.slow().is_some_and(|it| it != session.rank()) {
        return Ok(());
    }
    match (session.begin(STEPS), ends) {
        (Next::End(Ending::Failed { reason, .. }), Ends::Fails(_)) if reason.contains(DISK) => {
            Ok(())
        }
        (Next::End(Ending::Completed), Ends::InOrder | Ends::AtOnce(_)) => Ok(()),
        (other, _) => Err(format!("the job does not end so: {other:?}").into()),
    }
}

/// All layers forward, then backward; what was computed is looked at when all of it was asked for.
fn run<F: Framework>(session: &Session, framework: &mut F, step: u64) -> Result<(), Failure> {
    let numbers = |layer: usize, nano: usize, tensor: u64, width: usize| -> Vec<f32> {
        let seed = [step, layer as u64, nano as u64, session.rank().into(), tensor];
        (0..ROWS * width).map(|it| number(&seed, it as u64)).collect()
    };
    let at = |layer, nano, direction| PhaseAt { layer, nano, direction };
    // By nano-batch: Q of each layer and the O of the last one; LSE of each.
    let mut queries: Vec<Vec<F::Tensor>> = Vec::new();
    let mut sums: Vec<Vec<F::Tensor>> = Vec::new();
    for nano in 0..NANOS {
        queries.push(vec![framework.tensor(nano, &numbers(0, nano, 0, QUERY))?]);
        sums.push(Vec::new());
    }
    for layer in 0..LAYERS.len() {
        let mut tickets = Vec::new();
        for (nano, queries) in queries.iter().enumerate() {
            let kv = framework.tensor(nano, &numbers(layer, nano, 1, 2 * KV))?;
            let phase = at(layer, nano, Direction::Forward);
            tickets.push(framework.forward(session, phase, &queries[layer], kv)?);
        }
        for (nano, ticket) in tickets.into_iter().enumerate() {
            let [o, lse] = framework.of_forward(session, nano, ticket)?;
            queries[nano].push(o);
            sums[nano].push(lse);
        }
    }
    let mut gradients = Vec::new();
    for nano in 0..NANOS {
        let of_o = framework.tensor(nano, &numbers(0, nano, 2, QUERY))?;
        gradients.push((Some(of_o), Vec::new()));
    }
    for layer in (0..LAYERS.len()).rev() {
        let mut tickets = Vec::new();
        for (nano, (queries, sums)) in queries.iter().zip(&sums).enumerate() {
            let kv = framework.tensor(nano, &numbers(layer, nano, 1, 2 * KV))?;
            let of_lse = framework.tensor(nano, &numbers(layer, nano, 3, QUERY_HEADS))?;
            let of_o = gradients[nano].0.take().ok_or("each layer has a gradient")?;
            let phase = at(layer, nano, Direction::Backward);
            let kept = [&queries[layer], &queries[layer + 1], &sums[layer]];
            tickets.push(framework.backward(session, phase, kept, [kv, of_o, of_lse])?);
        }
        for (nano, ticket) in tickets.into_iter().enumerate() {
            let [dq, dk, dv] = framework.of_backward(session, nano, ticket)?;
            gradients[nano].0 = Some(dq);
            gradients[nano].1.extend([dk, dv]);
        }
    }
    for (nano, ((queries, sums), (dq, others))) in
        queries.iter().zip(&sums).zip(&gradients).enumerate()
    {
        let mut say = |kind: &str, tensors: &mut dyn Iterator<Item = &F::Tensor>| {
            let mut bytes = Vec::new();
            for it in tensors {
                bytes.extend_from_slice(bytemuck::cast_slice(&framework.read(nano, it)?));
            }
            let rank = session.rank();
            println!("step {step} rank {rank} nano {nano} {kind} {:016x}", xxh3_64(&bytes));
            Ok::<(), Failure>(())
        };
        say("o", &mut queries[1..].iter().chain(sums))?;
        say("dq", &mut dq.iter())?;
        say("dkv", &mut others.iter())?;
    }
    Ok(())
}

/// Between −1 and 1, the same in every run.
fn number(seed: &[u64; 5], at: u64) -> f32 {
    let [step, layer, nano, rank, tensor] = *seed;
    let hash = xxh3_64(bytemuck::bytes_of(&[step, layer, nano, rank, tensor, at]));
    (hash >> 40) as f32 / (1 << 23) as f32 - 1.0
}
