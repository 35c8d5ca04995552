//! Why something is as it is: a tree from an object down to the cause, with what to do about it.
//!
//! In: what was [`Seen`], and an object. Out: a [`Finding`]. What is fine is counted, what is not is told.
//!
//! | level | file |
//! |---|---|
//! | pool, job | `pool`, `job` |
//! | operator | `operator` |
//! | pod, node | `pod` |
//! | what to do | `remedy` |
//!
//! Invariant: something that is not fine says why, in its own words or in those of one below it.

mod job;
mod operator;
mod pod;
mod pool;
mod remedy;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::seen::{Kind, Seen, Target};

/// State of what a finding describes.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Verdict {
    /// Works as it should.
    Fine,
    /// Is on its way, or waits for something that is likely to come.
    Waiting,
    /// Does not work until somebody acts.
    Bad,
}

/// One level of an explanation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Finding {
    /// What the finding describes, such as `pod team/x-0-1`.
    pub what: String,
    /// State of it.
    pub verdict: Verdict,
    /// Why.
    pub says: String,
    /// What to do.
    pub remedy: Option<String>,
    /// Findings about the causes.
    pub below: Vec<Finding>,
}

/// Explains an object.
///
/// # Errors
///
/// There is no such object; the text names those that there are.
pub fn explain(seen: &Seen, namespace: &str, target: &Target) -> Result<Finding, String> {
    let found = match target.kind {
        Kind::Pool => seen.pool(namespace, &target.name).map(|it| pool::explain(seen, it)),
        Kind::Job => seen.job(namespace, &target.name).map(|it| job::explain(seen, it)),
    };
    found.ok_or_else(|| missing(seen, namespace, target))
}

fn missing(seen: &Seen, namespace: &str, target: &Target) -> String {
    let metas: Vec<_> = match target.kind {
        Kind::Pool => seen.pools.iter().map(|it| &it.metadata).collect(),
        Kind::Job => seen.jobs.iter().map(|it| &it.metadata).collect(),
    };
    let mut names: Vec<_> = metas
        .iter()
        .filter(|it| it.namespace.as_deref() == Some(namespace))
        .filter_map(|it| it.name.as_deref())
        .collect();
    names.sort_unstable();
    let there = match (names.len(), seen.unread.first()) {
        (0, Some(unread)) => unread.clone(),
        (0, None) => "there is none; choose another namespace with -n".to_owned(),
        _ => format!("there are {}", names.join(", ")),
    };
    format!("{target} is not in namespace {namespace}: {there}")
}

impl Finding {
    pub(crate) fn new(what: impl Into<String>, verdict: Verdict, says: impl Into<String>) -> Self {
        Self { what: what.into(), verdict, says: says.into(), remedy: None, below: Vec::new() }
    }

    pub(crate) fn with(mut self, remedy: Option<impl Into<String>>) -> Self {
        self.remedy = remedy.map(Into::into);
        self
    }

    pub(crate) fn over(mut self, below: impl IntoIterator<Item = Self>) -> Self {
        self.below.extend(below);
        self
    }

    /// The finding furthest down that explains this one: the worst at each level, of equal ones the
    /// first that something can be done about.
    pub fn cause(&self) -> &Self {
        let worst = self.below.iter().map(|it| it.verdict).max().unwrap_or(Verdict::Fine);
        if worst == Verdict::Fine || worst < self.verdict && self.remedy.is_some() {
            return self;
        }
        let causes = || self.below.iter().filter(|it| it.verdict == worst).map(Self::cause);
        causes().find(|it| it.remedy.is_some()).or_else(|| causes().next()).unwrap_or(self)
    }

    /// The tree as text, and its cause with the remedy as last lines.
    pub fn text(&self) -> String {
        let mut lines = Vec::new();
        self.draw(&mut lines, "", "");
        if self.verdict != Verdict::Fine {
            let cause = self.cause();
            lines.push(String::new());
            lines.push(format!("cause:  {}: {}", cause.what, cause.says));
            let nothing = match cause.verdict {
                Verdict::Fine | Verdict::Waiting => "nothing yet; it may well come by itself",
                Verdict::Bad => "no remedy is known; `cadre bundle` collects what a report needs",
            };
            lines.push(format!("remedy: {}", cause.remedy.as_deref().unwrap_or(nothing)));
        }
        lines.join("\n") + "\n"
    }

    fn draw(&self, lines: &mut Vec<String>, first: &str, rest: &str) {
        let mark = match self.verdict {
            Verdict::Fine => "ok     ",
            Verdict::Waiting => "waiting",
            Verdict::Bad => "bad    ",
        };
        lines.push(format!("{mark} {first}{}: {}", self.what, self.says).trim_end().to_owned());
        for (index, it) in self.below.iter().enumerate() {
            let last = index + 1 == self.below.len();
            let (first, under) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            it.draw(lines, &format!("{rest}{first}"), &format!("{rest}{under}"));
        }
    }
}

/// A finding about one of our object's conditions.
fn of_condition(it: &Condition, verdict: Verdict) -> Finding {
    let says = if it.message.is_empty() { it.reason.clone() } else { it.message.clone() };
    Finding::new(format!("{} {} ({})", it.type_, it.status, it.reason), verdict, says)
        .with(remedy::of_reason(&it.reason))
}

/// The worst of several verdicts.
fn worst<'a>(all: impl IntoIterator<Item = &'a Finding>) -> Verdict {
    all.into_iter().map(|it| it.verdict).max().unwrap_or(Verdict::Fine)
}
