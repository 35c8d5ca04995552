//! What the controller says of the pool and is told of steps: messages of the control channel, and what they mean here.
//!
//! In and out: plain values. Nothing is sent or kept here.
//!
//! Invariant: the same reports of the same step give the same message.

use cadre_control::proto::{self, notice};
use cadre_protocol::Peer;
use cadre_step::certificate::Certificate;
use cadre_step::conduct::decisions::{About, FaultAt, Over, Served};
use cadre_step::conduct::{Offer, View};
use cadre_step::envelope::StepDone;
use cadre_step::header::{Member, ViewNumber};
use cadre_step::phases::Direction;

use crate::io::planning::Figures;

/// A view of the controller's that says too little or too much: it has no silent default.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the controller's view says {what}; run workers and controller of the same release")]
pub(crate) struct Unreadable {
    what: String,
}

/// Reads the controller's view.
pub(crate) fn offered(view: &proto::View) -> Result<View, Unreadable> {
    let unreadable = |what| Unreadable { what };
    let number = view.number.ok_or_else(|| unreadable("no number".to_owned()))?;
    let offer = |(at, slot): (usize, &proto::Slot)| {
        let is_in_place = match slot.kind() {
            proto::Kind::InPlace => true,
            proto::Kind::Dedicated => false,
            proto::Kind::Unspecified => {
                return Err(unreadable(format!("no kind of slot {at}")));
            }
        };
        // The planner gives a slot without weight no work.
        if slot.weight == 0 {
            return Err(unreadable(format!("no weight of slot {at}")));
        }
        let Some(it) = &slot.server else {
            let (home, member, memory, numerics) = (None, None, None, None);
            return Ok(Offer { weight: slot.weight, home, memory, member, numerics });
        };
        let index = u16::try_from(it.index).map_err(|_| {
            unreadable(format!("server {} in slot {at}, above {}", it.index, u16::MAX))
        })?;
        let lacks = |what| Err(unreadable(format!("no {what} of server {index} in slot {at}")));
        if it.numerics_id.is_empty() {
            return lacks("numerics id");
        }
        if it.memory_bytes == 0 {
            return lacks("memory");
        }
        if !is_in_place && it.exchange_address.is_empty() {
            return lacks("address");
        }
        let member = if is_in_place {
            Member::InPlace(index)
        } else {
            let (incarnation, address) = (it.incarnation, it.exchange_address.clone());
            Member::Server { index, incarnation, address }
        };
        Ok(Offer {
            weight: slot.weight,
            home: is_in_place.then_some(index),
            memory: Some(it.memory_bytes),
            member: Some(member),
            numerics: Some(it.numerics_id.clone()),
        })
    };
    let slots = view.slots.iter().enumerate().map(offer).collect::<Result<_, _>>()?;
    Ok(View { number: ViewNumber { term: number.term, counter: number.counter }, slots })
}

/// Where faults are to be fired, as the controller is told.
pub(super) fn reached(FaultAt { step, direction }: FaultAt) -> proto::PhaseReached {
    let direction = match direction {
        Direction::Forward => proto::Direction::Forward,
        Direction::Backward => proto::Direction::Backward,
    };
    proto::PhaseReached { step, direction: direction.into() }
}

/// What people are told, as the controller is.
pub(super) fn notice(about: About, text: String) -> proto::Notice {
    use notice::{Event, Level};
    let (level, event, server) = match about {
        About::Warning => (Level::Warning, Event::Unspecified, None),
        About::ServerLost(id) => (Level::Warning, Event::ServerLost, Some(id)),
        About::PoolLost => (Level::Warning, Event::PoolLost, None),
        About::PoolBack => (Level::Information, Event::PoolBack, None),
    };
    let server = server.map(|it| proto::ServerName {
        kind: proto::Kind::Dedicated.into(),
        index: it.index.into(),
        incarnation: it.incarnation,
    });
    proto::Notice { level: level.into(), text, event: event.into(), server }
}

/// What a server did, as the controller is told.
fn served(Served { by, slot, did }: &Served) -> proto::ServerStep {
    let (kind, index, incarnation) = match *by {
        Peer::Trainer(id) => (proto::Kind::InPlace, id.0, 0),
        Peer::Server(id) => (proto::Kind::Dedicated, id.index, id.incarnation),
    };
    proto::ServerStep {
        slot: *slot as u32,
        index: index.into(),
        incarnation,
        kind: kind.into(),
        tasks: did.tasks,
        busy_seconds: did.busy_seconds,
        bytes_pulled: did.bytes_pulled,
    }
}

/// A finished step, as the controller is told: 0 steps while nobody has said how many the job has.
pub(super) fn progress(over: &Over, figures: Figures) -> proto::Progress {
    let Over { planned, done, served: by, failovers, failovers_so_far, steps } = over;
    let header = &planned.header;
    let servers: Vec<_> = by.iter().map(served).collect();
    let worst = |of: fn(&StepDone) -> f64| done.iter().map(of).fold(0.0, f64::max);
    let Figures { header: line, plans, imbalance_unplanned, certificate } = figures;
    let Certificate { compute, link, bytes } = certificate;
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
        validation_loss: done.first().and_then(|it| it.validation_loss),
        tokens: done.first().map_or(0, |it| it.tokens),
        seconds: worst(|it| it.seconds),
        exposed_wait_seconds: worst(|it| it.exposed_wait_seconds),
        header_wait_seconds: worst(|it| it.header_wait_seconds),
        failovers: *failovers,
        view: Some(proto::ViewNumber { term: header.view.term, counter: header.view.counter }),
        imbalance,
        imbalance_unplanned,
        header: line,
        servers,
        steps: steps.unwrap_or(0),
        failovers_so_far: *failovers_so_far,
        plans,
        gap_compute: Some(compute),
        gap_link: link,
        gap_bytes: bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_that_says_too_little_or_too_much_is_refused_by_what_it_says() {
        let number = Some(proto::ViewNumber { term: 1, counter: 2 });
        let refuse = |number, kind: proto::Kind, index, expected: &str| {
            let numerics_id = if index == 7 { String::new() } else { "n".to_owned() };
            let memory_bytes = u64::from(index != 8);
            let server =
                proto::Server { index, memory_bytes, numerics_id, ..proto::Server::default() };
            let server = Some(server);
            let slot = proto::Slot {
                weight: 100 * u32::from(index != 9),
                kind: kind.into(),
                server,
                ..proto::Slot::default()
            };
            let kind = proto::Kind::Dedicated.into();
            let vacant = proto::Slot { server: None, kind, weight: 100, ..slot.clone() };
            let refusal = offered(&proto::View { number, slots: vec![vacant, slot] }).unwrap_err();
            let end = "; run workers and controller of the same release";
            assert_eq!(refusal.to_string(), format!("the controller's view says {expected}{end}"));
        };
        let above = "server 65536 in slot 1, above 65535";
        refuse(number, proto::Kind::Dedicated, 65_536, above);
        refuse(number, proto::Kind::InPlace, 65_536, above);
        refuse(number, proto::Kind::Unspecified, 0, "no kind of slot 1");
        refuse(None, proto::Kind::Dedicated, 0, "no number");
        refuse(number, proto::Kind::Dedicated, 3, "no address of server 3 in slot 1");
        refuse(number, proto::Kind::InPlace, 8, "no memory of server 8 in slot 1");
        refuse(number, proto::Kind::InPlace, 9, "no weight of slot 1");
        refuse(number, proto::Kind::InPlace, 7, "no numerics id of server 7 in slot 1");
    }
}
