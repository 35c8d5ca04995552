//! A rank that calls its session in a wrong way; rank 0 does all it should, and learns why the job ends.
//!
//! In: which mistake. Out: the exit code of a failed job, or of a rank that leaves in order and too early.

use std::num::NonZeroU16;
use std::process::{Command, ExitCode};
use std::time::Duration;

use cadre_control::proto::finished::Outcome as Kind;
use cadre_crds::Wire;
use cadre_planner::{DocumentId, Heads, Mask, Stretch};
use cadre_worker::ExchangeChoice;
use cadre_worker::session::{
    Contract, Direction, Ending, Error, Inputs, Join, Kind as Layer, Layers, Lengths, NanoLengths,
    Next, Outcome, Outputs, PerHead, PerHeadMut, PhaseAt, Rows, RowsMut, Session, Ticket, Turns,
};

const ROWS: usize = 32;
const HEADS: Heads = Heads { query: 2, kv: 1, dim: 8 };
const QUERY: [f32; ROWS * 16] = [0.5; ROWS * 16];
const KV: [f32; ROWS * 8] = [0.5; ROWS * 8];

pub(crate) fn main(mistake: &str) -> Result<ExitCode, Box<dyn std::error::Error>> {
    cadre_worker::process::arm_parent_death()?;
    let contract = Contract::from_env()?;
    let other = mistake == "layers" && contract.me.index == 1;
    let mask = if other { Mask::Window { left: 7 } } else { Mask::Causal };
    let heads = match mistake {
        "heads" if contract.me.index == 1 => Heads { query: 4, kv: 2, ..HEADS },
        "dim" if contract.me.index == 1 => Heads { dim: 12, ..HEADS },
        "uneven" if contract.me.index == 1 => Heads { kv: 3, ..HEADS },
        _ => HEADS,
    };
    let layers = Layers::new([Layer::causal(HEADS), Layer { mask, ..Layer::causal(heads) }])?;
    let on_gpu = mistake == "on a gpu" && contract.me.index == 1;
    let join = || Join {
        exchange: if on_gpu { ExchangeChoice::Node } else { ExchangeChoice::Tcp },
        seed: u64::from(mistake == "seed") * u64::from(contract.me.index),
        memory: if mistake == "memory" && contract.me.index == 1 { 0 } else { 1 << 28 },
        wire: (mistake == "wire" && contract.me.index == 1).then_some(Wire::Bf16),
        ..super::join(
            layers.clone(),
            if mistake == "steps" && contract.me.index == 1 { 2 } else { 3 },
        )
    };
    let handlers = caught_signals()?;
    let session = Session::join(&contract, join())?;
    assert_eq!(caught_signals()?, handlers, "a session installs no signal handler");
    let wrong = session.rank() == 1;
    if wrong && mistake == "again" {
        Session::join(&contract, join()).err().ok_or("it has two sessions")?;
    }
    if wrong && mistake == "again, of other heads" {
        let layers = Layers::alike(Layer::causal(Heads { dim: 12, ..HEADS }), 1)?;
        let other = Join { layers, ..join() };
        Session::join(&contract, other).err().ok_or("it has two sessions")?;
    }
    if wrong && mistake == "second" {
        second()?;
    }
    let rank = u32::from(session.rank());
    let stretch = Stretch { document: DocumentId(rank), start: 0, end: ROWS as u32 };
    let nano = NanoLengths { documents: vec![(rank, ROWS as u32)], stretches: vec![stretch] };
    if !wrong || mistake != "unannounced" {
        let other = wrong && mistake == "turns";
        let turns = other.then(|| Turns::forward(NonZeroU16::MIN));
        session.announce(Lengths { step: 0, turns, nanos: vec![nano] })?;
    }
    let refused = if wrong && mistake == "early" {
        Some(phase(&session, mistake).expect_err("no step has begun"))
    } else {
        match session.begin(0) {
            Next::Step(_) => {
                let leaves = match mistake {
                    "all leave in the middle" if wrong => {
                        drop(submit(&session, "none")?);
                        true
                    }
                    "all leave" | "all leave in the middle" => true,
                    "leaves" => wrong,
                    "the conductor leaves" => !wrong,
                    _ => false,
                };
                if wrong && mistake == "leaves, failed" {
                    drop(submit(&session, "none")?);
                    return fails(session);
                }
                if leaves {
                    session.leave(Outcome::completed())?;
                    return Ok(ExitCode::SUCCESS);
                }
                // Its main thread does nothing more; its other threads go on.
                if wrong && mistake == "stands" {
                    loop {
                        std::thread::park();
                    }
                }
                let elsewhere = [
                    "unannounced",
                    "steps",
                    "again",
                    "again, of other heads",
                    "second",
                    "turns",
                    "the conductor leaves",
                ];
                let seen = wrong && !elsewhere.contains(&mistake);
                let called = phase(&session, if seen { mistake } else { "none" });
                if seen { Some(called.expect_err("the mistake is seen")) } else { None }
            }
            Next::End(_) => None,
        }
    };
    let (told, is_bad) = told(&session, mistake);
    let is_bad = refused.as_ref().map_or(is_bad, Error::is_bad_input);
    let message = refused.map_or(told, |it| it.to_string());
    let code: u8 = if is_bad { 2 } else { 3 };
    let exit_code = code;
    session.leave(Outcome { kind: Kind::Failed, message, exit_code, sample: String::new() })?;
    Ok(ExitCode::from(code))
}

/// How the other rank learns that the job ends, and whether that is bad input.
fn told(session: &Session, mistake: &str) -> (String, bool) {
    match session.ending(Duration::MAX) {
        // Whoever hears another reason says so by its exit code.
        Some(Ending::Failed { reason, bad_input }) => {
            let other = mistake == "leaves, failed" && !reason.contains(crate::lent::DISK);
            (reason, bad_input || other)
        }
        other => (format!("the job went on: {other:?}"), false),
    }
}

/// It leaves for a reason of its own.
fn fails(session: Session) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let (kind, message) = (Kind::Failed, crate::lent::DISK.to_owned());
    session.leave(Outcome { kind, message, exit_code: 1, sample: String::new() })?;
    Ok(ExitCode::FAILURE)
}

/// Another process joins as this rank, which is here. It is refused.
fn second() -> Result<(), Box<dyn std::error::Error>> {
    let ended = Command::new(std::env::current_exe()?)
        .args(["--exact", "acts_as_worker", "--nocapture"])
        .env("CADRE_PARENT_PID", std::process::id().to_string())
        .env("MISTAKE", "none")
        .output()?;
    let said = String::from_utf8_lossy(&ended.stderr);
    let refused = "error: refused by the controller: trainer 1 is here already, as process ";
    if said.contains(refused) { Ok(()) } else { Err(format!("it was not refused: {said}").into()) }
}

/// Signals that this process has handlers for, a bit each.
fn caught_signals() -> Result<String, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let caught = status.lines().find_map(|it| it.strip_prefix("SigCgt:")).ok_or("no such line")?;
    Ok(caught.trim().to_owned())
}

/// The first forward phase, with one mistake.
fn phase(session: &Session, mistake: &str) -> Result<(), Error> {
    let ticket = submit(session, mistake)?;
    let (mut o, mut lse) = (vec![0.0; QUERY.len()], vec![0.0; ROWS * 2]);
    let lse = if mistake == "room" { &mut lse[..3] } else { &mut lse[..] };
    let lse = PerHeadMut::f32(lse);
    session.wait(ticket, Outputs::Forward { o: RowsMut::f32(&mut o), lse })
}

/// Submits the first forward phase, with one mistake.
fn submit(session: &Session, mistake: &str) -> Result<Ticket, Error> {
    let layer = usize::from(mistake == "order");
    let phase = PhaseAt { layer, nano: 0, direction: Direction::Forward };
    let keys = if mistake == "rows" { &KV[..31] } else { &KV[..] };
    let (q, k, v) = (Rows::f32(&QUERY), Rows::f32(keys), Rows::f32(&KV));
    let inputs = if mistake == "direction" {
        let (lse, dout) = (PerHead::f32(&[0.0; ROWS * 2]), Rows::f32(&QUERY));
        Inputs::Backward { q, k, v, o: dout, lse, dout, dlse: None }
    } else {
        Inputs::Forward { q, k, v }
    };
    session.submit(phase, inputs)
}
