//! Random lives of a pool: jobs come and go, servers die, drain and come, controllers change. What must
//! hold at every moment is checked by the world; here, that in the end everything is used.

use cadre_views::{Fate, ServerId};
use proptest::prelude::*;

use super::world::World;

const JOBS: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Debug)]
enum Event {
    Start(usize),
    Finish(usize),
    /// Its trainers start again, and the conductor may have said that the attempt is over.
    Again(usize, bool),
    Step(usize),
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
        2 => (0_usize..8).prop_map(Event::Kill),
        2 => (0_usize..8).prop_map(Event::Drain),
        1 => (0_usize..8).prop_map(Event::Terminate),
        1 => (1_u32..6).prop_map(Event::Want),
        1 => (0_u64..2).prop_map(Event::Controller),
        2 => (1_u64..40).prop_map(Event::Pass),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_every_slot_has_its_server_in_the_end(
        events in prop::collection::vec(event(), 1..60),
    ) {
        let mut world = World::new(1, 3);
        let mut running = [false; JOBS.len()];
        let (mut term, mut wanted, mut incarnation) = (1, 3, 0);
        for event in events {
            let servers = world.servers();
            let pick = |at: usize| servers.get(at % servers.len().max(1)).copied();
            match event {
                Event::Start(job) if !running[job] => {
                    world.start_job(JOBS[job], 1 + job as u32, false);
                    running[job] = true;
                }
                Event::Finish(job) if running[job] => {
                    world.finish(JOBS[job]);
                    running[job] = false;
                }
                Event::Again(job, is_told) if running[job] => {
                    // The conductor that says nothing is the first, for who comes before belongs to the run before.
                    let first = if is_told { job as u32 } else { 0 };
                    world.start_again(JOBS[job], first, is_told);
                }
                Event::Step(job) if running[job] => world.step(JOBS[job]),
                Event::Start(_) | Event::Finish(_) | Event::Again(..) | Event::Step(_) => {}
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
                Event::Pass(seconds) => world.live(seconds),
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
        for _ in 0..6 {
            world.live(20);
            for job in (0..JOBS.len()).filter(|it| running[*it]) {
                world.step(JOBS[job]);
            }
        }
        let filled: usize = JOBS
            .iter()
            .filter_map(|it| world.last(it))
            .flat_map(|it| &it.slots)
            .filter(|it| it.server.is_some())
            .count();
        let any = running.contains(&true);
        prop_assert_eq!(filled, if any { wanted as usize } else { 0 });
    }
}
