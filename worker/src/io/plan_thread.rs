//! The thread that plans for a process, and what ends the job where such a thread panics.
//!
//! In: what is [`Wanted`], one at a time. Out: for each a [`Request`] to the IO thread. [`super::planning`] does the work.
//!
//! Invariant: the thread ends when nobody can want anything any more; if it panics, the job ends by its name.

use std::sync::mpsc::sync_channel;

use super::lines::Request;
use super::planning::{self, Finished, Plans, Wanted};
use super::queues::Line;

/// Starts the thread; its answers go to `back`.
///
/// # Errors
///
/// The system has no thread to give.
pub fn start(back: Line) -> std::io::Result<Plans> {
    // One is planned at a time, and the next goes there when its answer has come: the queue is never full.
    let (plans, all) = sync_channel(1);
    let plan = move || {
        let guard = Guard::new("plan", &back);
        for wanted in all {
            back.send(done(wanted));
        }
        guard.over();
    };
    std::thread::Builder::new().name("plan".into()).spawn(plan)?;
    Ok(plans)
}

/// Ends the job where a thread panics that others wait for.
pub struct Guard {
    thread: &'static str,
    back: Option<Line>,
}

impl Guard {
    /// Of the thread that runs.
    pub fn new(thread: &'static str, back: &Line) -> Self {
        Self { thread, back: Some(back.clone()) }
    }

    /// The thread ends as it should.
    pub fn over(mut self) {
        self.back = None;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(back) = &self.back {
            let reason = format!("the {} thread panicked; its log says where", self.thread);
            back.send(Request::Fail(reason));
        }
    }
}

/// Makes a header; plans a step, and places its bundles; reads a word; deals out a round; or drops what is finished.
pub fn done(wanted: Wanted) -> Request {
    match wanted {
        Wanted::Making(it) => Request::Made(Box::new(it.make())),
        Wanted::Own(it, trainers) => {
            Request::Planned(Box::new(planning::own(it.header(), trainers)))
        }
        Wanted::Plan(it) => Request::Planned(Box::new(planning::ready(*it))),
        Wanted::Read(it) => Request::Read(Box::new(it.read())),
        Wanted::Reassign(it) => Request::Reassigned(Box::new(it.reassign())),
        Wanted::Finished(all) => {
            all.into_iter().for_each(Finished::free);
            Request::Freed
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::SyncSender;

    use cadre_exchange::Waker;

    use super::super::{Asked, Handle};
    use super::*;
    use crate::memory::HostRows;

    #[test]
    fn what_is_finished_is_dropped_by_the_planning_thread() {
        struct Named(SyncSender<Option<String>>);

        impl Drop for Named {
            fn drop(&mut self) {
                self.0.send(std::thread::current().name().map(str::to_owned)).unwrap();
            }
        }

        let (handle, requests) = Handle::<HostRows>::channel(Waker::new().unwrap());
        let plans = start(handle.line()).unwrap();
        let (dropped, by) = sync_channel(1);
        plans.send(Wanted::Finished(vec![Finished::new(Named(dropped))])).unwrap();
        assert!(matches!(requests.recv(), Ok(Asked::For(Request::Freed))));
        assert_eq!(by.recv().unwrap().as_deref(), Some("plan"));
    }

    #[test]
    fn a_thread_that_panics_ends_the_job_by_its_name() {
        let (handle, requests) = Handle::<HostRows>::channel(Waker::new().unwrap());
        let back = handle.line();
        drop(handle);
        Guard::new("plan", &back).over();
        let thread = std::thread::spawn(move || {
            let _guard = Guard::new("plan", &back);
            panic!("a bug");
        });
        assert!(thread.join().is_err());
        let Ok(Asked::For(Request::Fail(reason))) = requests.recv() else {
            panic!("the job goes on")
        };
        assert!(reason.starts_with("the plan thread panicked"), "{reason}");
        assert!(requests.recv().is_err());
    }
}
