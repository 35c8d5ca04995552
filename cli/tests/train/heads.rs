//! Jobs whose documents have many KV heads, which may go to different servers.

use cadre_step::header::{Header, KvHeads};
use cadre_step::planned;
use serde_json::Value;

use super::{JOB, Job, Place, close, rows};
use crate::fs;

/// Eight KV heads, and documents that are longer than what a trainer holds.
const APART: &str =
    "--checkpoint-every=2, --kv-heads=8, --query-heads=8, --head-dim=8, --tokens=1024, --cap=2048";
const TOGETHER: &str = "--checkpoint-every=2, --kv-heads=8, --query-heads=8, --head-dim=8, --tokens=1024, --cap=2048, --heads=together";

/// Bytes that the servers of a run pulled.
fn pulled(place: &Place, name: &str) -> u64 {
    let text = fs::read_to_string(place.path(name).join("summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    let servers = summary["servers"].as_array().expect("a list of servers").iter();
    servers.map(|it| it["bytes_pulled"].as_u64().expect("bytes")).sum()
}

/// The finish of the last slot in each plan of a run, all of them together.
fn finish(place: &Place, name: &str, kv_heads: KvHeads) -> u64 {
    let headers = rows(&place.path(name).join("headers.jsonl")).into_iter();
    let finish = |header: Value| {
        let header: Header = serde_json::from_value(header).expect("a header");
        assert_eq!(header.kv_heads, kv_heads, "{name}");
        let plans = planned::plans(&header).expect("the job had them");
        plans.iter().map(|(_, plan)| plan.bounds().finish).sum::<u64>()
    };
    headers.map(finish).sum()
}

#[test]
fn heads_apart_pull_two_thirds_of_the_bytes_for_the_same_losses_and_as_even() {
    let place = Place::new();
    let four = Job { servers: 0, in_place: true, trainers: 4, ..JOB };
    let local = place.bits("local", Job { every: APART, ..four }, &["--attention", "local"]);
    close(&place.bits("apart", Job { every: APART, ..four }, &[]), &local);
    close(&place.bits("together", Job { every: TOGETHER, ..four }, &[]), &local);
    let (apart, together) = (pulled(&place, "apart"), pulled(&place, "together"));
    assert!(20 * apart <= 13 * together, "{apart} bytes apart, {together} together");
    let apart = finish(&place, "apart", KvHeads::Apart);
    let together = finish(&place, "together", KvHeads::Together);
    assert!(1000 * apart <= 1005 * together, "finish {apart} apart, {together} together");
}

#[test]
fn a_lost_server_changes_no_bit_of_heads_that_are_apart() {
    let place = Place::new();
    let job = Job { servers: 3, every: APART, ..JOB };
    let calm = place.bits("calm", job, &[]);
    let run = place.run("killed", job, &["--fault", "kill-server:0@2:bwd"]);
    assert_eq!(run.code, Some(0), "{}\n{}", run.said, run.logs());
    assert_eq!(run.bits(), calm);
    assert!(run.failovers() > 0, "no slot was lost");
}
