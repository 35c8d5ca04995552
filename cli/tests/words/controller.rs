//! The test's own controller: starts two trainers and a server as processes, tells them of each other, and hears them out.
//!
//! In: what the relays lose, and who else is a member. Out: a [`Run`]. It stands where the supervisor of `cadre run` does, and
//! says other addresses.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cadre_control::proto::{self, worker_message::Message};
use cadre_control::server::{self, Event, Link, LinkId, Running};
use cadre_control::{AttentionPlace, CONTROL_VERSION, Settings};
use cadre_crds::contract;
use cadre_exchange::{PeerId, Role};

use super::relay::{Loss, Losses, Lost, relay};

/// What every member of the jobs here knows.
pub(crate) const SECRET: [u8; 32] = [7; 32];
/// A job that is not over then hangs.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);
const STEPS: u64 = 4;
const TRAINERS: u16 = 2;

/// How a job ended.
pub(crate) struct Run {
    /// Bits of the losses, by step.
    pub(crate) losses: Vec<u32>,
    /// Headers of the run, by step.
    pub(crate) headers: Vec<String>,
    /// Exit codes: of the trainers, then of the server.
    pub(crate) codes: Vec<Option<i32>>,
    /// What the workers logged.
    pub(crate) logs: BTreeMap<String, String>,
    /// What the relays have lost.
    pub(crate) lost: Vec<Lost>,
}

/// A worker of the job.
struct Worker {
    id: PeerId,
    process: Child,
    /// Until it says goodbye.
    link: Option<Link>,
    stream: Option<LinkId>,
    /// Where its exchange listens, and where peers are told that it does.
    address: Option<(String, String)>,
    ring: String,
    /// Until its stream ends.
    here: bool,
}

/// A job that runs.
pub(crate) struct Job {
    folder: tempfile::TempDir,
    events: tokio::sync::mpsc::Receiver<Event>,
    _running: Running,
    workers: Vec<Worker>,
    /// A server that the controller did not start.
    guest: Option<(PeerId, String)>,
    /// What all of them compute with, as they say.
    numerics: String,
    loss: Loss,
    losses: Losses,
    deadline: Instant,
    steps: BTreeMap<u64, (u32, String)>,
}

fn name(id: PeerId) -> String {
    format!("{}-{}", id.role, id.index)
}

impl Job {
    /// Starts a job, with a second server if one is a guest; returns when every worker knows the others.
    pub(crate) fn start(loss: Loss, guest: Option<(PeerId, String)>) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let data = folder.path().join("data");
        fs::create_dir(&data).expect("a new folder");
        fs::write(data.join("a"), "in the beginning was the word ".repeat(200)).expect("a file");
        let control = folder.path().join("control");
        let listener = UnixListener::bind(&control).expect("a free path");
        let (sender, events) = tokio::sync::mpsc::channel(256);
        let running = server::spawn(listener, cadre_control::DATA_VERSION, sender);
        let ids = (0..TRAINERS).map(|it| PeerId::trainer(it, 0)).chain([PeerId::server(0, 0)]);
        let worker = |id: PeerId| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_cadre"));
            let role = match id.role {
                Role::Trainer => command
                    .arg("train")
                    .arg(format!("--data={}", data.display()))
                    .args(["--model=tiny", "--tokens=128", "--cap=200"])
                    .arg(format!("--steps={STEPS}")),
                Role::Server => command.arg("serve"),
            };
            let log = File::create(folder.path().join(name(id))).expect("a new file");
            let process = role
                .env(contract::CADRE_CONTROL, &control)
                .env(contract::CADRE_ROLE, id.role.to_string())
                .env(contract::CADRE_INDEX, id.index.to_string())
                .env(contract::CADRE_INCARNATION, id.incarnation.to_string())
                .env(contract::WORLD_SIZE, TRAINERS.to_string())
                .env(contract::CADRE_PARENT_PID, std::process::id().to_string())
                .env("NO_COLOR", "1")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log)
                .spawn()
                .expect("the binary starts");
            let (link, stream, address, ring) = (None, None, None, String::new());
            Worker { id, process, link, stream, address, ring, here: true }
        };
        let workers = ids.map(worker).collect();
        let mut job = Self {
            events,
            _running: running.expect("a thread"),
            workers,
            guest,
            numerics: String::new(),
            loss,
            losses: Losses::default(),
            deadline: Instant::now() + PATIENCE,
            steps: BTreeMap::new(),
            folder,
        };
        while job.workers.iter().any(|it| it.address.is_none()) {
            job.turn();
        }
        job.introduce();
        job
    }

    /// Every worker that was started, and where it really listens.
    pub(crate) fn addresses(&self) -> Vec<(PeerId, String)> {
        let address = |it: &Worker| it.address.as_ref().map(|address| (it.id, address.0.clone()));
        self.workers.iter().filter_map(address).collect()
    }

    /// Waits until the job is over, lets the server go, and collects what is left.
    pub(crate) fn finish(mut self) -> Run {
        while self.workers.iter().any(|it| it.here && it.id.role == Role::Trainer) {
            self.turn();
        }
        for worker in &self.workers {
            if let (Role::Server, Some(link)) = (worker.id.role, &worker.link) {
                link.send(proto::Drain { stays: false, over: true }).ok();
            }
        }
        while self.workers.iter().any(|it| it.here) {
            self.turn();
        }
        let wait = |it: &mut Worker| it.process.wait().expect("a child").code();
        let codes = self.workers.iter_mut().map(wait).collect();
        let steps = std::mem::take(&mut self.steps);
        let (losses, headers) = steps.into_values().unzip();
        let lost = self.losses.lock().expect("no panic").iter().cloned().collect();
        Run { losses, headers, codes, logs: self.logs(), lost }
    }

    fn logs(&self) -> BTreeMap<String, String> {
        let log = |it: &Worker| {
            let name = name(it.id);
            let text = fs::read(self.folder.path().join(&name)).unwrap_or_default();
            (name, String::from_utf8_lossy(&text).into_owned())
        };
        self.workers.iter().map(log).collect()
    }

    /// The next event of the control service.
    fn turn(&mut self) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let left = self.deadline.saturating_duration_since(Instant::now());
        let next = async { tokio::time::timeout(left, self.events.recv()).await };
        let Ok(event) = runtime.expect("a runtime").block_on(next) else {
            panic!("the job hangs after {} steps: {:#?}", self.steps.len(), self.logs());
        };
        match event.expect("the control service lives") {
            Event::Attached { link, hello, .. } => {
                let role = proto::Role::try_from(hello.role).expect("a role");
                let id = match role {
                    proto::Role::Server => PeerId::server(hello.index as u16, 0),
                    proto::Role::Trainer | proto::Role::Unspecified => {
                        PeerId::trainer(hello.index as u16, 0)
                    }
                };
                let settings = self.settings().to_text(CONTROL_VERSION).expect("of this version");
                link.send(proto::Welcome {
                    job_secret: SECRET.to_vec(),
                    settings,
                    control_version: CONTROL_VERSION,
                    ..proto::Welcome::default()
                })
                .expect("room");
                let worker = self.workers.iter_mut().find(|it| it.id == id);
                let worker = worker.expect("only these were started");
                worker.stream = Some(link.id());
                self.numerics = hello.numerics_id;
                worker.link = Some(link);
            }
            Event::Message { link, message } => self.said(link, message),
            Event::Detached { link } => {
                let worker = self.workers.iter_mut().find(|it| it.stream == Some(link));
                worker.expect("only these were started").here = false;
            }
        }
    }

    fn settings(&self) -> Settings {
        Settings {
            job: "words".into(),
            attempt: 1,
            trainers: TRAINERS,
            attention: AttentionPlace::Pool,
            wire: cadre_crds::Wire::F32,
            wire_is_open: Some(false),
            reproducible: true,
            encryption: cadre_crds::Encryption::Off,
            on_pool_loss: cadre_crds::OnPoolLoss::Wait,
            pool_wait_seconds: 30,
            suspect_after_milliseconds: 3000,
            trainer_suspect_after_seconds: 30,
            stalled_after_seconds: 600,
            checkpoints: self.folder.path().join("checkpoints"),
            checkpoints_kept: 3,
            failovers: 0,
            resume: None,
            headers: None,
            profile: None,
            tolerance: None,
            faults: Vec::new(),
        }
    }

    fn said(&mut self, link: LinkId, message: Message) {
        let (loss, losses) = (self.loss, &self.losses);
        let worker = self.workers.iter_mut().find(|it| it.stream == Some(link));
        let worker = worker.expect("only these were started");
        match message {
            Message::Listening(it) => {
                let relayed = relay(&it.exchange_address, loss, losses);
                worker.address = Some((it.exchange_address, relayed));
                worker.ring = it.ring_address;
            }
            Message::Progress(it) => {
                self.steps.insert(it.step, (it.loss_bits, it.header));
            }
            Message::Bye(_) => worker.link.take().into_iter().for_each(Link::farewell),
            Message::Hello(_)
            | Message::PhaseReached(_)
            | Message::ServerReport(_)
            | Message::Notice(_)
            | Message::Finished(_)
            | Message::Drained(_)
            | Message::Leaving(_)
            | Message::Probed(_)
            | Message::Busy(_)
            | Message::Saved(_) => {}
        }
    }

    /// Tells everybody where the others are, by their relays.
    fn introduce(&self) {
        let address = |it: &Worker| it.address.clone().expect("it listens").1;
        let trainers: Vec<_> = self
            .workers
            .iter()
            .filter(|it| it.id.role == Role::Trainer)
            .map(|it| proto::Trainer {
                incarnation: 0,
                exchange_address: address(it),
                ring_address: it.ring.clone(),
            })
            .collect();
        let slot = |index: u32, exchange_address: String| proto::Slot {
            slot: index,
            weight: 100,
            kind: proto::Kind::Dedicated.into(),
            server: Some(proto::Server {
                index,
                exchange_address,
                memory_bytes: 1 << 30,
                numerics_id: self.numerics.clone(),
                ..proto::Server::default()
            }),
        };
        let servers = self.workers.iter().filter(|it| it.id.role == Role::Server);
        let mut slots: Vec<_> = servers.map(|it| slot(it.id.index.into(), address(it))).collect();
        slots.extend(self.guest.iter().map(|(id, address)| slot(id.index.into(), address.clone())));
        let number = Some(proto::ViewNumber { term: 1, counter: 1 });
        let conductor = proto::Conductor {
            exchange_address: trainers[0].exchange_address.clone(),
            ring_address: trainers[0].ring_address.clone(),
            incarnation: 0,
        };
        for worker in &self.workers {
            let link = worker.link.as_ref().expect("it is attached");
            if worker.id != PeerId::trainer(0, 0) {
                link.send(conductor.clone()).expect("room");
            }
            if worker.id.role == Role::Trainer {
                link.send(proto::Trainers { trainers: trainers.clone() }).expect("room");
            }
        }
        let link = self.workers[0].link.as_ref().expect("it is attached");
        link.send(proto::View { number, slots }).expect("room");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.process.kill().ok();
            worker.process.wait().ok();
        }
    }
}
