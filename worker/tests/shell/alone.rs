//! What random faults hardly hit: servers that are asked to end in the middle of a step, a trainer that is asked to end when nobody is
//! there any more who could end the job, a path on which messages pass and what is pulled does not, one that is gone for good, a server
//! that is missed in the moment in which a header is planned, and ranks that leave early, one after the other.

use std::collections::BTreeSet;

use cadre_exchange::Role;
use cadre_protocol::{Nanos, Rules, Settings};

use crate::faults::{Fault, Faults, Pulled};
use crate::job::Job;
use crate::random::Random;
use crate::world::{Outcome, World};

const SECOND: u64 = 1_000_000_000;

/// A job of three servers, and what happens to them in the middle of it.
fn three_servers(seed: u64, faults: impl Fn(&mut Random) -> Vec<Fault>) -> Outcome {
    let mut random = Random::new(seed);
    let job = Job::new(seed, &mut random, Rules::all()).waiting(&mut random);
    let job = Job { servers: 3, moments: BTreeSet::new(), ..job };
    let mut when = || random.within(SECOND / 2, 6 * SECOND);
    let moments: Vec<_> = (0..8).map(|_| when()).collect();
    let list: Vec<_> = moments.into_iter().zip(faults(&mut random)).collect();
    let outcome = World::new(job, Faults { list: list.clone(), over: 20 * SECOND }, random).run();
    outcome.unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}; faults: {list:?}"))
}

#[test]
fn servers_that_are_asked_to_end_in_the_middle_of_a_step_are_no_failovers() {
    for seed in 0..40 {
        let drained = |_: &mut Random| (0..2).map(Fault::Drain).collect();
        let Outcome { lost, failed, .. } = three_servers(seed, drained);
        assert_eq!((lost, failed), (0, false), "seed {seed}");
        // Lent to another job, by a controller that may be slow to show a view without them.
        let lent = |_: &mut Random| (0..2).map(Fault::Lend).collect();
        let Outcome { lost, failed, .. } = three_servers(seed, lent);
        assert_eq!((lost, failed), (0, false), "seed {seed}, lent");
        let server = |index| (Role::Server, index);
        let storm = |random: &mut Random| {
            let rank = random.within(0, 1) as u16;
            let mut list = vec![
                Fault::Drain(0),
                Fault::Kill { who: vec![server(1)], silently: random.chance(50) },
            ];
            list.extend((0..4).map(|_| Fault::Blip(server(0), (Role::Trainer, rank), [true; 2])));
            list
        };
        let Outcome { lost, failed, .. } = three_servers(seed, storm);
        assert!(lost <= 1 && !failed, "seed {seed}: {lost} servers are lost, and one was killed");
    }
}

/// How jobs of so many seeds end, with what `made` makes of each.
fn each(seeds: u64, made: impl Fn(Job, &mut Random) -> (Job, Vec<(u64, Fault)>)) -> Vec<Outcome> {
    let one = |seed| {
        let mut random = Random::new(seed);
        let job = Job::new(seed, &mut random, Rules::all());
        let (job, list) = made(job, &mut random);
        let over = list.iter().map(|it| it.0).max().unwrap_or(0);
        let outcome = World::new(job, Faults { list, over }, random).run();
        outcome.unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"))
    };
    (0..seeds).map(one).collect()
}

/// How many of them fail, each with one fault within the first quarter of a second.
fn failed_of(seeds: u64, made: impl Fn(Job, &mut Random) -> (Job, u64, Fault)) -> usize {
    let outcomes = each(seeds, |job, random| {
        let (job, when, fault) = made(job, random);
        (job, vec![(when, fault)])
    });
    outcomes.iter().filter(|it| it.failed).count()
}

/// The world says who ends too late.
#[test]
fn a_trainer_whose_conductor_died_ends_soon_when_it_is_asked_to() {
    let outcomes = each(20, |job, random| {
        let job = Job { trainers: 2, steps: 4, moments: BTreeSet::new(), ..job };
        let died = random.within(SECOND / 100, SECOND / 2);
        let kill = Fault::Kill { who: vec![(Role::Trainer, 0)], silently: false };
        let asked = died + random.within(0, SECOND);
        (job, vec![(died, kill), (asked, Fault::Terminate(1))])
    });
    let ended = outcomes.iter().filter(|it| it.failed).count();
    assert!(ended > 10, "in {ended} of 20 jobs the conductor dies before the end");
}

/// A job of three trainers in which headers, and what they are made of, are published and pulled.
fn long_words(job: Job) -> Job {
    Job { trainers: 3, steps: 4, riding: 50, ..job }
}

/// A job of three trainers that compute in place, and no servers.
fn all_in_place(job: Job) -> Job {
    Job { trainers: 3, servers: 0, in_place: true, local: false, steps: 4, ..job }
}

/// As where long packets are lost: all processes hear each other, and a header, or the lengths for it, never come.
#[test]
fn a_word_that_cannot_be_pulled_ends_the_job_by_name() {
    let ended = failed_of(20, |job, random| {
        let when = random.within(0, SECOND / 4);
        // The other way passes: it brings the reason why the job ends.
        let (one, other) = ((Role::Trainer, 0), (Role::Trainer, random.within(1, 2) as u16));
        let (from, to) = if random.chance(50) { (one, other) } else { (other, one) };
        (long_words(job), when, Fault::Dry(from, to, Pulled::Words))
    });
    assert!(ended > 10, "in {ended} of 20 jobs a word is cut off before the end");
}

/// As where memory or a network is bad: nobody acts on a word that is not what its author has published.
#[test]
fn a_word_that_comes_damaged_ends_the_job_by_name() {
    let ended = failed_of(40, |job, random| {
        let when = random.within(0, SECOND / 4);
        let fault = Fault::Spoil((Role::Trainer, random.within(0, 2) as u16), random.within(0, 60));
        (long_words(job), when, fault)
    });
    assert!(ended > 20, "in {ended} of 40 jobs a word is pulled after that");
}

/// No server can be lost for it, and both reach the conductor.
#[test]
fn trainers_in_place_that_are_cut_off_from_each_other_end_the_job_by_their_names() {
    let ended = failed_of(20, |job, random| {
        let when = random.within(0, SECOND / 4);
        let pair = ((Role::Trainer, 1), (Role::Trainer, 2));
        let cut = Fault::Cut(pair.0, pair.1, 1_000 * SECOND, random.chance(50));
        (all_in_place(job), when, cut)
    });
    assert!(ended > 10, "in {ended} of 20 jobs they need rows of each other");
}

/// As where long packets are lost from a server to a trainer: the server is heard, answers, and nothing of it comes.
#[test]
fn a_server_whose_results_do_not_come_to_one_trainer_is_lost() {
    let mut all = 0;
    for seed in 0..20 {
        let dry = |random: &mut Random| {
            let rank = random.within(0, 1) as u16;
            vec![Fault::Dry((Role::Server, 0), (Role::Trainer, rank), Pulled::Results)]
        };
        let Outcome { lost, failed, .. } = three_servers(seed, dry);
        assert!(lost <= 1 && !failed, "seed {seed}: {lost} servers are lost, failed: {failed}");
        all += lost;
    }
    assert!(all >= 8, "in {all} of 20 jobs somebody waits for results of it");
}

/// Nobody can be lost for it.
#[test]
fn trainers_in_place_whose_results_do_not_come_end_the_job_by_their_names() {
    let ended = failed_of(20, |job, random| {
        let when = random.within(0, SECOND / 4);
        let ranks = *random.pick(&[(1, 2), (0, 1), (1, 0)]);
        let (from, to) = ((Role::Trainer, ranks.0), (Role::Trainer, ranks.1));
        (all_in_place(job), when, Fault::Dry(from, to, Pulled::Results))
    });
    assert!(ended > 10, "in {ended} of 20 jobs they need results of each other");
}

/// The thread that does IO comes a moment late to the plan, so that it learns of both at once.
#[test]
fn a_server_that_is_missed_as_a_header_is_planned_is_replaced() {
    let outcomes = each(100, |job, random| {
        let job = job.waiting(random);
        let job = Job { trainers: 1, servers: 2, moments: BTreeSet::new(), tokens: 24, ..job };
        // Of the first header, or of the next one, while the step before it runs.
        let when = random.within(0, 1) * 3 * SECOND;
        (job, vec![(when, Fault::Silent(random.within(0, 1) as u16))])
    });
    let fine = outcomes.iter().all(|it| it.lost <= 1 && !it.failed);
    let all: usize = outcomes.iter().map(|it| it.lost).sum();
    assert!(fine && all > 80, "in {all} of 100 jobs a header was planned after that: {outcomes:?}");
}

#[test]
fn ranks_that_leave_early_and_seconds_apart_end_the_job_in_order() {
    let outcomes = each(20, |job, random| {
        let quits = Some(random.within(1, 2));
        let (moments, stopped, reduces) = (BTreeSet::new(), false, true);
        (Job { trainers: 3, steps: 4, quits, moments, stopped, reduces, ..job }, Vec::new())
    });
    assert!(outcomes.iter().all(|it| !it.failed), "{outcomes:?}");
}

#[test]
fn ranks_that_all_leave_in_the_middle_of_a_step_end_the_job_by_their_names() {
    let outcomes = each(20, |job, random| {
        let (quits, quits_after) = (Some(random.within(0, 2)), random.within(1, 2) as u32);
        let (moments, stopped, reduces) = (BTreeSet::new(), false, true);
        let job = Job { trainers: 3, steps: 4, quits, quits_after, ..job };
        (Job { moments, stopped, reduces, ..job }, Vec::new())
    });
    assert!(outcomes.iter().all(|it| it.failed), "{outcomes:?}");
}

/// A server reads nothing for a while, and what it is told finds no room. As soon as there is some, it is said again.
#[test]
fn messages_that_found_no_room_are_said_as_soon_as_there_is_some() {
    let pause = 10;
    let jobs = |pauses: bool| {
        each(40, |job, random| {
            let job = job.waiting(random);
            let suspect_after = Nanos::from_millis(60_000);
            let heartbeat_every = Nanos::from_millis(20);
            let settings = Settings { suspect_after, heartbeat_every, ..job.settings };
            let moments = BTreeSet::new();
            let job = Job { servers: 1, queue: Some(1_500), settings, moments, ..job };
            let when = random.within(SECOND / 100, 4 * SECOND);
            let pause = Fault::Pause(vec![(Role::Server, 0)], pause * SECOND);
            (job, if pauses { vec![(when, pause)] } else { Vec::new() })
        })
    };
    let (quiet, paused) = (jobs(false), jobs(true));
    for (seed, (quiet, paused)) in quiet.iter().zip(&paused).enumerate() {
        assert_eq!((paused.lost, paused.failed), (0, false), "seed {seed}");
        println!("{seed} {} {} {:?}", quiet.seconds, paused.seconds, paused.full);
        let late = paused.seconds.saturating_sub(quiet.seconds);
        assert!(late <= pause + 5, "seed {seed}: a pause of {pause} s costs {late} s");
    }
    let heard = paused.iter().filter(|it| it.full[1] > 0).count();
    assert!(heard > 10, "in {heard} of 40 jobs a sender hears of room");
}
