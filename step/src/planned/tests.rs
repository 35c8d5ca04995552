//! Plans by kind of layers, and which of them each phase runs.

use std::num::NonZeroU16;

use cadre_planner::{
    Costs, DocumentId, Heads, Mask, Slot as Place, SlotId, Stretch, memory_of_slot,
};

use super::*;
use crate::header::Placement;
use crate::layers::Layers;
use crate::packing::Packing;
use crate::turns::{Turn, Turns, Which};

/// Two nano-batches of one document each, over two trainers and three servers.
fn header(masks: &[Mask]) -> Header {
    let any: Header = serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
    let nano = |rows: u32| {
        let stretch = |start, end| vec![Stretch { document: DocumentId(0), start, end }];
        Packing::new(&[rows], vec![stretch(0, rows / 2), stretch(rows / 2, rows)]).unwrap()
    };
    let causal = any.layers.kind_of(0);
    let layers = Layers::new(masks.iter().map(|&mask| Kind { mask, ..causal })).unwrap();
    let server = |index| Member::Server { index, incarnation: 0, address: String::new() };
    let slot = Place { weight: 100, head_start: 0, home: None, memory: 1 << 30 };
    Header {
        turns: Turns::together(NonZeroU16::new(2).unwrap()),
        costs: vec![any.costs[0]; layers.kinds().len()],
        layers,
        nanos: vec![nano(3_000), nano(5_000)],
        slots: vec![slot; 3],
        fillers: (0..3).map(|it| Some(server(it))).collect(),
        ..any
    }
}

fn planned(masks: &[Mask]) -> PlannedStep {
    PlannedStep::new(Arc::new(header(masks))).unwrap()
}

#[test]
fn every_phase_has_the_plan_of_its_nano_batch_and_of_its_layers_kind() {
    let near = Mask::Window { left: 99 };
    let masks = [near, Mask::Causal, near, Mask::Full, near];
    let planned = planned(&masks);
    assert_eq!(planned.plans.len(), 2 * 3, "a plan is made once for all layers of a kind");
    let step = planned.protocol_step(&planned.assign(None, &[true; 3]).unwrap()).unwrap();
    for (phase, at) in (0..).map(Phase).zip(planned.order.iter()) {
        let (nano, direction) = planned.nano_of(phase);
        let document = nano.problem.layout.documents()[0];
        assert_eq!((document.mask, direction), (masks[at.layer], at.direction));
        assert_eq!(document.rows, [3_000, 5_000][at.nano]);
        // The machines wait for what this phase's own plan says.
        let [forward, backward] = nano.lists.shapes().unwrap();
        let shape = if direction == Direction::Forward { forward } else { backward };
        assert_eq!(**step.shape(phase), shape, "{at:?}");
        assert_eq!(planned.works(phase), shape.works().len());
    }
}

#[test]
fn plans_that_no_phase_runs_are_not_made() {
    let near = Mask::Window { left: 99 };
    let masks = [near, Mask::Causal, near, Mask::Full];
    let turn =
        |nano, layers: Which| Turn { direction: Direction::Forward, nanos: vec![nano], layers };
    // Nano-batch 0 goes through layers of one kind alone, nano-batch 1 through those of the other two.
    let some = vec![turn(0, Which::Only(vec![0, 2])), turn(1, Which::Only(vec![1, 3]))];
    let turns = Turns::new(some).unwrap();
    let few = PlannedStep::new(Arc::new(Header { turns, ..header(&masks) })).unwrap();
    assert_eq!((few.plans.len(), few.order.count()), (3, 4));
    let all = planned(&masks);
    for at in few.order.iter() {
        let (made, whole) = (few.plan_index(at), all.plan_index(at));
        assert_eq!(few.plans[made].plan, all.plans[whole].plan, "{at:?}");
        assert_eq!(few.plans[made].problem.layout.documents()[0].mask, masks[at.layer]);
    }
    assert_eq!(few.phases_of_plans(), [2, 1, 1]);
    let step = few.protocol_step(&few.assign(None, &[true; 3]).unwrap()).unwrap();
    assert_eq!((step.shapes().len(), step.phases()), (2 * 3, 4));
}

#[test]
fn a_step_at_home_whose_plans_do_not_fit_together_is_refused_where_it_is_planned() {
    let slot = |rank: u16| Place {
        weight: 100,
        head_start: 0,
        home: Some(cadre_planner::RankId(rank.into())),
        memory: 1 << 30,
    };
    let roomy = Header {
        placement: Placement::Local,
        slots: (0..2).map(slot).collect(),
        fillers: (0..2).map(|it| Some(Member::InPlace(it))).collect(),
        ..header(&[Mask::Causal, Mask::Window { left: 9 }])
    };
    let sizes = needed(plans(&roomy).unwrap().iter().map(|it| (&it.0, &it.1)));
    for (less, fits) in [(0, true), (1, false)] {
        let slots = roomy.slots.iter().zip(&sizes);
        let slots = slots.map(|(it, memory)| Place { memory: memory - less, ..*it }).collect();
        let refused = plans(&Header { slots, ..roomy.clone() }).err();
        let full = |it: &_| matches!(it, cadre_planner::Error::SlotFull { .. });
        assert_eq!(refused.is_none(), fits);
        assert!(refused.iter().all(full), "{refused:?}");
    }
}

#[test]
fn the_plans_of_a_kind_are_those_of_a_model_that_has_no_other() {
    let near = Mask::Window { left: 99 };
    let mixed = planned(&[near, Mask::Causal, near]);
    for (kind, mask) in [near, Mask::Causal].into_iter().enumerate() {
        let alone = planned(&[mask; 3]);
        for nano in 0..2 {
            assert_eq!(mixed.plans[2 * nano + kind].plan, alone.plans[nano].plan, "{mask}");
        }
    }
    assert_ne!(mixed.digest, planned(&[Mask::Causal, near, near]).digest);
}

#[test]
fn layers_of_other_heads_have_plans_costs_and_bytes_of_their_own() {
    let narrow = Kind::causal(Heads { query: 4, kv: 4, dim: 8 });
    let wide = Heads { query: 8, kv: 2, dim: 64 };
    let wide = Kind { mask: Mask::Window { left: 99 }, ..Kind::causal(wide) };
    let costs = [Costs { task: 1024, ..Costs::default() }, Costs::default()];
    let of = |kinds: &[Kind], costs: &[Costs]| {
        let layers = Layers::new(kinds.iter().copied()).unwrap();
        let header = Header { layers, costs: costs.to_vec(), ..header(&[Mask::Causal]) };
        PlannedStep::new(Arc::new(header))
    };
    let mixed = of(&[wide, narrow, wide], &costs).unwrap();
    for (kind, own) in [wide, narrow].into_iter().enumerate() {
        let alone = of(&[own], &costs[kind..=kind]).unwrap();
        for nano in 0..2 {
            let (plan, alone) = (&mixed.plans[2 * nano + kind], &alone.plans[nano]);
            let Problem { heads, costs: found, lanes, .. } = *plan.problem;
            assert_eq!((heads, found, lanes), (own.heads, costs[kind], own.heads.kv));
            assert_eq!(plan.plan, alone.plan);
            assert_eq!(plan.shape(Direction::Backward), alone.shape(Direction::Backward));
        }
    }
    // Room for two phases of the wide layers, and for the largest bundle of any.
    let needed = |step: &PlannedStep| needed(step.plans.iter().map(|it| (&*it.problem, &*it.plan)));
    let (both, one) = (needed(&mixed), needed(&of(&[narrow], &costs[1..]).unwrap()));
    assert!(both.iter().zip(&one).all(|(both, one)| both > one), "{both:?} {one:?}");
    for wrong in [&costs[..1], &[costs, costs].concat()] {
        let refused = of(&[wide, narrow], wrong).unwrap_err().to_string();
        let expected = format!("step 0: its header has {} costs for 2 kinds", wrong.len());
        assert!(refused.starts_with(&expected), "{refused}");
    }
}

#[test]
fn two_phases_of_any_plans_and_the_largest_bundle_of_all_fit_a_slot() {
    // Many rows in small bundles, and few in large ones.
    let stretch = |(document, end)| Stretch { document: DocumentId(document), start: 0, end };
    let short = vec![128; 40];
    let half = |first: u32| (first..first + 20).map(|it| stretch((it, 128))).collect();
    let few = vec![vec![stretch((0, 2_500))], vec![stretch((1, 128))]];
    let nanos = vec![
        Packing::new(&short, vec![half(0), half(20)]).unwrap(),
        Packing::new(&[2_500, 128], few).unwrap(),
    ];
    let needed = |plans: &[(Problem, Plan)], slot: SlotId| {
        let of = plans.iter().map(|(problem, plan)| memory_of_slot(problem, plan, slot));
        let (phases, reserves): (Vec<_>, Vec<_>) = of.map(|it| (it.phase, it.reserve)).unzip();
        2 * phases.into_iter().max().unwrap() + reserves.into_iter().max().unwrap()
    };
    let mut made = 0;
    for memory in (120..220_u64).map(|it| it << 14) {
        let slots = vec![Place { weight: 100, head_start: 0, home: None, memory }; 3];
        let header = Header { nanos: nanos.clone(), slots, ..header(&[Mask::Causal]) };
        let Ok(plans) = plans(&header) else { continue };
        made += 1;
        for slot in (0..3).map(SlotId) {
            assert!(needed(&plans, slot) <= memory, "slot {slot:?} of {memory} bytes");
        }
    }
    assert!((1..100).contains(&made), "memory is short for some: {made} of 100");
}

/// Where one plan of many has no room under any limit, the others are not made anew for each.
#[test]
fn a_step_without_room_for_one_plan_is_refused_without_making_all_again_and_again() {
    let stretch = |(document, end)| Stretch { document: DocumentId(document), start: 0, end };
    let nano = |rows: u32| {
        let stretches = vec![vec![stretch((0, rows))], vec![stretch((1, 128))]];
        Packing::new(&[rows, 128], stretches).unwrap()
    };
    let count = 40;
    let header = Header {
        slots: vec![Place { weight: 100, head_start: 0, home: None, memory: 1 << 40 }; 3],
        turns: Turns::together(NonZeroU16::new(40).unwrap()),
        nanos: (0..count).map(|it| nano(2_500 + it)).collect(),
        ..header(&[Mask::Causal])
    };
    let roomy = plans(&header).unwrap();
    let needed = needed(roomy.iter().map(|it| (&it.0, &it.1)));
    let mut tight = roomy.clone();
    for (problem, _) in &mut tight {
        problem.slots.iter_mut().for_each(|it| it.memory = needed[0] / 20 * 19);
    }
    for hopeless in [0, tight.len() - 1] {
        let (mut made, mut kept) = (0, tight.clone());
        let refused = plans::fit_together(&mut kept, |problem, _| {
            made += 1;
            let at = tight.iter().position(|it| it.0 == *problem).unwrap();
            if at == hopeless {
                return Err(cadre_planner::Error::NoRoom { document: DocumentId(0) });
            }
            Ok(roomy[at].1.clone())
        });
        assert!(matches!(refused, Err(cadre_planner::Error::SlotFull { .. })), "{refused:?}");
        assert_eq!(kept, tight, "plans that do not fit stay as they were");
        println!("{made} plans made for {count}");
        assert!(made < 2 * tight.len(), "{made} plans were made for {count}");
    }
}

#[test]
fn bundles_of_all_kinds_go_to_survivors() {
    let planned = planned(&[Mask::Window { left: 99 }, Mask::Causal]);
    let alive = [true, false, true];
    let first = planned.assign(None, &[true; 3]).unwrap();
    let moved = planned.assign(Some(&first), &alive).unwrap();
    let table = planned.table(Round(1), vec![None; 3], &moved);
    assert_eq!(table.assignments.len(), 2 * planned.plans.len());
    let lost = Some(Slot(1));
    let before = planned.table(Round(0), vec![None; 3], &first);
    for (index, plan) in planned.plans.iter().enumerate() {
        let shapes = 2 * index..2 * index + 2;
        assert!(before.assignments[shapes.clone()].iter().all(|it| it.contains(&lost)));
        for slots in &table.assignments[shapes] {
            assert_eq!(slots.len(), plan.plan.bundles().len());
            assert!(slots.iter().all(|it| it.is_some() && *it != lost));
        }
    }
}
