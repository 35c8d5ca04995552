//! Our operator as a process of its own, with exactly the rights that the chart gives it.
//!
//! In: a cluster. Out: the program runs and answers; its metrics and what it costs. What the chart's role
//! leaves out, the program is refused here too.

use std::process::Command;

use anyhow::{Result, bail};
use rustix::process::Signal;

use crate::access::SYSTEM_NAMESPACE;
use crate::cluster::Cluster;
use crate::process::Process;
use crate::wait::{get, until};

/// A running operator.
#[derive(Debug)]
pub struct Operator {
    process: Process,
    port: u16,
}

/// Memory and processor time of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Most memory that it had resident, bytes.
    pub peak_bytes: u64,
    /// Processor time, seconds.
    pub processor_seconds: f64,
}

impl Operator {
    /// Starts one; `port` is for its metrics, and names it. Returns when its caches are filled.
    pub async fn start(cluster: &Cluster, port: u16) -> Result<Self> {
        Self::start_with(cluster, port, &[]).await
    }

    /// Starts one with more arguments.
    pub async fn start_with(cluster: &Cluster, port: u16, arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(cluster.programs().own("cadre-operator")?);
        command
            .env("KUBECONFIG", cluster.operators_config().await?)
            .env("POD_NAME", format!("operator-{port}"))
            .env("POD_NAMESPACE", SYSTEM_NAMESPACE)
            .env("NO_COLOR", "1")
            .arg(format!("--address=127.0.0.1:{port}"))
            .args(arguments);
        let name = format!("cadre-operator-{port}");
        let mut process = Process::start(&name, cluster.folder(), &mut command)?;
        until(&name, async || {
            process.check()?;
            Ok(get(port, "/readyz").ok().map(drop))
        })
        .await?;
        Ok(Self { process, port })
    }

    /// Starts one and waits until it leads.
    pub async fn leading(cluster: &Cluster, port: u16) -> Result<Self> {
        let operator = Self::start(cluster, port).await?;
        operator.leads().await?;
        Ok(operator)
    }

    /// Waits until it leads.
    pub async fn leads(&self) -> Result<()> {
        until("the lease", async || Ok((self.metric("cadre_operator_leader")? == 1).then_some(())))
            .await
    }

    /// The sum of a metric over its labels; 0 when it is not told yet.
    pub fn metric(&self, name: &str) -> Result<u64> {
        let text = get(self.port, "/metrics")?;
        let lines = text.lines().filter(|it| it.split(['{', ' ']).next() == Some(name));
        let values = lines.filter_map(|it| it.rsplit(' ').next()?.parse::<u64>().ok());
        Ok(values.sum())
    }

    /// What it said.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// What it has cost so far.
    pub fn sample(&self) -> Result<Sample> {
        let (peak_bytes, processor_seconds) = self.process.usage()?;
        Ok(Sample { peak_bytes, processor_seconds })
    }

    /// Kills it, as a crash does.
    pub fn kill(self) -> Result<()> {
        self.process.kill()
    }

    /// Asks it to end (SIGTERM), as a kubelet does.
    pub fn stop(self) -> Result<()> {
        let status = self.process.stop()?;
        if !status.success() {
            bail!("the operator ended with {status}");
        }
        Ok(())
    }

    /// Stops it (SIGSTOP): it neither works nor renews its lease.
    pub fn pause(&self) -> Result<()> {
        self.process.signal(Signal::STOP)
    }

    /// Lets it go on after a stop (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }
}
