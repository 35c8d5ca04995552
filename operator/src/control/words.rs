//! The control service's messages in the words of the decisions, and back.
//!
//! In and out: plain data on both sides; nothing is decided here.

use cadre_control::proto;
use cadre_crds::{AttentionPool, TrainingJob, Wire};
use cadre_views::{
    Command, Conductor, Hello, JobKey, Kind, Number, Report, Server, Slot, Trainer, View,
};
use serde_json::json;

pub(super) fn hello(hello: proto::Hello) -> Hello {
    Hello {
        incarnation: hello.incarnation,
        address: hello.exchange_address,
        ring: hello.ring_address,
        memory: hello.memory_bytes,
        numerics: hello.numerics_id,
        secret: hello.job_secret,
        session: hello.session,
        view: hello.view.as_ref().map(view_of),
        resume: hello.resume,
    }
}

pub(super) fn report(report: &proto::ServerReport) -> Report {
    let proto::ServerReport { busy_ppm, cost, busy_nanoseconds, .. } = *report;
    Report { busy_ppm, cost, busy_nanoseconds }
}

pub(super) fn number(number: proto::ViewNumber) -> Number {
    Number { term: number.term, counter: number.counter }
}

fn view_of(view: &proto::View) -> View {
    let slots = view.slots.iter().map(|slot| Slot {
        number: slot.slot,
        weight: slot.weight,
        kind: match slot.kind() {
            proto::Kind::InPlace => Kind::InPlace,
            proto::Kind::Dedicated | proto::Kind::Unspecified => Kind::Dedicated,
        },
        server: slot.server.as_ref().map(|it| Server {
            index: it.index,
            incarnation: it.incarnation,
            address: it.exchange_address.clone(),
            memory: it.memory_bytes,
            numerics: it.numerics_id.clone(),
        }),
    });
    View { number: number(view.number.unwrap_or_default()), slots: slots.collect() }
}

pub(super) fn view(view: View) -> proto::View {
    let slots = view.slots.into_iter().map(|slot| proto::Slot {
        slot: slot.number,
        weight: slot.weight,
        kind: match slot.kind {
            Kind::Dedicated => proto::Kind::Dedicated,
            Kind::InPlace => proto::Kind::InPlace,
        }
        .into(),
        server: slot.server.map(|it| proto::Server {
            index: it.index,
            incarnation: it.incarnation,
            exchange_address: it.address,
            memory_bytes: it.memory,
            numerics_id: it.numerics,
        }),
    });
    let proto_number = proto::ViewNumber { term: view.number.term, counter: view.number.counter };
    proto::View { number: Some(proto_number), slots: slots.collect() }
}

pub(super) fn conductor(conductor: Conductor) -> proto::Conductor {
    let Conductor { incarnation, address, ring } = conductor;
    proto::Conductor { exchange_address: address, ring_address: ring, incarnation }
}

pub(super) fn trainers(trainers: Vec<Trainer>) -> proto::Trainers {
    let trainer = |it: Trainer| proto::Trainer {
        incarnation: it.incarnation,
        exchange_address: it.address,
        ring_address: it.ring,
    };
    proto::Trainers { trainers: trainers.into_iter().map(trainer).collect() }
}

/// What a worker is told of its job and of the failovers in it so far, as the local supervisor tells it too. Of a job of another kind what is
/// not known has its default.
pub(super) fn settings(
    (key, failovers): (&JobKey, u32),
    job: Option<&TrainingJob>,
    pool: Option<(&str, &AttentionPool)>,
    trainers: u32,
    resume: &str,
) -> String {
    let attention = job.map(|it| &it.spec.attention);
    let suspect = pool.map(|it| it.1.spec.health.suspect_after_milliseconds);
    let mut settings = json!({
        "job": key.name,
        "attempt": key.attempt,
        "trainers": trainers,
        "pool": pool.map_or("", |it| it.0),
        "wire": attention.and_then(|it| it.wire).unwrap_or(Wire::F32),
        "failovers": failovers,
        "resume": Some(resume).filter(|it| !it.is_empty()),
    });
    if let Some(milliseconds) = suspect {
        settings["suspect_after_milliseconds"] = milliseconds.into();
    }
    if let Some(attention) = attention {
        settings["reproducible"] = attention.reproducible.into();
        settings["on_pool_loss"] = json!(attention.on_pool_loss);
        settings["pool_wait_seconds"] = attention.pool_wait_seconds.into();
    }
    if let Some(job) = job {
        settings["checkpoints_kept"] = job.spec.checkpoint.keep.into();
    }
    settings.to_string()
}

/// Whom a command is for.
pub(super) fn to(command: &Command) -> Option<&cadre_views::Who> {
    match command {
        Command::Welcome { to, .. }
        | Command::Postpone(to, _)
        | Command::Refuse(to, _)
        | Command::Conductor(to, _)
        | Command::Trainers(to, _)
        | Command::View(to, _)
        | Command::Drain { to, .. } => Some(to),
        Command::Notice(..) => None,
    }
}
