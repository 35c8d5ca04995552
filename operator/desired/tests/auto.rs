//! Mode `Auto` replayed against loads: it finds a number and stays, follows a change, shrinks late, goes to 0 and comes
//! back, and spends a day hardly more than who knows the day before.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadre_crds::contract::{ANNOTATION_INCARNATION, LABEL_REVISION, LABEL_SLOT};
use cadre_crds::{AttentionPool, AttentionPoolSpec, Scaling, ScalingMode};
use cadre_desired::pool::{Observed, Report, decide, scale::Memory};
use cadre_desired::{Action, Object, Settings};
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

/// Seconds between two looks.
const LOOK: i64 = 15;
/// Seconds that a new server needs before it serves.
const START: i64 = 40;

/// A pool whose servers share a load evenly.
struct Replay {
    pool: AttentionPool,
    /// When each server was asked for.
    servers: Vec<i64>,
    memory: Memory,
    second: i64,
    noise: u64,
    /// Servers that find a node.
    fits: usize,
    /// Whether the load is that of a job, which is there while there is load.
    has_jobs: bool,
    /// A server that works and whose reports do not arrive.
    silent: Option<usize>,
    /// Digest of what its servers are made from.
    revision: String,
}

impl Replay {
    fn new(replicas: u32, max: u32, noise: u64) -> Self {
        let scaling = Scaling { mode: ScalingMode::Auto, max: Some(max), ..Scaling::default() };
        let spec = AttentionPoolSpec { replicas, scaling, ..AttentionPoolSpec::default() };
        let metadata =
            ObjectMeta { name: Some("p".into()), uid: Some("u".into()), ..ObjectMeta::default() };
        let pool = AttentionPool { metadata, spec, status: None };
        let servers = vec![0; replicas as usize];
        let mut replay = Self {
            pool,
            servers,
            memory: Memory::default(),
            second: 1_000,
            noise,
            fits: usize::MAX,
            has_jobs: false,
            silent: None,
            revision: String::new(),
        };
        replay.revision = replay.revision();
        replay
    }

    /// Another operator leads, and knows what the status says.
    fn take_over(&mut self) {
        let status = self.pool.status.get_or_insert_default();
        let last = self.memory.decision.take().or(status.last_scale_decision.take());
        status.last_scale_decision = last;
        self.memory = Memory::default();
    }

    /// Servers that serve.
    fn serving(&self) -> usize {
        let placed = self.servers.iter().take(self.fits);
        placed.filter(|it| **it + START <= self.second).count()
    }

    /// A factor around one million, within five percent.
    fn noise(&mut self) -> u64 {
        // A linear congruence is enough noise for a replay.
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        950_000 + (self.noise >> 33) % 100_001
    }

    fn observed(
        &self,
        pods: Vec<Pod>,
        reports: BTreeMap<String, Report>,
        trainer: Option<Arc<Pod>>,
    ) -> Observed {
        Observed {
            pool: self.pool.clone(),
            unreadable: None,
            service: None,
            budget: None,
            revisions: Vec::new(),
            pods: pods.into_iter().map(Arc::new).collect(),
            trainers: trainer.into_iter().collect(),
            nodes: BTreeMap::new(),
            reports,
            holders: BTreeMap::new(),
            in_place: 0,
            reports_complete: true,
            memory: self.memory.clone(),
        }
    }

    /// Digest of what the pool's servers are made from.
    fn revision(&self) -> String {
        let observed = self.observed(Vec::new(), BTreeMap::new(), None);
        let (decision, _) = decide(&observed, &Settings::default(), Timestamp::UNIX_EPOCH);
        let kept = decision.actions.into_iter().find_map(|it| match it {
            Action::Create(Object::Revision(it)) => it.metadata.labels?.remove(LABEL_REVISION),
            Action::Create(_)
            | Action::Apply(_)
            | Action::Drain { .. }
            | Action::Note { .. }
            | Action::Delete(_)
            | Action::DeleteSelf
            | Action::Guard
            | Action::Release => None,
        });
        kept.expect("it is kept")
    }

    /// One look at a load in thousandths of a server. Out: servers wanted after it.
    fn look(&mut self, load: u64) -> u32 {
        self.second += LOOK;
        let share = (load * 1_000).checked_div(self.serving() as u64).unwrap_or(0);
        let mut pods = Vec::new();
        let mut reports = BTreeMap::new();
        for (slot, since) in self.servers.clone().into_iter().enumerate() {
            let mut pod = pod(slot, &self.revision);
            if slot >= self.fits {
                pod.spec = None;
            } else if since + START <= self.second {
                let busy = (share * self.noise() / 1_000_000).min(1_000_000);
                let serves = self.has_jobs && load > 0;
                // Who works for no job reports nothing.
                let reports_load = serves || !self.has_jobs;
                let is_heard = reports_load && self.silent != Some(slot);
                let busy_ppm = u32::try_from(busy).ok().filter(|_| is_heard);
                let name = pod.metadata.name.clone().unwrap_or_default();
                reports.insert(name, Report { busy_ppm, serves, ..Report::default() });
            }
            pods.push(pod);
        }
        let trainer = (self.has_jobs && load > 0).then(|| Arc::new(pod(0, "")));
        let observed = self.observed(pods, reports, trainer);
        let now = Timestamp::from_second(self.second).expect("a good second");
        let (decision, memory) = decide(&observed, &Settings::default(), now);
        for action in decision.actions {
            if let Action::Drain { reason, .. } = action {
                assert_eq!(reason, "ScaledDown", "nobody is replaced");
            }
        }
        self.memory = memory;
        let told = self.pool.status.as_ref().and_then(|it| it.last_scale_decision.as_ref());
        let last = self.memory.decision.as_ref().or(told);
        let wanted = last.map_or(self.pool.spec.replicas, |it| it.to);
        self.servers.resize(wanted as usize, self.second);
        wanted
    }

    /// Looks for so many seconds. Out: the wanted numbers where they changed, the first included.
    fn run(&mut self, load: u64, seconds: i64) -> Vec<u32> {
        let mut wanted: Vec<u32> = (0..seconds / LOOK).map(|_| self.look(load)).collect();
        wanted.dedup();
        wanted
    }
}

fn pod(slot: usize, revision: &str) -> Pod {
    let owner = OwnerReference { uid: "u".into(), controller: Some(true), ..Default::default() };
    let ready = PodCondition { type_: "Ready".into(), status: "True".into(), ..Default::default() };
    Pod {
        metadata: ObjectMeta {
            name: Some(format!("p-{slot}")),
            labels: Some(
                [
                    (LABEL_SLOT.to_owned(), slot.to_string()),
                    (LABEL_REVISION.to_owned(), revision.to_owned()),
                ]
                .into(),
            ),
            annotations: Some([(ANNOTATION_INCARNATION.to_owned(), "0".to_owned())].into()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec { node_name: Some("node".into()), ..PodSpec::default() }),
        status: Some(PodStatus {
            phase: Some("Running".into()),
            conditions: Some(vec![ready]),
            ..PodStatus::default()
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn constant_load_changes_the_number_for_a_while_and_then_never(
        replicas in 1_u32..40,
        load in 0_u64..40_000,
        noise in any::<u64>(),
    ) {
        let mut replay = Replay::new(replicas, 64, noise);
        replay.run(load, 1_800);
        let settled = replay.run(load, 7_200);
        // At the very edge noise may change the number once more, late, up or down; then it is well inside.
        prop_assert!(settled.len() <= 2, "{settled:?} at {load} thousandths");
        // Busy for about the target, 70 %: never above a sixth beyond it, and not twice what is needed.
        let servers = u64::from(settled[settled.len() - 1]);
        prop_assert!(load * 100 <= servers * 82_000 || servers == 64, "{servers} for {load}");
        prop_assert!(servers <= (load * 2 / 700).max(1) + 1, "{servers} for {load}");
    }

    #[test]
    fn it_never_swings(load in 0_u64..40_000, noise in any::<u64>()) {
        let mut replay = Replay::new(4, 64, noise);
        let way = replay.run(load, 3_600);
        let rises = way.windows(2).filter(|it| it[1] > it[0]).count();
        let falls = way.windows(2).filter(|it| it[1] < it[0]).count();
        prop_assert!(rises == 0 || falls <= 1, "{:?} at {} thousandths", way, load);
    }
}

/// Most servers of a day's pool, the window in which fewer must have sufficed, and how long a rise takes: two looks, a
/// third one until it is asked for, and the start of a server.
const MOST: u32 = 64;
const WINDOW: i64 = 300;
const REACTION: i64 = 3 * LOOK + START;
/// Looks of six hours.
const DAY: usize = 6 * 3600 / LOOK as usize;

/// A job of a day: its first look, how many, and its load in thousandths of a server.
fn jobs() -> impl Strategy<Value = Vec<(usize, usize, u64)>> {
    let job = (0..DAY, 40_usize..480, 300_u64..12_000);
    prop::collection::vec(job, 4..24)
}

/// Servers that a schedule has which knows all loads: they are there when they are needed, and are kept as long as `Auto`
/// has to keep them.
fn omniscient(loads: &[u64], fits: usize) -> Vec<usize> {
    // 70 % busy is the target.
    let need = |load: &u64| usize::try_from(load.div_ceil(700)).unwrap_or(fits).min(fits);
    let need: Vec<_> = loads.iter().map(need).collect();
    let (before, after) = ((WINDOW / LOOK) as usize, (START as usize).div_ceil(LOOK as usize));
    let around = |at: usize| &need[at.saturating_sub(before)..(at + after + 1).min(need.len())];
    (0..need.len()).map(|at| around(at).iter().copied().max().unwrap_or(0)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_day_costs_hardly_more_than_who_knows_it_before_and_never_swings(
        jobs in jobs(),
        fits in prop_oneof![3 => Just(MOST as usize), 1 => 8_usize..40],
        takeovers in prop::collection::btree_set(0..DAY, 0..3),
        noise in any::<u64>(),
    ) {
        let at = |look: usize| {
            let there = jobs.iter().filter(|(from, looks, _)| (*from..from + looks).contains(&look));
            // More than the most servers can bear tells nothing of `Auto`.
            there.map(|it| it.2).sum::<u64>().min(700 * u64::from(MOST))
        };
        let loads: Vec<u64> = (0..DAY).map(at).collect();
        let mut replay = Replay::new(0, MOST, noise);
        (replay.fits, replay.has_jobs) = (fits, true);
        let best = omniscient(&loads, fits);
        let (mut spent, mut lacked) = (0, 0);
        let mut changes: Vec<(i64, bool)> = Vec::new();
        for (look, &load) in loads.iter().enumerate() {
            if takeovers.contains(&look) {
                replay.take_over();
            }
            let before = replay.servers.len();
            let after = replay.look(load) as usize;
            if after != before {
                changes.push((replay.second, after > before));
            }
            spent += after.min(fits);
            // Who knows the day has as many servers as fit, too.
            let bears = |servers: usize| servers as u64 * 1_000 >= load;
            lacked += i64::from(!bears(replay.serving()) && bears(best[look]));
        }
        let known: usize = best.iter().sum();
        prop_assert!(spent * 100 <= known * 110, "{spent} looks of a server, {known} would do");
        let rises = changes.iter().filter(|it| it.1).count() as i64;
        prop_assert!(lacked * LOOK <= rises * REACTION, "{lacked} looks lack some, {rises} rises");
        for (last, (now, _)) in changes.iter().enumerate() {
            let recent: Vec<_> = changes[..=last].iter().filter(|it| it.0 + WINDOW > *now).collect();
            let turns = recent.windows(2).filter(|it| it[0].1 != it[1].1).count();
            prop_assert!(turns <= 1, "{recent:?}");
        }
        let idle = loads.iter().rev().take_while(|it| **it == 0).count();
        // A new leader waits for a window of its own.
        let led = takeovers.last().map_or(DAY, |it| DAY - it);
        let idle = idle.min(led) as i64 * LOOK;
        prop_assert!(idle < 2 * WINDOW || replay.servers.is_empty(), "idle for {idle} s");
    }
}

#[test]
fn a_pool_goes_to_nothing_when_its_jobs_are_gone_and_comes_back() {
    let mut replay = Replay::new(4, 64, 3);
    replay.has_jobs = true;
    assert_eq!(replay.run(0, 240), [4]);
    assert_eq!(replay.run(0, 240).last(), Some(&0), "nobody reports load, since nobody has a job");
    assert_eq!(replay.run(0, 7_200), [0]);
    assert_eq!(replay.run(2_000, 15), [1], "a job waits for a server");
    assert_eq!(replay.run(2_000, 1_200).last(), Some(&3));
}

#[test]
fn while_a_server_that_works_is_silent_the_number_stays() {
    for load in [100, 9_000] {
        let mut replay = Replay::new(8, 64, 9);
        (replay.has_jobs, replay.silent) = (true, Some(3));
        assert_eq!(replay.run(load, 3_600), [8], "its part of {load} is not known");
    }
}

#[test]
fn servers_that_find_no_node_are_not_taken_for_idle() {
    let mut replay = Replay::new(8, 64, 5);
    (replay.has_jobs, replay.fits) = (true, 2);
    assert_eq!(replay.run(9_000, 3_600), [8], "two are busy, six wait for a node");
    replay.fits = 8;
    assert!(replay.run(9_000, 3_600).last().is_some_and(|it| *it >= 12), "and now it grows");
}

#[test]
fn more_load_is_followed_in_minutes_and_less_only_after_the_window() {
    let mut replay = Replay::new(2, 64, 7);
    replay.run(1_400, 1_800);
    assert_eq!(replay.memory.decision, None, "two servers at 70 %");
    let up = replay.run(14_000, 600);
    assert!((19..=22).contains(up.last().expect("some look")), "{up:?}");
    let first = replay.run(1_400, 240);
    assert_eq!(first, up[up.len() - 1..], "the window is 300 s");
    let down = replay.run(1_400, 900);
    assert!((2..=3).contains(down.last().expect("some look")), "{down:?}");
}

#[test]
fn without_reports_the_number_stays() {
    let mut replay = Replay::new(3, 8, 1);
    replay.servers.clear();
    let pool = replay.pool.clone();
    for _ in 0..100 {
        replay.servers.clear();
        assert_eq!(replay.look(0), 3);
    }
    assert_eq!(pool.spec.replicas, 3);
}
