//! The processes of a job as they are in production, in one thread and virtual time: right bits or a clear end.
//!
//! Every process's IO thread is [`cadre_worker::io::Io`], with its machines, envelopes, headers and views; trainers run the real
//! session, every task the real kernels, every header the real planner. Only the wires, the controller and the clock are simulated.
//! Rows are small, so that a scenario takes milliseconds.
//!
//! Every scenario is made from one number. Half of the numbers are always the same, half are made of the commit (`testing/seeds.rs`).
//! `CADRE_SEED` and `CADRE_RUNS` choose the first and how many; a failure prints the command that repeats it. As many as somebody has
//! time for: `make soak PARTS=shell`.
//!
//! What is checked: O, dQ, dK and dV have the bits of attention on whole documents, added in the plan's order; the job ends as it
//! should, within bounded time; in calm weather nobody is lost; no thread spins; pulls keep the rules of the exchange; trainers hold
//! nothing after the last step, nor does any server, whatever happened to it.

mod alone;
#[path = "../../../exchange/protocol/tests/simulation/broken_rules.rs"]
mod broken_rules;
mod controller;
mod faults;
mod hostile;
mod job;
mod net;
mod plans;
mod process;
mod provider;
#[path = "../../../exchange/protocol/tests/simulation/random.rs"]
mod random;
#[path = "../../../testing/seeds.rs"]
mod seeds;
mod soak;
mod trainer;
mod truth;
#[path = "../../../testing/turns.rs"]
mod turns;
mod world;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cadre_crds::Wire;
use cadre_protocol::Rules;

use crate::faults::{Faults, Weather};
use crate::job::Job;
use crate::random::Random;
use crate::world::{Outcome, World, remark};

fn scenario(seed: u64, weather: Weather, rules: Rules) -> Result<Outcome, String> {
    let mut random = Random::new(seed);
    let job = Job::new(seed, &mut random, rules);
    scenario_of(job, random, weather)
}

fn scenario_of(job: Job, mut random: Random, weather: Weather) -> Result<Outcome, String> {
    let job = match weather {
        Weather::Relay => job.waiting(&mut random),
        Weather::Narrow => job.narrow(&mut random),
        Weather::Hostile => job.with_a_hostile_member(),
        Weather::Calm | Weather::Stormy | Weather::Burst => job,
    };
    let faults = Faults::random(&mut random, &job, weather);
    remark(format_args!("{job:?}\n{:?}", faults.list));
    let list = faults.list.clone();
    let run = || World::new(job, faults, random).run();
    catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|it| (*it).to_owned()));
            Err(format!("a panic: {}", text.unwrap_or_default()))
        })
        .map_err(|wrong| format!("{wrong}; faults: {list:?}"))
}

/// The same with all rules, and what its weather promises: nobody is lost where nothing goes wrong, and no job fails where a server
/// comes long before it has waited in vain.
fn kept(seed: u64, weather: Weather) -> Result<Outcome, String> {
    promised(weather, scenario(seed, weather, Rules::all())?)
}

fn promised(weather: Weather, outcome: Outcome) -> Result<Outcome, String> {
    let Outcome { lost, failed, .. } = outcome;
    match weather {
        Weather::Calm if lost > 0 => {
            Err(format!("{lost} servers are lost, and nothing went wrong"))
        }
        Weather::Calm if failed => Err("the job failed, and nothing went wrong".into()),
        Weather::Relay | Weather::Narrow if failed => {
            Err("the job failed, though a server comes long before it has waited in vain".into())
        }
        Weather::Calm
        | Weather::Stormy
        | Weather::Burst
        | Weather::Relay
        | Weather::Narrow
        | Weather::Hostile => Ok(outcome),
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|it| it.parse().ok())
}

#[derive(Debug, Default)]
struct Totals {
    runs: u64,
    steps: u64,
    failed: u64,
    lost: usize,
    happenings: u64,
    seconds: u64,
    /// Messages that found a full queue, and how often a sender heard of room after that.
    full: [u64; 2],
    /// Parcels that works read ahead of their bundle.
    copied: u64,
    /// Parts of dK or dV that went on while others of their phase were pulled.
    parts: u64,
    /// Words that were published and pulled.
    words: u64,
    /// Pulls that went on where they had stopped, and those of them that found another publication.
    resumed: [u64; 2],
    /// Runs in which two steps were out, and servers that were lost while two were at the conductor.
    both: [u64; 2],
    /// Most turns of an IO thread within a millisecond for which nothing came over the exchange.
    turns: u32,
}

/// Runs scenarios on two threads; which seeds there are does not depend on who is faster.
fn simulate(weather: Weather, first: u64, runs: u64) -> Totals {
    let next = AtomicU64::new(first);
    let totals = Mutex::new((Totals::default(), Vec::new()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + runs {
                break;
            }
            let result = kept(seed, weather);
            let mut all = totals.lock().expect("scenarios catch their panics");
            match result {
                Ok(it) => {
                    let sum = &mut all.0;
                    sum.runs += 1;
                    sum.steps += it.steps;
                    sum.failed += u64::from(it.failed);
                    sum.lost += it.lost;
                    sum.happenings += it.happenings;
                    sum.seconds += it.seconds;
                    (0..2).for_each(|at| sum.full[at] += it.full[at]);
                    sum.copied += it.copied;
                    sum.parts += it.parts;
                    sum.words += it.words;
                    (0..2).for_each(|at| sum.resumed[at] += it.resumed[at]);
                    sum.both[0] += u64::from(it.both.0);
                    sum.both[1] += it.both.1;
                    sum.turns = sum.turns.max(it.turns);
                }
                Err(wrong) => {
                    println!("{weather:?}: seed {seed}: {wrong}");
                    all.1.push(seed);
                }
            }
            if all.1.len() >= 20 {
                break;
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        work();
    });
    let (totals, wrong) = totals.into_inner().expect("scenarios catch their panics");
    println!("{weather:?}: first seed {first}: {totals:?}");
    for seed in &wrong {
        println!("{}", repeat(weather, *seed));
    }
    assert!(wrong.is_empty(), "{weather:?}: {} scenarios went wrong", wrong.len());
    totals
}

/// The command that runs a scenario again.
fn repeat(weather: Weather, seed: u64) -> String {
    let name = format!("{weather:?}").to_lowercase();
    let how = "cargo test --release --locked --workspace --features cadre/cluster --test shell";
    format!("CADRE_SEED={seed} CADRE_RUNS=1 {how} -- --exact {name} --nocapture")
}

/// Half of `runs` with seeds that never change, half with seeds of the tree.
fn both(weather: Weather, known: u64, runs: u64) -> Totals {
    let runs = number("CADRE_RUNS").unwrap_or(runs);
    let mut totals = Totals::default();
    for (first, runs) in seeds::first_seeds(&format!("{weather:?}"), known, runs) {
        let more = simulate(weather, first, runs);
        totals.runs += more.runs;
        totals.failed += more.failed;
        totals.lost += more.lost;
        (0..2).for_each(|at| totals.both[at] += more.both[at]);
        (0..2).for_each(|at| totals.full[at] += more.full[at]);
        totals.copied += more.copied;
        totals.parts += more.parts;
        totals.words += more.words;
        (0..2).for_each(|at| totals.resumed[at] += more.resumed[at]);
    }
    totals
}

/// Scenarios that went wrong once.
#[test]
fn what_went_wrong_once() {
    for (weather, seed) in [
        (Weather::Burst, 1_234_327_265_438_789),
        (Weather::Stormy, 1_222_296_414_982_855),
        // A trainer hears one word after the other, and the last one after more than 2 s.
        (Weather::Narrow, 1_234_327_265_775_200),
        // A job is stopped and its pool is lost while a trainer that has done the step is cut off from the conductor.
        (Weather::Stormy, 1_198_251_804_582_423),
        // Results of a trainer never come, and what it says does.
        (Weather::Stormy, 1_198_251_804_785_566),
        // So that one has done a step that the other has not.
        (Weather::Stormy, 1_198_251_805_101_833),
        // Somebody says a header of other layers in the name of the conductor, or that a phase is whole everywhere.
        (Weather::Hostile, 1_198_251_804_666_371),
        (Weather::Hostile, 1_198_251_804_579_981),
        (Weather::Hostile, 1_198_251_804_582_491),
    ] {
        simulate(weather, seed, 1);
    }
}

#[test]
fn calm() {
    let totals = both(Weather::Calm, 1, 200);
    assert!(totals.both[0] > 50 || number("CADRE_RUNS").is_some(), "a header goes out early");
    assert!(totals.copied > 0 || number("CADRE_RUNS").is_some(), "no work ran ahead of its bundle");
    assert!(totals.words > 100 || number("CADRE_RUNS").is_some(), "no header was pulled");
    assert!(totals.parts > 0 || number("CADRE_RUNS").is_some(), "no part went on before its phase");
}

#[test]
fn stormy() {
    let totals = both(Weather::Stormy, 1_000_000, 1_000);
    let asked = number("CADRE_RUNS").is_some();
    assert!(totals.lost > 100 || asked, "only {} servers were lost", totals.lost);
    assert!(totals.full[0] > 0 && totals.full[1] > 0 || asked, "no queue was full, and then not");
}

#[test]
fn burst() {
    let totals = both(Weather::Burst, 3_000_000, 500);
    let asked = number("CADRE_RUNS").is_some();
    assert!(totals.lost > 60 || asked, "only {} servers were lost", totals.lost);
}

#[test]
fn scenarios_that_once_went_wrong_go_well() {
    for (weather, seed) in [
        // A stopped server is told that the job is over, and then, as it was asked to end, that it may leave.
        (Weather::Burst, 1_253_511_344_239_290),
        // Servers that were replaced while they were stopped wake beside their replacements.
        (Weather::Stormy, 1_000_462),
        // Of the tensors of a pull one is gone, and a machine without power never answers for the other.
        (Weather::Stormy, 77_001_180),
        // Chunks of one row are thousands of pulls in a millisecond.
        (Weather::Calm, 910_000_035),
        // A trainer is cut off from the conductor while the job is stopped.
        (Weather::Stormy, 910_000_247),
        // The conductor dies while it tells the end.
        (Weather::Stormy, 910_007_807),
        // A server is to be lent just after the only trainer's machine has lost its power.
        (Weather::Burst, 910_009_516),
        // A trainer hears of the end on its way into the all-reduce.
        (Weather::Stormy, 910_013_182),
        // Rows crawl, slower than pulls may be without a byte.
        (Weather::Stormy, 910_010_538),
        // Rows that crawl wait behind what a server measures.
        (Weather::Stormy, 930_000_437),
        (Weather::Stormy, 930_000_059),
        // A link begins to crawl in the middle of what a server measures, and words wait behind it.
        (Weather::Burst, 234_325_912_881_301),
        // What a server measures with has landed, and it has not heard so yet.
        (Weather::Stormy, 227_528_719_954_519),
        // A trainer is stopped while the others hear how the job ends.
        (Weather::Burst, 234_325_912_862_036),
        (Weather::Stormy, 234_325_912_933_393),
        // A trainer has all its results and stands still for good, and another waits for what it computes.
        (Weather::Stormy, 234_325_913_008_888),
        // A trainer is busy for long, and another waits for it in the all-reduce.
        (Weather::Stormy, 1_602_572_873_384),
        (Weather::Stormy, 1_602_572_908_771),
        // A phase is whole, and works that were planned for its rank wait for rows of a busy one.
        (Weather::Stormy, 1_602_572_900_551),
        // Words of a link that crawls wait for longer behind what was measured than a server waits for them.
        (Weather::Stormy, 274_540_338_697_545),
        // The conductor is stopped while it says how the job ends.
        (Weather::Stormy, 1_288_342_842_845_816),
        // A device copies on and on for a pull that was given up, of results that never come.
        (Weather::Stormy, 1_222_296_414_920_690),
    ] {
        let mut random = Random::new(seed);
        let job = Job::new(seed, &mut random, Rules::all());
        // What they were when they went wrong.
        let job = Job { wire: Wire::F32, local: false, moments: BTreeSet::new(), ..job };
        let outcome = scenario_of(job, random, weather).and_then(|it| promised(weather, it));
        outcome.unwrap_or_else(|wrong| panic!("{weather:?}: seed {seed}: {wrong}"));
    }
}

#[test]
fn relay() {
    let totals = both(Weather::Relay, 4_000_000, 300);
    let some = totals.resumed[0] > 0 || number("CADRE_RUNS").is_some();
    assert!(some, "no pull went on where it had stopped");
    let both = totals.both[1] > 10 || number("CADRE_RUNS").is_some();
    assert!(both, "only {} servers were lost while two steps were out", totals.both[1]);
}

#[test]
fn narrow() {
    both(Weather::Narrow, 5_000_000, 100);
}

/// Each run is held to this, here and in the soak: a total of few would hide one.
#[test]
fn a_run_that_breaks_what_its_weather_promises_goes_wrong() {
    let outcome = |lost, failed| Outcome { failed, lost, ..Outcome::default() };
    let wrong = |weather, it| promised(weather, it).is_err();
    assert!(wrong(Weather::Calm, outcome(1, false)) && wrong(Weather::Calm, outcome(0, true)));
    for weather in [Weather::Relay, Weather::Narrow] {
        assert!(wrong(weather, outcome(1, true)) && !wrong(weather, outcome(1, false)));
    }
    for weather in [Weather::Stormy, Weather::Burst, Weather::Hostile] {
        assert!(!wrong(weather, outcome(2, true)), "faults may end a job of {weather:?}");
    }
}

/// What a member says that means harm: see [`hostile`].
#[test]
fn hostile() {
    let totals = both(Weather::Hostile, 6_000_000, 160);
    let asked = number("CADRE_RUNS").is_some();
    let (runs, failed) = (totals.runs, totals.failed);
    // Neither is all that it says refused at once, nor does it change nothing.
    assert!(
        asked || failed > runs / 10 && failed < runs * 9 / 10,
        "{failed} of {runs} jobs failed"
    );
}

/// Scenarios of each weather in which a rule may be missed.
const MISSED: u64 = 1_000;

/// In whichever weather it comes first, from seed 0 on.
fn broken_rule_is_seen(rule: &str) {
    let first = number("CADRE_SEED").unwrap_or(0);
    let weathers = [Weather::Narrow, Weather::Stormy, Weather::Burst];
    let all = (first..first + MISSED).flat_map(|seed| weathers.map(|it| (it, seed)));
    let broken = |(weather, seed)| {
        let wrong = scenario(seed, weather, Rules::without(rule)).err()?;
        Some((weather, seed, wrong))
    };
    let found = all.into_iter().find_map(broken);
    let (weather, seed, wrong) =
        found.unwrap_or_else(|| panic!("without `{rule}` nothing goes wrong"));
    println!("without `{rule}`, {weather:?}, seed {seed}: {wrong}");
    let fine = scenario(seed, weather, Rules::all());
    fine.unwrap_or_else(|wrong| panic!("{weather:?}, seed {seed} with all rules: {wrong}"));
}
