//! The demo's shape of job as pods: the operator's control service over TLS, and real `cadre` processes.
//!
//! The API server is the one in memory; this test plays the Job controller and the kubelet: it makes the
//! trainers' pods, projects tokens and the issuer's certificate into files, and starts what the containers
//! say with the variables that the operator wrote.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::leading::leading;
use super::server::Server;
use super::{name, reason};

/// Steps of the job: enough for a server to be killed in the middle.
const STEPS: u32 = 96;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_mins(3);

/// The `cadre` binary that was built beside this test, if it was.
fn cadre() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    let binary = test.parent()?.parent()?.join("cadre");
    binary.exists().then_some(binary)
}

/// A process of a pod, ended with the test.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    async fn ended(&mut self) -> ExitStatus {
        self.until("its end", |it| it.child.try_wait().expect("a child of this test")).await
    }

    async fn says(&mut self, text: &str) {
        self.until(text, |it| it.log().contains(text).then_some(())).await;
    }

    async fn until<T>(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> Option<T>) -> T {
        let found = async {
            loop {
                if let Some(found) = holds(self) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if let Ok(found) = tokio::time::timeout(PATIENCE, found).await {
            return found;
        }
        panic!("never: {what}; the log:\n{}", self.log())
    }
}

/// The kubelet's part.
struct Node {
    folder: tempfile::TempDir,
    binary: PathBuf,
}

impl Node {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the container of a pod. `changes` replace variables.
    fn start(
        &self,
        pod: &Value,
        authority: &str,
        token: &str,
        changes: &[(&str, &str)],
    ) -> Process {
        let pod_name = name(pod);
        let own = self.path(&format!("pods/{pod_name}-{}", changes.len()));
        fs::create_dir_all(own.join("run")).expect("a new folder");
        fs::write(own.join("run/ca.crt"), authority).expect("room");
        fs::write(own.join("run/token"), token).expect("room");
        let container = &pod["spec"]["containers"][0];
        let words = |key: &str| {
            let list = container[key].as_array().cloned().unwrap_or_default();
            list.iter().map(|it| it.as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
        };
        let log = own.join("log");
        let file = File::create(&log).expect("room");
        let mut command = Command::new(&self.binary);
        command.args(&words("command")[1..]).args(words("args"));
        command.env_clear().envs(self.variables(pod, &own)).envs(changes.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        Process { child: command.spawn().expect("the binary starts"), log }
    }

    /// The container's environment with the pod's fields and our folders in it.
    fn variables(&self, pod: &Value, own: &Path) -> BTreeMap<String, String> {
        let text = |it: &Path| it.display().to_string();
        let folders = [
            ("/var/run/cadre", text(&own.join("run"))),
            ("/var/lib/cadre-checkpoints", text(&self.path("checkpoints"))),
            ("/var/lib/cadre", text(own)),
        ];
        let variables = pod["spec"]["containers"][0]["env"].as_array().cloned().unwrap_or_default();
        let value = |it: &Value| match it["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("status.podIP") => "127.0.0.1".to_owned(),
            Some(field) if field.contains("completion-index") => {
                let index =
                    &pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"];
                index.as_str().unwrap_or_default().to_owned()
            }
            Some(field) => panic!("{field} is not known here"),
            None => {
                let value = it["value"].as_str().unwrap_or_default().to_owned();
                let found = folders.iter().find(|(from, _)| value.starts_with(from));
                found.map_or(value.clone(), |(from, to)| value.replace(from, to))
            }
        };
        variables
            .iter()
            .map(|it| (it["name"].as_str().unwrap_or_default().to_owned(), value(it)))
            .collect()
    }
}

fn objects(data: &Path) -> [Value; 2] {
    let pool = json!({
        "apiVersion": "cadre.dev/v1alpha1", "kind": "AttentionPool",
        "spec": {"replicas": 2, "inPlace": false, "template": {"spec": {"containers": [
            {"name": "server", "image": "i", "command": ["cadre", "serve"]},
        ]}}},
    });
    let args = [
        format!("--data={}", data.display()),
        "--model=tiny".into(),
        format!("--steps={STEPS}"),
        "--tokens=256".into(),
        "--cap=400".into(),
        "--checkpoint-every=32".into(),
    ];
    let job = json!({
        "apiVersion": "cadre.dev/v1alpha1", "kind": "TrainingJob",
        "spec": {
            "nodes": 2,
            "attention": {
                "poolRef": {"name": "p"}, "wire": "F32", "reproducible": true, "poolWaitSeconds": 60,
            },
            "template": {"spec": {"containers": [
                {"name": "trainer", "image": "i", "command": ["cadre", "train"], "args": args},
            ]}},
        },
    });
    [pool, job]
}

/// The bits of every step's loss, as a conductor's log has them.
fn losses(log: &str) -> Vec<String> {
    let bits = |line: &str| Some(line.split_once(", bits ")?.1.get(..8)?.to_owned());
    log.lines().filter_map(bits).collect()
}

/// The same job by `cadre run`.
fn alone(node: &Node, objects: &[Value; 2]) -> Vec<String> {
    let [mut pool, mut job] = objects.clone();
    pool["metadata"]["name"] = "p".into();
    job["metadata"]["name"] = "j".into();
    let manifest = node.path("run.yaml");
    fs::write(&manifest, format!("{pool}\n---\n{job}\n")).expect("room");
    let out = node.path("run");
    let done = Command::new(&node.binary)
        .arg("run")
        .arg("-f")
        .arg(manifest)
        .arg("--out")
        .arg(&out)
        .output()
        .expect("the binary starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    losses(&fs::read_to_string(out.join("logs/trainer-0-0.log")).expect("a log"))
}

/// Makes a pod of the job's template, as the Job controller does. Out: it.
async fn trainer(server: &Server, job: &Value, index: u32) -> Value {
    let template = &job["spec"]["template"];
    let mut pod = json!({"metadata": template["metadata"], "spec": template["spec"]});
    let place = index.to_string();
    pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = place.as_str().into();
    pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] = place.into();
    pod["spec"]["nodeName"] = "node-1".into();
    pod["status"] = super::running()["status"].clone();
    let own = format!("{}-{index}", name(job));
    server.put("pods", &own, &pod);
    server.until("the pod", |all| all.get("pods", &own).cloned()).await
}

/// The job under another name, which begins with what another one has left.
async fn go_on(server: &Server, job: &Value, (own, from): (&str, &str)) -> Value {
    let mut job = job.clone();
    job["spec"]["checkpoint"] = json!({"hostPath": "/shared", "resumeFrom": from});
    server.put("trainingjobs", own, &job);
    server.until("an attempt", |all| all.get("jobs", &format!("{own}-1")).cloned()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_trains_as_pods_with_the_bits_of_a_local_run_while_a_server_is_killed() {
    let Some(binary) = cadre() else {
        println!("skipped: no cadre beside this test; build it: cargo build --release -p cadre");
        return;
    };
    let node = Node { folder: tempfile::tempdir().expect("a temporary folder"), binary };
    let data = node.path("data");
    fs::create_dir(&data).expect("a new folder");
    for (file, words, times) in [("a", "in the beginning was ", 300), ("b", "the word ", 500)] {
        fs::write(data.join(file), words.repeat(times)).expect("room");
    }
    let objects = objects(&data);
    let expected = alone(&node, &objects);
    assert_eq!(expected.len(), STEPS as usize);

    // The operator, which leads.
    let server = Server::new();
    let _context = leading(&server, node.folder.path()).await.context;

    // Two servers wait; strangers do not get in.
    let [pool, job] = &objects;
    server.put("attentionpools", "p", pool);
    let pods = server
        .until("two servers", |all| {
            let pods: Vec<Value> = all.of("pods").into_iter().cloned().collect();
            (pods.len() == 2).then_some(pods)
        })
        .await;
    let authority = server
        .until("the issuer", |all| {
            let map = all.get("configmaps", "cadre-control-ca")?;
            Some(map["data"]["ca.crt"].as_str().expect("it has one").to_owned())
        })
        .await;
    for pod in &pods {
        server.put("pods", &name(pod), &super::running());
    }
    let mut forged = node.start(&pods[0], &authority, "token of nobody", &[("A", "1")]);
    assert_eq!(forged.ended().await.code(), Some(2), "{}", forged.log());
    assert!(
        forged.log().contains("the token is not good: invalid bearer token"),
        "{}",
        forged.log()
    );
    let other = [("CADRE_INDEX", "1"), ("A", "1")];
    let mut liar = node.start(&pods[0], &authority, &token(&pods[0]), &other);
    assert_eq!(liar.ended().await.code(), Some(2), "{}", liar.log());
    assert!(
        liar.log().contains("is server 0 ") && liar.log().contains("may not speak for server 1")
    );
    let mut servers: Vec<Process> =
        pods.iter().map(|it| node.start(it, &authority, &token(it), &[])).collect();

    // The job.
    server.put("trainingjobs", "j", job);
    let made = server.until("an attempt", |all| all.get("jobs", "j-1").cloned()).await;
    let mut trainers = Vec::new();
    for index in 0..2 {
        let pod = trainer(&server, &made, index).await;
        trainers.push(node.start(&pod, &authority, &token(&pod), &[]));
    }
    trainers[0].says(&format!("step 2 of {STEPS}")).await;
    servers[1].child.kill().expect("it runs");
    for trainer in &mut trainers {
        let end = trainer.ended().await;
        assert_eq!(end.code(), Some(0), "{}", trainer.log());
    }
    assert_eq!(losses(&trainers[0].log()), expected, "{}", trainers[0].log());

    // The last figures lasted before the conductor went: no leader that dies can take them along.
    let told = server.until("the job", |all| all.get("trainingjobs", "j").cloned()).await;
    let told = &told["status"];
    let progress = &told["progress"];
    assert_eq!((&progress["step"], &progress["percent"]), (&json!(STEPS), &json!(100)), "{told}");
    assert_eq!(told["failovers"], 1, "{told}");
    // The server that lives waits for the next job.
    server
        .until("measured links", |all| {
            let pool = all.get("attentionpools", "p")?;
            (reason(pool, "PlacementSatisfied") == "Near").then_some(())
        })
        .await;
    assert!(servers[0].child.try_wait().expect("a child of this test").is_none(), "it stays");

    goes_on(&server, &node, (job, &authority), &expected).await;
    let id = rustix_pid(&servers[0].child);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("it runs");
    assert_eq!(servers[0].ended().await.code(), Some(0), "{}", servers[0].log());
}

/// A new job goes on from a checkpoint of the first one, and one that names nothing is refused by the field.
async fn goes_on(
    server: &Server,
    node: &Node,
    (job, authority): (&Value, &str),
    expected: &[String],
) {
    let first = server.until("the job", |all| all.get("trainingjobs", "j").cloned()).await;
    let uid = first["metadata"]["uid"].as_str().expect("it has one").to_owned();
    let from = format!("j-{}", uid.get(..8).unwrap_or(&uid));
    let made = go_on(server, job, ("k", &format!("{from}/step-64"))).await;
    let mut trainers = Vec::new();
    for index in 0..2 {
        let pod = trainer(server, &made, index).await;
        trainers.push(node.start(&pod, authority, &token(&pod), &[]));
    }
    for trainer in &mut trainers {
        let end = trainer.ended().await;
        assert_eq!(end.code(), Some(0), "{}", trainer.log());
    }
    assert_eq!(losses(&trainers[0].log()), expected[64..], "{}", trainers[0].log());
    let own = server.until("the job", |all| all.get("trainingjobs", "k").cloned()).await;
    let own = own["metadata"]["uid"].as_str().expect("it has one").to_owned();
    let folder = node.path(&format!("checkpoints/k-{}", own.get(..8).unwrap_or(&own)));
    let log = fs::read_to_string(folder.join("headers.jsonl")).expect("the log of headers");
    assert_eq!(log.lines().count(), STEPS as usize, "the other job's lines, then its own");
    let made = go_on(server, job, ("l", &format!("{from}/step-65"))).await;
    let pod = trainer(server, &made, 0).await;
    let mut refused = node.start(&pod, authority, &token(&pod), &[]);
    assert_eq!(refused.ended().await.code(), Some(2), "{}", refused.log());
    let words = "/step-65 is no folder; create a new job that names the folder of a job";
    assert!(refused.log().contains("spec.checkpoint.resumeFrom: "), "{}", refused.log());
    assert!(refused.log().contains(words), "{}", refused.log());
}

/// What the API server knows a pod by.
fn token(pod: &Value) -> String {
    format!("token of {}", name(pod))
}

fn rustix_pid(child: &Child) -> rustix::process::Pid {
    rustix::process::Pid::from_raw(child.id().cast_signed()).expect("a child has an id above 0")
}
