//! Good and bad manifests, one table each; and the manifests that the project ships.

use std::path::{Path, PathBuf};

use cadre_crds::manifest::{Error, Manifests, Source, load, parse};
use cadre_crds::{OnPoolLoss, ScalingMode, Wire, validate};

const POOL: &str = "\
apiVersion: cadre.dev/v1alpha1
kind: AttentionPool
metadata:
  name: p
spec:
  replicas: 2
  inPlace: false
";

const JOB: &str = "\
apiVersion: cadre.dev/v1alpha1
kind: TrainingJob
metadata:
  name: j
spec:
  nodes: 2
  attention:
    poolRef: {name: p}
  template:
    spec:
      containers:
        - name: trainer
          command: [cadre, train]
          args: [--steps, \"60\"]
";

fn read(text: &str) -> Result<Manifests, Error> {
    parse(&[Source { file: PathBuf::from("m.yaml"), text: text.to_owned() }])
}

/// The error when `to` stands for `from` in the good manifests.
fn error(from: &str, to: &str) -> String {
    let good = format!("{POOL}---\n{JOB}");
    assert_eq!(good.matches(from).count(), 1, "`{from}` is once in the good manifests");
    let error = read(&good.replace(from, to)).expect_err(to).to_string();
    assert!(!error.contains('\n'));
    error
}

fn check(from: &str, to: &str, expected: &str) {
    assert_eq!(error(from, to), expected);
}

#[test]
fn defaults_are_those_of_the_documentation() {
    let Manifests { pool, job, cluster_only } = read(&format!("{POOL}---\n{JOB}")).unwrap();
    assert_eq!((pool.spec.replicas, pool.spec.in_place), (2, false));
    assert_eq!(pool.spec.scaling.mode, ScalingMode::Fixed);
    assert_eq!(pool.spec.health.reshape_after_seconds, 600);
    assert_eq!(pool.spec.health.suspect_after_milliseconds, 1000);
    assert_eq!(job.spec.trainers(), 2);
    assert_eq!(job.spec.attention.wire, None);
    assert_eq!(job.spec.attention.on_pool_loss, OnPoolLoss::Wait);
    assert_eq!(job.spec.failure_policy.max_restarts, None);
    assert_eq!(job.spec.checkpoint.keep, 3);
    assert_eq!(cluster_only, Vec::<String>::new());
}

#[test]
fn a_pool_serves_in_place_unless_it_says_otherwise() {
    let text = POOL.replace("  replicas: 2\n  inPlace: false\n", "  replicas: 0\n");
    let pool = read(&format!("{text}---\n{JOB}")).unwrap().pool;
    assert!(pool.spec.in_place);
}

#[test]
fn objects_survive_a_round_trip() {
    let pool = read(&format!("{POOL}---\n{JOB}")).unwrap().pool;
    let text = serde_json::to_string(&pool).unwrap();
    assert_eq!(serde_json::from_str::<cadre_crds::AttentionPool>(&text).unwrap(), pool);
}

#[test]
fn several_files_and_empty_documents_are_fine() {
    let sources = [
        Source { file: "a".into(), text: format!("---\n# nothing\n---\n{JOB}---\n") },
        Source { file: "b".into(), text: POOL.to_owned() },
    ];
    assert_eq!(parse(&sources).unwrap().job.spec.nodes, 2);
}

#[test]
fn slips_in_fields_are_named_with_their_line() {
    check(
        "  replicas: 2",
        "  replica: 2",
        "m.yaml:6: AttentionPool p: spec.replica is not a field of this object; \
         did you mean `replicas`?",
    );
    check(
        "          command: [cadre, train]",
        "          comand: [cadre, train]",
        "m.yaml:21: TrainingJob j: spec.template.spec.containers[0].comand is not a field of this \
         object; did you mean `command`?",
    );
    check(
        "  nodes: 2",
        "  gangs: 2",
        "m.yaml:14: TrainingJob j: spec.gangs is not a field of this object; remove it or correct \
         its name",
    );
    check(
        "  name: p\n",
        "  name: p\n  lables: {}\n",
        "m.yaml:5: AttentionPool p: metadata.lables is not a field of this object; did you mean \
         `labels`?",
    );
}

#[test]
fn wrong_types_are_named_with_their_line() {
    check(
        "  replicas: 2",
        "  replicas: two",
        "m.yaml:6: AttentionPool p: spec.replicas: invalid type: string \"two\", expected a whole \
         number, 0 or more; correct the value",
    );
    check(
        "  replicas: 2",
        "  replicas: -1",
        "m.yaml:6: AttentionPool p: spec.replicas: invalid value: integer `-1`, expected a whole \
         number, 0 or more; correct the value",
    );
    check(
        "poolRef: {name: p}",
        "poolRef: {name: p}\n    wire: F16",
        "m.yaml:17: TrainingJob j: spec.attention.wire: unknown variant `F16`, expected `F32` or \
         `Bf16`; correct the value",
    );
    check(
        "\"60\"",
        "60",
        "m.yaml:22: TrainingJob j: spec.template.spec.containers[0].args[1] is a number or a boolean \
         where text belongs; put it in quotes",
    );
    check(
        "    poolRef: {name: p}\n",
        "    share: 1\n",
        "m.yaml:15: TrainingJob j: spec.attention: missing field `poolRef`; correct the value",
    );
}

#[test]
fn what_is_not_one_of_our_objects_is_refused() {
    check(
        "kind: AttentionPool",
        "kind: Deployment",
        "m.yaml:2: kind is `Deployment`; write AttentionPool or TrainingJob, one object a document",
    );
    check(
        "apiVersion: cadre.dev/v1alpha1\nkind: TrainingJob",
        "apiVersion: cadre.dev/v1\nkind: TrainingJob",
        "m.yaml:10: TrainingJob j: apiVersion is `cadre.dev/v1`; write `cadre.dev/v1alpha1`",
    );
    check(
        "metadata:\n  name: p",
        "metadata: {}",
        "m.yaml:3: AttentionPool: metadata.name is missing; give the object a name",
    );
    check(
        POOL,
        "- a\n- list\n",
        "m.yaml:1: not an object; write apiVersion, kind, metadata and spec",
    );
    check(
        POOL,
        "",
        "m.yaml: no AttentionPool; add one to the files or name its file with another -f",
    );
    check(JOB, "", "m.yaml: no TrainingJob; add one to the files or name its file with another -f");
    check(
        JOB,
        POOL,
        "m.yaml:10: AttentionPool p: a second AttentionPool, the first is at m.yaml:2: \
         AttentionPool p; keep one, more come later",
    );
    let broken = read("spec: [1, 2\nkind: x\n").unwrap_err().to_string();
    assert!(broken.starts_with("m.yaml: not valid YAML: "), "{broken}");
    assert!(broken.contains("line 2") && !broken.contains('\n'), "{broken}");
    let twice = read(&format!("{POOL}kind: x\n")).unwrap_err().to_string();
    assert!(twice.contains("line 8") && twice.contains("kind"), "{twice}");
}

#[test]
#[allow(clippy::too_many_lines, reason = "it is a table")]
fn values_that_mean_nothing_are_refused() {
    let pool = |from: &str, to: &str, expected: &str| {
        let error = error(from, to);
        assert_eq!(error.split_once(": AttentionPool p: ").expect("names the pool").1, expected);
    };
    let spec = |to: &str, expected: &str| {
        pool("  replicas: 2\n", &format!("  replicas: 2\n  {to}\n"), expected);
    };
    pool(
        "  replicas: 2",
        "  replicas: 0",
        "spec.replicas is 0 while spec.inPlace is false, so the pool has no server; set \
         spec.replicas to 1 or more, or spec.inPlace to true",
    );
    pool("replicas: 2", "replicas: 5000", "spec.replicas is 5000; write a number from 0 to 4096");
    check(
        "  name: p\n",
        "  name: P_\n",
        "m.yaml:4: AttentionPool P_: metadata.name `P_` is not a name; use a–z, 0–9 and -, with a letter or digit at both ends",
    );
    let long = "p".repeat(53);
    check(
        "  name: p\n",
        &format!("  name: {long}\n"),
        &format!("m.yaml:4: AttentionPool {long}: metadata.name has 53 characters; 52 is the most"),
    );
    spec(
        "scaling: {mode: Auto}",
        "spec.scaling.max is missing while spec.scaling.mode is Auto; say how many servers there \
         may be at most",
    );
    spec("scaling: {min: 3, max: 2}", "spec.scaling.max is 2; write a number from 3 to 4096");
    spec(
        "updateStrategy: {type: OnDelete, rollingUpdate: {maxUnavailable: 2}}",
        "spec.updateStrategy.rollingUpdate is of no use to spec.updateStrategy.type OnDelete; remove it, or write RollingUpdate",
    );
    spec(
        "updateStrategy: {rollingUpdate: {maxUnavailable: 0}}",
        "spec.updateStrategy.rollingUpdate.maxUnavailable is 0; write a number from 1 to 4096",
    );
    spec("drain: {timeoutSeconds: 0}", "spec.drain.timeoutSeconds is 0; write 1 or more");
    spec(
        "health: {suspectAfterMilliseconds: 100}",
        "spec.health.suspectAfterMilliseconds is 100; write a number from 400 to 600000",
    );
    spec(
        "placement: {levels: ['']}",
        "spec.placement.levels[0] is empty; write a name or remove it",
    );
    spec(
        "template: {spec: {containers: [{name: x}]}}",
        "spec.template.spec.containers[0].name is `x`; name it `server`",
    );

    let job = |from: &str, to: &str, expected: &str| {
        let error = error(from, to);
        assert_eq!(error.split_once(": TrainingJob j: ").expect("names the job").1, expected);
    };
    job("  nodes: 2", "  nodes: 0", "spec.nodes is 0; write a number from 1 to 4096");
    job(
        "  nodes: 2",
        "  nodes: 4096\n  procsPerNode: 2",
        "spec.nodes × spec.procsPerNode makes 8192 trainers; 4096 is the most",
    );
    job(
        "{name: p}",
        "{name: q}",
        "spec.attention.poolRef.name is `q`, but the pool is called `p`; write `p`, or give the \
         manifest of `q`",
    );
    job(
        "{name: p}",
        "{name: p, namespace: far}",
        "spec.attention.poolRef.namespace is `far`, but the pool is in `default`; write `default`",
    );
    job(
        "{name: p}",
        "{name: p}\n    profile: ''",
        "spec.attention.profile is empty; name a file of cadre calibrate, or leave the field out",
    );
    for tolerance in ["0.999", "2.000001", "NaN", "", "two"] {
        job(
            "{name: p}",
            &format!("{{name: p}}\n    tolerance: '{tolerance}'"),
            &format!(
                "spec.attention.tolerance is `{tolerance}`; write a ratio from 1 to 2, such as \"1.002\", or leave the field out"
            ),
        );
    }
    job(
        "  nodes: 2",
        "  failurePolicy: {rules: [{action: Restart, exitCodes: []}]}",
        "spec.failurePolicy.rules[0].exitCodes is empty; list the exit codes that the rule is about",
    );
    job(
        "  nodes: 2",
        "  failurePolicy: {suspectAfterSeconds: 40, stalledAfterSeconds: 40}",
        "spec.failurePolicy.stalledAfterSeconds is 40, not above spec.failurePolicy.suspectAfterSeconds, which is 40; \
         write more than 40, or lower spec.failurePolicy.suspectAfterSeconds",
    );
    job(
        "  nodes: 2",
        "  checkpoint: {claimName: a, hostPath: /b}",
        "spec.checkpoint.hostPath is set beside spec.checkpoint.claimName; keep one of them",
    );
    for (from, problem) in [
        (
            "i-1/../j-2",
            "is `i-1/../j-2`, no folder of a job's checkpoints; write NAME-UID, or NAME-UID/step-N for one of them",
        ),
        ("i-1", "is set without storage; name that job's, spec.checkpoint.claimName or hostPath"),
    ] {
        let line = format!("  checkpoint: {{resumeFrom: {from}}}");
        job("  nodes: 2", &line, &format!("spec.checkpoint.resumeFrom {problem}"));
    }
    job(
        "        - name: trainer",
        "        - name: other\n        - name: trainer",
        "spec.template.spec.containers has 2 containers; write exactly one, named `trainer`",
    );
    job(
        "          command: [cadre, train]",
        "          env: [{name: RANK, value: \"0\"}]",
        "spec.template.spec.containers[0].env[0].name is `RANK`, which Cadre sets itself; remove \
         the variable",
    );
}

#[test]
fn one_machine_refuses_what_needs_a_cluster() {
    let check = |from: &str, to: &str, expected: &str| {
        let good = format!("{POOL}---\n{JOB}");
        let Manifests { pool, job, .. } = read(&good.replace(from, to)).unwrap();
        let refusal = validate::pool_on_one_machine(&pool)
            .and_then(|()| validate::job_on_one_machine(&job))
            .expect_err(to);
        assert_eq!(refusal.to_string(), expected);
    };
    check(
        "  replicas: 2",
        "  replicas: 0\n  scaling: {mode: External}",
        "spec.replicas is 0 while spec.inPlace is false, and nothing scales a pool on one machine; \
         set spec.replicas to 1 or more, or spec.inPlace to true",
    );
    check("  nodes: 2", "  suspend: true", "spec.suspend is true, so nothing would run; remove it");
    check(
        "          command: [cadre, train]\n",
        "",
        "spec.template.spec.containers[0].command is missing, and the image's own is not known on \
         one machine; write the program to run, such as [cadre, train]",
    );
    check(
        "          command:",
        "          env: [{name: A, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]\n          \
         command:",
        "spec.template.spec.containers[0].env[0].valueFrom needs a cluster; write a value",
    );
    check(
        "          command:",
        "          envFrom: [{configMapRef: {name: a}}]\n          command:",
        "spec.template.spec.containers[0].envFrom needs a cluster; write the variables under env",
    );
}

#[test]
fn fields_for_a_cluster_are_listed() {
    let text = format!("{POOL}---\n{JOB}").replace(
        "          command:",
        "          image: x\n          resources: {limits: {cpu: 4, nvidia.com/gpu: 1}}\n          \
         command:",
    );
    assert_eq!(
        read(&text).unwrap().cluster_only,
        ["TrainingJob j: spec.template.spec.containers[0].image, \
             spec.template.spec.containers[0].resources",]
    );
}

#[test]
fn unreadable_files_are_named() {
    let error = load(&[PathBuf::from("no/such.yaml")]).unwrap_err().to_string();
    assert_eq!(
        error,
        "no/such.yaml: No such file or directory (os error 2); name a readable YAML file"
    );
}

#[test]
fn shipped_examples_load() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let example = |name: &str| load(&[root.join("examples").join(name)]).unwrap();
    let bible = example("bible.yaml");
    assert_eq!((bible.pool.spec.replicas, bible.pool.spec.in_place), (2, false));
    assert_eq!(bible.job.spec.trainers(), 2);
    assert_eq!(bible.job.spec.attention.wire, Some(Wire::F32));
    validate::pool_on_one_machine(&bible.pool).unwrap();
    validate::job_on_one_machine(&bible.job).unwrap();
    let pytorch = example("pytorch.yaml");
    validate::pool_on_one_machine(&pytorch.pool).unwrap();
    validate::job_on_one_machine(&pytorch.job).unwrap();
    let in_place = example("bible-in-place.yaml");
    assert_eq!((in_place.pool.spec.replicas, in_place.pool.spec.in_place), (0, true));
    validate::pool_on_one_machine(&in_place.pool).unwrap();
    validate::job_on_one_machine(&in_place.job).unwrap();
}
