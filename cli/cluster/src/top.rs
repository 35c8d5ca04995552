//! How busy the servers of pools are, now, and which job has each of them since when.
//!
//! In: the metrics of the operator that leads, read through the API server. Out: a table, the busiest first. Raw load is
//! nowhere else: it never reaches the objects.

use std::collections::BTreeMap;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};

use crate::read::{Cluster, Error, OPERATOR};

/// Port and path of the operator's metrics.
const METRICS: &str = "8080/proxy/metrics";
/// Metrics of the operator about a server, and about itself.
const BUSY: &str = "cadre_operator_server_busy_ratio";
const TIME: &str = "cadre_operator_server_time_ratio";
const TRAINERS: &str = "cadre_operator_server_trainers";
const HELD: &str = "cadre_operator_server_held_since_timestamp_seconds";
const LEADS: &str = "cadre_operator_leader";

/// A server's load.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Namespace and name of its pool.
    pub pool: String,
    /// The server's pod.
    pub server: String,
    /// Busy share, 0 to 1; none before its first report.
    pub busy: Option<f64>,
    /// Observed over expected time.
    pub time: Option<f64>,
    /// Trainers whose rows come to it by each path.
    pub paths: BTreeMap<String, u32>,
    /// Namespace and name of the job that it works for, and since when, in seconds since 1970.
    pub job: Option<(String, i64)>,
}

/// Asks the operator that leads.
///
/// # Errors
///
/// There is none, or its metrics may not be read (the right to `pods/proxy` in its namespace).
pub async fn read(cluster: &Cluster) -> Result<Vec<Load>, Error> {
    let pods = Api::<Pod>::all(cluster.client.clone());
    let found = pods.list(&ListParams::default().labels(OPERATOR)).await;
    let found = found.map_err(|error| Error::request("operator pods", &error))?;
    let mut refused = None;
    for pod in &found.items {
        let home = pod.namespace().unwrap_or_default();
        let path = format!("/api/v1/namespaces/{home}/pods/{}:{METRICS}", pod.name_any());
        match cluster.client.request_text(http_get(&path)?).await {
            Ok(text) if leads(&text) => return Ok(loads(&text)),
            Ok(_) => {}
            Err(error) => {
                refused = Some(Error::request(format!("metrics of {}", pod.name_any()), &error));
            }
        }
    }
    Err(refused.unwrap_or_else(|| Error::Request {
        what: "metrics of the operator".to_owned(),
        why: format!("none of its {} pods leads", found.items.len()),
        code: Some(503),
    }))
}

fn http_get(path: &str) -> Result<http::Request<Vec<u8>>, Error> {
    http::Request::get(path).body(Vec::new()).map_err(|error| Error::Request {
        what: "metrics of the operator".to_owned(),
        why: error.to_string(),
        code: None,
    })
}

fn leads(text: &str) -> bool {
    samples(text).any(|it| it.name == LEADS && it.value > 0.0)
}

/// What a text of metrics says about servers, by pool and name.
pub fn loads(text: &str) -> Vec<Load> {
    let mut all: BTreeMap<(String, String), Load> = BTreeMap::new();
    for it in samples(text).filter(|it| [BUSY, TIME, TRAINERS, HELD].contains(&it.name)) {
        let label = |name: &str| {
            it.labels
                .iter()
                .find(|label| label.0 == name)
                .map(|it| it.1.clone())
                .unwrap_or_default()
        };
        let pool = format!("{}/{}", label("namespace"), label("pool"));
        let server = label("server");
        let load = all.entry((pool.clone(), server.clone())).or_insert(Load {
            pool,
            server,
            busy: None,
            time: None,
            paths: BTreeMap::new(),
            job: None,
        });
        match it.name {
            HELD => {
                let job = format!("{}/{}", label("job_namespace"), label("job"));
                load.job = Some((job, it.value as i64));
            }
            TRAINERS => {
                load.paths.insert(label("path"), it.value as u32);
            }
            BUSY => load.busy = Some(it.value),
            _ => load.time = Some(it.value),
        }
    }
    all.into_values().collect()
}

/// A table of those in one namespace, or of all; within a pool the busiest first.
pub fn table(loads: &[Load], namespace: Option<&str>) -> String {
    let prefix = namespace.map(|it| format!("{it}/")).unwrap_or_default();
    let mut shown: Vec<&Load> = loads.iter().filter(|it| it.pool.starts_with(&prefix)).collect();
    if shown.is_empty() {
        return "no server reports load; `cadre status` says which there are\n".to_owned();
    }
    let busy = |it: &Load| it.busy.unwrap_or(-1.0);
    shown.sort_by(|a, b| a.pool.cmp(&b.pool).then(busy(b).total_cmp(&busy(a))));
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header([
        "pool",
        "server",
        "job",
        "since",
        "busy",
        "",
        "time over expected",
        "rows by",
    ]);
    for it in shown {
        let share = it.busy.unwrap_or(0.0).clamp(0.0, 1.0);
        let percent =
            |it: Option<f64>| it.map_or("–".to_owned(), |it| format!("{:.0} %", it * 100.0));
        let bar = "█".repeat((share * 20.0).round() as usize);
        let (job, since) = it.job.clone().unzip();
        let since = since.and_then(|it| Timestamp::from_second(it).ok());
        table.add_row([
            it.pool.clone(),
            it.server.clone(),
            job.unwrap_or("–".to_owned()),
            since.map_or("–".to_owned(), |it| it.to_string()),
            percent(it.busy),
            bar,
            percent(it.time),
            if it.paths.is_empty() { "–".to_owned() } else { by(&it.paths) },
        ]);
    }
    format!("{table}\n")
}

/// Paths, with the trainers whose rows come by each.
fn by(paths: &BTreeMap<String, u32>) -> String {
    paths.iter().map(|(path, count)| format!("{path} {count}")).collect::<Vec<_>>().join(", ")
}

struct Sample<'a> {
    name: &'a str,
    labels: Vec<(String, String)>,
    value: f64,
}

/// Lines of a text of metrics; names of pods and pools hold nothing that is escaped.
fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter(|it| !it.starts_with('#')).filter_map(|line| {
        let (head, value) = line.rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let (name, labels) = head.split_once('{').unwrap_or((head, ""));
        let pairs = labels.trim_end_matches('}').split(',').filter_map(|it| it.split_once('='));
        let labels = pairs.map(|it| (it.0.to_owned(), it.1.trim_matches('"').to_owned())).collect();
        Some(Sample { name, labels, value })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# TYPE cadre_operator_server_busy_ratio gauge
cadre_operator_leader 1
cadre_operator_server_busy_ratio{namespace=\"team\",pool=\"p\",server=\"p-0-1\"} 0.25
cadre_operator_server_busy_ratio{namespace=\"team\",pool=\"p\",server=\"p-1-1\"} 0.75
cadre_operator_server_time_ratio{namespace=\"team\",pool=\"p\",server=\"p-1-1\"} 1.1
cadre_operator_server_trainers{namespace=\"team\",pool=\"p\",server=\"p-1-1\",path=\"ucx\"} 3
cadre_operator_server_trainers{namespace=\"team\",pool=\"p\",server=\"p-1-1\",path=\"shm\"} 1
cadre_operator_server_held_since_timestamp_seconds{namespace=\"team\",pool=\"p\",server=\"p-0-1\",job_namespace=\"other\",job=\"j\"} 1767225600
cadre_operator_server_held_since_timestamp_seconds{namespace=\"team\",pool=\"p\",server=\"p-2-1\",job_namespace=\"team\",job=\"k\"} 1767225601
cadre_operator_server_busy_ratio{namespace=\"x\",pool=\"q\",server=\"q-0-1\"} 0.5
# EOF
";

    #[test]
    fn the_busiest_of_a_pool_comes_first() {
        assert!(leads(TEXT) && !leads("cadre_operator_leader 0\n"));
        let loads = loads(TEXT);
        assert_eq!(loads.len(), 4, "one that works and has not reported, too");
        let table = super::table(&loads, Some("team"));
        let (busy, idle) = (table.find("p-1-1"), table.find("p-0-1"));
        assert!(busy.is_some() && busy < idle, "{table}");
        assert!(table.contains("75 %") && table.contains("110 %"), "{table}");
        let line = |server: &str| table.lines().find(|it| it.contains(server)).unwrap_or_default();
        let held = line("p-0-1");
        assert!(held.contains("other/j") && held.contains("2026-01-01T00:00:00Z"), "{table}");
        assert!(line("p-1-1").contains("shm 1, ucx 3") && !held.contains("ucx"), "{table}");
        assert!(line("p-2-1").contains("team/k") && !line("p-1-1").contains("/j"), "{table}");
        assert!(!table.contains("q-0-1"), "another namespace's: {table}");
        assert!(super::table(&loads, None).contains("x/q"));
        assert!(super::table(&[], None).contains("no server reports load"));
    }
}
