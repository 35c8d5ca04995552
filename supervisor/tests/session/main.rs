//! Ranks on `cadre_worker::session` with real processes: the example of the docs, and callers that make mistakes.
//!
//! This test program is the trainers and servers too, started again by the supervisor: `acts_as_worker`.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one event out of many")]

#[path = "../../../kernels/emulation/built.rs"]
mod built;
mod leaving;
mod lent;
mod mistaken;
#[path = "../../../worker/examples/rank.rs"]
#[allow(unreachable_pub, reason = "a program of its own elsewhere")]
mod rank;
#[path = "../../../testing/seeds.rs"]
mod seeds;
mod threads;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use cadre_control::AttentionPlace;
use cadre_supervisor::{Interrupt, Limits, RunConfig, RunError, run};
use cadre_worker::session::{Join, JoinError, KvHeads, Layers};
use cadre_worker::{Choice, ExchangeChoice, ServerArgs, Threads, server_main};
use serde_json::json;

use self::lent::Ends;

const TRAINERS: u16 = 2;
/// Ranks of [`lent`]; behind the second may stand a seed, from which streams of the emulated GPU get on.
const ON_HOST: &str = "rows of the host";
const ON_GPU: &str = "rows on a GPU";
const SEED: &str = ", seed ";
/// Jobs that run at the same time.
const AT_ONCE: usize = 4;

#[test]
fn acts_as_worker() {
    let Ok(role) = std::env::var("CADRE_ROLE") else { return };
    let ended = match (role.as_str(), std::env::var("MISTAKE")) {
        ("server", _) => server_main(ServerArgs {
            threads: Threads::ONE,
            engine: Choice::Cpu,
            gpu: None,
            exchange: ExchangeChoice::Tcp,
            memory_mib: 512,
        })
        .map_err(Into::into),
        (_, Ok(act)) if act == "threads" => threads::main(),
        (_, Ok(act)) if act.starts_with(ON_HOST) => lent::main(false, Ends::of(&act)),
        (_, Ok(act)) if act.starts_with(ON_GPU) => lent::main(true, Ends::of(&act)),
        (_, Ok(mistake)) => mistaken::main(&mistake),
        (_, Err(_)) => rank::main(),
    };
    let code = match ended {
        Ok(code) if code == ExitCode::SUCCESS => 0,
        Ok(code) if code == ExitCode::from(2) => 2,
        Ok(_) => 3,
        Err(error) => {
            eprintln!("error: {error}");
            let refused = error.downcast_ref::<JoinError>();
            if refused.is_some_and(JoinError::is_bad_input) { 2 } else { 3 }
        }
    };
    std::process::exit(code);
}

/// What a rank of these tests joins with.
fn join(layers: Layers, steps: u64) -> Join<'static> {
    Join {
        layers,
        kv_heads: KvHeads::Apart,
        steps: Some(steps),
        wire: None,
        seed: 0,
        engine: Choice::Cpu,
        gpu: None,
        threads: Threads::ONE,
        memory: 1 << 28,
        exchange: ExchangeChoice::Tcp,
        address: String::new(),
        resume: None,
        first: Box::new(|_, _| Ok(0)),
    }
}

fn config(
    out: &Path,
    attention: AttentionPlace,
    faults: &[&str],
    mistake: Option<&str>,
) -> RunConfig {
    let container = |name: &str| {
        let set = |name: &str, value: &str| json!({"name": name, "value": value});
        let mut env: Vec<_> = mistake.map(|it| set("MISTAKE", it)).into_iter().collect();
        if let Some(of) = mistake.and_then(|it| it.strip_prefix(ON_GPU)) {
            env.push(set("LD_LIBRARY_PATH", &built::driver().to_string_lossy()));
            env.extend(of.strip_prefix(SEED).map(|it| set("CADRE_EMULATED_PROGRESS", it)));
        }
        json!({"spec": {"containers": [{
            "name": name,
            "command": ["cadre"],
            "args": ["--exact", "acts_as_worker", "--nocapture"],
            "env": env,
        }]}})
    };
    // Only who is stopped has to be missed soon; nobody else is to be missed where the machine stands.
    let stops = faults.iter().any(|it| it.starts_with("stop"));
    let suspect = if stops { 1_000 } else { 10_000 };
    let pool = json!({
        "metadata": {"name": "pool"},
        "spec": {"replicas": 2, "inPlace": false, "template": container("server"),
            "health": {"suspectAfterMilliseconds": suspect}},
    });
    let job = json!({
        "metadata": {"name": "job"},
        "spec": {
            "template": container("trainer"), "nodes": TRAINERS,
            "attention": {"poolRef": {"name": "pool"}, "onPoolLoss": "Fail"},
            "failurePolicy": if mistake == Some("stands") {
                json!({"suspectAfterSeconds": 2, "stalledAfterSeconds": 3})
            } else {
                json!({"stalledAfterSeconds": 600})
            },
        },
    });
    RunConfig {
        pool: serde_json::from_value(pool).expect("a pool"),
        job: serde_json::from_value(job).expect("a job"),
        steps: Some(3),
        out: out.to_owned(),
        trace: false,
        resume: false,
        attention,
        headers: None,
        faults: faults.iter().map(|text| text.parse().expect("a fault")).collect(),
        replace: false,
        program: std::env::current_exe().expect("this program"),
        limits: Limits { survivors: Duration::from_secs(3), ..Limits::default() },
    }
}

/// Runs the job to its end; what it came to, and the lines of all ranks.
fn ended(
    attention: AttentionPlace,
    faults: &[&str],
    mistake: Option<&str>,
) -> (Result<(), RunError>, BTreeSet<String>) {
    let out = tempfile::tempdir().expect("a folder of this test");
    let (events, received) = sync_channel(1 << 16);
    let config = config(out.path(), attention, faults, mistake);
    let result = run(config, events, &Interrupt::default());
    drop(received);
    let log = |rank: u16| {
        let path = out.path().join(format!("logs/trainer-{rank}-0.log"));
        std::fs::read_to_string(path).unwrap_or_default()
    };
    let lines = (0..TRAINERS).flat_map(|rank| {
        log(rank)
            .lines()
            .filter(|it| it.starts_with("step "))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    });
    (result.map(drop), lines.collect())
}

#[test]
fn results_have_the_bits_of_a_calm_run_whatever_servers_die() {
    let of = |lines: &BTreeSet<String>, kind: &str| -> BTreeSet<String> {
        lines.iter().filter(|it| it.contains(kind)).cloned().collect()
    };
    let (result, calm) = ended(AttentionPlace::Pool, &[], None);
    result.expect("a calm run ends well");
    // Ranks, layers, ways: the second step goes forward alone.
    assert_eq!(calm.len(), 2 * 2 * (2 + 1 + 2), "{calm:#?}");
    let (result, local) = ended(AttentionPlace::Local, &[], None);
    result.expect("a local run ends well");
    assert_eq!(of(&local, " o "), of(&calm, " o "));
    for fault in ["kill-server@1:fwd", "kill-server:1@2:bwd", "stop-server:0@0:bwd"] {
        let (result, lines) = ended(AttentionPlace::Pool, &[fault], None);
        result.unwrap_or_else(|error| panic!("{fault}: {error:?}"));
        assert_eq!(lines, calm, "{fault}");
    }
}

#[test]
fn a_job_whose_rows_lie_on_a_gpu_has_the_bits_of_one_on_the_host_whatever_servers_die() {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let of = |place, faults: &[&str], act: &str| {
        let (result, lines) = ended(place, faults, Some(act));
        result.unwrap_or_else(|error| panic!("{act}, {place:?}, {faults:?}: {error:?}"));
        lines
    };
    let host = of(AttentionPlace::Pool, &[], ON_HOST);
    // Steps, ranks, nano-batches; O with LSE, dQ, dK with dV.
    assert_eq!(host.len(), 3 * 2 * 2 * 3, "{host:#?}");
    // Streams that get on as late as they may, and as it happens.
    let seeds = seeds::first_seeds("streams of lent rows", 1, 4);
    let seeds = seeds.into_iter().flat_map(|(first, cases)| first..first + cases);
    let seeded: Vec<_> = seeds.map(|it| format!("{ON_GPU}{SEED}{it}")).collect();
    let mut acts = vec![(ON_GPU, "kill-server:1@1:bwd")];
    acts.extend(seeded.iter().map(|it| (it.as_str(), "kill-server@1:fwd")));
    for (act, fault) in acts {
        assert_eq!(of(AttentionPlace::Pool, &[fault], act), host, "{act}, {fault}");
    }
    // Parts of dK and dV are others there, and what comes of them.
    let forward = |lines: BTreeSet<String>| -> BTreeSet<String> {
        lines.into_iter().filter(|it| it.contains(" o ")).collect()
    };
    let local = of(AttentionPlace::Local, &[], ON_GPU);
    assert_eq!(forward(local), forward(host));
}

#[test]
fn a_call_out_of_turn_ends_the_job_with_rank_phase_and_remedy() {
    let mistakes = [
        (
            "order",
            "rank 1: step 0, layer 1, nano-batch 0, forward was submitted, but step 0, layer 0, nano-batch 0, \
             forward with its rows is next; make the calls of a step in their order",
        ),
        (
            "rows",
            "rank 1: K of step 0, layer 0, nano-batch 0, forward has 31 elements, not 32 rows of 8; \
             hand over the rows that were announced for it",
        ),
        ("early", "rank 1: a phase was submitted, but no step has begun: call begin first"),
        (
            "room",
            "rank 1: LSE of step 0, layer 0, nano-batch 0, forward has 3 elements, not 32 rows of 2",
        ),
        (
            "layers",
            "rank 1: its layers are 1 × causal heads 2/1 dim 8, 1 × window:8 heads 2/1 dim 8, those of step 0 are \
             2 × causal heads 2/1 dim 8; give every rank the same model",
        ),
        (
            "heads",
            "rank 1: its layers are 1 × causal heads 2/1 dim 8, 1 × causal heads 4/2 dim 8, those of step 0 are \
             2 × causal heads 2/1 dim 8; give every rank the same model",
        ),
        (
            "wire",
            "rank 1 joined with rows of Bf16, step 0 has F32 on the wire; give every rank the same type, or set \
             spec.attention.wire",
        ),
        ("seed", "rank 1 has the seed 1, step 0 the seed 0; give every rank the same"),
        (
            "direction",
            "rank 1: step 0, layer 0, nano-batch 0, forward was submitted, but step 0, layer 0, nano-batch 0, \
             forward with its rows is next",
        ),
        (
            "unannounced",
            "rank 1: step 0 was asked for, but it was not announced: call announce, or announce_end if it does not come",
        ),
        (
            "stands",
            "rank 1 has not submitted step 0, layer 0, nano-batch 0, forward for 3 s; look where",
        ),
        // What rank 1 sends beside it goes forward alone.
        (
            "turns",
            "step 0: trainer 0 announced the turns F0 B0, trainer 1 F0, other ones from turn 1 on; give all ranks the same turns",
        ),
        // Rank 0 has said that it has three.
        ("steps", "; give all ranks the same data and number of steps"),
        (
            "again",
            "rank 1 joins its job a second time; a process joins once: leave the first session, or start a process for each rank",
        ),
        (
            "again, of other heads",
            "rank 1 joins its job a second time; a process joins once: leave the first session, or start a process for each rank",
        ),
        ("second", " joins as a rank of the job, but trainer 1 is here already, as process "),
    ];
    let check = |(mistake, words): (&str, &str)| {
        let (result, _) = ended(AttentionPlace::Pool, &[], Some(mistake));
        // Another attempt would end in the same way, but for a thread that stands still.
        let is_mistake = mistake != "stands";
        let told = match result {
            Err(RunError::BadInput { message, .. }) if is_mistake => message,
            Err(RunError::JobFailed { message, .. }) if !is_mistake => message,
            other => panic!("{mistake}: {other:?}"),
        };
        assert!(told.contains(words), "{mistake}: {told}");
    };
    // Most of their time is waiting.
    for some in mistakes.chunks(AT_ONCE) {
        thread::scope(|scope| some.iter().for_each(|&it| drop(scope.spawn(move || check(it)))));
    }
}

#[test]
fn heads_that_nothing_computes_are_refused_before_a_rank_joins() {
    for (mistake, words) in [
        (
            "dim",
            "no engine takes the head dim 12 in layer 1 of rank 1; give the model heads of a multiple of 8",
        ),
        ("uneven", "2 query heads in layer 1 of rank 1 are no multiple of its 3 KV heads; give"),
        (
            "on a gpu",
            "--exchange node does not take the head dim 8 in layer 0 of rank 1, whose rows would stay on the GPU; give",
        ),
        ("memory", "rank 1 brings no memory for rows of others; give it 1 MiB or more"),
    ] {
        match ended(AttentionPlace::Pool, &[], Some(mistake)).0 {
            Err(RunError::BadInput { message, .. }) => {
                assert!(message.contains(words), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn one_thread_submits_while_another_waits_and_a_loss_may_depend_on_lse() {
    for attention in [AttentionPlace::Pool, AttentionPlace::Local] {
        let (result, _) = ended(attention, &[], Some("threads"));
        result.unwrap_or_else(|error| panic!("{attention:?}: {error:?}"));
    }
}
