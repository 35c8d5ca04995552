//! What a server's reports say: how busy it is, how fast, and whether something is wrong with it.
//!
//! In: reports with the time they came. Out: a [`Figure`]. A report whose time is over says nothing any
//! more: then the weight is the nominal one. Whole numbers only, the same on every machine.
//!
//! Speeds are held against a reference, the upper median of the servers of one job, so a pool of one kind
//! of machine has weights around 100 and one slow machine moves only its own.

use std::collections::VecDeque;
use std::time::Duration;

use cadre_planner::Learnt;

use crate::slots::NOMINAL_WEIGHT;

/// Reports over which the busy share is averaged.
const AVERAGED_REPORTS: usize = 10;
/// A new report counts as one part in this many of the speed.
const SPEED_PARTS: u64 = 4;

/// One report.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Report {
    /// Share of the time in which it computed, in millionths.
    pub busy_ppm: u32,
    /// Cost of the tasks since the last report, in the cost model's units.
    pub cost: u64,
    /// Time they took.
    pub busy_nanoseconds: u64,
    /// No step that is out counts on the server, as far as it knows.
    pub is_spare: bool,
}

impl Report {
    /// Whether it shows that its job uses the server.
    pub(crate) fn is_used(self) -> bool {
        !self.is_spare || self.cost > 0 || self.busy_nanoseconds > 0
    }
}

/// When a server is stale, slow or silent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Health {
    /// Age after which a report no longer counts.
    pub report_timeout: Duration,
    /// How long a slot may stay vacant before it leaves the view.
    pub reshape_after: Duration,
    /// Reference over own speed, in percent, from which a server counts as slow.
    pub slow_factor_percent: u32,
    /// Slow reports in a row until a server is quarantined. A server that is silent for this many
    /// report timeouts is quarantined too.
    pub quarantine_after: u32,
}

/// Load and speed of a server.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Figure {
    /// Mean share of the time in which it computes, in millionths; none while its reports are stale.
    pub busy_ppm: Option<u32>,
    /// Reference over own speed, in percent; 0 while unknown.
    pub slow_factor_percent: u32,
}

/// The reports of one start of a server.
#[derive(Clone, Debug)]
pub struct Load {
    since: Duration,
    last: Option<Duration>,
    busy: VecDeque<u32>,
    /// Cost a second, smoothed.
    speed: Option<u64>,
    slow: u32,
    slow_factor_percent: u32,
    /// Whether the newest report says that nothing needs the server.
    is_spare: bool,
    learnt: Learnt,
}

impl Load {
    /// For a server that has just begun to serve.
    pub fn new(now: Duration) -> Self {
        Self {
            since: now,
            last: None,
            busy: VecDeque::new(),
            speed: None,
            slow: 0,
            slow_factor_percent: 0,
            is_spare: false,
            learnt: Learnt::new(NOMINAL_WEIGHT),
        }
    }

    /// The server begins to serve, or has come back: earlier silence does not count.
    pub fn begin(&mut self, now: Duration) {
        self.since = now;
        self.slow = 0;
        self.is_spare = false;
    }

    /// Takes a report. `reference` is the speed of servers like this one, from [`reference()`].
    pub fn report(
        &mut self,
        now: Duration,
        report: Report,
        reference: Option<u64>,
        health: Health,
    ) {
        self.last = Some(now);
        self.is_spare = !report.is_used();
        self.busy.push_back(report.busy_ppm.min(1_000_000));
        if self.busy.len() > AVERAGED_REPORTS {
            self.busy.pop_front();
        }
        let Some(speed) = speed(report.cost, report.busy_nanoseconds) else { return };
        let before = self.speed.unwrap_or(speed);
        let smooth = (before / SPEED_PARTS) * (SPEED_PARTS - 1) + speed / SPEED_PARTS;
        self.speed = Some(if self.speed.is_none() { speed } else { smooth.max(1) });
        let Some(reference) = reference else { return };
        let percent = u128::from(reference) * 100 / u128::from(speed);
        let percent = u32::try_from(percent).unwrap_or(u32::MAX);
        self.slow = if percent >= health.slow_factor_percent { self.slow + 1 } else { 0 };
        let own = u128::from(self.speed.unwrap_or(speed));
        self.slow_factor_percent =
            u32::try_from(u128::from(reference) * 100 / own).unwrap_or(u32::MAX);
        let expected = u128::from(report.cost) * 1_000_000_000 / u128::from(reference.max(1));
        let expected = u64::try_from(expected).unwrap_or(u64::MAX);
        self.learnt.report(expected, report.busy_nanoseconds);
    }

    /// The speed that others may be held against; none while unknown or stale.
    pub fn speed(&self, now: Duration, health: Health) -> Option<u64> {
        self.speed.filter(|_| self.is_fresh(now, health))
    }

    /// The weight of its slot for jobs that learn.
    pub fn weight(&self, now: Duration, health: Health) -> u32 {
        if self.is_fresh(now, health) { self.learnt.weight } else { NOMINAL_WEIGHT }
    }

    /// Whether its job does not need it now.
    pub fn is_spare(&self, now: Duration, health: Health) -> bool {
        self.is_spare && self.is_fresh(now, health)
    }

    /// What the status tells.
    pub fn figure(&self, now: Duration, health: Health) -> Figure {
        if !self.is_fresh(now, health) {
            return Figure::default();
        }
        let sum: u64 = self.busy.iter().map(|&it| u64::from(it)).sum();
        let mean = sum.checked_div(self.busy.len() as u64);
        Figure {
            busy_ppm: mean.and_then(|it| u32::try_from(it).ok()),
            slow_factor_percent: self.slow_factor_percent,
        }
    }

    /// Why it should be kept out, if it should.
    pub fn trouble(&self, now: Duration, health: Health) -> Option<Trouble> {
        if self.slow >= health.quarantine_after {
            return Some(Trouble::Slow);
        }
        let heard = self.last.map_or(self.since, |last| last.max(self.since));
        let silent = health.report_timeout.saturating_mul(health.quarantine_after);
        (heard + silent <= now).then_some(Trouble::Silent)
    }

    /// Whether its newest report still counts.
    pub fn is_fresh(&self, now: Duration, health: Health) -> bool {
        self.last.is_some_and(|last| now < last + health.report_timeout)
    }
}

/// Why a server is kept out.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Trouble {
    /// Too many of its reports in a row were slow.
    Slow,
    /// It sends no reports any more.
    Silent,
    /// The conductor has given it up.
    Lost,
}

/// What servers of one job are held against: the upper median of their speeds; none with fewer than two.
pub fn reference(speeds: impl IntoIterator<Item = u64>) -> Option<u64> {
    let mut speeds: Vec<u64> = speeds.into_iter().collect();
    speeds.sort_unstable();
    (speeds.len() >= 2).then(|| speeds[speeds.len() / 2])
}

/// Cost a second, of work that cost `cost` and took this time; none without work.
pub fn speed(cost: u64, busy_nanoseconds: u64) -> Option<u64> {
    if cost == 0 || busy_nanoseconds == 0 {
        return None;
    }
    let speed = u128::from(cost) * 1_000_000_000 / u128::from(busy_nanoseconds);
    Some(u64::try_from(speed).unwrap_or(u64::MAX).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEALTH: Health = Health {
        report_timeout: Duration::from_secs(10),
        reshape_after: Duration::from_mins(10),
        slow_factor_percent: 150,
        quarantine_after: 3,
    };

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    /// A second's report of a server with this speed, busy for half of the time.
    fn half_busy(speed: u64) -> Report {
        Report {
            busy_ppm: 500_000,
            cost: speed / 2,
            busy_nanoseconds: 500_000_000,
            is_spare: false,
        }
    }

    #[test]
    fn a_stale_report_says_nothing_and_the_weight_is_nominal_again() {
        let mut load = Load::new(at(0));
        for second in 1..=30 {
            load.report(at(second), half_busy(800_000), Some(1_000_000), HEALTH);
        }
        assert_eq!(load.weight(at(30), HEALTH), 80);
        let figure = Figure { busy_ppm: Some(500_000), slow_factor_percent: 125 };
        assert_eq!(load.figure(at(39), HEALTH), figure);
        assert_eq!(load.weight(at(40), HEALTH), NOMINAL_WEIGHT);
        assert_eq!(load.figure(at(40), HEALTH), Figure::default());
        assert_eq!(load.speed(at(40), HEALTH), None);
        assert_eq!(load.trouble(at(59), HEALTH), None);
        assert_eq!(load.trouble(at(60), HEALTH), Some(Trouble::Silent));
    }

    #[test]
    fn three_slow_reports_in_a_row_are_trouble_and_two_are_not() {
        let mut load = Load::new(at(0));
        let mut report = |speed| {
            load.report(at(1), half_busy(speed), Some(1_000_000), HEALTH);
            load.trouble(at(1), HEALTH)
        };
        assert_eq!(report(600_000), None);
        assert_eq!(report(600_000), None);
        assert_eq!(report(900_000), None);
        assert_eq!(report(600_000), None);
        assert_eq!(report(600_000), None);
        assert_eq!(report(600_000), Some(Trouble::Slow));
    }

    #[test]
    fn idle_servers_are_not_slow() {
        let mut load = Load::new(at(0));
        for second in 1..100 {
            load.report(at(second), Report::default(), Some(1), HEALTH);
        }
        assert_eq!(load.figure(at(99), HEALTH).busy_ppm, Some(0));
        assert_eq!((load.trouble(at(99), HEALTH), load.weight(at(99), HEALTH)), (None, 100));
    }

    proptest! {
        /// At constant speeds with scatter, weights settle and stay: no plan changes any more.
        #[test]
        fn weights_settle_on_the_speeds_and_stay(
            speeds in prop::collection::vec(600_000_u64..1_000_000, 3..8),
            seed in any::<u64>(),
        ) {
            let mut noise = seed;
            let mut scatter = move || {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                990_000 + (noise >> 33) % 20_001
            };
            let mut loads = vec![Load::new(at(0)); speeds.len()];
            let mut late = 0;
            for second in 1..=200 {
                for (own, &speed) in speeds.iter().enumerate() {
                    let all = loads.iter().filter_map(|it| it.speed(at(second), HEALTH));
                    let reference = reference(all.collect::<Vec<_>>());
                    let before = loads[own].learnt.weight;
                    let report = half_busy(speed * scatter() / 1_000_000);
                    loads[own].report(at(second), report, reference, HEALTH);
                    late += u32::from(second > 100 && loads[own].learnt.weight != before);
                }
            }
            let nominal = reference(speeds.iter().copied()).expect("three or more") as f64;
            for (load, &speed) in loads.iter().zip(&speeds) {
                let wanted = speed as f64 / nominal * 100.0;
                let weight = f64::from(load.weight(at(200), HEALTH));
                prop_assert!((weight - wanted).abs() <= 3.0, "{weight} for {wanted}");
            }
            // 100 seconds of up to 8 servers.
            prop_assert!(late <= 40, "{late} changes at constant speed");
        }
    }
}
