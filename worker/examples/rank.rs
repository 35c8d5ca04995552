//! A trainer in under 150 lines: one document that spans all ranks, a layer with a window and one without, no weights.
//!
//! In: the environment that `cadre run` and the operator set, and three steps to do. Out: a line per step and phase with a
//! digest of the rank's results, which is the same whatever servers compute them and die meanwhile.
//!
//! A real trainer has a loader where [`lengths`] is, a model where [`numbers`] is, and sums its gradients over all ranks.

use std::num::NonZeroU16;
use std::process::ExitCode;

use cadre_worker::session::finished::Outcome as Kind;
use cadre_worker::session::process::arm_parent_death;
use cadre_worker::session::{
    Contract, Direction, DocumentId, Ending, EngineChoice, ExchangeChoice, Heads, Inputs, Join,
    Kind as Layer, KvHeads, Layers, Lengths, Mask, NanoLengths, Next, Outcome, Outputs, PerHead,
    PerHeadMut, PhaseAt, Rows, RowsMut, Session, StepDone, Stretch, Threads, Turns,
};
use xxhash_rust::xxh3::xxh3_64;

const STEPS: u64 = 3;
/// Rows of the first layer keep their own key and the 99 before it.
const LAYERS: [Layer; 2] =
    [Layer { mask: Mask::Window { left: 99 }, ..Layer::causal(HEADS) }, Layer::causal(HEADS)];
const HEADS: Heads = Heads { query: 4, kv: 2, dim: 16 };
/// Rows of the document on each rank.
const ROWS: usize = 160;
const QUERY: usize = ROWS * (HEADS.query * HEADS.dim) as usize;
const KV: usize = ROWS * (HEADS.kv * HEADS.dim) as usize;

/// Joins the job, runs its steps and leaves it.
///
/// # Errors
///
/// The job cannot be joined, or a call was refused.
pub fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    arm_parent_death()?;
    let contract = Contract::from_env()?;
    let session = Session::join(
        &contract,
        Join {
            layers: Layers::new(LAYERS)?,
            kv_heads: KvHeads::Apart,
            steps: Some(STEPS),
            wire: None,
            seed: 0,
            engine: EngineChoice::Cpu,
            gpu: None,
            threads: Threads::ONE,
            memory: 1 << 30,
            exchange: ExchangeChoice::Auto,
            address: String::new(),
            resume: None,
            first: Box::new(|_, _| Ok(0)),
        },
    )?;
    session.announce(lengths(&session, 0))?;
    let mut step = 0;
    let ending = loop {
        match session.begin(step) {
            // A refused call has ended the job everywhere: leave with its reason.
            Next::Step(_) => {
                if let Err(error) = run(&session, step) {
                    break Ending::Failed { reason: error.to_string(), bad_input: false };
                }
            }
            Next::End(ending) => break ending,
        }
        step += 1;
    };
    let (kind, message, exit_code) = match ending {
        Ending::Completed => (Kind::Completed, String::new(), 0),
        Ending::Stopped { .. } => (Kind::Stopped, String::new(), 0),
        Ending::Failed { reason, bad_input } => {
            (Kind::Failed, reason, if bad_input { 2 } else { 3 })
        }
    };
    session.leave(Outcome { kind, message, exit_code, sample: String::new() })?;
    Ok(ExitCode::from(exit_code))
}

/// What this rank holds: its stretch of one document that goes on over all ranks.
fn lengths(session: &Session, step: u64) -> Lengths {
    let (rank, ranks) = (u32::from(session.rank()), u32::from(session.settings().trainers));
    let rows = ROWS as u32;
    let stretch = Stretch { document: DocumentId(0), start: rank * rows, end: (rank + 1) * rows };
    let nano = NanoLengths { documents: vec![(0, ranks * rows)], stretches: vec![stretch] };
    Lengths { step, turns: turns(step), nanos: vec![nano] }
}

/// The second step goes forward alone, as an evaluation does; the others go as steps do of which nothing is said.
fn turns(step: u64) -> Option<Turns> {
    (step == 1).then(|| Turns::forward(NonZeroU16::MIN))
}

/// One step: every layer forward, then, where its turns say so, every layer backward.
fn run(session: &Session, step: u64) -> Result<(), Box<dyn std::error::Error>> {
    if step + 1 < STEPS {
        session.announce(lengths(session, step + 1))?;
    }
    let (rank, mut kept) = (session.rank(), Vec::new());
    for layer in 0..LAYERS.len() {
        let seed = [step, layer as u64, rank.into()];
        let [q, k, v] = [numbers(seed, 0, QUERY), numbers(seed, 1, KV), numbers(seed, 2, KV)];
        let inputs = Inputs::Forward { q: Rows::f32(&q), k: Rows::f32(&k), v: Rows::f32(&v) };
        let phase = PhaseAt { layer, nano: 0, direction: Direction::Forward };
        let ticket = session.submit(phase, inputs)?;
        let (mut o, mut lse) = (vec![0.0; QUERY], vec![0.0; QUERY / usize::from(HEADS.dim)]);
        session.wait(
            ticket,
            Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) },
        )?;
        println!("step {step} rank {rank} layer {layer} o {:016x}", digest(&[&o, &lse]));
        kept.push((q, k, v, o, lse));
    }
    let backward = kept.iter().enumerate().filter(|_| turns(step).is_none());
    for (layer, (q, k, v, o, lse)) in backward.rev() {
        let dout = numbers([step, layer as u64, rank.into()], 3, QUERY);
        let [q, k, v, o, dout] = [q, k, v, o, &dout].map(|it| Rows::f32(it));
        let lse = PerHead::f32(lse);
        let inputs = Inputs::Backward { q, k, v, o, lse, dout, dlse: None };
        let phase = PhaseAt { layer, nano: 0, direction: Direction::Backward };
        let ticket = session.submit(phase, inputs)?;
        let (mut dq, mut dk, mut dv) = (vec![0.0; QUERY], vec![0.0; KV], vec![0.0; KV]);
        let (to_q, to_k, to_v) =
            (RowsMut::f32(&mut dq), RowsMut::f32(&mut dk), RowsMut::f32(&mut dv));
        session.wait(ticket, Outputs::Backward { dq: to_q, dk: to_k, dv: to_v })?;
        println!("step {step} rank {rank} layer {layer} d {:016x}", digest(&[&dq, &dk, &dv]));
    }
    let tokens = (ROWS * usize::from(session.settings().trainers)) as u64;
    let exposed_wait_seconds = session.exposed_wait().as_secs_f64();
    let header_wait_seconds = session.header_wait().as_secs_f64();
    let done =
        StepDone { step, tokens, exposed_wait_seconds, header_wait_seconds, ..StepDone::default() };
    session.done(done)?;
    Ok(())
}

/// Numbers between −1 and 1, the same in every run.
fn numbers(seed: [u64; 3], tensor: u64, count: usize) -> Vec<f32> {
    let hash =
        |index: u64| xxh3_64(bytemuck::bytes_of(&[seed[0], seed[1], seed[2], tensor, index]));
    (0..count as u64).map(|it| (hash(it) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn digest(tensors: &[&[f32]]) -> u64 {
    let bytes: Vec<u8> = tensors.iter().flat_map(|it| bytemuck::cast_slice(it)).copied().collect();
    xxh3_64(&bytes)
}
