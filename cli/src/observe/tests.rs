//! Reports of logs that are written here: by the calibrations that ship, so that no clock decides.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::options::ReportOptions;
use super::*;

/// A job of an 8B's heads, whose steps all have the same documents and seconds.
struct Job {
    ranks: Vec<Vec<u32>>,
    layers: Vec<&'static str>,
    seconds: f64,
    profile: String,
}

/// One rank has a document of 512K, the others a thousand short ones; layers, as many as an 8B has.
fn uneven() -> Job {
    let short = vec![512; 1_024];
    Job {
        ranks: vec![vec![1 << 19], short.clone(), short.clone(), short],
        layers: vec!["causal"; 32],
        // About half of it is attention of rank 0.
        seconds: 750.0,
        profile: "h200-hopper".into(),
    }
}

fn head(rank: usize, ranks: usize, layers: &[&str]) -> Value {
    json!({"cadre_observe": 1, "rank": rank, "ranks": ranks, "device": "cuda", "layers": layers, "heads": [32, 8, 128]})
}

fn line(step: u64, seconds: f64, documents: &[u32]) -> Value {
    json!({"step": step, "seconds": seconds, "seconds_before": 0.5, "documents": [documents]})
}

impl Job {
    fn write(&self, folder: &Path) {
        for (rank, documents) in self.ranks.iter().enumerate() {
            // The first step is slow, and left out.
            let steps =
                (0..4).map(|it| line(it, if it == 0 { 9e9 } else { self.seconds }, documents));
            let lines = [head(rank, self.ranks.len(), &self.layers)].into_iter().chain(steps);
            let text = lines.map(|it| it.to_string()).collect::<Vec<_>>().join("\n") + "\n";
            fs::write(folder.join(format!("rank-{rank}.jsonl")), text).unwrap();
        }
    }

    fn report(&self) -> Value {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path());
        let text = read(&[folder.path().to_owned()], &self.profile, true).unwrap();
        assert_eq!(text.lines().count(), 1);
        serde_json::from_str(&text).unwrap()
    }

    fn no_gain(&self, expected: &str) {
        let report = self.report();
        assert_eq!(report["gains"], false, "{report}");
        assert!(report["because"].as_str().unwrap().starts_with(expected), "{report}");
    }
}

fn read(files: &[PathBuf], profile: &str, json: bool) -> Result<String, ObserveError> {
    let profile = (!profile.is_empty()).then(|| profile.to_owned());
    let options = ReportOptions {
        files: files.to_vec(),
        profile,
        servers: None,
        lanes: std::num::NonZeroU16::MIN,
        json,
    };
    observe(&ObserveCommand::Report(options))
}

fn number(report: &Value, name: &str) -> f64 {
    report[name].as_f64().unwrap()
}

#[test]
fn a_job_with_one_long_document_gains_what_its_rank_waits_for() {
    let report = uneven().report();
    assert_eq!((report["gains"].as_bool(), number(&report, "step_seconds")), (Some(true), 750.0));
    assert_eq!((report["steps"].as_u64(), report["ranks"].as_u64()), (Some(3), Some(4)));
    // Only one of four ranks has work to speak of.
    let over = number(&report, "max_over_mean");
    assert!((3.9..=4.0).contains(&over), "{over}");
    let (attention, lost) = (number(&report, "attention_seconds"), number(&report, "lost_seconds"));
    assert!((lost - attention * (1.0 - 1.0 / over)).abs() < 1e-6 * lost, "{lost}");
    // A pool evens all of it out, but for what the planner leaves and what waits for links.
    let (pooled, links) =
        (number(&report, "pooled_attention_seconds"), number(&report, "link_seconds"));
    assert!((pooled * over / attention - 1.0).abs() < 0.01, "{pooled} {attention}");
    let step = 750.0 - (attention - pooled - links);
    assert!((number(&report, "pooled_step_seconds") - step).abs() < 1e-6, "{report}");
    assert!((number(&report, "speedup") - 750.0 / step).abs() < 1e-9 && links > 0.0);

    let folder = tempfile::tempdir().unwrap();
    uneven().write(folder.path());
    let table = read(&[folder.path().to_owned()], "", false).unwrap();
    assert!(table.contains("a pool gains: a step takes"), "{table}");
    assert!(table.contains("32 × causal") && table.contains("4 slots in place"), "{table}");
}

#[test]
fn a_job_without_a_gain_is_told_why() {
    let even = Job { ranks: vec![vec![1 << 18; 2]; 4], ..uneven() };
    even.no_gain("ranks are even: the busiest one's attention is 0.0 % above the mean");
    let short = vec![vec![2_048; 8], vec![512; 32]];
    let short = Job { ranks: short, seconds: 10.0, ..uneven() };
    short.no_gain("short documents: attention of the busiest rank takes");
    let mut hybrid = vec!["none"; 32];
    hybrid[0] = "causal";
    let hybrid = Job { layers: hybrid, ..uneven() };
    hybrid.no_gain("few layers of full attention, 1 of 32");
    let windows = Job { layers: vec!["window:1024"; 32], ..uneven() };
    windows.no_gain("few layers of full attention, 0 of 32");
    Job { layers: vec!["none"; 4], ..uneven() }.no_gain("no layer has core attention");
    let alone = Job { ranks: vec![vec![1 << 19]], ..uneven() };
    alone.no_gain("one rank has no other to share its attention with");

    // A calibration whose links carry a megabyte a second.
    let mut profile = cadre_planner::Profile::builtin("h200-hopper").unwrap();
    profile.links.iter_mut().for_each(|it| it.rate = 1);
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), serde_json::to_string(&profile).unwrap()).unwrap();
    let slow = Job { profile: file.path().display().to_string(), ..uneven() };
    slow.no_gain("slow links: even attention saves");
}

#[test]
fn bad_logs_are_refused_by_file_and_line() {
    let check = |text: &[&str], expected: &str| {
        let folder = tempfile::tempdir().unwrap();
        let name = |rank| folder.path().join(format!("rank-{rank}.jsonl"));
        for (rank, text) in text.iter().enumerate() {
            fs::write(name(rank), text).unwrap();
        }
        let said = read(&[folder.path().to_owned()], "h200-hopper", true).unwrap_err().to_string();
        assert!(said.contains(expected), "{said} does not contain {expected}");
    };
    let head = |rank, ranks| head(rank, ranks, &["causal"]).to_string() + "\n";
    let line = |step, rows| line(step, 1e4, &[rows]).to_string() + "\n";
    let whole = |rank, ranks| head(rank, ranks) + &line(0, 9) + &line(1, 9);
    check(&[], "there is no .jsonl file in it");
    check(&["{}\n"], "rank-0.jsonl line 1: ");
    check(&[&line(0, 9)], "it has no line with cadre_observe");
    check(&[&(head(0, 1) + &line(0, 9))], "no step that all 1 ranks have ended after the first");
    check(&[&whole(0, 2)], "rank 1 of 2 is missing");
    check(&[&whole(0, 2), &whole(0, 2)], "rank 0 has two files");
    check(&[&whole(0, 2), &whole(1, 3)], "the numbers of ranks are others than those of");
    check(&[&(whole(0, 1) + &line(2, 0))], "rank-0.jsonl line 4: a document has 0 rows");
    check(&[&whole(0, 1).replace("\"causal\"", "\"linear\"")], "is no kind of layer");
    check(&[&whole(0, 1).replace("observe\":1", "observe\":2")], "it is of cadre_observe 2");
    check(&[&whole(0, 1).replace("[32,", "[0,")], "line 1: heads or ranks is 0");
    check(
        &[&whole(0, 1).replace("10000.0", "1e-12")],
        "calibrate the processor that the job ran on",
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a");
    let said = read(std::slice::from_ref(&file), "h200-hopper", true).unwrap_err().to_string();
    assert!(said.starts_with(&file.display().to_string()), "{said}");
    // Of a CPU nothing ships.
    fs::write(&file, whole(0, 1).replace("cuda", "cpu")).unwrap();
    let said = read(&[file], "", true).unwrap_err().to_string();
    assert!(said.contains("cadre calibrate --head-dim 128"), "{said}");
}

#[test]
fn a_file_holds_the_newest_start_and_may_end_within_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let head = head(0, 1, &["causal"]).to_string() + "\n";
    let line = |step, rows| line(step, 1e4, &[rows]).to_string() + "\n";
    let all = [&head, &line(0, 7), &line(1, 7), &head, &line(0, 9), &line(1, 9), &line(2, 9)];
    let text = all.map(String::as_str).concat();
    let file = folder.path().join("a");
    fs::write(&file, &text[..text.len() - 5]).unwrap();
    let report: Value = serde_json::from_str(&read(&[file], "h200-hopper", true).unwrap()).unwrap();
    assert_eq!((report["steps"].as_u64(), report["longest_document"].as_u64()), (Some(1), Some(9)));
}
