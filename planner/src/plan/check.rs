//! What every plan promises, checked by everyone who has computed or read one.
//!
//! In: a plan and its problem. Out: nothing, or the first broken promise. The check shares no code
//! with the balance, only masks and costs, and does not change anything.

use std::ops::Range;

use super::{Bounds, Bundle, BundleId, Cuts, Plan, Runs, Task};
use crate::memory::Memory;
use crate::{DocumentId, Error, Problem, TILE_ROWS};

impl Plan {
    /// Checks the plan against its problem.
    ///
    /// # Guarantees
    ///
    /// * Every row of every KV head of every document is computed exactly once.
    /// * Tasks are in the order (bundle, rows), bundles in the order (slot, document, KV heads, keys);
    ///   head groups of one document in one slot do not overlap, nor do keys of one group.
    /// * With several lanes all KV heads of a document stay together.
    /// * Keys are those of the mask, and a bundle's keys those of its tasks, without a gap.
    /// * Cuts are where [`Plan::cuts`] says; a standby slot has work only in a plan at home.
    /// * No slot has rows or keys of a rank that it cannot reach.
    /// * Every slot's memory holds two phases of its work and the largest bundle of the plan.
    /// * The bounds are those of the plan.
    ///
    /// # Errors
    ///
    /// The first promise that is broken.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        problem.check()?;
        let given = problem.digest();
        if self.problem != given {
            return Err(Error::OtherProblem { planned: self.problem, given });
        }
        if self.bounds != self.verify(problem)? {
            return Err(Error::BadBounds);
        }
        Ok(())
    }

    /// Checks all but the bounds against a checked problem, and returns what the bounds should be.
    pub(super) fn verify(&self, problem: &Problem) -> Result<Bounds, Error> {
        self.check_bundles(problem)?;
        for (id, bundle) in (0..).map(BundleId).zip(&self.bundles) {
            self.check_tasks(problem, id, bundle)?;
        }
        let runs = Runs::of(self);
        self.check_cover(problem, &runs)?;
        self.check_reach(problem)?;
        let memory = Memory::of(problem, self);
        memory.check(problem, 0)?;
        Ok(Bounds::of(problem, self, &runs, &memory))
    }

    fn check_bundles(&self, problem: &Problem) -> Result<(), Error> {
        let mut next = 0;
        let mut last: Option<&Bundle> = None;
        for (id, bundle) in (0..).map(BundleId).zip(&self.bundles) {
            let refuse = |why| Err(Error::BadBundle { bundle: id, why });
            let Bundle { document, kv_heads, slot, tasks, keys } = bundle;
            if problem.layout.document(*document).is_none() {
                return refuse("its document does not exist");
            }
            match problem.slots.get(slot.0 as usize) {
                None => return refuse("its slot does not exist"),
                Some(it) if it.is_standby() && self.cuts == Cuts::Tiles => {
                    return refuse("its slot is standby");
                }
                Some(_) => {}
            }
            if kv_heads.is_empty() || kv_heads.end > problem.heads.kv {
                return refuse("its kv heads do not exist");
            }
            if !problem.heads_may_part() && *kv_heads != problem.all_heads() {
                return refuse(
                    "its kv heads are some of all, but with several lanes all move together",
                );
            }
            if tasks.is_empty() || tasks.start != next || tasks.end as usize > self.tasks.len() {
                return refuse("its tasks do not follow those of the bundle before");
            }
            next = tasks.end;
            let Needed { keys: needed, is_in_order, has_gap } = self.needed(id);
            if *keys != needed {
                return refuse("its keys are not those of its tasks");
            }
            if !is_in_order {
                return refuse("its tasks are not in row order");
            }
            if has_gap {
                return refuse("it has keys between those of its tasks");
            }
            if let Some(before) = last {
                let place = |it: &Bundle| (it.slot, it.document, it.kv_heads.start, it.keys.start);
                let is_together = (before.slot, before.document) == (*slot, *document);
                if place(before) >= place(bundle) {
                    return refuse("it is not behind the bundle before");
                }
                if is_together && before.kv_heads != *kv_heads {
                    if before.kv_heads.end > kv_heads.start {
                        return refuse("its kv heads overlap those of the bundle before");
                    }
                } else if is_together && before.keys.end >= keys.start {
                    return refuse("its keys touch those of the bundle before");
                }
            }
            last = Some(bundle);
        }
        if next as usize != self.tasks.len() {
            let (found, expected) = (self.tasks.len() as u64, next.into());
            return Err(Error::Mismatch { what: "list of tasks", found, expected });
        }
        Ok(())
    }

    /// What the tasks of a bundle say of it.
    fn needed(&self, bundle: BundleId) -> Needed {
        let (mut first, mut end, mut row) = (u32::MAX, 0, 0);
        let (mut is_in_order, mut has_gap) = (true, false);
        for it in self.tasks_of(bundle) {
            has_gap |= first <= end && it.keys.start > end;
            (first, end) = (first.min(it.keys.start), end.max(it.keys.end));
            is_in_order &= row <= it.rows.start;
            row = it.rows.end;
        }
        Needed { keys: first..end, is_in_order, has_gap }
    }

    /// Checks the tasks of a bundle, each for itself.
    fn check_tasks(&self, problem: &Problem, id: BundleId, owner: &Bundle) -> Result<(), Error> {
        let whole = problem.document(owner.document);
        let allowed = |cut: u32| {
            cut.is_multiple_of(TILE_ROWS)
                || cut == whole.rows
                || self.cuts == Cuts::RankEdges && is_rank_edge(problem, owner.document, cut)
        };
        for (task, it) in (owner.tasks.start..).zip(self.tasks_of(id)) {
            let refuse = |why| Err(Error::BadTask { task, why });
            let Task { document, rows, keys, kv_heads, bundle } = it;
            if *bundle != id || owner.document != *document || owner.kv_heads != *kv_heads {
                return refuse("it is not what its bundle says");
            }
            if rows.is_empty() || rows.end > whole.rows {
                return refuse("its rows do not exist");
            }
            if rows.end - rows.start > problem.costs.task_rows {
                return refuse("it is longer than costs.task_rows");
            }
            if *keys != whole.mask.keys(whole.rows, rows.clone()) {
                return refuse("its keys are not those of its mask");
            }
            if !allowed(rows.start) || !allowed(rows.end) {
                return refuse("it is cut inside a tile");
            }
        }
        Ok(())
    }

    /// Checks that every slot reaches the ranks that hold what its bundles need.
    fn check_reach(&self, problem: &Problem) -> Result<(), Error> {
        if problem.links.reach_all() {
            return Ok(());
        }
        let (places, _) = problem.places();
        let beyond = problem.links.beyond_reach();
        for (id, &Bundle { document, slot, ref keys, .. }) in (0..).map(BundleId).zip(&self.bundles)
        {
            let rows = self.tasks_of(id).iter().map(|it| &it.rows).chain([keys]);
            let beyond = beyond.get(places[slot.0 as usize]).map_or(&[][..], |it| it);
            for piece in rows.flat_map(|it| problem.layout.locate(document, it.clone())) {
                let rank = piece.rank;
                if beyond.binary_search(&(rank.0 as usize)).is_ok() {
                    return Err(Error::CannotReach { bundle: id, document, slot, rank });
                }
            }
        }
        Ok(())
    }

    /// Checks that every row of every KV head is computed once.
    fn check_cover(&self, problem: &Problem, all_runs: &Runs) -> Result<(), Error> {
        let (order, firsts) = self.by_document(problem);
        let all = problem.all_heads();
        // Between two neighbouring edges, every head is computed in the same runs of rows.
        let mut edges = Vec::new();
        let mut runs: Vec<(&Range<u32>, &Range<u16>)> = Vec::new();
        for (document, whole) in (0..).map(DocumentId).zip(problem.layout.documents()) {
            let index = document.0 as usize;
            runs.clear();
            edges.clear();
            edges.extend([all.start, all.end]);
            for &bundle in &order[firsts[index] as usize..firsts[index + 1] as usize] {
                let heads = &self.bundles[bundle.0 as usize].kv_heads;
                runs.extend(all_runs.of_bundle(bundle).iter().map(|it| (&it.rows, heads)));
                if *heads != all {
                    edges.extend([heads.start, heads.end]);
                }
            }
            if runs.len() > 1 {
                runs.sort_unstable_by_key(|it| it.0.start);
                edges.sort_unstable();
                edges.dedup();
            }
            for kv_head in edges[..edges.len() - 1].iter().copied() {
                let mine = runs.iter().filter(|it| it.1.contains(&kv_head));
                let row = covered(mine.map(|it| it.0));
                if row != Ok(whole.rows) {
                    let row = row.unwrap_or_else(|row| row);
                    return Err(Error::NotOnce { document, kv_head, row });
                }
            }
        }
        Ok(())
    }

    /// Bundles by document, and where a document's begin.
    fn by_document(&self, problem: &Problem) -> (Vec<BundleId>, Vec<u32>) {
        let mut firsts = vec![0_u32; problem.layout.documents().len() + 1];
        for it in &self.bundles {
            firsts[it.document.0 as usize + 1] += 1;
        }
        for at in 1..firsts.len() {
            firsts[at] += firsts[at - 1];
        }
        let mut next = firsts.clone();
        let mut order = vec![BundleId(0); self.bundles.len()];
        for (bundle, it) in (0..).map(BundleId).zip(&self.bundles) {
            let at = &mut next[it.document.0 as usize];
            order[*at as usize] = bundle;
            *at += 1;
        }
        (order, firsts)
    }
}

/// What a bundle has to be, by its tasks.
struct Needed {
    /// Smallest range that holds the keys of all tasks.
    keys: Range<u32>,
    /// Whether the tasks are in row order.
    is_in_order: bool,
    /// Whether some task has only keys behind those of all tasks before it.
    has_gap: bool,
}

/// The end of ranges that follow each other from 0, or the first row that is missing or twice.
fn covered<'a>(ranges: impl Iterator<Item = &'a Range<u32>>) -> Result<u32, u32> {
    let mut next = 0;
    for Range { start, end } in ranges {
        if *start != next {
            return Err(next.min(*start));
        }
        next = *end;
    }
    Ok(next)
}

fn is_rank_edge(problem: &Problem, document: DocumentId, cut: u32) -> bool {
    let pieces = problem.layout.pieces_of_document(document);
    pieces.binary_search_by_key(&cut, |it| it.rows.start).is_ok()
}
