//! What lost servers cost: at once, until they are replaced, and after the plan knows that they are gone.
//!
//! In: a job's pool, a number of its servers, the first ones. Out: [`Lost`]. Bundles go to survivors as `reassign` deals them
//! out in a running job; they move whole, so the rest of the step and all steps until a replacement comes are as late as the
//! survivor that got most.

use cadre_crds::OnPoolLoss;
use cadre_planner::{Assignment, BundleId, reassign};
use serde::Serialize;

use super::super::report::having;
use super::super::{DRAWN_STEPS, Job, SizeError};
use super::layer::{Cluster, Run};
use super::{Where, plans, run};

/// Phases in flight when a server is lost.
const PHASES_IN_FLIGHT: f64 = 2.0;

/// Under the names of the JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Lost {
    pub(super) servers: u16,
    /// In the step of the loss: until the servers are declared lost, and their bundles of the phases in flight.
    pub(super) seconds_at_once: f64,
    /// Time of a step until the servers are replaced.
    pub(super) seconds_until_replaced: Option<f64>,
    /// Time of a step that is planned without them.
    pub(super) seconds_planned_anew: Option<f64>,
    /// Why a number is missing.
    pub(super) because: Option<String>,
}

impl Lost {
    pub(super) fn new(
        job: &Job,
        cluster: &Cluster<'_>,
        place: Where,
        servers: u32,
        lost: u16,
    ) -> Result<Self, SizeError> {
        let detected = f64::from(job.suspected_ms) / 1e3;
        let mut it = Self {
            servers: lost,
            seconds_at_once: detected,
            seconds_until_replaced: None,
            seconds_planned_anew: None,
            because: None,
        };
        if servers == u32::from(lost) && place == Where::Dedicated {
            let does = match job.on_pool_loss {
                OnPoolLoss::Fail => "the job fails",
                OnPoolLoss::Wait => "the job waits for the pool",
                OnPoolLoss::Local => "trainers that stand by take the bundles",
            };
            it.because = Some(format!("no server is left: {does} (onPoolLoss)"));
            return Ok(it);
        }
        let mut until = Run::new(job);
        let mut redone: f64 = 0.0;
        for step in 0..DRAWN_STEPS {
            let plans = match plans(job, place, servers, step) {
                Ok(plans) => plans,
                Err(why @ SizeError::Planner { .. }) => {
                    it.because = Some(why.to_string());
                    return Ok(it);
                }
                Err(error) => return Err(error),
            };
            for (drawn, layers) in plans.iter().zip(having(job).cycle()) {
                // Dedicated servers have the lowest slots. Standby slots take no work while the
                // pool has a server.
                let alive: Vec<bool> = (0..)
                    .zip(&drawn.problem.slots)
                    .map(|(slot, it): (u32, _)| slot >= u32::from(lost) && !it.is_standby())
                    .collect();
                let planned = Assignment::planned(&drawn.plan);
                let moved = match reassign(&drawn.problem, &drawn.plan, &planned, &alive) {
                    Ok(moved) => moved,
                    Err(error) => {
                        it.because = Some(error.to_string());
                        return Ok(it);
                    }
                };
                let mut more = vec![0_u64; alive.len()];
                for bundle in (0..drawn.plan.bundles().len() as u32).map(BundleId) {
                    if let Some(slot) = moved.executor(bundle)
                        && planned.executor(bundle) != Some(slot)
                    {
                        more[slot.0 as usize] += drawn.plan.bundle_cost(&drawn.problem, bundle);
                    }
                }
                let most = more.into_iter().max().unwrap_or(0) as f64;
                let machine = cluster.machine;
                let time = machine.attention(&drawn.problem, most) * machine.back(&drawn.problem);
                redone = redone.max(PHASES_IN_FLIGHT * time / 1e9);
                until.add(job, cluster, drawn, Some(&moved), layers);
            }
        }
        it.seconds_at_once += redone;
        it.seconds_until_replaced = Some(until.seconds(job, cluster.machine));
        // The first ones are lost: those that stay keep their speeds and links.
        let mut left = job.clone();
        left.weights[0].drain(..usize::from(lost).min(job.weights[0].len()));
        left.links = job.links.without_servers(lost);
        match run(&left, cluster, place, servers - u32::from(lost))? {
            Ok(anew) => it.seconds_planned_anew = Some(anew.seconds(job, cluster.machine)),
            Err(why) => it.because = Some(format!("planned without them: {why}")),
        }
        Ok(it)
    }
}
