//! What the controller says of the pool and is told of steps: messages of the control channel, and what they mean here.
//!
//! In and out: plain values. Nothing is sent or kept here.
//!
//! Invariant: the same reports of the same step give the same message.

use cadre_control::proto;
use cadre_protocol::{Filler, Fillers, Peer};
use cadre_step::certificate::Certificate;
use cadre_step::conduct::{Offer, View};
use cadre_step::envelope::{ServerStep, StepDone};
use cadre_step::header::{Header, Member, ViewNumber};
use cadre_step::planned::{PlannedStep, filler};

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
        let Some(it) = &slot.server else {
            let (home, member, memory, numerics) = (None, None, None, None);
            return Ok(Offer { weight: slot.weight, home, memory, member, numerics });
        };
        let index = u16::try_from(it.index).map_err(|_| {
            unreadable(format!("server {} in slot {at}, above {}", it.index, u16::MAX))
        })?;
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

/// The slot that a member fills: by the header, else by the newest round that has it.
fn slot_of(planned: &PlannedStep, tables: &[Fillers], from: Peer) -> Option<usize> {
    let fills = |it: &Option<Filler>| it.and_then(Filler::executor) == Some(from);
    let mut first = planned.header.fillers.iter().map(|it| it.as_ref().map(filler));
    let newest = || tables.iter().rev().find_map(|it| it.iter().position(fills));
    first.position(|it| fills(&it)).or_else(newest)
}

/// What a server did, as the controller is told. `tables` are the step's rounds. Nothing of one that fills no slot.
pub(crate) fn server_step(
    planned: &PlannedStep,
    tables: &[Fillers],
    from: Peer,
    done: &ServerStep,
) -> Option<proto::ServerStep> {
    let slot = slot_of(planned, tables, from)?;
    let (kind, index, incarnation) = match from {
        Peer::Trainer(id) => (proto::Kind::InPlace, id.0, 0),
        Peer::Server(id) => (proto::Kind::Dedicated, id.index, id.incarnation),
    };
    Some(proto::ServerStep {
        slot: slot as u32,
        index: index.into(),
        incarnation,
        kind: kind.into(),
        tasks: done.tasks,
        busy_seconds: done.busy_seconds,
        bytes_pulled: done.bytes_pulled,
    })
}

/// A finished step, as the controller is told. Failovers are those of the step, and those of the job so far. Steps are those of the
/// job, 0 while nobody has said how many.
pub(crate) fn progress(
    header: &Header,
    figures: Figures,
    done: &[StepDone],
    servers: Vec<proto::ServerStep>,
    (failovers, failovers_so_far): (u32, u32),
    steps: u64,
) -> proto::Progress {
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
        failovers,
        view: Some(proto::ViewNumber { term: header.view.term, counter: header.view.counter }),
        imbalance,
        imbalance_unplanned,
        header: line,
        servers,
        steps,
        failovers_so_far,
        plans,
        gap_compute: Some(compute),
        gap_link: link,
        gap_bytes: bytes,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_view_that_says_too_little_or_too_much_is_refused_by_what_it_says() {
        let number = Some(proto::ViewNumber { term: 1, counter: 2 });
        let refuse = |number, kind: proto::Kind, index, expected: &str| {
            let server = Some(proto::Server { index, ..proto::Server::default() });
            let slot =
                proto::Slot { weight: 100, kind: kind.into(), server, ..proto::Slot::default() };
            let vacant =
                proto::Slot { server: None, kind: proto::Kind::Dedicated.into(), ..slot.clone() };
            let refusal = offered(&proto::View { number, slots: vec![vacant, slot] }).unwrap_err();
            let end = "; run workers and controller of the same release";
            assert_eq!(refusal.to_string(), format!("the controller's view says {expected}{end}"));
        };
        let above = "server 65536 in slot 1, above 65535";
        refuse(number, proto::Kind::Dedicated, 65_536, above);
        refuse(number, proto::Kind::InPlace, 65_536, above);
        refuse(number, proto::Kind::Unspecified, 0, "no kind of slot 1");
        refuse(None, proto::Kind::Dedicated, 0, "no number");
    }

    #[test]
    fn a_server_is_told_of_in_the_slot_that_it_fills_also_beside_vacant_ones_and_by_rounds() {
        use cadre_protocol::{ServerId, TrainerId};
        let any: Header =
            serde_json::from_str(include_str!("../../../../testing/header.json")).unwrap();
        let slot = any.slots[0];
        let server = |index, incarnation| Member::Server {
            index,
            incarnation,
            address: "127.0.0.1:1".into(),
        };
        let header = Header {
            slots: vec![slot; 3],
            fillers: vec![None, Some(server(1, 0)), Some(Member::Standby(0))],
            ..any
        };
        let planned = PlannedStep::new(Arc::new(header)).unwrap();
        let id = |index, incarnation| ServerId { index, incarnation };
        let first = vec![Some(Filler::Server(id(2, 4))), None, None];
        let last = vec![None, Some(Filler::Server(id(1, 1))), Some(Filler::InPlace(TrainerId(0)))];
        let tables = [first, last];
        let slot = |tables: &[Fillers], from| {
            let done = ServerStep { step: 0, tasks: 3, busy_seconds: 0.5, bytes_pulled: 7 };
            server_step(&planned, tables, from, &done).map(|it| it.slot)
        };
        let rank = Peer::Trainer(TrainerId(0));
        assert_eq!(slot(&[], Peer::Server(id(1, 0))), Some(1), "slot 0 is vacant");
        assert_eq!(slot(&tables, Peer::Server(id(1, 0))), Some(1), "lost since");
        assert_eq!(slot(&tables, Peer::Server(id(1, 1))), Some(1), "a replacement");
        assert_eq!(slot(&tables, Peer::Server(id(2, 4))), Some(0), "lost again");
        assert_eq!((slot(&[], rank), slot(&tables, rank)), (None, Some(2)), "it took works over");
        assert_eq!(slot(&tables, Peer::Server(id(9, 0))), None);
    }
}
