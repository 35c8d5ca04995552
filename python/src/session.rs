//! A rank's session for Python: the calls of `cadre_worker::session`, over tensors.
//!
//! In: the environment of a job, tensors, numbers. Out: what the session says. It adds no rule: who calls out of turn hears it
//! from the session, and the job ends everywhere with that reason.
//!
//! Invariant: the session is taken only by `leave`, which waits until no other thread is inside a call.

use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use cadre_control::proto::finished::Outcome as Kind;
use cadre_control::proto::notice::{Event, Level};
use cadre_kernels::device::CallersContext;
use cadre_planner::Heads;
use cadre_worker::process::{arm_parent_death, last_words};
use cadre_worker::session::{
    self, Contract, Direction, Ending, Inputs, Join, JoinError, KvHeads, Layers, Lengths, Next,
    Outcome, Outputs, PhaseAt, StepDone,
};
use cadre_worker::{Choice, Threads};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::ending::{self, BAD_INPUT, COULD_NOT_GO_ON, STOPPED};
use crate::lent::{self, Behind};
use crate::refusal::{NotFinite, failed, of_rank, refused, told};
use crate::tensor::{Given, Tensor, check_apart};
use crate::turns::{MicroBatch, MicroBatches, in_words, lengths_of};
use crate::wire;

/// Longest time for which a main thread that waits does not hear a signal, such as that of Ctrl-C.
const SIGNALS_HEARD_EVERY: Duration = Duration::from_millis(200);

/// See the module.
#[pyclass(frozen, module = "cadre._native")]
pub(crate) struct Session {
    held: RwLock<Option<session::Session>>,
    layers: u16,
    not_finite: NotFinite,
    #[pyo3(get)]
    rank: u16,
    #[pyo3(get)]
    ranks: u16,
    /// Type of rows on the wire: `torch.float32` or `torch.bfloat16` without the `torch.`.
    #[pyo3(get)]
    wire: &'static str,
    /// Whether no manifest says that type.
    #[pyo3(get)]
    wire_is_open: bool,
    /// Which GPU computes what a plan gives to this rank.
    #[pyo3(get)]
    gpu: Option<usize>,
}

/// A submitted phase, to be waited for once.
#[pyclass(frozen, module = "cadre._native")]
pub(crate) struct Ticket(Mutex<Option<session::Ticket>>);

#[pymethods]
impl Session {
    /// Joins the job that the environment names, with a kind for each layer, and its query heads, KV heads and head dim.
    #[staticmethod]
    /// `rows`: their type, as `wire` is written, which is that on the wire where no manifest says it. `gpu`: which one computes what
    /// the plan gives to this rank, in PyTorch's context there; None: the CPU does.
    #[pyo3(signature = (*, kinds, heads, steps, seed, threads, on_nonfinite="end", rows=None, gpu=None))]
    #[allow(clippy::needless_pass_by_value, reason = "Python's lists come by value")]
    #[allow(clippy::too_many_arguments, reason = "they are named in Python")]
    fn join(
        py: Python<'_>,
        kinds: Vec<String>,
        heads: Vec<(u16, u16, u16)>,
        steps: u64,
        seed: u64,
        threads: usize,
        on_nonfinite: &str,
        rows: Option<&str>,
        gpu: Option<usize>,
    ) -> PyResult<Self> {
        let contract = Contract::from_env().map_err(JoinError::from);
        // Before all else: a second session ends the job, whatever it asks for.
        if let Ok(contract) = &contract {
            session::Session::check_alone(contract).map_err(refused)?;
        }
        let rows = rows.map(wire::read).transpose()?;
        let not_finite = NotFinite::read(on_nonfinite)?;
        if kinds.len() != heads.len() {
            let why = format!("{} layers have kinds and {} heads", kinds.len(), heads.len());
            return Err(refused(why + "; give each layer both"));
        }
        let kinds = kinds
            .iter()
            .zip(heads)
            .map(|(kind, (query, kv, dim))| session::Kind::read(kind, Heads { query, kv, dim }));
        let kinds = kinds.collect::<Result<Vec<_>, _>>().map_err(refused)?;
        let layers = Layers::new(kinds).map_err(refused)?;
        let count = layers.count();
        arm_parent_death().map_err(failed)?;
        let joined = py.detach(|| {
            let _kept = CallersContext::keep();
            let contract = contract?;
            let join = Join {
                layers,
                kv_heads: KvHeads::Apart,
                steps: Some(steps),
                wire: rows,
                seed,
                engine: if gpu.is_some() { Choice::Gpu } else { Choice::Cpu },
                gpu,
                threads: Threads::new(threads),
                memory: u64::from(contract.memory_mib) << 20,
                exchange: contract.exchange,
                address: String::new(),
                resume: None,
                first: Box::new(|_, _| Ok(0)),
            };
            session::Session::join(&contract, join)
        });
        let joined = joined
            .map_err(|error| if error.is_bad_input() { refused(error) } else { failed(error) })?;
        let (rank, settings) = (joined.rank(), joined.settings());
        let (ranks, wire_is_open) = (settings.trainers, settings.wire_is_open == Some(true));
        let wire = wire::name(settings.wire);
        // A pod that is drained, or torchrun, asks each rank; the job ends with the step that is out.
        ending::on_sigterm(joined.ender()).map_err(failed)?;
        let held = RwLock::new(Some(joined));
        Ok(Self { held, layers: count, not_finite, rank, ranks, wire, wire_is_open, gpu })
    }

    /// Tells the conductor what this rank holds of a step, by micro-batch. They go forward (`F`) and backward (`B`), but for the
    /// first `frozen` layers, in the order of `turns`.
    #[allow(clippy::needless_pass_by_value, reason = "Python's lists come by value")]
    fn announce(
        &self,
        py: Python<'_>,
        step: u64,
        micro_batches: Vec<MicroBatch>,
        turns: Vec<(char, MicroBatches)>,
        frozen: u16,
    ) -> PyResult<()> {
        let turns = in_words(turns, frozen, self.layers)?;
        let nanos = micro_batches.into_iter().map(lengths_of).collect();
        let lengths = Lengths { step, turns, nanos };
        // It takes as long as there are documents, and the queue to the IO thread may be full.
        py.detach(|| self.with(|session| session.announce(lengths).map_err(told)))
    }

    /// Waits for a step: `step`, or `completed` or `stopped` where none follows.
    fn begin(&self, py: Python<'_>, step: u64) -> PyResult<&'static str> {
        self.until(py, |session| Ok(session.await_step(step, SIGNALS_HEARD_EVERY)))?;
        let next = py.detach(|| {
            let _kept = CallersContext::keep();
            self.with(|session| Ok(session.begin(step)))
        })?;
        match next {
            Next::Step(_) => Ok("step"),
            Next::End(Ending::Completed) => Ok("completed"),
            Next::End(Ending::Stopped { .. }) => Ok("stopped"),
            Next::End(Ending::Failed { reason, .. }) => Err(PyRuntimeError::new_err(reason)),
        }
    }

    /// Starts a phase, of a micro-batch and a layer: backward if O, LSE, dO and dLSE are given. The rows are the caller's again at once.
    /// With `lent`, the number of a GPU and a stream there, they lie on that GPU, and are the caller's again in the order of that stream.
    #[pyo3(signature = (phase, qkv, gradients=None, *, lent=None))]
    #[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
    fn submit(
        &self,
        py: Python<'_>,
        phase: (u16, usize),
        qkv: Given<'_, 3>,
        gradients: Option<Given<'_, 4>>,
        lent: Option<Behind>,
    ) -> PyResult<Ticket> {
        let side = lent::side_of(lent);
        let qkv = of_rank(self.rank, Tensor::all(["Q", "K", "V"], side, &qkv))?;
        let gradients = gradients.map(|[o, lse, dout, dlse]| -> PyResult<_> {
            let of = Tensor::all(["O", "LSE", "dO"], side, &[o, lse, dout])?;
            Ok((of, Tensor::optional("dLSE", side, &dlse)?))
        });
        let gradients = of_rank(self.rank, gradients.transpose())?;
        let ticket = py.detach(|| {
            let (nano, layer) = phase;
            let direction =
                if gradients.is_none() { Direction::Forward } else { Direction::Backward };
            let phase = PhaseAt { layer, nano: nano.into(), direction };
            if let Some(behind) = lent {
                let given = (&qkv, gradients.as_ref());
                return self.with(|it| lent::submit(it, behind, phase, given));
            }
            let [q, k, v] = qkv.each_ref().map(Tensor::rows);
            let inputs = match &gradients {
                None => Inputs::Forward { q, k, v },
                Some(([o, lse, dout], dlse)) => {
                    let (o, lse, dout) = (o.rows(), lse.per_head()?, dout.rows());
                    let dlse = dlse.as_ref().map(Tensor::per_head).transpose()?;
                    Inputs::Backward { q, k, v, o, lse, dout, dlse }
                }
            };
            self.with(|session| session.submit(phase, inputs).map_err(told))
        });
        Ok(Ticket(Mutex::new(Some(of_rank(self.rank, ticket)?))))
    }

    /// Computes what is planned for this rank, waits, and writes the results: O and LSE, or dQ, dK and dV. What is not finite
    /// among them, in words, unless it ends the job. With `lent` they are there in the order of that stream.
    #[pyo3(signature = (ticket, *results, lent=None))]
    #[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
    fn wait(
        &self,
        py: Python<'_>,
        ticket: &Ticket,
        results: Vec<Bound<'_, PyAny>>,
        lent: Option<Behind>,
    ) -> PyResult<Option<String>> {
        let names: &[&'static str] = match results.len() {
            2 => &["O", "LSE"],
            3 => &["dQ", "dK", "dV"],
            _ => return Err(refused("wait takes O and LSE, or dQ, dK and dV")),
        };
        let side = lent::side_of(lent);
        let tensors: PyResult<Vec<_>> =
            names.iter().zip(&results).map(|(name, it)| Tensor::new(name, side, it)).collect();
        let mut tensors = of_rank(self.rank, tensors)?;
        of_rank(self.rank, check_apart(&tensors.iter().collect::<Vec<_>>(), &[]))?;
        self.until(py, |session| {
            let ticket = ticket.0.lock().unwrap_or_else(PoisonError::into_inner);
            let is_ready = |it| session.await_ready(it, SIGNALS_HEARD_EVERY);
            Ok(ticket.as_ref().is_none_or(is_ready))
        })?;
        let found = py.detach(|| {
            // This thread may compute on a GPU.
            let _kept = CallersContext::keep();
            // Taken when nothing can be refused any more: whoever mends the results may wait again.
            let ticket = || {
                let ticket = ticket.0.lock().unwrap_or_else(PoisonError::into_inner).take();
                ticket.ok_or_else(|| refused("this ticket was waited for; submit a phase again"))
            };
            if let Some(behind) = lent {
                let results = (&mut tensors[..], self.not_finite);
                let found = self.with(|it| lent::wait(it, behind, ticket, results));
                return found.map(|it| it.map(|it| it.to_string()));
            }
            let outputs = match &mut tensors[..] {
                [o, lse] => Outputs::Forward { o: o.rows_mut(), lse: lse.per_head_mut()? },
                [dq, dk, dv] => {
                    let (dq, dk, dv) = (dq.rows_mut(), dk.rows_mut(), dv.rows_mut());
                    Outputs::Backward { dq, dk, dv }
                }
                _ => unreachable!("there are as many tensors as names"),
            };
            let ticket = ticket()?;
            self.with(|session| match self.not_finite {
                NotFinite::Report => {
                    let found = session.wait_reporting(ticket, outputs).map_err(told)?;
                    Ok(found.map(|it| it.to_string()))
                }
                NotFinite::End => session.wait(ticket, outputs).map_err(told).map(|()| None),
            })
        });
        of_rank(self.rank, found)
    }

    /// Tells the conductor that a step is over here.
    #[pyo3(signature = (step, *, loss, gradient_norm, learning_rate, validation_loss, tokens, seconds))]
    #[allow(clippy::too_many_arguments, reason = "they are named in Python")]
    fn done(
        &self,
        py: Python<'_>,
        step: u64,
        loss: f32,
        gradient_norm: f32,
        learning_rate: f32,
        validation_loss: Option<f32>,
        tokens: u64,
        seconds: f64,
    ) -> PyResult<()> {
        // The queue to the IO thread may be full.
        py.detach(|| {
            self.with(|session| {
                let exposed_wait_seconds = session.exposed_wait().as_secs_f64();
                let header_wait_seconds = session.header_wait().as_secs_f64();
                let done = StepDone {
                    step,
                    loss,
                    gradient_norm,
                    learning_rate,
                    validation_loss,
                    tokens,
                    seconds,
                    exposed_wait_seconds,
                    header_wait_seconds,
                };
                session.done(done).map_err(told)
            })
        })
    }

    /// Writes a warning into the job's log.
    fn warn(&self, py: Python<'_>, text: String) -> PyResult<()> {
        py.detach(|| {
            self.with(|session| {
                session.tell(Level::Warning, text, Event::Unspecified);
                Ok(())
            })
        })
    }

    /// Says that this rank is busy elsewhere for `seconds`: it does not stand still.
    fn busy(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let lease = Duration::try_from_secs_f64(seconds)
            .map_err(|_| refused(format!("busy for {seconds} s; say a time of 0 s or more")))?;
        py.detach(|| {
            self.with(|session| {
                session.busy(lease);
                Ok(())
            })
        })
    }

    /// Says that a checkpoint is written that holds `steps` steps, counted over all attempts, and where.
    #[pyo3(signature = (steps, path=None))]
    fn saved(&self, py: Python<'_>, steps: u64, path: Option<String>) -> PyResult<()> {
        py.detach(|| {
            self.with(|session| {
                if let Some(path) = path {
                    let text = format!("checkpoint of {steps} steps is at {path}");
                    session.tell(Level::Information, text, Event::CheckpointWritten);
                }
                session.saved(steps);
                Ok(())
            })
        })
    }

    /// Leaves the job, once: `completed`, `stopped`, or any other text, which is why the job fails, everywhere; `for_good` if
    /// another attempt would fail in the same way. Calls of other threads end first; one that waits may end with an error.
    #[pyo3(signature = (how, *, for_good=false))]
    fn leave(&self, py: Python<'_>, how: &str, for_good: bool) -> PyResult<()> {
        let outcome = |kind, message: &str, exit_code| Outcome {
            kind,
            message: message.to_owned(),
            exit_code,
            sample: String::new(),
        };
        py.detach(|| {
            let outcome = match how {
                "completed" => outcome(Kind::Completed, "", 0),
                // Exit code 0 of a pod is that of a job that is complete.
                "stopped" => {
                    let is_pod = self.read().as_ref().is_some_and(session::Session::is_pod);
                    let code = if is_pod || ending::asked() { STOPPED } else { 0 };
                    outcome(Kind::Stopped, "", code)
                }
                reason => {
                    let (reason, code) = ending::fail(self.read().as_ref(), reason, for_good);
                    outcome(Kind::Failed, &reason, code)
                }
            };
            ending::exit_with(outcome.exit_code);
            if [BAD_INPUT, COULD_NOT_GO_ON].contains(&outcome.exit_code) {
                last_words(&outcome.message);
            }
            let held = self.held.write().unwrap_or_else(PoisonError::into_inner).take();
            let is_pod = held.as_ref().is_some_and(session::Session::is_pod);
            held.map_or(Ok(()), |it| it.leave(outcome)).map_err(|it| ending::left(it, is_pod))
        })
    }
}

impl Session {
    /// Waits until `so` holds, which looks for a while only; between looks the main thread hears signals.
    fn until(
        &self,
        py: Python<'_>,
        so: impl Fn(&session::Session) -> PyResult<bool> + Sync,
    ) -> PyResult<()> {
        loop {
            let found = py.detach(|| {
                let _kept = CallersContext::keep();
                self.with(&so)
            })?;
            if found {
                return Ok(());
            }
            py.check_signals()?;
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<session::Session>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, call: impl FnOnce(&session::Session) -> PyResult<T>) -> PyResult<T> {
        let held = self.read();
        let session = held.as_ref();
        call(session.ok_or_else(|| {
            PyRuntimeError::new_err(format!("rank {} has left its job; join again", self.rank))
        })?)
    }
}
