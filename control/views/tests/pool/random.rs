//! Random lives of a pool: jobs come and go, servers die, drain and come, controllers change. What must
//! hold at every moment is checked by the world; here, that in the end everything is used, by the shares of those
//! who train; and that nothing moves then.

use cadre_views::{Fate, ServerId};
use proptest::prelude::*;

use super::rest::Rest;
use super::world::{World, key};

const JOBS: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Debug)]
enum Event {
    Start(usize),
    Finish(usize),
    /// Its trainers start again, and the conductor may have said that the attempt is over.
    Again(usize, bool),
    Step(usize),
    /// No step of it is out for the time being, or one that computes nothing.
    Rest(usize, bool),
    Kill(usize),
    Drain(usize),
    Terminate(usize),
    Want(u32),
    Controller(u64),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (0..JOBS.len()).prop_map(Event::Start),
        1 => (0..JOBS.len()).prop_map(Event::Finish),
        1 => (0..JOBS.len(), any::<bool>()).prop_map(|(job, is_told)| Event::Again(job, is_told)),
        6 => (0..JOBS.len()).prop_map(Event::Step),
        3 => (0..JOBS.len(), any::<bool>()).prop_map(|(job, is_out)| Event::Rest(job, is_out)),
        2 => (0_usize..8).prop_map(Event::Kill),
        2 => (0_usize..8).prop_map(Event::Drain),
        1 => (0_usize..8).prop_map(Event::Terminate),
        1 => (1_u32..6).prop_map(Event::Want),
        1 => (0_u64..2).prop_map(Event::Controller),
        4 => (1_u64..40).prop_map(Event::Pass),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_every_slot_has_its_server_in_the_end(
        events in prop::collection::vec(event(), 1..60),
    ) {
        let mut world = World::new(1, 3);
        let mut running = [false; JOBS.len()];
        let (mut term, mut wanted, mut incarnation, mut passed) = (1, 3, 0, 0);
        for event in events {
            let servers = world.servers();
            let pick = |at: usize| servers.get(at % servers.len().max(1)).copied();
            match event {
                Event::Start(job) if !running[job] => {
                    world.start_job(JOBS[job], 1 + job as u32, false);
                    running[job] = true;
                }
                Event::Finish(job) if running[job] => {
                    world.go_on(JOBS[job]);
                    world.finish(JOBS[job]);
                    running[job] = false;
                }
                Event::Again(job, is_told) if running[job] => {
                    // The conductor that says nothing is the first, for who comes before belongs to the run before.
                    let first = if is_told { job as u32 } else { 0 };
                    world.go_on(JOBS[job]);
                    world.start_again(JOBS[job], first, is_told);
                }
                Event::Step(job) if running[job] => {
                    world.go_on(JOBS[job]);
                    world.step(JOBS[job]);
                }
                Event::Rest(job, is_out) if running[job] => {
                    let rest = if is_out { Rest::Within } else { Rest::Between };
                    // A header goes out.
                    world.go_on(JOBS[job]);
                    world.resting.insert(key(JOBS[job]), rest);
                }
                Event::Start(_)
                | Event::Finish(_)
                | Event::Again(..)
                | Event::Step(_)
                | Event::Rest(..) => {}
                Event::Kill(at) => {
                    if let Some(id) = pick(at) {
                        world.kill(id);
                        for job in JOBS {
                            world.lose(job, id);
                        }
                    }
                }
                Event::Drain(at) => {
                    if let Some(id) = pick(at) {
                        world.mark(id, Fate::Drains);
                    }
                }
                Event::Terminate(at) => {
                    if let Some(id) = pick(at) {
                        world.terminate(id);
                    }
                }
                Event::Want(number) => {
                    wanted = number;
                    world.want(number);
                }
                Event::Controller(later) => {
                    term += later;
                    world.change_controller(term);
                }
                Event::Pass(seconds) => {
                    passed += seconds;
                    world.live(seconds);
                }
            }
        }
        // Everything that was let go is replaced, and nothing happens any more.
        for id in world.servers() {
            world.kill(id);
            for job in JOBS {
                world.lose(job, id);
            }
        }
        for index in 0..wanted {
            incarnation += 1;
            world.start_server(ServerId { index, incarnation: 1000 + incarnation });
        }
        let there: Vec<&str> = (0..JOBS.len()).filter(|it| running[*it]).map(|it| JOBS[it]).collect();
        let wanted = wanted as usize;
        let least = wanted.checked_div(there.len()).unwrap_or(0);
        // Who rests goes on resting first, then all train.
        for trains in [false, true] {
            if trains {
                for it in &there {
                    world.go_on(it);
                }
            }
            let works: Vec<_> = there.iter().copied().filter(|it| world.trains(it)).collect();
            let shown = |world: &World| there.iter().map(|it| world.servers_of(it)).collect::<Vec<_>>();
            // Who rests is idle after four of its steps, each of which may have taken all the time so far.
            for _ in 0..8 {
                world.live_slowly(50 + passed / 2);
                for it in &works {
                    world.step(it);
                }
            }
            let before = shown(&world);
            world.live_slowly(400);
            for it in &works {
                world.step(it);
            }
            prop_assert_eq!(&shown(&world), &before, "something moves although nothing changes");
            let filled: usize = there
                .iter()
                .filter_map(|it| world.last(it))
                .flat_map(|it| &it.slots)
                .filter(|it| it.server.is_some())
                .count();
            // What a step that is out counts on changes hands when that is over.
            let counted = |it: &&str| world.held_by(it) - world.servers_of(it).len();
            let counted: usize = there.iter().filter(|it| !world.trains(it)).map(counted).sum();
            prop_assert_eq!(filled + counted, if there.is_empty() { 0 } else { wanted });
            for job in &there {
                let (has, lent) = (world.held_by(job), world.lent_by(job));
                prop_assert!(has >= least.min(1), "{} has {}", job, has);
                if works.contains(job) {
                    let is_served = has + counted >= least && lent == 0;
                    prop_assert!(is_served, "{} of {} for {}", has, wanted, job);
                }
                prop_assert!(!trains || has <= least + 1, "{} of {} for {}", has, wanted, job);
            }
        }
    }
}
