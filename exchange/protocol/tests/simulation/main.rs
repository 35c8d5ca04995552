//! Many processes, virtual time, random faults: right bits or a clear end, and always progress.
//!
//! Every scenario is made from one number. `CADRE_SEED` sets the first, `CADRE_STEPS` how many steps
//! each part simulates; a failure prints the number that repeats it with `CADRE_SEED=… CADRE_STEPS=1`.
//!
//! What is checked, while it runs: a trainer's results have the bits of a run without faults, each is
//! merged once, and every phase is complete; a server holds no more than its budget, runs nothing
//! without its rows, takes no rows of a phase that it knows to be passed; no machine spins; with faults
//! over, the job goes on to its end; after the last step no server holds anything.

mod faults;
mod job;
mod net;
mod process;
mod random;
mod shell;
mod supervisor;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use cadre_protocol::Rules;

use crate::faults::Faults;
use crate::job::Job;
use crate::random::Random;
use crate::world::{Outcome, World};

/// How a scenario is broken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Weather {
    Calm,
    /// Faults now and then.
    Stormy,
    /// All faults in one moment.
    Burst,
}

fn scenario(seed: u64, weather: Weather, rules: Rules) -> Result<Outcome, String> {
    let mut random = Random::new(seed);
    let steps = random.within(5, 45);
    let mut job = Job::new(&mut random, steps);
    job.settings.rules = rules;
    let faults = match weather {
        Weather::Calm => Faults::none(),
        Weather::Stormy | Weather::Burst => {
            Faults::random(&mut random, &job, weather == Weather::Burst)
        }
    };
    let list = format!("{:?}", faults.list);
    let run = || World::new(job, faults, random).run();
    catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|_| Err("a panic".into()))
        .map_err(|wrong| format!("{wrong}; faults: {list}"))
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(default)
}

#[derive(Debug, Default)]
struct Totals {
    scenarios: u64,
    steps: u64,
    ended: u64,
    lost: usize,
}

fn simulate(weather: Weather, first: u64, steps: u64) -> Totals {
    let mut totals = Totals::default();
    let mut failed = 0;
    println!("{weather:?}: first seed {first}");
    for seed in first.. {
        let Outcome { steps: done, end, lost } = match scenario(seed, weather, Rules::all()) {
            Ok(outcome) => outcome,
            Err(wrong) => {
                println!("{weather:?}: seed {seed}: {wrong}");
                failed += 1;
                assert!(failed < 10, "{weather:?}: ten scenarios went wrong");
                continue;
            }
        };
        totals.scenarios += 1;
        totals.steps += done;
        totals.ended += u64::from(end.is_some());
        totals.lost += lost;
        if totals.steps >= steps {
            break;
        }
    }
    println!("{weather:?}: {totals:?}");
    assert_eq!(failed, 0, "{weather:?}: scenarios went wrong");
    totals
}

#[test]
fn every_job_without_faults_ends_with_the_right_bits() {
    let totals = simulate(Weather::Calm, number("CADRE_SEED", 1), number("CADRE_STEPS", 5_000));
    assert_eq!((totals.ended, totals.lost), (0, 0), "nobody is lost where nothing goes wrong");
}

#[test]
fn faults_cost_time_or_end_the_job_but_never_bits() {
    let first = number("CADRE_SEED", 1_000_000);
    simulate(Weather::Stormy, first, number("CADRE_STEPS", 60_000));
}

#[test]
fn many_faults_at_once_cost_no_bits_either() {
    let first = number("CADRE_SEED", 3_000_000);
    simulate(Weather::Burst, first, number("CADRE_STEPS", 40_000));
}

fn broken_rule_is_seen(rule: &str) {
    let first = number("CADRE_SEED", 2_000_000);
    let broken = |seed: &u64| scenario(*seed, Weather::Stormy, Rules::without(rule)).is_err();
    let seed = (first..first + 3_000).find(broken);
    let seed = seed.unwrap_or_else(|| panic!("without `{rule}` nothing goes wrong"));
    let wrong = scenario(seed, Weather::Stormy, Rules::without(rule)).err();
    println!("without `{rule}`, seed {seed}: {}", wrong.unwrap_or_default());
    let fine = scenario(seed, Weather::Stormy, Rules::all());
    fine.unwrap_or_else(|wrong| panic!("seed {seed} with all rules: {wrong}"));
}

macro_rules! broken_rules {
    ($($test:ident: $rule:literal,)*) => {$(
        #[test]
        fn $test() {
            broken_rule_is_seen($rule);
        }
    )*};
}

broken_rules! {
    rows_reused_before_the_watermark_are_seen: "release at watermark",
    rows_pulled_after_the_watermark_are_seen: "pull checks watermark",
    results_merged_twice_are_seen: "first result wins",
    incomplete_bundles_in_the_reserve_are_seen: "reserve takes complete bundles",
    results_of_another_incarnation_are_seen: "pull checks incarnation",
    moved_bundles_that_nobody_rings_for_are_seen: "round rings again",
}
