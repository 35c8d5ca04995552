//! Problems and plans that are refused, each by name.

use cadre_planner::{
    BundleId, Costs, DocumentId, Error, Heads, Link, Plan, Problem, Profile, ProfileError, RankId,
    Slot, SlotId, Tolerance, plan, plan_at_home,
};
use serde_json::{Value, json};

use crate::problems::{PLENTY, causal, dedicated, in_place, problem};

fn good() -> Problem {
    problem(vec![causal(1_000), causal(500)], 750, vec![dedicated(100), dedicated(100)])
}

fn refused(change: impl FnOnce(&mut Problem), expected: Error) {
    let mut problem = good();
    change(&mut problem);
    let message = expected.to_string();
    assert!(!message.ends_with('.') && message.contains(';') || message.contains(':'), "{message}");
    assert_eq!(plan(&problem), Err(expected));
}

#[test]
fn a_calibration_of_another_processor_is_refused() {
    let of = |processor: &str| {
        let shipped = Profile::builtin("h200-fa2").unwrap();
        Profile { processor: processor.into(), ..shipped }
    };
    for (processor, here) in [
        ("cpu-avx2-1", "cpu-avx2-8"),
        ("gpu-nvidia-h200", "gpu-nvidia-h200"),
        ("gpu-nvidia-h200-portable", "gpu-nvidia-h200-portable"),
        ("h200-fa2", "gpu-nvidia-h200"),
        ("h100-hopper", "gpu-nvidia-h100-80gb-hbm3"),
    ] {
        assert_eq!(of(processor).check_processor(here), Ok(()), "{processor} for {here}");
    }
    for (processor, here) in [
        ("cpu-avx2-1", "cpu-avx512-1"),
        ("gpu-nvidia-h200", "gpu-nvidia-h100"),
        ("gpu-nvidia-h200", "cpu-avx2-1"),
        ("h200-fa2", "cpu-avx2-1"),
        ("h200-mine", "gpu-nvidia-h200"),
        ("h100-hopper", "gpu-nvidia-h200"),
        ("h200-hopper", "gpu-nvidia-gh200-480gb"),
        ("h200-hopper", "gpu-nvidia-h200-portable"),
        ("gpu-nvidia-h200", "gpu-nvidia-h200-portable"),
        ("gpu-nvidia-h200-portable", "gpu-nvidia-h200"),
    ] {
        let (processor, here) = (processor.to_owned(), here.to_owned());
        let refused = of(&processor).check_processor(&here);
        assert_eq!(refused, Err(ProfileError::Processor { processor, here }));
    }
}

#[test]
fn numbers_out_of_range_are_refused() {
    for (query, kv, dim) in [(0, 2, 64), (4, 0, 64), (4, 2, 0), (5, 2, 64)] {
        let heads = Heads { query, kv, dim };
        refused(|it| it.heads = heads, Error::BadHeads { query, kv, dim });
    }
    for lanes in [0, 3] {
        refused(|it| it.lanes = lanes, Error::BadLanes { lanes, kv: 2 });
    }
    refused(|it| it.element_bytes = 8, Error::BadElement { bytes: 8 });
    for rows in [0, 100, 1 << 25] {
        refused(|it| it.costs.task_rows = rows, Error::BadTaskRows { rows });
    }
    refused(|it| it.slots.clear(), Error::NoSlot);
    let zero = vec![dedicated(0); 2];
    refused(|it| it.slots = zero, Error::NoWeight { slots: 2 });
    let many = vec![dedicated(100); (1 << 20) + 1];
    let (count, most) = (many.len() as u64, 1 << 20);
    refused(|it| it.slots = many, Error::TooMany { things: "slots", count, most });
    let unknown = Error::UnknownHome { slot: SlotId(1), home: RankId(2), ranks: 2 };
    refused(|it| it.slots[1] = in_place(2), unknown);
    let head_start = u64::MAX;
    let long = Error::LongHeadStart { slot: SlotId(0), head_start, most: 1 << 57 };
    refused(|it| it.slots[0].head_start = head_start, long);
}

#[test]
fn more_work_than_can_be_counted_is_refused() {
    let mut much = problem(vec![causal(1 << 24); 40], u32::MAX, vec![dedicated(100)]);
    much.heads = Heads { query: 64, kv: 8, dim: 128 };
    assert_eq!(plan(&much), Err(Error::TooMuchWork { most: 1 << 57 }));
}

#[test]
fn more_bytes_than_can_be_counted_are_refused() {
    let mut much = problem(vec![causal(1 << 17); 40], u32::MAX, vec![dedicated(100); 20_000]);
    much.heads = Heads { query: 1_000, kv: 1_000, dim: 60_000 };
    assert_eq!(plan(&much), Err(Error::TooManyBytes { most: 1 << 62 }));
}

#[test]
fn memory_that_does_not_suffice_is_refused_with_what_is_needed() {
    let document = DocumentId(0);
    // One tile of 104 rows with 1,000 keys, or the whole tile before with 896, under one KV head: thrice the dearer.
    let needed = 3 * (1_000 * 1_024 + 104 * 1_552);
    let large = Error::DocumentTooLarge { document, needed, largest: 1_000_000 };
    refused(|it| it.slots.iter_mut().for_each(|slot| slot.memory = 1_000_000), large);
    let tight = |it: &mut Problem| it.slots.iter_mut().for_each(|slot| slot.memory = needed);
    refused(tight, Error::NoRoom { document });
}

#[test]
fn rows_stay_at_home_only_where_there_is_a_slot_with_memory() {
    let mut home = good();
    assert_eq!(plan_at_home(&home), Err(Error::NoSlotAtHome { rank: RankId(0) }));
    home.slots = vec![in_place(1), Slot { memory: 1_000, ..in_place(0) }];
    let Err(Error::SlotFull { slot, memory, .. }) = plan_at_home(&home) else {
        panic!("a slot of 1000 bytes is too small");
    };
    assert_eq!((slot, memory), (SlotId(1), 1_000));
}

/// Plans by hand that break one promise each.
#[test]
fn a_wrong_plan_is_found_by_its_check() {
    let mut problem = problem(vec![causal(1_000), causal(500)], 750, vec![dedicated(100)]);
    problem.slots.push(Slot { weight: 0, memory: PLENTY, ..dedicated(0) });
    problem.costs = Costs { task_rows: 256, ..Costs::default() };
    let good = serde_json::to_value(plan(&problem).unwrap()).unwrap();
    let check = |change: &dyn Fn(&mut Value), expected: Error| {
        let mut plan = good.clone();
        change(&mut plan);
        let plan: Plan = serde_json::from_value(plan).unwrap();
        assert_eq!(plan.check(&problem), Err(expected));
    };
    let bundle = |bundle, why| Error::BadBundle { bundle: BundleId(bundle), why };
    let task = |task, why| Error::BadTask { task, why };

    check(&|it| it["bundles"][0]["document"] = json!(7), bundle(0, "its document does not exist"));
    check(&|it| it["bundles"][0]["slot"] = json!(7), bundle(0, "its slot does not exist"));
    check(&|it| it["bundles"][0]["slot"] = json!(1), bundle(0, "its slot is standby"));
    check(
        &|it| it["bundles"][0]["kv_heads"]["end"] = json!(3),
        bundle(0, "its kv heads do not exist"),
    );
    let gap = "its tasks do not follow those of the bundle before";
    check(&|it| it["bundles"][0]["tasks"]["end"] = json!(99), bundle(0, gap));
    check(&|it| it["bundles"][1]["tasks"]["start"] = json!(3), bundle(1, gap));
    let keys = "its keys are not those of its tasks";
    check(&|it| it["bundles"][0]["keys"]["end"] = json!(999), bundle(0, keys));
    check(
        &|it| it["tasks"].as_array_mut().unwrap().swap(0, 1),
        bundle(0, "its tasks are not in row order"),
    );
    let second = "it is not behind the bundle before";
    check(&|it| it["bundles"][0]["document"] = json!(1), bundle(1, second));
    let overlap = "its kv heads overlap those of the bundle before";
    check(
        &|it| {
            it["bundles"][1]["document"] = json!(0);
            it["bundles"][1]["kv_heads"]["start"] = json!(1);
        },
        bundle(1, overlap),
    );
    let what = "list of tasks";
    check(
        &|it| {
            let last = it["tasks"][0].clone();
            it["tasks"].as_array_mut().unwrap().push(last);
        },
        Error::Mismatch { what, found: 7, expected: 6 },
    );

    check(&|it| it["tasks"][0]["bundle"] = json!(9), task(0, "it is not what its bundle says"));
    check(&|it| it["tasks"][0]["bundle"] = json!(1), task(0, "it is not what its bundle says"));
    check(&|it| it["tasks"][3]["rows"]["end"] = json!(1001), task(3, "its rows do not exist"));
    let long = "it is longer than costs.task_rows";
    check(&|it| it["tasks"][3]["rows"]["start"] = json!(800), task(3, "it is cut inside a tile"));
    check(
        &|it| it["tasks"][1]["rows"]["start"] = json!(0),
        bundle(0, "its tasks are not in row order"),
    );
    check(
        &|it| it["tasks"][0]["rows"]["end"] = json!(128),
        task(0, "its keys are not those of its mask"),
    );
    check(
        &|it| {
            it["tasks"][0]["rows"]["end"] = json!(128);
            it["tasks"][0]["keys"]["end"] = json!(128);
        },
        Error::NotOnce { document: DocumentId(0), kv_head: 0, row: 128 },
    );
    check(
        &|it| {
            it["tasks"][0]["rows"]["start"] = json!(0);
            it["tasks"][0]["rows"]["end"] = json!(512);
            it["tasks"][1]["rows"]["start"] = json!(512);
        },
        task(0, long),
    );
    check(&|it| it["bounds"]["finish"] = json!(1), Error::BadBounds);
    let planned = good["problem"].as_u64().unwrap();
    check(&|it| it["problem"] = json!(1), Error::OtherProblem { planned: 1, given: planned });
}

/// Each lane holds its own heads, so a plan in which they part is none for lanes, whoever wrote it.
#[test]
fn heads_of_a_document_part_with_one_lane_alone() {
    let one = problem(vec![causal(4_096)], 4_096, vec![dedicated(100); 2]);
    let parted = plan(&one).unwrap();
    assert!(parted.bundles().iter().any(|it| it.kv_heads.len() == 1), "{parted:?}");
    let two = Problem { lanes: 2, ..one };
    let mut text = serde_json::to_value(&parted).unwrap();
    text["problem"] = json!(two.digest());
    let parted: Plan = serde_json::from_value(text).unwrap();
    let why = "its kv heads are some of all, but with several lanes all move together";
    assert_eq!(parted.check(&two), Err(Error::BadBundle { bundle: BundleId(0), why }));
}

/// Finishing times, and times of links, that 64 bits cannot add: plans that differ would look equal.
#[test]
fn slots_and_links_too_slow_to_be_counted_are_refused() {
    let refused = |problem: &Problem, expected: &str| {
        let error = plan(problem).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    };
    let mut much = problem(vec![causal(2_000); 8], 4_000, vec![dedicated(100), dedicated(1)]);
    much.costs.tile = u32::MAX;
    much.heads = Heads { query: 60_000, kv: 2, dim: 8 };
    much.tolerance = Tolerance::new(2.0).unwrap();
    refused(&much, "slot 1 of weight 1 alone would need longer than 1152921504606846976");
    much.slots[1].weight = 0;
    assert_eq!(plan(&much).map(|it| it.check(&much)), Ok(Ok(())));
    let mut slow = problem(vec![causal(1 << 20); 8], 1 << 20, vec![dedicated(100); 4]);
    slow.heads = Heads { query: 16_000, kv: 8_000, dim: 2_000 };
    slow.lanes = 1_000;
    let link = Link { node: 0, rail: 0, leaf: 0, out: 50_000, into: 50_000 };
    slow.links.places = vec![link; 12];
    slow.links.places[3].into = 1;
    slow.links.prices.far = 10_000_000;
    refused(&slow, "a link of 1 bytes a microsecond may need longer than 2305843009213693952");
}
