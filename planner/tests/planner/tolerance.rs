//! What a tolerance allows is kept, and spent on the busiest link.

use cadre_planner::{Bounds, Error, Problem, Tolerance, plan};
use proptest::prelude::*;

use crate::draws::{Where, draw, links};
use crate::problems::{PLENTY, problems};
use crate::seeds::first_seeds;

fn of(ratio: f64) -> Tolerance {
    Tolerance::new(ratio).unwrap()
}

/// The latest finish that a ratio allows.
fn latest(level: u64, ratio: f64) -> u64 {
    (level as f64 * ratio) as u64 + 1
}

#[test]
fn what_may_be_less_even_loads_its_busiest_link_less_on_fresh_draws() {
    let (mut less, mut cases) = (0.0, 0.0);
    for (first, count) in first_seeds("tolerance", 100, 6) {
        for seed in first..first + count {
            for place in [Where::InPlace, Where::Dedicated, Where::Mixed] {
                for one_lane in [false, true] {
                    let problem = draw(seed, place, one_lane);
                    let name = format!("seed {seed}, {place:?}, one lane {one_lane}");
                    let usual = plan(&problem).unwrap().bounds();
                    let mut before = usual;
                    for ratio in [1.01, 1.05, 1.2] {
                        let problem = Problem { tolerance: of(ratio), ..problem.clone() };
                        let plan = plan(&problem).unwrap();
                        assert_eq!(plan.check(&problem), Ok(()), "{name}");
                        let it = plan.bounds();
                        let allowed = latest(it.level, ratio).max(usual.finish);
                        assert!(it.finish <= allowed, "{name}, {ratio}: {it:?}");
                        // A plan that was late may be so by less.
                        if before.finish <= latest(it.level, ratio) - it.level / 10_000 {
                            assert!(it.link <= before.link, "{name}, {ratio}: {it:?} {before:?}");
                        }
                        before = it;
                    }
                    println!("{name}: {:.3}", before.link as f64 / usual.link.max(1) as f64);
                    less += (before.link.max(1) as f64 / usual.link.max(1) as f64).ln();
                    cases += 1.0;
                }
            }
        }
    }
    let mean = f64::exp(less / cases);
    println!("busiest link at 1.2 over the usual, geometric mean: {mean:.3}");
    assert!(mean < 0.9, "{mean}");
}

/// Whether a plan is worse than one that a narrower ratio allows and that keeps it: its busiest link has more to do, or it moves more
/// bytes; where links are known, with as much to do there. One that was late may become so by less.
fn is_worse(narrow: &Bounds, wide: &Bounds, ratio: f64, is_known: bool) -> bool {
    let is_on_time = narrow.finish < latest(wide.level, ratio) - wide.level / 10_000;
    let moves_more = wide.pulled > narrow.pulled && (!is_known || wide.link == narrow.link);
    is_on_time && (wide.link > narrow.link || moves_more)
}

/// Ratios from just above the usual one to 2, those near 1 as often as those far from it.
fn ratios() -> impl Strategy<Value = f64> {
    (-6.2_f64..0.0).prop_map(|it| 1.0 + it.exp())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_wider_tolerance_is_never_worse(
        problem in problems(Just(PLENTY)),
        first in ratios(),
        second in ratios(),
        seed in prop::option::of(any::<u64>()),
    ) {
        let problem = match seed {
            Some(seed) => Problem { links: links(&problem, seed), ..problem },
            None => problem,
        };
        let at = |ratio: f64| {
            plan(&Problem { tolerance: of(ratio), ..problem.clone() }).unwrap().bounds()
        };
        let (first, second) = (first.min(second), first.max(second));
        let (usual, narrow, wide) = (at(1.002), at(first), at(second));
        for (ratio, it) in [(1.002, &usual), (first, &narrow)] {
            let worse = is_worse(it, &wide, ratio, seed.is_some());
            prop_assert!(!worse, "{ratio} {it:?}, {second} {wide:?}");
        }
    }
}

#[test]
fn a_wider_tolerance_is_never_worse_on_fresh_draws() {
    let mut worse = Vec::new();
    let mut cases = 0;
    for (first, count) in first_seeds("wider", 110, 6) {
        for seed in first..first + count {
            let place = [Where::InPlace, Where::Dedicated, Where::Mixed][seed as usize % 3];
            let problem = draw(seed, place, seed.is_multiple_of(2));
            let mut before: Option<(f64, Bounds)> = None;
            for ratio in [1.002, 1.003, 1.009, 1.013, 1.03, 1.045, 1.05, 1.066, 1.09, 1.13, 1.3] {
                let asked = Problem { tolerance: of(ratio), ..problem.clone() };
                let it = plan(&asked).unwrap().bounds();
                if let Some((narrow, before)) = &before {
                    cases += 1;
                    if is_worse(before, &it, *narrow, false) {
                        worse.push(format!("seed {seed}, {narrow} {before:?}, {ratio} {it:?}"));
                    }
                }
                before = Some((ratio, it));
            }
        }
    }
    assert!(worse.is_empty(), "{} of {cases}:\n{}", worse.len(), worse.join("\n"));
}

#[test]
fn ratios_that_no_plan_is_made_for_are_refused() {
    for (given, said) in [
        (0.999_999, "0.999999"),
        (2.000_001, "2.000001"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
    ] {
        assert_eq!(Tolerance::new(given), Err(Error::BadTolerance { given: said.into() }));
    }
    for text in ["", "1,05", "1.05x", "-1", "nan", "1e9"] {
        let refused = text.parse::<Tolerance>().unwrap_err().to_string();
        assert!(refused.ends_with("; give a ratio from 1 to 2, such as 1.002"), "{refused}");
    }
    for text in ["1", "1.002", "1.05", "1.123456", "2"] {
        let it: Tolerance = text.parse().unwrap();
        assert_eq!(it.to_string(), text);
        let told = serde_json::to_string(&it).unwrap();
        assert_eq!(serde_json::from_str::<Tolerance>(&told).unwrap(), it);
    }
    assert_eq!(of(1.002), Tolerance::default());
    assert!(serde_json::from_str::<Tolerance>("0.5").is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_tolerance_is_kept_and_is_in_the_digest(
        problem in problems(Just(PLENTY)),
        millionths in 0_u32..=1_000_000,
    ) {
        let ratio = 1.0 + f64::from(millionths) / 1e6;
        let usual = plan(&problem).unwrap().bounds();
        let asked = Problem { tolerance: of(ratio), ..problem.clone() };
        prop_assert_eq!(asked.digest() == problem.digest(), asked.tolerance == problem.tolerance);
        let plan = plan(&asked).unwrap();
        prop_assert_eq!(plan.check(&asked), Ok(()));
        let it = plan.bounds();
        if asked.tolerance >= Tolerance::USUAL {
            prop_assert!(it.finish <= latest(it.level, ratio).max(usual.finish), "{:?} {:?}", it, usual);
            if usual.finish <= it.level + it.level / 504 {
                prop_assert!(it.link <= usual.link, "{:?} {:?}", it, usual);
            }
        }
    }
}
