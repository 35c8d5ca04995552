//! Discrete events: activities that wait for each other and for resources.
//!
//! In: activities, each with a duration, at most one resource and an order; edges between them. Out: when each starts
//! and ends. A resource does one activity at a time, of those that are ready the one with the lowest order, and is
//! never idle while one is ready. Ties go by number, so a run has one outcome.
//!
//! An edge waits for an activity's end or only for its start; the second is how a transfer occupies the sender's and
//! the receiver's link at the same time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::machine::Nanos;

/// Index of an activity.
pub(crate) type Activity = usize;
/// Index of a resource.
pub(crate) type Resource = usize;

/// Activities and edges.
#[derive(Clone, Debug, Default)]
pub(crate) struct Engine {
    activities: Vec<Row>,
    edges: Vec<Edge>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    resource: Option<Resource>,
    order: u64,
    duration: Nanos,
}

#[derive(Clone, Copy, Debug)]
struct Edge {
    from: Activity,
    to: Activity,
    delay: Nanos,
    from_start: bool,
}

impl Engine {
    /// Adds an activity. One without a resource occupies nothing and only takes time.
    pub(crate) fn add(
        &mut self,
        resource: Option<Resource>,
        order: u64,
        duration: Nanos,
    ) -> Activity {
        self.activities.push(Row { resource, order, duration });
        self.activities.len() - 1
    }

    /// `to` starts no earlier than `delay` after the end of `from`.
    pub(crate) fn after(&mut self, from: Activity, to: Activity, delay: Nanos) {
        self.edges.push(Edge { from, to, delay, from_start: false });
    }

    /// `to` starts no earlier than `from` does.
    pub(crate) fn after_start(&mut self, from: Activity, to: Activity) {
        self.edges.push(Edge { from, to, delay: 0, from_start: true });
    }

    /// Runs all activities; returns the time at which the last one ends.
    pub(crate) fn run(self) -> Nanos {
        self.times().into_iter().map(|it| it.1).max().unwrap_or(0)
    }

    /// Start and end of each activity. A circle of edges is a bug of the caller.
    fn times(mut self) -> Vec<(Nanos, Nanos)> {
        self.edges.sort_by_key(|it| it.from);
        let count = self.activities.len();
        let mut waits = vec![0_u32; count];
        let mut first = vec![0; count + 1];
        for edge in &self.edges {
            waits[edge.to] += 1;
            first[edge.from + 1] += 1;
        }
        for index in 0..count {
            first[index + 1] += first[index];
        }
        let resources = self.activities.iter().filter_map(|it| it.resource).max();
        let resources = resources.map_or(0, |last| last + 1);
        let queues = vec![Queue::default(); resources];
        let mut run = Run { engine: &self, first, waits, queues, events: BinaryHeap::new() };
        let mut times = vec![(Nanos::MAX, Nanos::MAX); count];
        for activity in 0..count {
            if run.waits[activity] == 0 {
                run.events.push(Reverse((0, What::Ready, activity)));
            }
        }
        while let Some(Reverse((now, what, index))) = run.events.pop() {
            match what {
                What::End => run.end(now, index),
                What::Release => run.release(now, index),
                What::Ready => run.ready(now, index, &mut times),
                What::Serve => run.serve(now, index, &mut times),
            }
        }
        debug_assert!(times.iter().all(|it| it.1 != Nanos::MAX), "activities wait in a circle");
        times
    }
}

/// Kinds of events. At one moment they happen in this order, so that a resource chooses when all else is known.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum What {
    /// An activity ends.
    End,
    /// An activity has one edge less to wait for.
    Release,
    /// An activity waits for nothing but its resource.
    Ready,
    /// A resource may take its next activity.
    Serve,
}

#[derive(Clone, Debug, Default)]
struct Queue {
    busy: bool,
    ready: BinaryHeap<Reverse<(u64, Activity)>>,
}

struct Run<'a> {
    engine: &'a Engine,
    /// By activity: index of its first edge.
    first: Vec<usize>,
    waits: Vec<u32>,
    queues: Vec<Queue>,
    /// Pending events: time, kind, and the activity or resource.
    events: BinaryHeap<Reverse<(Nanos, What, usize)>>,
}

impl Run<'_> {
    fn ready(&mut self, now: Nanos, activity: Activity, times: &mut [(Nanos, Nanos)]) {
        let Row { resource, order, .. } = self.engine.activities[activity];
        match resource {
            None => self.start(now, activity, times),
            Some(resource) => {
                self.queues[resource].ready.push(Reverse((order, activity)));
                self.events.push(Reverse((now, What::Serve, resource)));
            }
        }
    }

    fn serve(&mut self, now: Nanos, resource: Resource, times: &mut [(Nanos, Nanos)]) {
        let queue = &mut self.queues[resource];
        if queue.busy {
            return;
        }
        if let Some(Reverse((_, activity))) = queue.ready.pop() {
            queue.busy = true;
            self.start(now, activity, times);
        }
    }

    fn start(&mut self, now: Nanos, activity: Activity, times: &mut [(Nanos, Nanos)]) {
        let end = now + self.engine.activities[activity].duration;
        times[activity] = (now, end);
        self.events.push(Reverse((end, What::End, activity)));
        self.follow(now, activity, true);
    }

    fn end(&mut self, now: Nanos, activity: Activity) {
        self.follow(now, activity, false);
        if let Some(resource) = self.engine.activities[activity].resource {
            self.queues[resource].busy = false;
            self.events.push(Reverse((now, What::Serve, resource)));
        }
    }

    /// Posts the edges that leave from an activity's start, or from its end.
    fn follow(&mut self, now: Nanos, activity: Activity, from_start: bool) {
        let edges = &self.engine.edges[self.first[activity]..self.first[activity + 1]];
        for edge in edges.iter().filter(|it| it.from_start == from_start) {
            self.events.push(Reverse((now + edge.delay, What::Release, edge.to)));
        }
    }

    fn release(&mut self, now: Nanos, activity: Activity) {
        self.waits[activity] -= 1;
        if self.waits[activity] == 0 {
            self.events.push(Reverse((now, What::Ready, activity)));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_resource_takes_the_lowest_order_of_those_ready() {
        let mut engine = Engine::default();
        let first = engine.add(Some(0), 9, 10);
        let late = engine.add(Some(0), 2, 5);
        let early = engine.add(Some(0), 1, 5);
        let free = engine.add(None, 0, 3);
        engine.after(first, late, 0);
        engine.after(first, early, 0);
        engine.after(late, free, 4);
        assert_eq!(engine.clone().run(), 27);
        assert_eq!(engine.times(), [(0, 10), (15, 20), (10, 15), (24, 27)]);
    }

    #[test]
    fn a_transfer_holds_both_links_at_once() {
        let mut engine = Engine::default();
        let other = engine.add(Some(1), 0, 4);
        let out = engine.add(Some(0), 1, 10);
        let into = engine.add(Some(1), 1, 10);
        engine.after_start(out, into);
        let times = engine.times();
        assert_eq!(times[other], (0, 4));
        assert_eq!(times[into], (4, 14));
    }

    proptest! {
        #[test]
        fn no_resource_does_two_things_and_no_edge_is_broken(
            rows in prop::collection::vec((0_usize..4, 0_u64..5, 0_u64..50), 1..60),
            pairs in prop::collection::vec((0_usize..60, 0_usize..60, 0_u64..5, any::<bool>()), 0..120),
        ) {
            let mut engine = Engine::default();
            for &(resource, order, duration) in &rows {
                engine.add(Some(resource).filter(|it| *it < 3), order, duration);
            }
            for &(a, b, delay, start) in &pairs {
                let (from, to) = (a.min(b) % rows.len(), a.max(b) % rows.len());
                if from < to {
                    if start { engine.after_start(from, to) } else { engine.after(from, to, delay) }
                }
            }
            let edges = engine.edges.clone();
            let times = engine.times();
            for edge in edges {
                let from = times[edge.from];
                let earliest = if edge.from_start { from.0 } else { from.1 + edge.delay };
                prop_assert!(times[edge.to].0 >= earliest);
            }
            for resource in 0..3 {
                let mut held: Vec<_> = (0..rows.len()).filter(|it| rows[*it].0 == resource).map(|it| times[it]).collect();
                held.sort_unstable();
                prop_assert!(held.windows(2).all(|it| it[0].1 <= it[1].0));
            }
        }
    }
}
