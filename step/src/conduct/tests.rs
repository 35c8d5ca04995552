//! Headers that are put together, and what trainers announce that cannot be.

use cadre_planner::{DocumentId, Heads, LinkMap, Mask, Stretch, Tolerance};

use super::making::packing;
use super::*;
use crate::envelope::NanoLengths;
use crate::layers::Kind;
use crate::planned::plans::MAX_PLANS;

/// Of a model whose layers are all of other windows.
fn draft(layers: u16) -> Draft {
    let causal = Kind::causal(Heads { query: 2, kv: 1, dim: 8 });
    let window = |left| Kind { mask: Mask::Window { left }, ..causal };
    Draft {
        trainers: 1,
        layers: Layers::new((0..layers.into()).map(window)).unwrap(),
        kv_heads: KvHeads::Together,
        wire: Wire::F32,
        seed: 0,
        numerics: "test".into(),
        reproducible: true,
        placement: Placement::Local,
        costs: vec![Costs::default(); layers.into()],
        tolerance: Tolerance::USUAL,
        links: LinkMap::default(),
        standby: Standby::No,
        trainer_memory: 1 << 20,
        replay: None,
        header: None,
        filled: Vec::new(),
        memories: BTreeMap::new(),
    }
}

fn prepare(layers: u16, nanos: Vec<NanoLengths>) -> Result<u32, Error> {
    let view = View { number: ViewNumber::default(), slots: Vec::new() };
    let lengths = Lengths { step: 7, turns: None, nanos };
    Ok(draft(layers).order(7, BTreeMap::from([(0, lengths)]), &view).make()?.phases)
}

fn nano(documents: u32) -> NanoLengths {
    let stretch = |it| Stretch { document: DocumentId(it), start: 0, end: 1 };
    let documents = 0..documents;
    NanoLengths {
        documents: documents.clone().map(|it| (it, 1)).collect(),
        stretches: documents.map(stretch).collect(),
    }
}

#[test]
fn trainers_number_their_documents_as_they_like() {
    let whole = |documents: &[(u32, u32)]| {
        let stretch = |&(it, end)| Stretch { document: DocumentId(it), start: 0, end };
        let stretches = documents.iter().map(stretch).collect();
        let nanos = vec![NanoLengths { documents: documents.to_vec(), stretches }];
        Lengths { step: 7, turns: None, nanos }
    };
    let packed =
        |trainers: &[Lengths]| packing(7, 0, &(0..).zip(trainers.iter().cloned()).collect());
    // A trainer with more documents than the other: numbers of the other's are missing.
    let sparse = packed(&[whole(&[(0, 5), (2, 7), (4, 9), (6, 3)]), whole(&[(1, 4)])]).unwrap();
    let dense = packed(&[whole(&[(0, 5), (2, 7), (3, 9), (4, 3)]), whole(&[(1, 4)])]).unwrap();
    assert_eq!(sparse, dense);
    let mut untold = whole(&[(3, 5)]);
    untold.nanos[0].documents.clear();
    let [known, short, late] = [(8, 4), (3, 6), (2, 5)].map(|it| whole(&[it]));
    let mut late_stretch = late.clone();
    late_stretch.nanos[0].stretches[0].start = 1;
    let mut beyond = late.clone();
    beyond.nanos[0].stretches[0].end = 6;
    for (trainers, expected) in [
        (vec![known.clone(), untold], "trainer 1 holds rows of document 3, and no trainer tells"),
        (
            vec![known.clone(), whole(&[(3, 5)]), short],
            "trainer 1 gives document 3 the length 5, trainer 2 6; give all",
        ),
        (
            vec![known.clone(), late_stretch],
            "rows 0..1 of document 2 are at no rank; every row needs one (trainer 1 announced it)",
        ),
        (
            vec![known.clone(), late.clone(), late],
            "of document 2 are at two ranks; keep them at one (trainers 1, 2 announced it)",
        ),
        (vec![known, beyond], "rank 1 holds rows 0..6 of document 2, which is empty or beyond"),
    ] {
        let refused = packed(&trainers).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn a_step_that_nothing_can_be_made_of_is_refused_by_its_number() {
    assert_eq!(prepare(3, vec![nano(2), nano(1)]).unwrap(), 12);
    let most = |layers: u16| vec![nano(1); MAX_PLANS / usize::from(layers)];
    prepare(7, most(7)).unwrap();
    for (layers, nanos, expected) in [
        (2, Vec::new(), "step 7 has no nano-batch"),
        (1, vec![nano(2_000_001)], "step 7 has 4000002 documents and stretches"),
        (7, [most(7), most(7)].concat(), "step 7: 9362 nano-batches and 7 kinds of layers have"),
    ] {
        let refused = prepare(layers, nanos).unwrap_err().to_string();
        assert!(refused.starts_with(expected), "{refused}");
    }
}

#[test]
fn trainers_agree_on_turns_that_go_over_what_they_hold() {
    let number = |it| NonZeroU16::new(it).unwrap();
    let summed = Turns::accumulated(number(2), number(1)).ok();
    let prepare = |turns: [Option<Turns>; 2], held: usize| {
        let view = View { number: ViewNumber::default(), slots: Vec::new() };
        let stretch = Stretch { document: DocumentId(9), start: 0, end: 1 };
        let other = NanoLengths { documents: vec![(9, 1)], stretches: vec![stretch] };
        let nanos = [vec![nano(1); held], vec![other; held]];
        let told =
            turns.into_iter().zip(nanos).map(|(turns, nanos)| Lengths { step: 7, turns, nanos });
        let mut draft = Draft { trainers: 2, ..draft(3) };
        let made = draft.order(7, (0..).zip(told).collect(), &view).make()?;
        Ok::<_, Error>((made.phases, made.header.turns.to_string()))
    };
    assert_eq!(prepare([None, None], 2).unwrap(), (12, "F0,1 B0,1".into()));
    let written = Some(Turns::together(number(2)));
    assert_eq!(prepare([None, written], 2).unwrap(), (12, "F0,1 B0,1".into()));
    let both = [summed.clone(), summed.clone()];
    assert_eq!(prepare(both.clone(), 2).unwrap(), (12, "F0 B0 F1 B1".into()));
    let forward = Some(Turns::forward(number(1)));
    assert_eq!(prepare([forward.clone(), forward], 1).unwrap(), (3, "F0".into()));
    let one = Lengths { step: 7, turns: None, nanos: vec![nano(1)] };
    let uneven = [one.clone(), Lengths { nanos: vec![nano(1); 2], ..one }];
    let view = View { number: ViewNumber::default(), slots: Vec::new() };
    let refused = draft(3).order(7, (4..).zip(uneven).collect(), &view).make().unwrap_err();
    let refused = refused.to_string();
    let expected = "step 7: trainer 4 announced 1 nano-batches, trainer 5 2; announce all";
    assert!(refused.starts_with(expected), "{refused}");
    let refused = |turns, held, expected: &str| {
        let refused = prepare(turns, held).unwrap_err().to_string();
        assert!(refused.starts_with(expected), "{refused}");
    };
    let theirs = "step 7: trainer 0 announced the turns F0 B0 F1 B1, trainer 1 F0,1 B0,1, other ones from turn 0 on; give";
    refused([summed, None], 2, theirs);
    let forward = Some(Turns::forward(number(2)));
    let theirs = "step 7: trainer 0 announced the turns F0,1 B0,1, trainer 1 F0,1, other ones from turn 1 on; give";
    refused([None, forward], 2, theirs);
    refused(both, 3, "step 7: turns take 2 nano-batches, and ranks announced the rows of 3;");
}

#[test]
fn servers_keep_their_slots_in_a_replay_with_fewer_of_them() {
    let offer = |index: Option<u16>| {
        let server = |index| Member::Server { index, incarnation: 0, address: String::new() };
        let (memory, member) = (Some(1 << 30), index.map(server));
        Offer { weight: 100, home: None, memory, member, numerics: None }
    };
    let view = |servers: &[Option<u16>]| View {
        number: ViewNumber::default(),
        slots: servers.iter().map(|it| offer(*it)).collect(),
    };
    let lengths = || BTreeMap::from([(0, Lengths { step: 7, turns: None, nanos: vec![nano(2)] })]);
    let pool = || Draft { placement: Placement::Pool, ..draft(1) };
    let three = pool().order(7, lengths(), &view(&[Some(0), Some(1), Some(2)])).make().unwrap();
    let line = serde_json::to_string(three.header.as_ref()).unwrap();
    let log = Log::parse(std::path::Path::new("headers.jsonl"), &line).unwrap();

    let mut replay = Draft { replay: Some(Arc::new(log)), ..pool() };
    let mut filled = |servers: &[Option<u16>]| {
        let view = view(servers);
        let made = replay.order(7, lengths(), &view).make().unwrap();
        replay.made(made.header);
        let fillers = replay.fillers(&view);
        let header = replay.finish(view.number, fillers).header();
        let index = |it: &Option<Member>| match it {
            Some(Member::Server { index, .. }) => Some(*index),
            Some(Member::InPlace(_) | Member::Standby(_)) | None => None,
        };
        header.fillers.iter().map(index).collect::<Vec<_>>()
    };
    assert_eq!(filled(&[Some(0), Some(1)]), [Some(0), Some(1), None]);
    // One is lost, then replaced; the other stays where it is.
    assert_eq!(filled(&[None, Some(1)]), [None, Some(1), None]);
    assert_eq!(filled(&[Some(4), Some(1)]), [Some(4), Some(1), None]);
}
