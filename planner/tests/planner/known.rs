//! Fresh draws with links: knowing them is never worse than ignoring them.

use cadre_planner::{Problem, Traffic, plan};

use crate::draws::{Where, draw, links, on_one_node};

const PLACES: [Where; 3] = [Where::InPlace, Where::Dedicated, Where::Mixed];
const SEEDS: u64 = 10;

/// Every draw of a few seeds.
fn draws() -> impl Iterator<Item = (String, u64, Problem)> {
    (100..100 + SEEDS).flat_map(|seed| {
        PLACES.into_iter().flat_map(move |place| {
            [false, true].map(move |one_lane| {
                (
                    format!("seed {seed}, {place:?}, one lane {one_lane}"),
                    seed,
                    draw(seed, place, one_lane),
                )
            })
        })
    })
}

#[test]
fn knowing_links_is_never_worse_on_fresh_draws() {
    for (name, seed, problem) in draws() {
        let blind = plan(&problem).unwrap();
        let problem = Problem { links: links(&problem, seed), ..problem };
        let known = plan(&problem).unwrap().bounds();
        let link = Traffic::of(&problem, &blind).busiest();
        let late = |finish: u64| finish.saturating_sub(known.level + known.level / 504);
        let (known, blind) =
            ((late(known.finish), known.link), (late(blind.bounds().finish), link));
        assert!(known <= blind, "{name}: {known:?} {blind:?}");
    }
}

#[test]
fn places_on_one_node_have_no_more_to_do_than_places_that_are_equal() {
    let [equal, known] = [false, true].map(|it| plan(&on_one_node(192, it)).unwrap().bounds());
    assert!(known.link <= equal.link && known.finish <= equal.finish, "{known:?} {equal:?}");
}
