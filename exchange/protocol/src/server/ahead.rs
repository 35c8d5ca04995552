//! Which works are ready: all works of a bundle when all its rows are here. Before that some may run ahead of their bundle: those
//! whose own rows are here.
//!
//! Nobody computes on memory to which pulls still write. So works that run ahead get a copy of
//! their rows ([`Command::Ahead`]). Where the shell cannot make copies, works wait for their whole bundle.
//!
//! * When: nothing else is ready, so that whoever computes would wait. The earliest phase comes first; where many bundles find no
//!   room, later ones may be looked at before earlier ones are again.
//! * Room: as much as all rows of the bundle, out of what the reserve has free. If that is too little, they wait for
//!   their bundle.
//! * Who: in place, what was planned here is the trainer's main thread's, which may stand in code of its own until others have
//!   their results. Beside dedicated servers those may be of bundles that move here and want the reserve, so none of it runs ahead.
//! * Cost: a copy has at least twice the bytes of the bundle's copy before it. So all copies of a bundle together have
//!   fewer than twice the bytes of its rows, however many parcels these come in.
//!
//! Guarantees: copies are of one bundle at a time, and they keep nobody waiting for long: the works that read them wait
//! for nobody, and when the last of them ran the room is free.

use std::ops::Bound;

use super::active::{Active, Key};
use super::listed::look;
use super::room::{FRONT, Room};
use super::{Command, Host, Server};
use crate::{Filler, Work};

/// Bundles that one event looks at, at most: the next one goes on where it stopped.
const MAX_LOOKS_AN_EVENT: usize = 64;

impl Server {
    /// All works of a bundle are ready when all its rows are here; before that, some may run ahead of it.
    pub(super) fn make_ready(&mut self, key: Key, out: &mut Vec<Command>) {
        let active = self.active.get_mut(&key).expect("only active bundles become ready");
        if active.absent > 0 {
            if !active.runnable.is_empty() {
                self.ahead.insert(key);
            }
            return;
        }
        self.ahead.remove(&key);
        for work in active.take_runnable() {
            self.ready += 1;
            out.push(Command::Ready { at: key.0, work });
        }
    }

    /// Hands out works ahead of their bundle, if no other work is ready.
    pub(super) fn run_ahead(&mut self, out: &mut Vec<Command>) {
        if self.ready > 0 || !self.settings.runs_ahead || !self.rooms.may_lend_anything() {
            return;
        }
        let from = self.ahead_from.take().unwrap_or(FRONT);
        let mut next = self.ahead.range(from..).next().or(self.ahead.first()).copied();
        let mut looks = 0;
        while let Some(key) = next {
            if looks == MAX_LOOKS_AN_EVENT {
                self.ahead_from = next;
                return;
            }
            looks += 1;
            next = self.ahead.range((Bound::Excluded(key), Bound::Unbounded)).next().copied();
            let active = &self.active[&key];
            look(1);
            if !self.is_always_run(key, active) {
                self.ahead.remove(&key);
                continue;
            }
            // Most of what waits does so for room: that is looked at first.
            if !self.rooms.may_lend(key.0, active.rows) {
                continue;
            }
            let active = self.active.get_mut(&key).expect("bundles that are partly here have room");
            let bytes = active.read_bytes;
            if active.runnable.is_empty() || bytes < 2 * active.copied {
                // Until more of it is here.
                self.ahead.remove(&key);
                continue;
            }
            let room = active.rows;
            if self.rooms.lend(key.0, room).is_none() {
                continue;
            }
            active.copied = bytes;
            let works = active.take_runnable();
            active.ahead.extend(&works);
            self.ready += works.len();
            self.ahead.remove(&key);
            out.push(Command::Ahead { at: key.0, works });
            return;
        }
    }

    /// Whether whoever runs the works of a bundle waits for nobody meanwhile, or nobody for the room of their copy.
    fn is_always_run(&self, key: Key, active: &Active) -> bool {
        let is_server = |it: &Option<Filler>| matches!(it, Some(Filler::Server(_)));
        match self.host {
            Host::Dedicated(_) => true,
            Host::InPlace(_) => {
                let fillers = &self.steps[&key.0.step].step.table().fillers;
                active.room == Room::Reserve || !fillers.iter().any(is_server)
            }
        }
    }

    /// A work ran, or was dropped: if it was the last that reads a copy, that is gone.
    pub(super) fn ran_ahead(&mut self, key: Key, work: Work) {
        let active = self.active.get_mut(&key).expect("a bundle outlives its works");
        if active.ahead.remove(&work) && active.ahead.is_empty() {
            let room = active.rows;
            self.rooms.free(key.0, Room::Reserve, room);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::server::Event;
    use crate::{
        Acks, At, Bundle, BundleShape, Message, Nanos, Parcel, ParcelShape, Peer, PullId, Round,
        RoundTable, ServerId, Settings, Shape, Slot, Step, TrainerId, WorkShape,
    };

    const ME: ServerId = ServerId { index: 0, incarnation: 0 };
    const AT: At = At::new(0, 0);

    /// A server of one phase; what it says is ready, as commands.
    struct Alone {
        server: Server,
        pulls: Vec<(PullId, Parcel)>,
        said: Vec<Command>,
    }

    impl Alone {
        /// One bundle with a parcel of 10 bytes of each trainer; each work needs the first so many.
        fn new(trainers: u16, needs: &[u32], settings: Settings) -> Self {
            let parcel = |it| ParcelShape { bundle: Bundle(0), from: TrainerId(it), bytes: 10 };
            let work = |&it: &u32| WorkShape {
                bundle: Bundle(0),
                needs: (0..it).map(Parcel).collect(),
                results: vec![(TrainerId(0), 100)],
            };
            let (works, parcels) = (needs.iter().map(work), (0..trainers).map(parcel));
            let bundles = vec![BundleShape { slot: Slot(0) }];
            let shape = Shape::new(bundles, works.collect(), parcels.collect()).unwrap();
            let table = RoundTable {
                step: 0,
                round: Round(0),
                fillers: vec![Some(Filler::Server(ME))],
                assignments: vec![vec![Some(Slot(0))]],
            };
            let step = Step::new(trainers, 7, vec![Arc::new(shape)], vec![0], table).unwrap();
            let server = Server::new(Host::Dedicated(ME), u64::MAX, settings, Nanos(0));
            let mut it = Self { server, pulls: Vec::new(), said: Vec::new() };
            it.handle(Event::Begin(Arc::new(step)));
            for from in (0..trainers).map(|it| Peer::Trainer(TrainerId(it))) {
                let (round, acks) = (Round(0), Acks::default());
                let message = Message::Doorbell { at: AT, round, acks, digest: 7 };
                it.handle(Event::Message { from, message });
            }
            it
        }

        fn handle(&mut self, event: Event) {
            let mut out = Vec::new();
            self.server.handle(Nanos(0), event, &mut out);
            for command in out {
                if let Command::Pull { pull, parcel, .. } = command {
                    self.pulls.push((pull, parcel));
                } else if matches!(command, Command::Ahead { .. } | Command::Ready { .. }) {
                    self.said.push(command);
                }
            }
        }

        /// What is ready when a parcel has landed.
        fn land(&mut self, parcel: u32) -> Vec<Command> {
            let of = self.pulls.iter().find(|it| it.1 == Parcel(parcel));
            let pull = of.expect("every parcel is pulled").0;
            self.handle(Event::Pulled { pull, result: Ok(0) });
            std::mem::take(&mut self.said)
        }

        fn run(&mut self, works: &[u32]) -> Vec<Command> {
            let works = works.iter().map(|&it| Work(it)).collect();
            self.handle(Event::Ran { at: AT, works });
            std::mem::take(&mut self.said)
        }
    }

    fn ahead(works: &[u32]) -> Vec<Command> {
        vec![Command::Ahead { at: AT, works: works.iter().map(|&it| Work(it)).collect() }]
    }

    fn ready(works: &[u32]) -> Vec<Command> {
        works.iter().map(|&it| Command::Ready { at: AT, work: Work(it) }).collect()
    }

    #[test]
    fn works_start_on_the_rows_that_they_need_when_nothing_else_is_ready() {
        let mut it = Alone::new(4, &[1, 1, 2, 3, 4], Settings::default());
        assert_eq!(it.land(1), [], "the first parcel is everybody's");
        assert_eq!(it.land(0), ahead(&[0, 1, 2]), "works that need the first two");
        assert_eq!(it.land(2), [], "three are ready already");
        assert_eq!(it.run(&[0, 1]), [], "one is");
        assert_eq!(it.land(3), ready(&[3, 4]), "the bundle is whole");
        assert_eq!(it.run(&[2]), []);
        assert_eq!(it.run(&[3, 4]), []);
        assert_eq!(it.server.rooms.lend(AT, 540), Some(()), "the whole reserve is free");
    }

    #[test]
    fn what_landed_meanwhile_starts_when_the_last_work_ran() {
        let mut it = Alone::new(3, &[1, 2, 3], Settings::default());
        assert_eq!(it.land(0), ahead(&[0]));
        assert_eq!(it.land(1), []);
        assert_eq!(it.run(&[0]), ahead(&[1]));
        assert_eq!(it.land(2), ready(&[2]));
    }

    /// Trainer 0's server in place, beside a dedicated one or another trainer's; each has one bundle of rows of trainers 1 and 2.
    #[test]
    fn in_place_no_copy_keeps_a_bundle_that_moves_here_waiting_for_the_main_thread() {
        let parcel = |it: u32| {
            let from = TrainerId(1 + (it % 2) as u16);
            ParcelShape { bundle: Bundle(it / 2), from, bytes: 10 }
        };
        let work = |bundle: u32, needs: &[u32]| WorkShape {
            bundle: Bundle(bundle),
            needs: needs.iter().map(|it| Parcel(*it)).collect(),
            results: vec![(TrainerId(1), 10)],
        };
        let works = vec![work(0, &[0]), work(0, &[0, 1]), work(1, &[2, 3])];
        let bundles = [0, 1].map(|it| BundleShape { slot: Slot(it) }).to_vec();
        let shape = Arc::new(Shape::new(bundles, works, (0..4).map(parcel).collect()).unwrap());
        let slots = [Some(Slot(0)), Some(Slot(1))].to_vec();
        let here = Some(Filler::InPlace(TrainerId(0)));
        for (other, ran_ahead) in
            [(Filler::Server(ME), false), (Filler::InPlace(TrainerId(1)), true)]
        {
            let table = |round, fillers: [_; 2], slots| RoundTable {
                step: 0,
                round: Round(round),
                fillers: fillers.to_vec(),
                assignments: vec![slots],
            };
            let first = table(0, [here, Some(other)], slots.clone());
            let step = Step::new(3, 7, vec![Arc::clone(&shape)], vec![0], first).unwrap();
            // Two phases of 40 bytes and a reserve of 40 hold no copy beside a bundle that moved.
            let host = Host::InPlace(TrainerId(0));
            let server = Server::new(host, u64::MAX, Settings::default(), Nanos(0));
            let mut it = Alone { server, pulls: Vec::new(), said: Vec::new() };
            it.handle(Event::Begin(Arc::new(step)));
            let ring = |it: &mut Alone, from: u16| {
                let (round, acks) = (Round(0), Acks::default());
                let message = Message::Doorbell { at: AT, round, acks, digest: 7 };
                it.handle(Event::Message { from: Peer::Trainer(TrainerId(from)), message });
            };
            ring(&mut it, 1);
            assert_eq!(it.land(0), if ran_ahead { ahead(&[0]) } else { Vec::new() });
            if ran_ahead {
                continue;
            }
            // The main thread stands in the model's code, the dedicated server is lost, and all of its bundle is readable.
            let next = table(1, [here, None], [Some(Slot(0)); 2].to_vec());
            it.handle(Event::Round(Arc::new(next)));
            ring(&mut it, 2);
            assert!(it.pulls.iter().any(|it| it.1 == Parcel(2)), "it has no room");
        }
    }

    #[test]
    fn each_copy_of_a_bundles_rows_is_twice_the_one_before() {
        let mut it = Alone::new(9, &[1, 2, 3, 4, 5, 6, 7, 8, 9], Settings::default());
        let mut copied = Vec::new();
        for parcel in 0..8 {
            for command in it.land(parcel) {
                let Command::Ahead { works, .. } = command else { panic!("{command:?}") };
                let works: Vec<u32> = works.into_iter().map(|it| it.0).collect();
                assert_eq!(it.run(&works), []);
                copied.push(works);
            }
        }
        assert_eq!(copied, [vec![0], vec![1], vec![2, 3], vec![4, 5, 6, 7]]);
        assert_eq!(it.land(8), ready(&[8]));
    }

    #[test]
    fn works_wait_for_their_bundle_without_room_for_a_copy_or_where_none_can_be_made() {
        let mut it = Alone::new(2, &[1, 2], Settings::default());
        // The reserve is 220 bytes, all rows are 20.
        it.server.rooms.lend(AT, 201).unwrap();
        assert_eq!(it.land(0), []);
        assert_eq!(it.land(1), ready(&[0, 1]));

        let settings = Settings { runs_ahead: false, ..Settings::default() };
        let mut it = Alone::new(2, &[1, 2], settings);
        assert_eq!(it.land(0), []);
        assert_eq!(it.land(1), ready(&[0, 1]));
    }
}
