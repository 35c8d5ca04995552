//! A thread's queue of works, and their launches.
//!
//! In: notices of the IO thread. Out: finished works, back to it. Used by the compute thread of a
//! dedicated server, by a trainer inside its attention calls (in place), and by the rescue thread.
//!
//! Invariant: works run in the order of phases, and every work that came is answered exactly once.

use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use cadre_kernels::Engine;
use cadre_protocol::At;

use crate::io::{Handle, Notice, Request};
use crate::launch::{Resident, Work, fuse, launch};
use crate::trace::{Activity, Tracer};

/// See the module.
pub struct Compute {
    queue: Vec<Work>,
    cancelled: Option<At>,
    /// Works that ran, by phase, for the in-place server's account of a call.
    ran: BTreeMap<At, usize>,
    engine: Engine,
    resident: Option<Resident>,
    track: &'static str,
    handle: Handle,
    tracer: Tracer,
    /// Why this process can compute nothing more.
    lost: Option<String>,
}

/// What a launch took.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progress {
    /// Nothing was queued.
    Idle,
    /// Something ran for so long.
    Ran(Duration),
}

impl Compute {
    /// A queue whose launches `engine` runs, or `resident` where rows live on the GPU; spans go to `track`.
    pub fn new(
        (engine, resident): (Engine, Option<Resident>),
        track: &'static str,
        handle: Handle,
        tracer: Tracer,
    ) -> Self {
        let (queue, cancelled, ran) = (Vec::new(), None, BTreeMap::new());
        Self { queue, cancelled, ran, engine, resident, track, handle, tracer, lost: None }
    }

    /// Queues a work behind those of its phase and of earlier ones.
    pub fn push(&mut self, work: Work) {
        if self.cancelled >= Some(at(&work)) {
            return self.handle.send(Request::Dropped(work));
        }
        let order = |it: &Work| (at(it), it.work);
        let place = self.queue.partition_point(|it| order(it) <= order(&work));
        self.queue.insert(place, work);
    }

    /// Drops what nobody wants any more.
    pub fn cancel(&mut self, through: At) {
        self.cancelled = self.cancelled.max(Some(through));
        let kept = self.queue.partition_point(|it| at(it) <= through);
        for work in self.queue.drain(..kept) {
            self.handle.send(Request::Dropped(work));
        }
        self.ran = self.ran.split_off(&At::new(through.step, 0));
    }

    /// Runs the next launch.
    pub fn run(&mut self) -> Progress {
        let works = fuse(&mut self.queue, &self.engine);
        let Some(first) = works.first() else { return Progress::Idle };
        let (start, count, phase) = (Instant::now(), works.len(), at(first));
        let result = launch(works, &mut self.engine, self.resident.as_mut());
        let took = start.elapsed();
        self.tracer.span(self.track, Activity::Launch, start, || {
            format!("step {} phase {}: {count} works", phase.step, phase.phase.0)
        });
        match result {
            Ok(done) => {
                *self.ran.entry(phase).or_insert(0) += done.len();
                for done in done {
                    self.handle.send(Request::Ran(done));
                }
            }
            Err(error) if error.is_lost() => self.lost = Some(error.to_string()),
            Err(error) => self.handle.send(Request::Fail(format!("a launch failed: {error}"))),
        }
        if let Some(why) = self.engine.unfit() {
            tracing::warn!("{}: the CPU computes what the GPU cannot: {why}", self.track);
        }
        Progress::Ran(took)
    }

    /// Works of a phase that ran here.
    pub fn ran(&self, at: At) -> usize {
        self.ran.get(&at).copied().unwrap_or(0)
    }

    /// Whether nothing of a phase is wanted any more.
    pub fn is_cancelled(&self, at: At) -> bool {
        self.cancelled >= Some(at)
    }

    /// Why this process can compute nothing more, if that is so.
    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Runs works as they come, until the job ends; or says why it can compute nothing more.
    pub fn serve(mut self, notices: &Receiver<Notice>) -> Result<(), String> {
        loop {
            if let Some(why) = self.lost {
                return Err(why);
            }
            let next = if self.queue.is_empty() {
                let start = Instant::now();
                let next = notices.recv().ok();
                self.tracer.span(self.track, Activity::Wait, start, String::new);
                next
            } else {
                match notices.try_recv() {
                    Ok(notice) => Some(notice),
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => None,
                    Err(std::sync::mpsc::TryRecvError::Empty) => {
                        self.run();
                        continue;
                    }
                }
            };
            match next {
                Some(Notice::Work(work)) => self.push(*work),
                Some(Notice::Cancelled(through)) => self.cancel(through),
                Some(Notice::Lost(why)) => return Err(why),
                Some(Notice::Trainers(_) | Notice::Step(_) | Notice::Whole(_)) => {}
                Some(Notice::End(_)) | None => return Ok(()),
            }
        }
    }
}

fn at(work: &Work) -> At {
    At { step: work.planned.header.step, phase: work.phase }
}
