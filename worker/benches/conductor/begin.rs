//! The job of the bench, before its first step: its trainers and servers are known, and nothing was said.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use cadre_control::Settings as JobSettings;
use cadre_control::proto::{WorkerMessage, worker_message};
use cadre_crds::Wire;
use cadre_exchange::{PeerId, Waker};
use cadre_planner::{Costs, Heads, LinkMap, Tolerance};
use cadre_protocol::{Nanos, Peer, Settings};
use cadre_step::conduct::decisions::Event as Conducted;
use cadre_step::conduct::{Draft, Offer, Standby, View};
use cadre_step::header::{KvHeads, Member, Placement, ViewNumber};
use cadre_step::layers::{Kind, Layers};
use cadre_worker::io::clock::Clock;
use cadre_worker::io::conducting::Conducting;
use cadre_worker::io::queues::notices;
use cadre_worker::io::shared::Shared;
use cadre_worker::io::{Control, Handle, Io, Lines, Outlets};
use cadre_worker::trace::Tracer;

use super::mute::Mute;
use super::{Job, Took};

/// The conductor of a job whose trainers and servers are all there.
pub(super) fn begin(trainers: u16, servers: u16, layers: u16) -> Job {
    let draft = Draft {
        trainers,
        layers: Layers::alike(Kind::causal(Heads { query: 8, kv: 2, dim: 128 }), layers)
            .expect("there is a layer"),
        kv_heads: KvHeads::Apart,
        wire: Wire::Bf16,
        seed: 1,
        numerics: "bench".into(),
        reproducible: true,
        placement: Placement::Pool,
        costs: vec![Costs::default()],
        tolerance: Tolerance::USUAL,
        links: LinkMap::default(),
        standby: Standby::No,
        trainer_memory: 1 << 40,
        replay: None,
        header: None,
        filled: Vec::new(),
        memories: BTreeMap::new(),
    };
    let settings: JobSettings =
        serde_json::from_str(include_str!("../../../testing/settings.json")).expect("a job's");
    let settings = JobSettings { trainers, wire: Wire::Bf16, ..settings };
    let nanos = Arc::<AtomicU64>::default();
    let clock = Clock::counted(Instant::now(), Arc::clone(&nanos));
    let waker = Waker::new().expect("an event counter");
    let mute = Mute::new(waker.clone());
    let mut shared = Shared::new(Peer::CONDUCTOR, (mute, clock), Tracer::off());
    let mut conducting = Conducting::new(draft, Settings::default(), 0, &settings, Nanos(0));
    let list: Vec<_> =
        (0..trainers).map(|it| (PeerId::trainer(it, 0), "127.0.0.1:1".to_owned())).collect();
    for (id, address) in &list {
        shared.know(*id, address);
    }
    conducting.handle(&mut shared, Conducted::Trainers(list));
    let offer = |index| Offer {
        weight: 100,
        home: None,
        memory: Some(1 << 40),
        member: Some(Member::Server { index, incarnation: 0, address: "127.0.0.1:1".into() }),
        numerics: None,
    };
    let number = ViewNumber { term: 1, counter: 1 };
    conducting.view(&mut shared, View { number, slots: (0..servers).map(offer).collect() });
    let (handle, requests) = Handle::channel(waker.clone());
    let (plans, wanted) = sync_channel(1);
    let (controller, receiver) = sync_channel(1);
    let reports = Arc::<AtomicUsize>::default();
    let reported = Arc::clone(&reports);
    let sender = Box::new(move |message: WorkerMessage| {
        if matches!(message.message, Some(worker_message::Message::Progress(_))) {
            reported.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    });
    let (main, told) = notices(waker);
    let lines = Lines {
        requests,
        plans,
        control: Control { sender, receiver },
        outlets: Outlets { main, rescue: None, interrupt: None },
    };
    Job {
        io: Io::new(shared, (None, None, Some(conducting)), lines),
        wanted,
        handle,
        nanos,
        reports,
        said: BTreeMap::new(),
        publications: 0,
        took: Took::default(),
        events: Vec::new(),
        _lines: (controller, told),
    }
}
