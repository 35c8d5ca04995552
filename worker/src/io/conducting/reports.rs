//! What the controller says of the pool and is told of steps: messages of the control channel, and what they mean here.
//!
//! In and out: plain values. Nothing is sent or kept here.
//!
//! Invariant: the same reports of the same step give the same message.

use cadre_control::proto;
use cadre_planner::imbalance_at_home;
use cadre_protocol::Peer;
use cadre_step::conduct::{Offer, View};
use cadre_step::envelope::{ServerStep, StepDone};
use cadre_step::header::{Member, ViewNumber};
use cadre_step::planned::{PlannedStep, filler};

/// Reads the controller's view.
pub(crate) fn offered(view: &proto::View) -> View {
    let number = view.number.unwrap_or_default();
    let slots = view.slots.iter().map(|slot| {
        let index = slot.server.as_ref().map(|it| it.index as u16);
        let home = (slot.kind() == proto::Kind::InPlace).then_some(index).flatten();
        let member = slot.server.as_ref().map(|it| match home {
            Some(rank) => Member::InPlace(rank),
            None => Member::Server {
                index: it.index as u16,
                incarnation: it.incarnation,
                address: it.exchange_address.clone(),
            },
        });
        let memory = slot.server.as_ref().map(|it| it.memory_bytes);
        let numerics = slot.server.as_ref().map(|it| it.numerics_id.clone());
        Offer { weight: slot.weight, home, memory, member, numerics }
    });
    let number = ViewNumber { term: number.term, counter: number.counter };
    View { number, slots: slots.collect() }
}

/// What a server did, as the controller is told.
pub(crate) fn server_step(
    planned: &PlannedStep,
    from: Peer,
    done: &ServerStep,
) -> proto::ServerStep {
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

/// The most and the mean of the ranks' own attention cost in all layers of a step, if no row moved.
fn at_home(planned: &PlannedStep) -> (u128, u128) {
    let layers = &planned.header.layers;
    let kinds = (0..layers.kinds().len()).cycle();
    planned.plans.iter().zip(kinds).fold((0, 0), |sum, (plan, kind)| {
        let cost = imbalance_at_home(&plan.problem).expect("a planned problem is sound");
        let all_layers = |it: u64| u128::from(it) * u128::from(layers.having(kind));
        (sum.0 + all_layers(cost.0), sum.1 + all_layers(cost.1))
    })
}

/// A finished step, as the controller is told. Failovers are those of the step, and those of the job so far.
pub(crate) fn progress(
    planned: &PlannedStep,
    done: &[StepDone],
    servers: Vec<proto::ServerStep>,
    (failovers, failovers_so_far): (u32, u32),
    steps: u64,
) -> proto::Progress {
    let header = &planned.header;
    let worst = |of: fn(&StepDone) -> f64| done.iter().map(of).fold(0.0, f64::max);
    let (most, mean) = at_home(planned);
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
        gradient_norm: done.first().map_or(0.0, |it| it.gradient_norm),
        learning_rate: done.first().map_or(0.0, |it| it.learning_rate),
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
