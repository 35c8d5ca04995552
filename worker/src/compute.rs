//! A thread's queue of works, and their launches.
//!
//! In: notices of the IO thread. Out: finished works, back to it. Used by the compute thread of a
//! dedicated server, by a trainer inside its attention calls (in place), and by the rescue thread.
//!
//! ```text
//! queue ──host: computed at once──────────────────────────────────▶ answered
//!   └──GPU: put on a stream──▶ flights ──over──▶ (promised: until its word) ──▶ answered, or thrown away
//! ```
//!
//! Invariant: works run in the order of phases, and every work that came is answered exactly once, but those
//! whose promise is broken or refused: these are not.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cadre_kernels::EngineError;
use cadre_kernels::device::Error;
use cadre_protocol::At;

use crate::io::queues::{Notices, Owed};
use crate::io::{Asked, Handle, Notice, Request};
use crate::launch::{Done, Launcher, Promise, Word, Work, fuse};
use crate::memory::Memory;
use crate::trace::{Activity, Tracer};

/// Maximum launches in flight: one runs on each of two streams, and one waits behind each.
const MAX_LAUNCHES_IN_FLIGHT: usize = 4;

/// Sleep while launches are in flight, since their ends wake no thread.
pub const LAUNCH_LOOK_EVERY: Duration = Duration::from_micros(50);

/// See the module.
pub struct Compute<M: Memory> {
    /// Queued works, by phase and number; there may be hundreds of thousands. A work that arrives
    /// again is behind the first one.
    queue: BTreeMap<(At, u32, u64), Work<M>>,
    came: u64,
    account: Account,
    launcher: M::Launcher,
    /// What ran before its rows were known to count.
    promised: Vec<Done<M>>,
    track: &'static str,
    handle: Handle<M>,
    tracer: Tracer,
    /// Why this process can compute nothing more.
    lost: Option<String>,
}

/// Which works of a queue ran and which are not wanted any more, for any thread that asks, also while another one computes; clones
/// are of the same queue.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<Mutex<Over>>);

#[derive(Debug, Default)]
struct Over {
    cancelled: Option<At>,
    /// Works that ran, by phase.
    ran: BTreeMap<At, usize>,
}

impl Account {
    /// Works of a phase that ran here.
    pub fn ran(&self, at: At) -> usize {
        self.lock().ran.get(&at).copied().unwrap_or(0)
    }

    /// Whether nothing of a phase is wanted any more.
    pub fn is_cancelled(&self, at: At) -> bool {
        self.lock().cancelled >= Some(at)
    }

    fn cancel(&self, through: At) {
        let mut over = self.lock();
        over.cancelled = over.cancelled.max(Some(through));
        over.ran = over.ran.split_off(&At::new(through.step, 0));
    }

    fn count(&self, at: At) {
        let ran = &mut self.lock().ran;
        *ran.entry(at).or_insert(0) += 1;
        // Two steps are out at most; of earlier ones nobody asks any more.
        while ran.first_key_value().is_some_and(|it| it.0.step + 1 < at.step) {
            ran.pop_first();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Over> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far works came.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progress {
    /// Nothing is queued or under way.
    Idle,
    /// Launches are under way; ask again in [`LAUNCH_LOOK_EVERY`].
    Flying,
    /// Something ran, or was enqueued on a stream.
    Ran,
}

impl<M: Memory> Compute<M> {
    /// A queue whose launches `launcher` runs; spans go to `track`.
    pub fn new(
        launcher: M::Launcher,
        track: &'static str,
        handle: Handle<M>,
        tracer: Tracer,
    ) -> Self {
        let (queue, came, account) = (BTreeMap::new(), 0, Account::default());
        let (promised, lost) = (Vec::new(), None);
        Self { queue, came, account, launcher, promised, track, handle, tracer, lost }
    }

    /// What of its works is over.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Queues a work behind those of its phase and of earlier ones.
    pub fn push(&mut self, work: Work<M>) {
        if self.account.is_cancelled(work.at()) {
            return self.refuse(work);
        }
        self.came += 1;
        self.queue.insert((work.at(), work.work, self.came), work);
    }

    /// Whether works are queued or under way.
    pub fn owed(&self) -> Owed {
        let has_works = !self.queue.is_empty() || self.launcher.flights() > 0;
        if has_works { Owed::Works } else { Owed::Nothing }
    }

    /// Drops works of phases up to `through`, whose results are no longer wanted.
    pub fn cancel(&mut self, through: At) {
        self.account.cancel(through);
        while let Some(first) = self.queue.first_entry().filter(|it| it.key().0 <= through) {
            let work = first.remove();
            self.refuse(work);
        }
    }

    /// Answers a work that will not run, if anybody waits for it.
    fn refuse(&self, work: Work<M>) {
        if work.promise.as_ref().is_none_or(Promise::refuse) {
            self.handle.send(Asked::Dropped(work));
        }
    }

    /// Answers works that are done, and begins the next launch.
    pub fn run(&mut self) -> Progress {
        if self.lost.is_some() {
            return Progress::Idle;
        }
        let landed = self.land();
        let begun = self.launcher.flights() < MAX_LAUNCHES_IN_FLIGHT && self.begin();
        if landed || begun {
            Progress::Ran
        } else if self.launcher.flights() == 0 && self.promised.is_empty() {
            Progress::Idle
        } else {
            Progress::Flying
        }
    }

    /// Runs the next launch, or puts it on a stream; whether there was one.
    fn begin(&mut self) -> bool {
        if M::Launcher::EARLY {
            let broken = |it: &Promise| it.word() == Word::Broken;
            self.queue.retain(|_, it| !it.promise.as_ref().is_some_and(broken));
        }
        let works = fuse(&mut self.queue, self.launcher.engine());
        let Some(first) = works.first() else { return false };
        let (start, phase) = (Instant::now(), first.at());
        match self.launcher.put(works) {
            Ok(done) if done.is_empty() => {}
            Ok(done) => {
                self.span(start, phase, done.len());
                for done in done {
                    self.answer(done);
                }
            }
            Err(error) => self.failed(&error),
        }
        if let Some(why) = self.launcher.unfit() {
            tracing::warn!("{}: the CPU computes what the GPU cannot: {why}", self.track);
        }
        true
    }

    /// Answers works whose launches are over and whose rows count; whether there were any.
    fn land(&mut self) -> bool {
        let landed = self.launcher.land();
        let mut any = !landed.is_empty();
        for landed in landed {
            match landed {
                Ok((start, done)) => {
                    if let Some(first) = done.first() {
                        self.span(start, first.work.at(), done.len());
                    }
                    self.promised.extend(done);
                }
                Err(error) => self.failed(&error.into()),
            }
        }
        for done in std::mem::take(&mut self.promised) {
            match done.work.promise.as_ref().map_or(Word::Kept, Promise::word) {
                Word::Kept => {
                    any = true;
                    self.answer(done);
                }
                Word::Open => self.promised.push(done),
                // The rows did not count, or the results are no longer wanted.
                Word::Broken | Word::Refused => {}
            }
        }
        any
    }

    fn answer(&mut self, done: Done<M>) {
        self.account.count(done.work.at());
        self.handle.send(Asked::Ran(done));
    }

    /// A GPU that fails costs this process, whatever the reason: others may have one that does not. Works that no engine takes are
    /// the job's fault.
    fn failed(&mut self, error: &EngineError) {
        let short = |what: &str, bytes: usize, free: usize| {
            format!(
                "GPU memory is too small for {what}: {bytes} bytes are asked for, {free} are free; end other programs on this GPU, \
                 name another one (--gpu), or cut documents shorter (--cap)"
            )
        };
        match error {
            EngineError::Device(Error::OutOfMemory { what, bytes, free }) => {
                self.lost = Some(short(what, *bytes, *free));
            }
            EngineError::Device(error) if error.is_lost() => self.lost = Some(error.to_string()),
            EngineError::Device(error) => self.lost = Some(format!("a launch failed: {error}")),
            EngineError::Refused(_) => {
                self.handle.send(Request::Fail(format!("a launch failed: {error}")));
            }
        }
    }

    fn span(&self, start: Instant, phase: At, count: usize) {
        self.tracer.span(self.track, Activity::Launch, start, || {
            format!("step {} phase {}: {count} works", phase.step, phase.phase.0)
        });
    }

    /// Why this process can compute nothing more, if that is so.
    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Runs works as they arrive, until the job ends; the error is why it can compute nothing more.
    pub fn serve(mut self, notices: &Notices<M>) -> Result<(), String> {
        loop {
            if let Some(why) = self.lost {
                return Err(why);
            }
            let next = match notices.try_recv() {
                Ok(notice) => Some(notice),
                Err(TryRecvError::Disconnected) => None,
                Err(TryRecvError::Empty) => match self.run() {
                    Progress::Ran => continue,
                    Progress::Flying => match notices.recv_timeout(LAUNCH_LOOK_EVERY) {
                        Ok(notice) => Some(notice),
                        Err(RecvTimeoutError::Timeout) => continue,
                        Err(RecvTimeoutError::Disconnected) => None,
                    },
                    Progress::Idle => {
                        let start = Instant::now();
                        let next = notices.recv().ok();
                        self.tracer.span(self.track, Activity::Wait, start, String::new);
                        next
                    }
                },
            };
            let Some(next) = next else { return Ok(()) };
            if let ControlFlow::Break(ended) = self.take(next) {
                return ended;
            }
        }
    }

    /// Handles a notice of the IO thread; breaks when the job has ended.
    pub fn take(&mut self, notice: Notice<M>) -> ControlFlow<Result<(), String>> {
        match notice {
            Notice::Work(work) => self.push(*work),
            Notice::Cancelled(through) => self.cancel(through),
            Notice::Lost(why) => return ControlFlow::Break(Err(why)),
            Notice::Trainers(_) | Notice::Step(_) | Notice::Part(_) | Notice::Whole(_) => {}
            Notice::End(_) => return ControlFlow::Break(Ok(())),
        }
        ControlFlow::Continue(())
    }
}
