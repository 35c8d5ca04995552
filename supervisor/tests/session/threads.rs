//! A rank that hands over one nano-batch while another of its threads waits for the other, and whose loss depends on LSE.
//!
//! In: the environment of the supervisor. Out: exit code 0 where every result is that of attention in f64.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use cadre_planner::{DocumentId, Heads, Stretch};
use cadre_worker::session::{
    Contract, Direction, Ending, Inputs, Kind as Layer, Layers, Lengths, NanoLengths, Next,
    Outcome, Outputs, PerHead, PerHeadMut, PhaseAt, Rows, RowsMut, Session, StepDone,
};

const ROWS: usize = 32;
const DIM: usize = 8;
const HEADS: Heads = Heads { query: 2, kv: 1, dim: DIM as u16 };
const NANOS: usize = 6;

/// Q, K, V, dO and dLSE of a nano-batch.
struct Tensors {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    dlse: Vec<f32>,
}

pub(crate) fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    cadre_worker::process::arm_parent_death()?;
    let session = Session::join(
        &Contract::from_env()?,
        super::join(Layers::alike(Layer::causal(HEADS), 1)?, 1),
    )?;
    let rank = u32::from(session.rank());
    let stretch = Stretch { document: DocumentId(rank), start: 0, end: ROWS as u32 };
    let whole = NanoLengths { documents: vec![(rank, ROWS as u32)], stretches: vec![stretch] };
    let none = NanoLengths { documents: Vec::new(), stretches: Vec::new() };
    let nano = |it| if has_rows(session.rank(), it) { whole.clone() } else { none.clone() };
    session.announce(Lengths { step: 0, turns: None, nanos: (0..NANOS).map(nano).collect() })?;
    let Next::Step(_) = session.begin(0) else {
        return Err("the job ended before its step".into());
    };
    step(&session)?;
    session.done(StepDone {
        step: 0,
        loss: 0.0,
        gradient_norm: 0.0,
        validation_loss: None,
        learning_rate: 0.0,
        tokens: 1,
        seconds: 0.0,
        exposed_wait_seconds: 0.0,
        header_wait_seconds: 0.0,
    })?;
    let Next::End(Ending::Completed) = session.begin(1) else { return Err("it goes on".into()) };
    session.leave(Outcome::completed())?;
    if threads()?.contains("io") {
        return Err("it has left, and its io thread runs".into());
    }
    // The others are idle, and end.
    let since = Instant::now();
    while OTHERS.iter().any(|it| threads().is_ok_and(|all| all.contains(*it))) {
        if since.elapsed() > Duration::from_secs(30) {
            return Err(format!("it has left, and these run: {:?}", threads()?).into());
        }
        std::thread::yield_now();
    }
    Ok(ExitCode::SUCCESS)
}

/// Threads of a session that may outlive it.
const OTHERS: [&str; 3] = ["rescue", "plan", "copies"];

/// Names of the threads of this process.
fn threads() -> std::io::Result<BTreeSet<String>> {
    let all = std::fs::read_dir("/proc/self/task")?;
    // One may have ended since it was listed.
    let names = all.filter_map(|it| std::fs::read_to_string(it.ok()?.path().join("comm")).ok());
    Ok(names.map(|it| it.trim_end().to_owned()).collect())
}

/// Rank 1 has rows of every other nano-batch alone, and makes no calls for those between.
fn has_rows(rank: u16, nano: usize) -> bool {
    rank == 0 || nano.is_multiple_of(2)
}

/// All nano-batches forward, then backward: this thread submits, one waits, one asks whether the job ends.
fn step(session: &Session) -> Result<(), Box<dyn std::error::Error>> {
    let own = (0..NANOS).filter(|&it| has_rows(session.rank(), it));
    let all: Vec<(usize, Tensors)> = own.map(|it| (it, tensors(session.rank(), it))).collect();
    let query = ROWS * 2 * DIM;
    let (tickets, submitted) = sync_channel(NANOS);
    let kept = std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            submitted
                .iter()
                .map(|ticket| {
                    let (mut o, mut lse) = (vec![0.0; query], vec![0.0; ROWS * 2]);
                    session.wait(
                        ticket,
                        Outputs::Forward {
                            o: RowsMut::f32(&mut o),
                            lse: PerHeadMut::f32(&mut lse),
                        },
                    )?;
                    Ok((o, lse))
                })
                .collect::<Result<Vec<_>, cadre_worker::session::Error>>()
        });
        let asker = scope.spawn(|| session.ending(Duration::ZERO).is_none());
        for &(nano, ref it) in &all {
            let phase = PhaseAt { layer: 0, nano, direction: Direction::Forward };
            let (q, k, v) = (Rows::f32(&it.q), Rows::f32(&it.k), Rows::f32(&it.v));
            let ticket = session.submit(phase, Inputs::Forward { q, k, v }).expect("its turn");
            tickets.send(ticket).expect("the other thread waits");
        }
        drop(tickets);
        assert!(asker.join().expect("it asks"), "nothing has ended");
        waiter.join().expect("it waits")
    })?;
    for (&(nano, ref it), (o, lse)) in all.iter().zip(&kept) {
        let phase = PhaseAt { layer: 0, nano, direction: Direction::Backward };
        let inputs = Inputs::Backward {
            q: Rows::f32(&it.q),
            k: Rows::f32(&it.k),
            v: Rows::f32(&it.v),
            o: Rows::f32(o),
            lse: PerHead::f32(lse),
            dout: Rows::f32(&it.dout),
            dlse: Some(PerHead::f32(&it.dlse)),
        };
        let ticket = session.submit(phase, inputs)?;
        let (mut dq, mut dk, mut dv) =
            (vec![0.0; query], vec![0.0; ROWS * DIM], vec![0.0; ROWS * DIM]);
        let (to_q, to_k, to_v) =
            (RowsMut::f32(&mut dq), RowsMut::f32(&mut dk), RowsMut::f32(&mut dv));
        session.wait(ticket, Outputs::Backward { dq: to_q, dk: to_k, dv: to_v })?;
        let expected = reference(it);
        let found = [o, lse, &dq, &dk, &dv];
        for (name, (found, expected)) in
            ["O", "LSE", "dQ", "dK", "dV"].iter().zip(found.into_iter().zip(&expected))
        {
            let largest = expected.iter().fold(0.0, |max: f64, it| max.max(it.abs()));
            for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                let error = (f64::from(*found) - expected).abs();
                if error > 1e-5 * largest {
                    return Err(format!("{name}[{index}] is {found}, not {expected}").into());
                }
            }
        }
    }
    Ok(())
}

/// Numbers between −1 and 1, others for every rank and nano-batch.
fn tensors(rank: u16, nano: usize) -> Tensors {
    let numbers = |tensor: u64, count: usize| -> Vec<f32> {
        let hash = |index: u64| {
            let seed = [u64::from(rank), nano as u64, tensor, index];
            xxhash_rust::xxh3::xxh3_64(bytemuck::bytes_of(&seed))
        };
        (0..count as u64).map(|it| (hash(it) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    };
    let (query, kv) = (ROWS * 2 * DIM, ROWS * DIM);
    Tensors {
        q: numbers(0, query),
        k: numbers(1, kv),
        v: numbers(2, kv),
        dout: numbers(3, query),
        dlse: numbers(4, ROWS * 2),
    }
}

/// O, LSE and the gradients of `sum(O · dO) + sum(LSE · dLSE)` under a causal mask.
fn reference(it: &Tensors) -> [Vec<f64>; 5] {
    let scale = 1.0 / (DIM as f64).sqrt();
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let (mut o, mut lse) = (vec![0.0; it.q.len()], vec![0.0; ROWS * 2]);
    let mut gradients = [vec![0.0; it.q.len()], vec![0.0; it.k.len()], vec![0.0; it.v.len()]];
    for row in 0..ROWS {
        for head in 0..2 {
            let at = row * 2 + head;
            let (mine, key) = (at * DIM..(at + 1) * DIM, |it: usize| it * DIM..(it + 1) * DIM);
            let (q, dout) = (&it.q[mine.clone()], &it.dout[mine.clone()]);
            let scores: Vec<f64> =
                (0..=row).map(|other| scale * dot(q, &it.k[key(other)])).collect();
            lse[at] = scores.iter().map(|it| it.exp()).sum::<f64>().ln();
            let shares: Vec<f64> = scores.iter().map(|it| (it - lse[at]).exp()).collect();
            let products: Vec<f64> = (0..=row).map(|other| dot(dout, &it.v[key(other)])).collect();
            let delta: f64 = shares.iter().zip(&products).map(|(a, b)| a * b).sum();
            for (other, (share, product)) in shares.iter().zip(&products).enumerate() {
                let ds = share * (product - delta + f64::from(it.dlse[at]));
                for (index, lane) in mine.clone().zip(key(other)) {
                    o[index] += share * f64::from(it.v[lane]);
                    gradients[0][index] += scale * ds * f64::from(it.k[lane]);
                    gradients[1][lane] += scale * ds * f64::from(it.q[index]);
                    gradients[2][lane] += share * f64::from(it.dout[index]);
                }
            }
        }
    }
    let [dq, dk, dv] = gradients;
    [o, lse, dq, dk, dv]
}
