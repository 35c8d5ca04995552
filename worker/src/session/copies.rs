//! The thread that waits for lent rows, and what comes behind them.
//!
//! In: phases whose rows are being copied to the host, and whatever is to be asked behind them. Out: their rows, turned, to the IO thread,
//! in the order of the calls. Results go the other way without it.
//!
//! At most [`MAX_WAITING_PHASES`] wait for the thread; whoever asks for one more waits until it has taken one. Invariant: once there is
//! such a thread, every phase of the rank goes through it.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use cadre_kernels::Threads;
use cadre_kernels::device::{self, Event, Ferry, Going, Gpu, Stream};
use cadre_protocol::{At, TrainerId};
use cadre_step::phases::PhaseAt;

use super::call::{Error, Sizes};
use super::lent_rows::{Arriving, LentInputs, LentOutputs};
use super::lock;
use crate::heads::HeadByHead;
use crate::io::plan_thread::Guard;
use crate::io::{Asked, Handle, Request};
use crate::memory::Memory;

/// Why there is no such thread.
#[derive(Debug)]
pub(super) enum NotStarted {
    Gpu(device::Error),
    Thread(std::io::Error),
}

impl From<device::Error> for NotStarted {
    fn from(source: device::Error) -> Self {
        Self::Gpu(source)
    }
}

/// Phases that wait for their rows.
const MAX_WAITING_PHASES: usize = 16;

/// See the module.
pub(super) struct Copies<M> {
    queue: SyncSender<Item<M>>,
    down: Mutex<Ferry>,
    up: Mutex<Ferry>,
    /// Results whose copies may not be over.
    going: Mutex<Vec<Going>>,
}

enum Item<M> {
    Lent(Box<Lending>),
    Asked(Asked<M>),
}

/// A phase whose rows are on their way.
struct Lending {
    at: At,
    phase: PhaseAt,
    rows: Arriving,
    sizes: Sizes,
    form: HeadByHead,
}

impl<M: Memory> Copies<M> {
    /// For rank `me`, whose rows lie on `gpu`; they are kept in `place`.
    pub(super) fn start(
        (me, threads): (TrainerId, Threads),
        gpu: &Gpu,
        place: M::Place,
        handle: Handle<M>,
    ) -> Result<Self, NotStarted> {
        let (down, up) = (Mutex::new(Ferry::new(gpu)?), Mutex::new(Ferry::new(gpu)?));
        let (queue, items) = sync_channel(MAX_WAITING_PHASES);
        let run = move || {
            let guard = Guard::new("copies", &handle.line());
            for item in items {
                handle.send(match item {
                    Item::Asked(asked) => asked,
                    Item::Lent(lending) => submitted(me, *lending, &place, threads),
                });
            }
            guard.over();
        };
        let started = std::thread::Builder::new().name("copies".into()).spawn(run);
        started.map_err(NotStarted::Thread)?;
        Ok(Self { queue, down, up, going: Mutex::default() })
    }

    /// Asks for something behind the phases that were submitted.
    pub(super) fn ask(&self, asked: Asked<M>) {
        // Without the thread the job has ended: its guard said so.
        self.queue.send(Item::Asked(asked)).ok();
    }

    /// Puts the copies of a phase's rows, and hands the rest to the thread; when the rows are the caller's again.
    pub(super) fn submit(
        &self,
        (at, phase): (At, PhaseAt),
        inputs: &LentInputs<'_>,
        behind: &Stream,
        (sizes, form): (&Sizes, &HeadByHead),
    ) -> Result<Arc<Event>, device::Error> {
        let rows = inputs.down(&lock(&self.down), behind)?;
        let over = rows.over();
        let lending = Lending { at, phase, rows, sizes: *sizes, form: form.clone() };
        self.queue.send(Item::Lent(Box::new(lending))).ok();
        Ok(over)
    }

    /// Has `fill` write results, and puts their copies; when they are there.
    pub(super) fn results<T>(
        &self,
        outputs: LentOutputs<'_>,
        behind: &Stream,
        fill: impl FnOnce(super::call::Outputs<'_>) -> Result<T, Error>,
        failed: impl Fn(device::Error) -> Error,
    ) -> Result<(Arc<Event>, T), Error> {
        let mut rooms = outputs.rooms(&lock(&self.up)).map_err(&failed)?;
        let filled = outputs.fill(&mut rooms, fill)?;
        let going = lock(&self.up).up(outputs.with(rooms), behind).map_err(&failed)?;
        let over = Arc::clone(going.over());
        let mut all = lock(&self.going);
        all.retain(|it| !it.is_over().unwrap_or(true));
        all.push(going);
        Ok((over, filled))
    }
}

/// What the IO thread is asked once the rows of a phase have come.
fn submitted<M: Memory>(
    me: TrainerId,
    Lending { at, phase, rows, sizes, form }: Lending,
    place: &M::Place,
    threads: Threads,
) -> Asked<M> {
    match rows.land(|it| it.hold((&sizes, &form), place, threads)) {
        Ok(rows) => Asked::Submit(at, rows),
        Err(source) => {
            let (phase, source) = (phase.in_words(at.step), Box::new(source));
            let why = Error::Device { rank: me.0, phase, source };
            Asked::For(Request::Fail(why.to_string()))
        }
    }
}
