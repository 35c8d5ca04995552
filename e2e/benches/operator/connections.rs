//! 1000 workers on the operator's control service: over TLS, each with the token of its own pod, each with a report a
//! second; and how soon the conductor has another view when a server has died.
//!
//! In: a cluster with fake nodes. Out: lines. The workers are clients of this process, by the code that workers run; what
//! they compute is made up. A server dies here in two ways, since the operator may hear of it from the conductor, to
//! whom links broke, or from the kubelet.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cadre_control::client::{self, Attachment, Options, attach};
use cadre_control::proto::controller_message::Message;
use cadre_control::proto::{Hello, Listening, Notice, Progress, Role, ServerName, ServerReport};
use cadre_control::proto::{View, ViewNumber, notice};
use cadre_control::{CONTROL_VERSION, Credentials, DATA_VERSION, Endpoint};
use cadre_e2e::{Cluster, Operator, until};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::{Counted, HERE, Lines, gone, mebibytes, middle_and_most, pool_of, ready};

/// Servers and trainers: 1000 workers.
const SERVERS: u32 = 992;
const TRAINERS: u32 = 8;
const WORK: Duration = Duration::from_mins(1);
/// Servers that die, for each way.
const DEATHS: usize = 9;
/// Between two reports of a worker.
const REPORTS: Duration = Duration::from_secs(1);
/// Longest wait for a view.
const PATIENCE: Duration = Duration::from_mins(2);
const URL: &str = "https://127.0.0.1:9443";

pub(crate) async fn measure(cluster: &Cluster, lines: &mut Lines) -> Result<()> {
    let certificates = certificates(cluster)?;
    let arguments = [format!("--certificates={}", certificates.display())];
    let arguments = [arguments[0].as_str(), "--control=127.0.0.1:9443"];
    let operator = Operator::start_with(cluster, 8082, &arguments).await?;
    operator.leads().await?;
    let job = format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: load}}\nspec:\n  nodes: \
         {TRAINERS}\n  attention: {{poolRef: {{name: p}}}}\n  template:\n    spec:\n      \
         containers: [{{name: trainer, image: 'example.com/trainer:1'}}]\n"
    );
    cluster.apply(HERE, &pool_of("p", SERVERS, ""))?;
    cluster.apply(HERE, &job)?;
    ready(cluster, SERVERS).await?;
    let hellos = hellos(cluster, &certificates).await?;
    let before = mebibytes(operator.sample()?.peak_bytes);
    lines.add("no worker: most memory of the operator so far", before, "MiB");

    let case = format!("{} workers", SERVERS + TRAINERS);
    let counted = Counted::from_now(cluster, &operator)?;
    let mut load = Load::start(hellos);
    load.view("all servers", |it| filled(it).count() == SERVERS as usize)?;
    counted.tell(&format!("{case}, come: first connection to a view with all servers"), lines)?;
    let counted = Counted::from_now(cluster, &operator)?;
    tokio::time::sleep(WORK).await;
    counted.tell(&format!("{case}, a report a second"), lines)?;

    let mut told = Vec::new();
    let mut ended = Vec::new();
    for _ in 0..DEATHS {
        told.push(load.lose()?.as_secs_f64());
        ended.push(load.end_pod(cluster).await?.as_secs_f64());
    }
    for (case, times) in [
        ("from a conductor's word that a server is lost to its next view", told),
        ("from a server's pod being Failed to the conductor's next view", ended),
    ] {
        let (middle, most) = middle_and_most(times);
        lines.add(&format!("{case}, median of {DEATHS}"), middle, "s");
        lines.add(&format!("{case}, longest"), most, "s");
    }
    load.stop();
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE])?;
    gone(cluster).await?;
    operator.stop()
}

/// What the chart's Secret holds.
fn certificates(cluster: &Cluster) -> Result<PathBuf> {
    let (keys, folder) = (cluster.folder().join("keys"), cluster.folder().join("control"));
    fs::create_dir_all(&folder).context("a folder for certificates")?;
    for (from, to) in
        [("ca.crt", "ca.crt"), ("apiserver.crt", "tls.crt"), ("apiserver.key", "tls.key")]
    {
        fs::copy(keys.join(from), folder.join(to)).context("a certificate")?;
    }
    Ok(folder)
}

/// What each worker says first, and how it proves who it is.
async fn hellos(cluster: &Cluster, certificates: &Path) -> Result<Vec<(Endpoint, Hello, String)>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), HERE);
    let listed = until("all pods", async || {
        let found = pods.list(&ListParams::default().labels("cadre.dev/pool=p")).await?;
        Ok((found.items.len() == (SERVERS + TRAINERS) as usize).then_some(found))
    })
    .await?;
    let made = stream::iter(listed).map(async |pod| {
        let token = token(cluster, &pod).await?;
        let file = certificates.join(format!("token-{}", pod.name_any()));
        fs::write(&file, token).context("a token")?;
        let credentials = Credentials { issuers: certificates.join("ca.crt"), token: file };
        let endpoint = Endpoint::parse(URL, Some(credentials)).context("an endpoint")?;
        Ok((endpoint, hello(&pod)?, pod.name_any()))
    });
    made.buffer_unordered(16).try_collect().await
}

/// A token as the kubelet projects it.
async fn token(cluster: &Cluster, pod: &Pod) -> Result<String> {
    let bound = BoundObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: Some(pod.name_any()),
        uid: pod.uid(),
    };
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            audiences: Some(vec!["cadre.dev/control".into()]),
            bound_object_ref: Some(bound),
            expiration_seconds: Some(3600),
        }),
        ..TokenRequest::default()
    };
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), HERE);
    let answer = accounts.create_token_request("default", &PostParams::default(), &request).await?;
    answer.status.and_then(|it| it.token).context("a token request has an answer")
}

fn hello(pod: &Pod) -> Result<Hello> {
    let number = |text: Option<&String>| text.and_then(|it| it.parse::<u32>().ok());
    let is_server = pod.labels().get("cadre.dev/role").is_some_and(|it| it == "server");
    let label =
        if is_server { "cadre.dev/slot" } else { "batch.kubernetes.io/job-completion-index" };
    let index = number(pod.labels().get(label));
    let index = index.with_context(|| format!("pod {} has an index", pod.name_any()))?;
    let role = if is_server { Role::Server } else { Role::Trainer };
    let conducts = !is_server && index == 0;
    Ok(Hello {
        role: role.into(),
        index,
        incarnation: number(pod.annotations().get("cadre.dev/incarnation")).unwrap_or(0),
        control_version: CONTROL_VERSION,
        data_version: DATA_VERSION,
        numerics_id: "made up".into(),
        memory_bytes: 1 << 30,
        job_secret: if conducts { vec![7; 32] } else { Vec::new() },
        trainers: if is_server { 0 } else { TRAINERS },
        ..Hello::default()
    })
}

/// Servers that a view offers.
fn filled(view: &View) -> impl Iterator<Item = (u32, u32)> {
    view.slots.iter().filter_map(|it| it.server.as_ref()).map(|it| (it.index, it.incarnation))
}

/// All workers.
struct Load {
    /// By index and start.
    servers: BTreeMap<(u32, u32), Running>,
    trainers: Vec<Running>,
    conductor: Option<client::Sender>,
    news: Receiver<News>,
}

/// From the conductor.
enum News {
    Attached(client::Sender),
    View(Instant, View),
}

struct Running {
    pod: String,
    stops: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Load {
    fn start(hellos: Vec<(Endpoint, Hello, String)>) -> Self {
        let (sender, news) = channel();
        let (mut servers, mut trainers) = (BTreeMap::new(), Vec::new());
        for (endpoint, hello, pod) in hellos {
            let stops = Arc::<AtomicBool>::default();
            let (own, who) = (stops.clone(), (hello.index, hello.incarnation));
            let is_server = hello.role() == Role::Server;
            let sender = Some(sender.clone()).filter(|_| !is_server && hello.index == 0);
            let thread = std::thread::spawn(move || work(endpoint, hello, sender.as_ref(), &own));
            let running = Running { pod, stops, thread };
            if is_server {
                servers.insert(who, running);
            } else {
                trainers.push(running);
            }
        }
        Self { servers, trainers, conductor: None, news }
    }

    /// Waits for a view. Out: when it came.
    fn view(&mut self, what: &str, holds: impl Fn(&View) -> bool) -> Result<Instant> {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let news = self.news.recv_timeout(left);
            match news.with_context(|| format!("never a view with {what}"))? {
                News::Attached(sender) => self.conductor = Some(sender),
                News::View(at, view) if holds(&view) => return Ok(at),
                News::View(..) => {}
            }
        }
    }

    /// A server dies, and the conductor says so. Out: how long until it has a view without the server.
    fn lose(&mut self) -> Result<Duration> {
        let (who, _) = self.kill()?;
        let conductor = self.conductor.as_ref().context("the conductor has come")?;
        let began = Instant::now();
        conductor.send(Notice {
            level: notice::Level::Warning.into(),
            text: format!("server {} is lost", who.0),
            event: notice::Event::ServerLost.into(),
            server: Some(ServerName { index: who.0, incarnation: who.1, ..ServerName::default() }),
        })?;
        let at = self.view("a server less", |it| filled(it).all(|it| it != who))?;
        Ok(at.duration_since(began))
    }

    /// A server dies, and its kubelet says so.
    async fn end_pod(&mut self, cluster: &Cluster) -> Result<Duration> {
        let (who, pod) = self.kill()?;
        let pods: Api<Pod> = Api::namespaced(cluster.client(), HERE);
        let failed = json!({"status": {"phase": "Failed"}});
        let began = Instant::now();
        pods.patch_status(&pod, &PatchParams::default(), &Patch::Merge(failed)).await?;
        let at = self.view("a server less", |it| filled(it).all(|it| it != who))?;
        Ok(at.duration_since(began))
    }

    /// Ends a server's connection.
    fn kill(&mut self) -> Result<((u32, u32), String)> {
        let (who, running) = self.servers.pop_first().context("a server is left")?;
        running.stops.store(true, Ordering::Relaxed);
        ensure!(running.thread.join().is_ok(), "a worker has panicked");
        Ok((who, running.pod))
    }

    fn stop(self) {
        let all = self.servers.into_values().chain(self.trainers);
        for running in all.collect::<Vec<_>>() {
            running.stops.store(true, Ordering::Relaxed);
        }
    }
}

/// A worker's life.
fn work(endpoint: Endpoint, hello: Hello, news: Option<&Sender<News>>, stops: &AtomicBool) {
    let (is_server, index) = (hello.role() == Role::Server, hello.index);
    let options = Options { welcome: None, ..Options::default() };
    let Attachment { sender, receiver, .. } = match attach(endpoint, hello, options) {
        Ok(attachment) => attachment,
        Err(error) => return println!("worker {index}: {error}"),
    };
    if let Some(news) = news {
        // Who waits for news has more to say than the reports below.
        let _ = news.send(News::Attached(sender.clone()));
    }
    let port = 1024 + index;
    let address = format!("10.1.0.1:{port}");
    let ring_address = if is_server { String::new() } else { format!("10.1.0.2:{port}") };
    let mut next = Instant::now() + REPORTS;
    let mut sent = sender.send(Listening { exchange_address: address, ring_address });
    let mut step = 0;
    let mut number = ViewNumber::default();
    while sent.is_ok() && !stops.load(Ordering::Relaxed) {
        match receiver.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(message) => {
                if let (Some(Message::View(view)), Some(news)) = (message.message, news) {
                    number = view.number.unwrap_or_default();
                    let _ = news.send(News::View(Instant::now(), view));
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                next += REPORTS;
                step += 1;
                sent = if is_server {
                    sender.send(report(index, step))
                } else if news.is_some() {
                    sender.send(progress(step, number))
                } else {
                    Ok(())
                };
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Half busy, each a little different.
fn report(index: u32, step: u64) -> ServerReport {
    let noise = (u64::from(index) * 7919 + step * 104_729) % 20_000;
    ServerReport {
        step,
        busy_ppm: 490_000 + noise as u32,
        cost: 500_000_000,
        busy_nanoseconds: 490_000_000 + noise * 1000,
        ..ServerReport::default()
    }
}

fn progress(step: u64, number: ViewNumber) -> Progress {
    Progress {
        step,
        steps: 100_000,
        tokens: 4096,
        seconds: 1.0,
        imbalance: 1.0,
        view: Some(number),
        ..Progress::default()
    }
}
