//! What the controller is told of steps.
//!
//! In: what servers and trainers report of a step. Out: messages of the control channel. Nothing is sent or
//! kept here.
//!
//! Invariant: the same reports of the same step give the same message.

use cadre_control::proto;
use cadre_planner::imbalance_at_home;
use cadre_protocol::Peer;

use crate::io::envelope::{ServerStep, StepDone};
use crate::planned::{PlannedStep, filler};
use crate::supervisor::Moment;

/// What a server did, as the controller is told.
pub fn server_step(planned: &PlannedStep, from: Peer, done: &ServerStep) -> proto::ServerStep {
    let slot =
        planned.header.fillers.iter().flatten().position(|it| filler(it).executor() == Some(from));
    let (kind, index, incarnation) = match from {
        Peer::Trainer(id) => (proto::Kind::InPlace, id.0, 0),
        Peer::Server(id) => (proto::Kind::Dedicated, id.index, id.incarnation),
    };
    proto::ServerStep {
        slot: slot.unwrap_or(0) as u32,
        index: index.into(),
        incarnation,
        kind: kind.into(),
        tasks: done.tasks,
        busy_seconds: done.busy_seconds,
        bytes_pulled: done.bytes_pulled,
    }
}

/// A finished step, as the controller is told. Failovers are those of the step, and those of the job so far.
pub fn progress(
    planned: &PlannedStep,
    done: &[StepDone],
    servers: Vec<proto::ServerStep>,
    (failovers, failovers_so_far): (u32, u32),
    steps: u64,
) -> proto::Progress {
    let header = &planned.header;
    let worst = |of: fn(&StepDone) -> f64| done.iter().map(of).fold(0.0, f64::max);
    let at_home = planned
        .nanos
        .iter()
        .map(|it| imbalance_at_home(&it.problem).expect("a planned problem is sound"));
    let (most, mean) = at_home.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
    let busy: Vec<f64> = servers.iter().map(|it| it.busy_seconds).collect();
    let total: f64 = busy.iter().sum();
    let imbalance = if total > 0.0 {
        busy.iter().copied().fold(0.0, f64::max) * busy.len() as f64 / total
    } else {
        1.0
    };
    proto::Progress {
        step: header.step,
        loss_bits: done.first().map_or(0, |it| it.loss.to_bits()),
        tokens: done.first().map_or(0, |it| it.tokens),
        seconds: worst(|it| it.seconds),
        exposed_wait_seconds: worst(|it| it.exposed_wait_seconds),
        failovers,
        view: Some(proto::ViewNumber { term: header.view.term, counter: header.view.counter }),
        imbalance,
        imbalance_unplanned: if mean > 0 { most as f64 / mean as f64 } else { 1.0 },
        header: serde_json::to_string(header.as_ref()).expect("a header is plain data"),
        servers,
        steps,
        failovers_so_far,
    }
}

/// The moment of a control message.
pub fn moment(step: u64, direction: proto::Direction) -> Moment {
    let direction = match direction {
        proto::Direction::Backward => crate::supervisor::Direction::Backward,
        proto::Direction::Forward | proto::Direction::Unspecified => {
            crate::supervisor::Direction::Forward
        }
    };
    Moment { step, direction }
}
