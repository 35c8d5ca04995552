//! Workers that come late or once more: trainers of a job that is not whole, another run of a job under its key, connections that
//! broke.

use cadre_views::{Hello, Input, ServerId, Who};

use super::id;
use super::world::{Worker, World, key};

impl World {
    /// Of a job with so many trainers the conductor alone comes: the images of the others do not.
    pub(crate) fn begin_job(&mut self, job: &str, trainers: u32) {
        self.make_trainers(job, trainers);
        self.greet(&Who::Trainer(key(job), 0));
    }

    /// The others come, too.
    pub(crate) fn complete_job(&mut self, job: &str, trainers: u32) {
        for rank in 1..trainers {
            self.greet(&Who::Trainer(key(job), rank));
        }
        self.step(job);
    }

    /// Trainers start again where they were, this one first; the conductor may have said before that the attempt is over.
    pub(crate) fn start_again(&mut self, job: &str, first: u32, is_told: bool) {
        let key = key(job);
        if is_told {
            self.put(Input::Finished(key.clone()));
        }
        self.run += 1;
        self.stepped.remove(&key);
        let trainer = |it: &Who| match it {
            Who::Trainer(of, rank) if *of == key => Some(*rank),
            Who::Trainer(..) | Who::Server(_) => None,
        };
        let mut ranks: Vec<_> = self.workers.keys().filter_map(trainer).collect();
        ranks.sort_by_key(|it| *it != first);
        for rank in ranks {
            let secret = if rank == 0 { vec![self.run; 32] } else { Vec::new() };
            let hello = Hello { secret, data_version: self.data_version, ..Hello::default() };
            let who = Who::Trainer(key.clone(), rank);
            self.workers.insert(who.clone(), Worker { hello, ..Worker::default() });
            self.greet(&who);
        }
        self.step(job);
    }

    /// The connection of a server breaks, and it comes again.
    pub(crate) fn reconnect(&mut self, id: ServerId) {
        self.put(Input::Detached(Who::Server(id)));
        self.greet(&Who::Server(id));
    }
}

/// As containers that are started again in their pods, and jobs that are made anew under their names.
#[test]
fn another_run_of_a_job_under_its_key_gets_servers_though_the_one_before_has_not_gone() {
    for (first, is_told) in [(0, true), (1, true), (0, false), (1, false)] {
        let mut world = World::new(1, 2);
        world.start_job("j", 2, false);
        for _ in 0..3 {
            world.start_again("j", first, is_told);
            world.live(5);
            let now = (world.held_by("j"), world.view("j"), world.unserved("j"));
            assert!(now.1.ends_with(": D0.0 D1.0"), "{first}, {is_told}: {now:?}");
            assert_eq!((now.0, now.2), (2, None));
        }
        world.finish("j");
        assert_eq!(world.waiting().len(), 2);
    }
}

#[test]
fn a_job_whose_pods_are_named_again_gets_its_servers_back() {
    let mut world = World::new(1, 2);
    world.start_job("j", 1, false);
    // Its namespace was taken off the pool's list by mistake.
    world.facts.jobs.clear();
    world.tell_facts();
    assert_eq!(world.held_by("j"), 0);
    world.facts.jobs.insert(key("j"));
    world.tell_facts();
    world.live(1);
    assert_eq!(world.held_by("j"), 2);
    assert!(world.view("j").ends_with(": D0.0 D1.0"), "{}", world.view("j"));
}

#[test]
fn a_server_that_did_not_hear_that_it_changes_hands_is_told_again() {
    let mut world = World::new(1, 2);
    world.start_job("a", 1, false);
    world.start_job("b", 1, false);
    world.loses_drains = true;
    world.step("a");
    assert_eq!((world.held_by("a"), world.held_by("b")), (2, 0));
    world.loses_drains = false;
    world.reconnect(id(1, 0));
    assert_eq!((world.held_by("a"), world.held_by("b")), (1, 1));
}
