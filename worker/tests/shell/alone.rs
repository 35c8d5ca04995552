//! A trainer that is asked to end when nobody is there any more who could end the job.

use cadre_exchange::Role;
use cadre_protocol::Rules;

use crate::faults::{Fault, Faults};
use crate::job::Job;
use crate::random::Random;
use crate::world::World;

const SECOND: u64 = 1_000_000_000;

/// The world says who ends too late.
#[test]
fn a_trainer_whose_conductor_died_ends_soon_when_it_is_asked_to() {
    let mut ended = 0;
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let job = Job::new(seed, &mut random, Rules::all());
        let job = Job { trainers: 2, steps: 4, ..job };
        let died = random.within(SECOND / 100, SECOND / 2);
        let kill = Fault::Kill { who: vec![(Role::Trainer, 0)], silently: false };
        let asked = died + random.within(0, SECOND);
        let list = vec![(died, kill), (asked, Fault::Terminate(1))];
        let outcome = World::new(job, Faults { list, over: asked }, random).run();
        let outcome = outcome.unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        ended += u32::from(outcome.failed);
    }
    assert!(ended > 10, "in {ended} of 20 jobs the conductor dies before the end");
}
