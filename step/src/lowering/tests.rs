//! Every byte has a name here, and moves by the lists: landings and homes must hold the right names, once.

use std::collections::{BTreeMap, BTreeSet};

use cadre_planner::{
    Costs, Document, DocumentId, Heads, Layout, Links, Mask, Slot as Place, Stretch, Tolerance,
    plan, plan_at_home,
};
use cadre_protocol::Work;
use proptest::prelude::*;
use serde_json::json;

use super::*;

const HEADS: Heads = Heads { query: 6, kv: 3, dim: 2 };

/// A byte of a document's row of all heads: tensor, document, row, place in the row.
type Name = (Tensor, u32, u32, u64);

/// Bytes that are still to come are `None`.
type Names = Vec<Option<Name>>;

/// A tensor, in a group of KV heads.
#[derive(Clone)]
struct Part {
    tensor: Tensor,
    kv_heads: Range<u16>,
    /// Bytes of a row under one KV head.
    row: u64,
}

impl Part {
    fn of(problem: &Problem, kv_heads: &Range<u16>, tensor: Tensor) -> Self {
        Self { tensor, kv_heads: kv_heads.clone(), row: row_bytes(problem, tensor) }
    }

    fn all_heads(problem: &Problem, tensor: Tensor) -> Self {
        Self::of(problem, &(0..HEADS.kv), tensor)
    }

    /// Some rows under the group's heads, head by head.
    fn names(&self, document: DocumentId, rows: Range<u32>) -> Names {
        let &Self { tensor, ref kv_heads, row } = self;
        let each = |head: u16| {
            let bytes = u64::from(head) * row..u64::from(head + 1) * row;
            let name =
                move |it| bytes.clone().map(move |byte| Some((tensor, document.0, it, byte)));
            rows.clone().flat_map(name)
        };
        kv_heads.clone().flat_map(each).collect()
    }

    /// A bundle's query rows, task by task.
    fn queries(&self, plan: &Plan, bundle: BundleId) -> Names {
        let tasks = plan.tasks_of(bundle).iter();
        tasks.flat_map(|it| self.names(it.document, it.rows.clone())).collect()
    }
}

/// Everything that a trainer holds of a tensor.
fn held(problem: &Problem, rank: RankId, tensor: Tensor) -> Names {
    let whole = Part::all_heads(problem, tensor);
    let pieces = problem.layout.pieces_of(rank);
    pieces.flat_map(|(document, piece)| whole.names(document, piece.rows)).collect()
}

fn go(pieces: &[Piece], from: &Names, to: &mut Names) {
    for Piece { remote, local, bytes } in pieces {
        for byte in 0..*bytes {
            let place = &mut to[(local + byte) as usize];
            assert_eq!(*place, None, "a byte came twice");
            *place = from[(remote + byte) as usize];
        }
    }
}

fn bytes_of(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|it| it.bytes).sum()
}

fn ranks(problem: &Problem) -> impl Iterator<Item = RankId> + use<> {
    (0..problem.layout.ranks().len() as u32).map(RankId)
}

/// Bytes that a work is said to have for each trainer.
fn results(shape: &Shape, work: usize) -> BTreeMap<TrainerId, u64> {
    shape.work(Work(work as u32)).results.iter().copied().collect()
}

fn bundles(plan: &Plan) -> impl Iterator<Item = (BundleId, &cadre_planner::Bundle)> {
    (0..).map(BundleId).zip(plan.bundles())
}

fn landings_hold_what_bundles_read(problem: &Arc<Problem>, plan: &Arc<Plan>, direction: Direction) {
    let lists = Lists::new(problem, plan);
    let [forward, backward] = lists.shapes().unwrap();
    let shape = if direction == Direction::Forward { forward } else { backward };
    for (id, bundle) in bundles(plan) {
        let inputs = lists.inputs(id, direction);
        let mut landing: Names = vec![None; inputs.bytes];
        for source in &inputs.sources {
            for (tensor, pieces) in source.tensors() {
                go(pieces, &held(problem, source.rank, tensor), &mut landing);
            }
            let bytes: u64 = source.tensors().map(|(_, it)| bytes_of(it)).sum();
            assert_eq!(source.bytes, bytes);
            // Some rows of a stretch are one piece under each head.
            for (tensor, pieces) in source.tensors() {
                let of_keys = matches!(tensor, Tensor::K | Tensor::V);
                let tasks = plan.tasks_of(id).iter().map(|it| it.rows.clone()).collect();
                let rows = if of_keys { vec![bundle.keys.clone()] } else { tasks };
                let here =
                    rows.into_iter().flat_map(|it| problem.layout.locate(bundle.document, it));
                let stretches = here.filter(|it| it.rank == source.rank).count();
                assert!(
                    pieces.len() <= stretches * bundle.kv_heads.len(),
                    "{tensor:?}: {pieces:?}"
                );
            }
        }
        let mut areas = inputs.areas.clone();
        let mut used = 0;
        for &tensor in read(direction) {
            let part = Part::of(problem, &bundle.kv_heads, tensor);
            let expected = if matches!(tensor, Tensor::K | Tensor::V) {
                part.names(bundle.document, bundle.keys.clone())
            } else {
                part.queries(plan, id)
            };
            let area = areas.of(tensor).clone();
            used += area.len();
            assert!(landing[area] == expected[..], "{tensor:?} of {bundle:?}");
        }
        assert_eq!(used, landing.iter().flatten().count(), "bytes came that nobody reads");
        for (parcel, source) in lists.parcels_of(id).zip(&inputs.sources) {
            let parcel_shape = shape.parcels()[parcel as usize];
            let expected = (Bundle(id.0), TrainerId(source.rank.0 as u16), source.bytes);
            let of = (parcel_shape.bundle, parcel_shape.from, parcel_shape.bytes);
            assert_eq!(of, expected);
            let (of, found) = lists.parcel(Parcel(parcel), direction);
            assert_eq!((of, found.rank), (id, source.rank));
        }
    }
}

/// Parcels that no task reads come to the last one.
fn tasks_need_the_parcels_that_they_read(problem: &Arc<Problem>, plan: &Arc<Plan>) {
    let lists = Lists::new(problem, plan);
    let [shape, _] = lists.shapes().unwrap();
    for (id, bundle) in bundles(plan) {
        let mut reads: Vec<Vec<Parcel>> = Vec::new();
        for task in &plan.tasks()[bundle.tasks.start as usize..bundle.tasks.end as usize] {
            let mut names = Vec::new();
            for &tensor in read(Direction::Forward) {
                let rows = if tensor == Tensor::Q { &task.rows } else { &task.keys };
                let part = Part::of(problem, &task.kv_heads, tensor);
                names.extend(part.names(task.document, rows.clone()));
            }
            let names: BTreeSet<Name> = names.into_iter().flatten().collect();
            let sends = |it: &u32| {
                let (_, source) = lists.parcel(Parcel(*it), Direction::Forward);
                source.tensors().any(|(tensor, pieces)| {
                    let held = held(problem, source.rank, tensor);
                    let bytes = pieces.iter().flat_map(|it| it.remote..it.remote + it.bytes);
                    { bytes }.any(|it| held[it as usize].is_some_and(|it| names.contains(&it)))
                })
            };
            reads.push(lists.parcels_of(id).filter(sends).map(Parcel).collect());
        }
        let idle = |it: &Parcel| !reads.iter().flatten().any(|read| read == it);
        let idle: Vec<_> = lists.parcels_of(id).map(Parcel).filter(idle).collect();
        let last = reads.last_mut().unwrap();
        last.extend(idle);
        last.sort_unstable();
        let works = bundle.tasks.clone().map(|it| shape.work(Work(it)));
        for (work, reads) in works.zip(reads) {
            assert_eq!((work.bundle.0, work.needs), (id.0, &reads[..]), "{bundle:?}");
        }
    }
}

fn outputs_reach_their_homes_once(problem: &Arc<Problem>, plan: &Arc<Plan>) {
    let lists = Lists::new(problem, plan);
    let [shape, _] = lists.shapes().unwrap();
    for rank in ranks(problem) {
        let whole = held(problem, rank, Tensor::O);
        let whole_lse = held(problem, rank, Tensor::OLse);
        let (mut o, mut lse) = (vec![None; whole.len()], vec![None; whole_lse.len()]);
        for (index, task) in plan.tasks().iter().enumerate() {
            let result = |tensor| {
                let part = Part::of(problem, &task.kv_heads, tensor);
                part.names(task.document, task.rows.clone())
            };
            let (o_pieces, lse_pieces) = lists.forward_result(problem, plan, index, rank);
            go(&o_pieces, &result(Tensor::O), &mut o);
            go(&lse_pieces, &result(Tensor::OLse), &mut lse);
            let promised = results(&shape, index);
            let bytes = bytes_of(&o_pieces) + bytes_of(&lse_pieces);
            assert_eq!(bytes, promised.get(&TrainerId(rank.0 as u16)).copied().unwrap_or(0));
        }
        assert!(o == whole && lse == whole_lse, "rows of {rank:?} are missing or misplaced");
    }
}

fn gradients_reach_their_homes_once(problem: &Arc<Problem>, plan: &Arc<Plan>) {
    let lists = Lists::new(problem, plan);
    let [_, shape] = lists.shapes().unwrap();
    let mut key_rows: BTreeMap<BundleId, u64> = BTreeMap::new();
    for rank in ranks(problem) {
        let whole = held(problem, rank, Tensor::DQ);
        let mut dq = vec![None; whole.len()];
        for (id, bundle) in bundles(plan) {
            let result = lists.backward_result(problem, plan, id, rank);
            let dq_part = Part::of(problem, &bundle.kv_heads, Tensor::DQ);
            go(&result.dq, &dq_part.queries(plan, id), &mut dq);

            // The landing holds the trainer's rows that the result names, in that order.
            let dk = Part::of(problem, &bundle.kv_heads, Tensor::DK);
            let mut landing: Names = vec![None; result.part_bytes as usize];
            let keys = dk.names(bundle.document, bundle.keys.clone());
            go(&result.part, &keys, &mut landing);
            let mut expected: Names = Vec::new();
            for KeyRows { local, first } in &result.keys {
                let start = bundle.keys.start + first;
                let rows = start..start + local.len() as u32;
                let at: Vec<_> = problem.layout.locate(bundle.document, rows.clone()).collect();
                assert!(at.len() == 1 && at[0].rank == rank && at[0].local == *local);
                expected.extend(dk.names(bundle.document, rows));
            }
            assert!(landing == expected, "dK of {bundle:?} at {rank:?}");

            let row = dk.row * bundle.kv_heads.len() as u64;
            *key_rows.entry(id).or_default() += result.part_bytes / row;
            let promised = results(&shape, id.0 as usize);
            let bytes = bytes_of(&result.dq) + 2 * result.part_bytes;
            assert_eq!(bytes, promised.get(&TrainerId(rank.0 as u16)).copied().unwrap_or(0));
        }
        assert!(dq == whole, "dQ of {rank:?} is missing or misplaced");
    }
    for (id, bundle) in bundles(plan) {
        assert_eq!(key_rows[&id], u64::from(bundle.keys.end - bundle.keys.start));
    }
}

/// The plan with every bundle of an odd index and more than one KV head cut into two groups.
fn cut_by_heads(plan: &Plan) -> Plan {
    let (mut tasks, mut bundles) = (Vec::new(), Vec::new());
    for (id, bundle) in self::bundles(plan) {
        let Range { start, end } = bundle.kv_heads;
        let cut = if id.0 % 2 == 0 || end - start < 2 { vec![] } else { vec![start + 1] };
        let edges = [vec![start], cut, vec![end]].concat();
        for kv_heads in edges.windows(2).map(|it| it[0]..it[1]) {
            let first = tasks.len() as u32;
            for task in plan.tasks_of(id) {
                let bundle = BundleId(bundles.len() as u32);
                let kv_heads = kv_heads.clone();
                tasks.push(cadre_planner::Task { bundle, kv_heads, ..task.clone() });
            }
            let tasks = first..tasks.len() as u32;
            bundles.push(cadre_planner::Bundle { kv_heads, tasks, ..bundle.clone() });
        }
    }
    let mut whole = serde_json::to_value(plan).unwrap();
    whole["tasks"] = json!(tasks);
    whole["bundles"] = json!(bundles);
    serde_json::from_value(whole).unwrap()
}

prop_compose! {
    /// Rows of a document, its mask, and where it is cut among which ranks.
    fn documents()(
        rows in 1..300_u32,
        mask in prop_oneof![
            Just(Mask::Causal),
            Just(Mask::Full),
            (0..200_u32).prop_map(|left| Mask::Window { left }),
        ],
        cuts in prop::collection::btree_set(1..300_u32, 0..3),
        ranks in prop::collection::vec(0..3_usize, 4),
    ) -> (Document, Vec<(Range<u32>, usize)>) {
        let cuts: Vec<u32> = cuts.into_iter().filter(|&it| it < rows).collect();
        let edges: Vec<u32> = [0].into_iter().chain(cuts).chain([rows]).collect();
        let stretches = edges.windows(2).map(|it| it[0]..it[1]).zip(ranks).collect();
        (Document { rows, mask }, stretches)
    }
}

prop_compose! {
    fn problems()(
        documents in prop::collection::vec(documents(), 1..5),
        element_bytes in prop_oneof![Just(2), Just(4)],
        dedicated in 1..4_usize,
        backwards in any::<bool>(),
    ) -> Problem {
        let mut ranks: Vec<Vec<Stretch>> = vec![Vec::new(); 3];
        for (id, (_, stretches)) in (0..).map(DocumentId).zip(&documents) {
            for (rows, rank) in stretches {
                ranks[*rank].push(Stretch { document: id, start: rows.start, end: rows.end });
            }
        }
        ranks.retain(|it| !it.is_empty());
        if backwards {
            for it in &mut ranks {
                it.reverse();
            }
        }
        let place = |home| Place { weight: 100, head_start: 0, home, memory: 1 << 40 };
        let at_home = (0..ranks.len() as u32).map(|rank| place(Some(RankId(rank))));
        let slots = at_home.chain((0..dedicated).map(|_| place(None))).collect();
        let documents = documents.into_iter().map(|it| it.0).collect();
        let layout = Layout::new(documents, ranks).unwrap();
        let costs = Costs { task_rows: 128, ..Costs::pairs_only() };
        let (links, tolerance) = (Links::equal(), Tolerance::USUAL);
        Problem { layout, heads: HEADS, element_bytes, lanes: 1, slots, costs, links, tolerance }
    }
}

#[test]
fn a_whole_document_is_one_piece_under_all_its_heads() {
    let documents = [64, 100].map(|rows| Document { rows, mask: Mask::Causal });
    let layout = Layout::end_to_end(documents.to_vec(), 200).unwrap();
    let slot = Place { weight: 100, head_start: 0, home: None, memory: 1 << 30 };
    let (costs, links, tolerance) = (Costs::default(), Links::equal(), Tolerance::USUAL);
    let slots = vec![slot];
    let problem = Problem {
        layout,
        heads: HEADS,
        element_bytes: 4,
        lanes: 3,
        slots,
        costs,
        links,
        tolerance,
    };
    let plan = Arc::new(plan(&problem).unwrap());
    let lists = Lists::new(&Arc::new(problem), &plan);
    for (id, _) in bundles(&plan) {
        for (tensor, pieces) in lists.inputs(id, Direction::Backward).sources[0].tensors() {
            assert_eq!(pieces.len(), 1, "{tensor:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_byte_travels_to_its_place_once(problem in problems()) {
        let problem = Arc::new(problem);
        for plan in [plan(&problem).unwrap(), plan_at_home(&problem).unwrap()] {
            plan.check(&problem).unwrap();
            for plan in [cut_by_heads(&plan), plan].map(Arc::new) {
                landings_hold_what_bundles_read(&problem, &plan, Direction::Forward);
                landings_hold_what_bundles_read(&problem, &plan, Direction::Backward);
                tasks_need_the_parcels_that_they_read(&problem, &plan);
                outputs_reach_their_homes_once(&problem, &plan);
                gradients_reach_their_homes_once(&problem, &plan);
            }
        }
    }
}
