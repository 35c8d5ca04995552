//! The simulated job: random steps, a stand-in for the planner's `reassign`, and what is right.
//!
//! Rows and results are numbers. A row is a hash of who holds it and of the phase it was written for, a
//! result is a hash of the rows that were really read, so that a reused row shows.

use std::sync::Arc;

use cadre_protocol::server::Host;
use cadre_protocol::{
    AssignedRounds, Assignment, At, Bundle, BundleShape, Filler, Fillers, Nanos, OnPoolLoss,
    Parcel, ParcelShape, Phase, Round, RoundTable, ServerId, Settings, Shape, Slot, Step,
    TrainerId, Work, WorkShape, alive,
};

use crate::random::{Random, hash};

/// What a scenario is made of.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) trainers: u16,
    /// Dedicated slots come first, then in-place ones, then standby ones.
    pub(crate) dedicated: u16,
    pub(crate) slots: Fillers,
    pub(crate) steps: u64,
    pub(crate) settings: Settings,
    /// Phases that a trainer has in flight.
    pub(crate) ahead: u32,
    /// Whether no trainer begins a step before all have finished the last.
    pub(crate) all_reduce: bool,
    /// Memory of dead and paused processes can be read, and of whoever took their place.
    pub(crate) shared_memory: bool,
    /// Whether some slots refuse some bundles.
    pub(crate) picky: bool,
    templates: Vec<Template>,
}

#[derive(Debug)]
struct Template {
    shapes: Vec<Arc<Shape>>,
    phases: Vec<u16>,
}

/// A step in a process, with the assignments of its rounds so far.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) step: Arc<Step>,
    rounds: AssignedRounds<Vec<Assignment>>,
}

/// Some bundle has no slot.
#[derive(Debug)]
pub(crate) struct Unplaceable;

impl Job {
    pub(crate) fn new(random: &mut Random, steps: u64) -> Self {
        let most = *random.pick(&[2, 3, 3, 6]);
        let trainers = random.within(2, most) as u16;
        let in_place = random.chance(30);
        let most = *random.pick(&[2, 3, 3, 8]);
        let dedicated = random.within(u64::from(!in_place), most) as u16;
        let mut slots: Fillers = (0..dedicated)
            .map(|index| Some(Filler::Server(ServerId { index, incarnation: 0 })))
            .collect();
        if in_place {
            slots.extend((0..trainers).map(|it| Some(Filler::InPlace(TrainerId(it)))));
        }
        let planned = slots.len() as u64;
        let standby = !in_place && random.chance(60);
        if standby {
            slots.extend((0..trainers).map(|it| Some(Filler::Standby(TrainerId(it)))));
        }
        let templates = (0..3).map(|_| template(random, trainers, planned)).collect();
        let on_pool_loss = match random.within(0, 2) {
            0 if standby => OnPoolLoss::Local,
            1 => OnPoolLoss::Fail,
            _ => OnPoolLoss::Wait(Nanos::from_millis(3_000)),
        };
        Self {
            trainers,
            dedicated,
            slots,
            steps,
            settings: settings(random, on_pool_loss),
            ahead: random.within(1, 2) as u32,
            all_reduce: random.chance(70),
            shared_memory: random.chance(50),
            picky: random.chance(10),
            templates,
        }
    }

    fn template(&self, step: u64) -> &Template {
        &self.templates[(step % self.templates.len() as u64) as usize]
    }

    pub(crate) fn phases(&self, step: u64) -> u32 {
        self.template(step).phases.len() as u32
    }

    pub(crate) fn shape(&self, at: At) -> &Arc<Shape> {
        let template = self.template(at.step);
        &template.shapes[usize::from(template.phases[at.phase.0 as usize])]
    }

    /// The step, with the fillers of its header; `None` if some bundle then has no slot.
    pub(crate) fn step(&self, step: u64, fillers: &Fillers) -> Option<Running> {
        let template = self.template(step);
        let planned = |shape: &Arc<Shape>| shape.bundles().iter().map(|it| Some(it.slot)).collect();
        let planned: Vec<Assignment> = template.shapes.iter().map(planned).collect();
        let first = self.reassign(&planned, fillers).ok()?;
        let (shapes, phases) = (template.shapes.clone(), template.phases.clone());
        let (fillers, assignments) = (fillers.clone(), first.clone());
        let table = RoundTable { step, round: Round(0), fillers, assignments };
        let made = Step::new(self.trainers, hash(&[step]), shapes, phases, table);
        let made = Arc::new(made.expect("it is well made"));
        Some(Running { step: made, rounds: AssignedRounds::new(first) })
    }

    /// Moves the bundles of slots that are not alive.
    fn reassign(
        &self,
        before: &[Assignment],
        fillers: &Fillers,
    ) -> Result<Vec<Assignment>, Unplaceable> {
        let alive = alive(fillers);
        let moved = |(bundle, slot): (usize, &Option<Slot>)| match slot {
            Some(it) if alive[usize::from(it.0)] => Ok(Some(*it)),
            Some(_) | None => {
                self.survivor(Bundle(bundle as u32), fillers).map(Some).ok_or(Unplaceable)
            }
        };
        before.iter().map(|it| it.iter().enumerate().map(moved).collect()).collect()
    }

    fn survivor(&self, bundle: Bundle, fillers: &Fillers) -> Option<Slot> {
        let holds = |it: &usize| {
            // Few trainers in place refuse anything, so that most jobs go on.
            let refuses = if *it < usize::from(self.dedicated) { 3 } else { 17 };
            !self.picky || !(*it as u32 + bundle.0).is_multiple_of(refuses)
        };
        let alive = alive(fillers);
        let slots: Vec<_> = (0..fillers.len()).filter(|&it| alive[it]).filter(holds).collect();
        let index = (bundle.0 as usize * 7) % slots.len().max(1);
        slots.get(index).map(|&it| Slot(it as u16))
    }

    /// The table of the newest round of `tables`.
    pub(crate) fn table(
        &self,
        running: &mut Running,
        tables: &[Fillers],
    ) -> Result<Arc<RoundTable>, Unplaceable> {
        let assigned = running.rounds.after(tables, |it, fillers| self.reassign(it, fillers))?;
        Ok(Arc::new(RoundTable {
            step: running.step.number(),
            round: Round(tables.len() as u32),
            fillers: tables.last().cloned().unwrap_or_default(),
            assignments: assigned.clone(),
        }))
    }

    /// Bytes of a server: in every other job just what its largest step needs.
    pub(crate) fn memory(&self, host: Host) -> u64 {
        if self.steps % 2 == 1 {
            return u64::MAX;
        }
        let here = |filler: &Option<Filler>| match (host, filler) {
            (Host::Dedicated(me), Some(Filler::Server(it))) => me.index == it.index,
            (Host::InPlace(me), Some(Filler::InPlace(it))) => me == *it,
            (Host::Dedicated(_) | Host::InPlace(_), _) => false,
        };
        let mine = |it: &BundleShape| here(&self.slots[usize::from(it.slot.0)]);
        let need = |template: &Template| {
            let (mut phase, mut reserve) = (0, 0);
            for shape in &template.shapes {
                let bytes = |it: usize| shape.bundle_bytes(Bundle(it as u32));
                let bundles = shape.bundles().iter().enumerate();
                let planned = bundles.filter(|it| mine(it.1)).map(|it| bytes(it.0)).sum::<u64>();
                phase = phase.max(planned);
                reserve = reserve.max((0..shape.bundles().len()).map(bytes).max().unwrap_or(0));
            }
            2 * phase + reserve
        };
        self.templates.iter().map(need).max().unwrap_or(0)
    }

    /// The work that a trainer wants in a phase.
    pub(crate) fn wanted(&self, at: At, trainer: TrainerId) -> impl Iterator<Item = Work> {
        let works = self.shape(at).works().enumerate();
        works
            .filter(move |it| it.1.results.iter().any(|it| it.0 == trainer))
            .map(|it| Work(it.0 as u32))
    }

    pub(crate) fn right_result(&self, at: At, work: Work) -> u64 {
        let shape = self.shape(at);
        let rows = shape.work(work).needs.iter();
        let rows = rows.map(|&it| row(shape.parcels()[it.0 as usize].from, at, it));
        result(at, work, rows)
    }
}

/// Rows of a parcel, written for `at`.
pub(crate) fn row(from: TrainerId, at: At, parcel: Parcel) -> u64 {
    hash(&[u64::from(from.0), at.step, u64::from(at.phase.0), u64::from(parcel.0)])
}

/// The result of a work from the rows that it read.
pub(crate) fn result(at: At, work: Work, rows: impl Iterator<Item = u64>) -> u64 {
    let head = [at.step, u64::from(at.phase.0), u64::from(work.0)];
    hash(&head.into_iter().chain(rows).collect::<Vec<_>>())
}

/// The phase after `at`.
pub(crate) fn next(job: &Job, at: At) -> At {
    if at.phase.0 + 1 < job.phases(at.step) {
        At { phase: Phase(at.phase.0 + 1), ..at }
    } else {
        At::new(at.step + 1, 0)
    }
}

/// Ten times as fast as in production, so that faults fall into steps.
fn settings(random: &mut Random, on_pool_loss: OnPoolLoss) -> Settings {
    Settings {
        heartbeat_every: Nanos::from_millis(20),
        suspect_after: Nanos::from_millis(100),
        trainer_after: Nanos::from_millis(2_000),
        conductor_after: Nanos::from_millis(2_000),
        pull_within: Nanos::from_millis(*random.pick(&[10, 50, 300])),
        phase_within: Nanos::from_millis(*random.pick(&[60, 500])),
        retry_after: Nanos::from_millis(2),
        reach_within: Nanos::from_millis(100),
        ack_within: Nanos(500_000),
        window: random.within(2, 4) as usize,
        on_pool_loss,
        ..Settings::default()
    }
}

fn template(random: &mut Random, trainers: u16, slots: u64) -> Template {
    let shapes = (0..random.within(1, 2)).map(|_| Arc::new(shape(random, trainers, slots)));
    let shapes: Vec<_> = shapes.collect();
    let count = random.within(2, 4);
    let phases = (0..count).map(|_| random.within(0, shapes.len() as u64 - 1) as u16).collect();
    Template { shapes, phases }
}

fn shape(random: &mut Random, trainers: u16, slots: u64) -> Shape {
    let (mut bundles, mut works, mut parcels) = (Vec::new(), Vec::new(), Vec::new());
    for bundle in (0..random.within(1, 4) as u32).map(Bundle) {
        bundles.push(BundleShape { slot: Slot(random.within(0, slots - 1) as u16) });
        let first = parcels.len() as u32;
        for _ in 0..random.within(1, 3) {
            let from = TrainerId(random.within(0, u64::from(trainers) - 1) as u16);
            parcels.push(ParcelShape { bundle, from, bytes: random.within(1, 100) });
        }
        let mine: Vec<_> = (first..parcels.len() as u32).map(Parcel).collect();
        for index in 0..random.within(1, 3) {
            // The first work reads everything, so that no parcel is idle.
            let keep = |random: &mut Random| index == 0 || random.chance(60);
            let mut needs: Vec<_> = mine.iter().copied().filter(|_| keep(random)).collect();
            if needs.is_empty() {
                needs.push(mine[0]);
            }
            let mut readers: Vec<_> = needs.iter().map(|it| parcels[it.0 as usize].from).collect();
            readers.sort_unstable();
            readers.dedup();
            readers.retain(|_| random.chance(80));
            let results = readers.iter().map(|&it| (it, random.within(1, 100))).collect();
            works.push(WorkShape { bundle, needs, results });
        }
    }
    Shape::new(bundles, works, parcels).expect("it is well made")
}
