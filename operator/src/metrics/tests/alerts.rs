//! The chart's alerts, evaluated on what this process tells of objects as they are in a cluster.
//!
//! Statuses are the operator's own. The expressions are evaluated by the small part of `PromQL` that the alerts use, read
//! from Prometheus' documentation ("Querying"); an alert that uses more fails the test by name. Not covered: the time in `for`, and how
//! `increase` extrapolates to the borders of its window.

use std::collections::{BTreeMap, BTreeSet};

use cadre_desired::{Applied, Settings, job, pool};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::super::*;

type Labels = BTreeMap<String, String>;
type Vector = Vec<(Labels, f64)>;

/// What one process told at one moment.
#[derive(Clone, Debug)]
struct Scrape(Vec<(String, Labels, f64)>);

impl Scrape {
    fn read(text: &str) -> Self {
        let line = |line: &str| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let labels = labels.trim_end_matches('}').split(',').filter(|it| !it.is_empty());
            let labels = labels.map(|it| {
                let (label, value) = it.split_once('=').expect("label=value");
                (label.to_owned(), value.trim_matches('"').to_owned())
            });
            (name.to_owned(), labels.collect(), value.parse().expect("a number"))
        };
        Self(text.lines().filter(|it| !it.starts_with('#')).map(line).collect())
    }
}

/// An expression, being read and evaluated on scrapes, the oldest first.
struct Reader<'a> {
    words: Vec<String>,
    at: usize,
    scrapes: &'a [Scrape],
}

impl<'a> Reader<'a> {
    fn evaluate(expression: &str, scrapes: &'a [Scrape]) -> Vector {
        let mut words: Vec<String> = Vec::new();
        let is_word = |it: char| it.is_alphanumeric() || it == '_' || it == '.';
        for letter in expression.chars() {
            match words.last_mut() {
                Some(last) if last.starts_with('"') && (last.len() < 2 || !last.ends_with('"')) => {
                    last.push(letter);
                }
                Some(last) if is_word(letter) && last.chars().all(is_word) => last.push(letter),
                Some(_) | None => words.push(letter.to_string()),
            }
        }
        words.retain(|it| !it.trim().is_empty());
        let mut reader = Self { words, at: 0, scrapes };
        let found = reader.either();
        assert_eq!(reader.at, reader.words.len(), "{expression}: more than is known here");
        found
    }

    fn next_is(&mut self, word: &str) -> bool {
        let is = self.words.get(self.at).is_some_and(|it| it == word);
        self.at += usize::from(is);
        is
    }

    fn word(&mut self) -> String {
        self.at += 1;
        self.words.get(self.at - 1).cloned().expect("the expression goes on")
    }

    fn expect(&mut self, word: &str) {
        let found = self.word();
        assert_eq!(found, word, "in {:?}", self.words);
    }

    fn either(&mut self) -> Vector {
        let mut left = self.without();
        while self.next_is("or") {
            let right = self.without();
            let known: BTreeSet<Labels> = left.iter().map(|it| it.0.clone()).collect();
            left.extend(right.into_iter().filter(|it| !known.contains(&it.0)));
        }
        left
    }

    fn without(&mut self) -> Vector {
        let mut left = self.compared();
        while self.next_is("unless") {
            self.expect("on");
            let labels = self.labels();
            let right: BTreeSet<Labels> =
                self.compared().iter().map(|it| only(&it.0, &labels)).collect();
            left.retain(|it| !right.contains(&only(&it.0, &labels)));
        }
        left
    }

    fn compared(&mut self) -> Vector {
        let mut found = self.one();
        if self.next_is("-") {
            for word in ["time", "(", ")"] {
                self.expect(word);
            }
            for it in &mut found {
                it.1 -= now().as_second() as f64;
            }
        }
        if self.next_is(">") {
            let least = self.number();
            found.retain(|it| it.1 > least);
        } else if self.next_is("<") {
            let most = self.number();
            found.retain(|it| it.1 < most);
        }
        found
    }

    fn one(&mut self) -> Vector {
        if self.next_is("(") {
            return self.closed();
        }
        match self.word().as_str() {
            "vector" => {
                self.expect("(");
                let value = self.number();
                self.expect(")");
                vec![(Labels::new(), value)]
            }
            "sum" => {
                let labels = if self.next_is("by") { self.labels() } else { BTreeSet::new() };
                self.expect("(");
                let mut sums = BTreeMap::<Labels, f64>::new();
                for (own, value) in self.closed() {
                    *sums.entry(only(&own, &labels)).or_default() += value;
                }
                sums.into_iter().collect()
            }
            "increase" => {
                self.expect("(");
                let name = self.word();
                let wanted = self.matchers();
                for word in ["[", "15m", "]", ")"] {
                    self.expect(word);
                }
                let scrapes = self.scrapes;
                let each: Vec<Vector> =
                    scrapes.iter().map(|it| select(it, &name, &wanted)).collect();
                let of = |labels: &Labels| {
                    let mut values = each.iter().flatten().filter(|it| it.0 == *labels);
                    values.next().map(|it| it.1)
                };
                let newest = each.last().cloned().unwrap_or_default();
                newest
                    .into_iter()
                    .filter_map(|it| Some((it.0.clone(), it.1 - of(&it.0)?)))
                    .collect()
            }
            name if name.starts_with("cadre_operator_") => {
                let wanted = self.matchers();
                self.scrapes.last().map(|it| select(it, name, &wanted)).unwrap_or_default()
            }
            other => panic!("{other} is not known here"),
        }
    }

    fn closed(&mut self) -> Vector {
        let found = self.either();
        self.expect(")");
        found
    }

    fn number(&mut self) -> f64 {
        self.word().parse().expect("a number")
    }

    fn labels(&mut self) -> BTreeSet<String> {
        self.expect("(");
        let mut labels = BTreeSet::new();
        while !self.next_is(")") {
            labels.insert(self.word());
            self.next_is(",");
        }
        labels
    }

    fn matchers(&mut self) -> Labels {
        let mut wanted = Labels::new();
        if self.next_is("{") {
            while !self.next_is("}") {
                let label = self.word();
                self.expect("=");
                wanted.insert(label, self.word().trim_matches('"').to_owned());
                self.next_is(",");
            }
        }
        wanted
    }
}

fn only(labels: &Labels, wanted: &BTreeSet<String>) -> Labels {
    labels
        .iter()
        .filter(|it| wanted.contains(it.0))
        .map(|it| (it.0.clone(), it.1.clone()))
        .collect()
}

fn select(scrape: &Scrape, name: &str, wanted: &Labels) -> Vector {
    let fits = |it: &&(String, Labels, f64)| {
        it.0 == name && wanted.iter().all(|(label, value)| it.1.get(label) == Some(value))
    };
    scrape.0.iter().filter(fits).map(|it| (it.1.clone(), it.2)).collect()
}

/// Names and expressions of the chart's alerts, and the labels that their words name.
fn alerts() -> Vec<(String, String, Vec<String>)> {
    let chart = include_str!("../../../../charts/cadre/templates/monitoring.yaml");
    let alert = |part: &str| {
        let (name, rest) = part.split_once('\n').expect("an expression");
        let (expression, rest) = rest.split_once("for: ").expect("how long");
        let expression = expression.trim().trim_start_matches("expr:").trim_start_matches(" >-");
        let (_, summary) = rest.split_once("summary:").expect("a summary");
        let labels = summary.split("$labels.").skip(1);
        let letter = |it: char| !it.is_alphanumeric();
        let labels = labels.filter_map(|it| it.split(letter).next().map(str::to_owned));
        let expression = expression.split_whitespace().collect::<Vec<_>>().join(" ");
        (name.trim().to_owned(), expression, labels.collect())
    };
    chart.split("- alert: ").skip(1).map(alert).collect()
}

/// Names of the alerts that fire.
fn firing(scrapes: &[Scrape]) -> Vec<String> {
    let fires = |(name, expression, labels): (String, String, Vec<String>)| {
        let found = Reader::evaluate(&expression, scrapes);
        for (own, _) in &found {
            for label in &labels {
                assert!(
                    own.contains_key(label),
                    "{name} has no label {label}, which its words name"
                );
            }
        }
        (!found.is_empty()).then_some(name)
    };
    alerts().into_iter().filter_map(fires).collect()
}

const DAY: i64 = 24 * 60 * 60;

fn now() -> Timestamp {
    Timestamp::from_second(1_700_000_000).expect("a good second")
}

fn named(spec: &Value) -> Value {
    json!({"metadata": {"namespace": "n", "name": "x", "uid": "u"}, "spec": spec})
}

/// A pool with the status that the operator gives it; `change` makes what is observed.
#[allow(clippy::needless_pass_by_value, reason = "it is written at the call")]
fn a_pool(spec: Value, change: impl Fn(&mut AttentionPool)) -> Arc<Readable<AttentionPool>> {
    let mut read: Readable<AttentionPool> = serde_json::from_value(named(&spec)).expect("a pool");
    let observed = pool::Observed {
        pool: read.object.clone(),
        reports_complete: true,
        ..pool::Observed::default()
    };
    let status = pool::status(&Applied::new(observed, None), &Settings::default(), now());
    read.object.status = Some(status);
    change(&mut read.object);
    Arc::new(read)
}

/// A job that waits for a pool which is not there, or that trains.
fn a_job(is_stalled: bool, restarts: u32) -> Arc<Readable<TrainingJob>> {
    let spec = json!({
        "attention": {"poolRef": {"name": "x"}},
        "template": {"spec": {"containers": [{"name": "trainer"}]}},
    });
    let mut read: Readable<TrainingJob> = serde_json::from_value(named(&spec)).expect("a job");
    let pool = (!is_stalled).then(|| {
        let pool = serde_json::from_value(named(&json!({"replicas": 1})));
        pool.expect("a pool")
    });
    let observed = job::Observed {
        job: read.object.clone(),
        unreadable: None,
        pool,
        service: None,
        jobs: Vec::new(),
        pods: Vec::new(),
        progress: None,
        checkpoint: 0,
        failovers: 0,
        last_words: None,
        joined: None,
        attached: Some(BTreeSet::new()),
        refused_pod: None,
        unserved: None,
        watched: None,
    };
    let mut status = job::status(&Applied::new(observed, None), now()).expect("ours");
    status.restarts = restarts;
    read.object.status = Some(status);
    Arc::new(read)
}

#[test]
fn each_alert_fires_for_its_cause_alone_and_all_are_silent_when_all_is_well() {
    let leader = || {
        let metrics = Metrics::default();
        metrics.leader.set(1);
        metrics
    };
    let ready = |it: &mut AttentionPool| {
        let status = it.status.as_mut().expect("it has one");
        status.ready = status.desired;
    };
    let wanted = || json!({"replicas": 2, "inPlace": false});
    let well = || Seen {
        servers: Vec::new(),
        pools: vec![a_pool(wanted(), ready), a_pool(json!({}), |_| {})],
        jobs: vec![a_job(false, 0)],
        gaps: Vec::new(),
        certificates: vec![("tls.crt", now().as_second() + 15 * DAY), ("ca.crt", i64::MAX / 2)],
    };
    let told = |metrics: &Metrics, seen: &Seen| Scrape::read(&metrics.text(seen));
    let of = |seen: Seen| firing(&[told(&leader(), &well()), told(&leader(), &seen)]);
    let mut fired = BTreeSet::new();
    let mut check = |found: Vec<String>, expected: &[&str]| {
        assert_eq!(found, expected);
        fired.extend(found);
    };

    let busy = leader();
    busy.reconciled("AttentionPool", true, Duration::ZERO);
    busy.reconciled("AttentionPool", false, Duration::ZERO);
    let before = told(&busy, &well());
    check(firing(std::slice::from_ref(&before)), &[]);
    for _ in 0..5 {
        busy.reconciled("AttentionPool", false, Duration::ZERO);
    }
    check(firing(&[before.clone(), told(&busy, &well())]), &[]);
    busy.reconciled("AttentionPool", false, Duration::ZERO);
    check(firing(&[before, told(&busy, &well())]), &["CadreReconcileErrors"]);

    // Nobody is there, or a standby alone, which tells of no object.
    check(firing(&[Scrape(Vec::new())]), &["CadreWithoutLeader"]);
    check(firing(&[told(&Metrics::default(), &Seen::default())]), &["CadreWithoutLeader"]);
    let pools = |spec: Value, change: &dyn Fn(&mut AttentionPool)| Seen {
        pools: vec![a_pool(spec, change)],
        ..well()
    };
    check(of(well()), &[]);
    check(of(pools(wanted(), &|_| {})), &["CadrePoolWithoutServer"]);
    // Mode Auto without a bound.
    let invalid = json!({"scaling": {"mode": "Auto"}});
    check(of(pools(invalid, &|_| {})), &["CadreStalled"]);
    let slow = |it: &mut AttentionPool| {
        ready(it);
        it.status.as_mut().expect("it has one").quarantined = 1;
    };
    check(of(pools(wanted(), &slow)), &["CadreSlowServer"]);
    let far = |it: &mut AttentionPool| {
        ready(it);
        let conditions = &mut it.status.as_mut().expect("it has one").conditions;
        let placed = conditions.iter_mut().find(|it| it.type_ == "PlacementSatisfied");
        let placed = placed.expect("it is told");
        (placed.status, placed.reason) = ("False".into(), "Far".into());
    };
    check(of(pools(wanted(), &far)), &["CadreFarPlacement"]);
    let ends = |days: i64| Seen {
        certificates: vec![("ca.crt", now().as_second() + days * DAY)],
        ..well()
    };
    check(of(ends(13)), &["CadreCertificateEnds"]);
    check(of(ends(-1)), &["CadreCertificateEnds"]);
    check(of(Seen { jobs: vec![a_job(true, 0)], ..well() }), &["CadreJobStalled"]);
    check(of(Seen { jobs: vec![a_job(false, 2)], ..well() }), &[]);
    check(of(Seen { jobs: vec![a_job(false, 3)], ..well() }), &["CadreJobRestarts"]);

    let all: BTreeSet<String> = alerts().into_iter().map(|it| it.0).collect();
    assert_eq!(fired, all, "each has fired");
}
