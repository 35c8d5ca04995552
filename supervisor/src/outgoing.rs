//! The queue of events to the display and the files, whose reader may stop: a pipe that nobody reads, a disk that hangs.
//!
//! In: events, in order. Out: the same, through a bounded queue. The supervisor never waits for the reader, so that it can still
//! end the run. While the queue is full, it stops reading from workers ([`Gate`]).
//!
//! ```text
//! supervisor ──has room──▶ queue ──▶ display and files
//!     └──full: load reports are dropped, all else waits here, and workers are not heard until it is gone
//! ```
//!
//! Invariant: no event but a load report is lost or reordered. Few events wait here: those that were in the supervisor's own
//! queue when this one filled up, and the ends of its processes.

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::event::RunEvent;

/// A gate that holds a thread while it is closed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Blocks while the gate is closed.
    pub(crate) fn pass(&self) {
        let (closed, changed) = &*self.0;
        let guard = closed.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_while(guard, |closed| *closed).unwrap_or_else(PoisonError::into_inner));
    }

    fn close(&self, close: bool) {
        let (closed, changed) = &*self.0;
        *closed.lock().unwrap_or_else(PoisonError::into_inner) = close;
        changed.notify_all();
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Outgoing {
    queue: SyncSender<RunEvent>,
    waiting: VecDeque<RunEvent>,
    gate: Gate,
}

impl Outgoing {
    pub(crate) fn new(queue: SyncSender<RunEvent>, gate: Gate) -> Self {
        Self { queue, waiting: VecDeque::new(), gate }
    }

    /// Whether events wait here because the queue was full.
    pub(crate) fn is_held_up(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Appends an event. Drops load reports while other events wait here, and any event if the reader is gone.
    pub(crate) fn put(&mut self, event: RunEvent) {
        if self.is_held_up() {
            if !matches!(event, RunEvent::Load(_)) {
                self.waiting.push_back(event);
            }
            return;
        }
        match self.queue.try_send(event) {
            Ok(()) | Err(TrySendError::Disconnected(_) | TrySendError::Full(RunEvent::Load(_))) => {
            }
            Err(TrySendError::Full(event)) => {
                self.waiting.push_back(event);
                self.gate.close(true);
            }
        }
    }

    /// Moves waiting events into the queue, as far as it has room.
    pub(crate) fn go_on(&mut self) {
        while let Some(event) = self.waiting.pop_front() {
            if let Err(TrySendError::Full(event)) = self.queue.try_send(event) {
                self.waiting.push_front(event);
                return;
            }
        }
        self.gate.close(false);
    }

    /// Blocks until all events are in the queue, or the reader is gone. It is called when no process is left.
    pub(crate) fn finish(&mut self) {
        for event in self.waiting.drain(..) {
            if self.queue.send(event).is_err() {
                return;
            }
        }
    }
}

/// Who waits at the gate ends, too.
impl Drop for Outgoing {
    fn drop(&mut self) {
        self.gate.close(false);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;
    use std::thread;

    use super::super::event::{Level, LoadRecord, Role, WorkerName};
    use super::*;

    fn notice(number: usize) -> RunEvent {
        RunEvent::Notice { level: Level::Information, text: number.to_string() }
    }

    fn load() -> RunEvent {
        let worker = WorkerName { role: Role::Server, index: 0, incarnation: 0 };
        RunEvent::Load(LoadRecord {
            worker,
            step: 0,
            queue: 0,
            busy: 0.0,
            tasks_per_second: 0.0,
            observed_over_expected: 0.0,
            memory_bytes: 0,
        })
    }

    #[test]
    fn a_queue_that_is_full_loses_load_reports_alone_and_stops_who_says_more() {
        let (queue, taken) = sync_channel(2);
        let gate = Gate::default();
        let mut events = Outgoing::new(queue, gate.clone());
        events.put(load());
        gate.pass();
        for number in 0..4 {
            events.put(notice(number));
            events.put(load());
        }
        assert!(events.is_held_up());
        let (passed, waits) = sync_channel(1);
        let other = gate.clone();
        let waiting = thread::spawn(move || {
            other.pass();
            passed.send(()).ok();
        });
        let mut told = Vec::new();
        while events.is_held_up() {
            assert!(waits.try_recv().is_err(), "somebody passed a closed gate");
            told.extend(taken.try_iter());
            events.go_on();
        }
        waiting.join().expect("it passes when there is room");
        told.extend(taken.try_iter());
        let text = |it: &RunEvent| match it {
            RunEvent::Notice { text, .. } => Some(text.clone()),
            RunEvent::Load(_) => Some("load".into()),
            RunEvent::Attempt(_)
            | RunEvent::Process(_)
            | RunEvent::ProcessEnded { .. }
            | RunEvent::Step(_)
            | RunEvent::Server(_)
            | RunEvent::Header { .. }
            | RunEvent::Finished(_) => None,
        };
        let told: Vec<_> = told.iter().filter_map(text).collect();
        assert_eq!(told, ["load", "0", "1", "2", "3"], "the second place was a notice's");
    }

    #[test]
    fn nobody_waits_for_events_of_a_run_that_nobody_follows() {
        let (queue, taken) = sync_channel(1);
        let gate = Gate::default();
        let mut events = Outgoing::new(queue, gate.clone());
        (0..3).for_each(|it| events.put(notice(it)));
        drop(taken);
        events.go_on();
        assert!(!events.is_held_up());
        gate.pass();
        events.put(notice(3));
        events.finish();
    }
}
