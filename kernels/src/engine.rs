//! Chooses the kernels of a process: those of its GPU where they fit the rows, those of the CPU otherwise.
//!
//! In: a [`Choice`], then tasks and bundles in the memory of the host. Out: their results. A launch goes to the GPU as a
//! whole or not at all: head dims without a GPU kernel and f32 rows are computed on the CPU, and [`Engine::unfit`] says why.
//!
//! It keeps no state between launches but memory to use again. Invariant: which kernels run depends on shape and type alone,
//! so processes with one [`Engine::numerics_id`] compute the same bits.

use crate::cubins::{CUBINS, PORTABLE};
use crate::device::host::HostRows;
use crate::device::{self, Family, Gpu, Order, Refusal, compiler, runs_machine_code};
use crate::{Backward, Error, Forward, Heads, Threads};
use crate::{backward, check, cpu, forward, numerics_id};

/// The engine that a process is asked to use.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice {
    /// A GPU that the kernels support, if there is one; otherwise the CPU.
    #[default]
    Auto,
    /// The CPU, also where there is a GPU.
    Cpu,
    /// A GPU; without one that the kernels support, an error.
    Gpu,
}

/// Which of the visible GPUs a process uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum WhichGpu {
    /// The GPU with this ordinal. Nothing replaces it, also under [`Choice::Auto`].
    Number(usize),
    /// The GPU that the process with this number gets when all processes of a machine take the GPUs in turn.
    Turn(usize),
}

impl Default for WhichGpu {
    /// The first.
    fn default() -> Self {
        Self::Turn(0)
    }
}

impl WhichGpu {
    fn open(self) -> Result<Gpu, device::Error> {
        match self {
            Self::Number(ordinal) => Gpu::open(ordinal),
            Self::Turn(turn) => Gpu::open_in_turn(turn),
        }
    }
}

/// Why a launch was not computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    /// No engine can compute it.
    #[error(transparent)]
    Refused(#[from] Error),
    /// The GPU failed.
    #[error(transparent)]
    Device(#[from] device::Error),
}

impl EngineError {
    /// Whether this process can compute nothing more.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Device(error) if error.is_lost())
    }
}

/// Kernels, and what they need to run.
#[derive(Debug)]
pub struct Engine {
    threads: Threads,
    gpu: Option<HostRows>,
    order: Order,
    /// Why there is no GPU.
    without: Option<device::Error>,
    /// Why the CPU computed a launch although there is a GPU; the first such reason.
    unfit: Option<Refusal>,
}

/// Marks the GPU's part of a numerics id.
const OF_GPU: &str = ", gpu ";

/// The part of an [`Engine::numerics_id`] that holds for rows that no GPU computes.
pub fn numerics_of_cpu(id: &str) -> &str {
    id.split_once(OF_GPU).map_or(id, |it| it.0)
}

/// Cost of a full launch, in pairs × query heads × dim: some tens of milliseconds of one CPU core, or some milliseconds of a GPU.
const CPU_LAUNCH: u64 = 1 << 30;
const GPU_LAUNCH: u64 = 1 << 40;

impl Engine {
    /// The kernels of the CPU.
    pub fn cpu(threads: Threads) -> Self {
        Self { threads, gpu: None, order: Order::Fixed, without: None, unfit: None }
    }

    /// Opens the engine that `choice` names. A GPU engine uses the first GPU; the CPU engine uses `threads`.
    ///
    /// # Errors
    ///
    /// Why there is no GPU, where one is demanded.
    pub fn choose(choice: Choice, threads: Threads) -> Result<Self, device::Error> {
        Self::choose_on(WhichGpu::default(), choice, threads)
    }

    /// As [`Self::choose`], on the GPU `which`.
    ///
    /// # Errors
    ///
    /// Why there is no GPU, where one is demanded or named. A GPU is named beside [`Choice::Cpu`]. The GPU does not run the
    /// kernels that are asked for.
    pub fn choose_on(
        which: WhichGpu,
        choice: Choice,
        threads: Threads,
    ) -> Result<Self, device::Error> {
        let open = || HostRows::new(&which.open()?, Order::Fixed);
        match (choice, which) {
            (Choice::Cpu, WhichGpu::Number(ordinal)) => Err(device::Error::CpuAsked { ordinal }),
            (Choice::Cpu, WhichGpu::Turn(_)) => Ok(Self::cpu(threads)),
            (Choice::Gpu, _) | (Choice::Auto, WhichGpu::Number(_)) => {
                Ok(Self { gpu: Some(open()?), ..Self::cpu(threads) })
            }
            (Choice::Auto, WhichGpu::Turn(_)) => Ok(match open() {
                Ok(gpu) => Self { gpu: Some(gpu), ..Self::cpu(threads) },
                // Kernels that were asked for by name are not replaced by the CPU's.
                Err(error @ device::Error::Family { .. }) => return Err(error),
                Err(error) => Self { without: Some(error), ..Self::cpu(threads) },
            }),
        }
    }

    /// An engine with the same kernels and a stream and memory of its own, for another thread.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn another(&self) -> Result<Self, device::Error> {
        let gpu = self.gpu.as_ref();
        let gpu = gpu.map(|it| HostRows::new(it.stream().gpu(), self.order)).transpose()?;
        Ok(Self {
            gpu,
            order: self.order,
            without: self.without.clone(),
            ..Self::cpu(self.threads)
        })
    }

    /// Sets whether dQ is summed in one order, so that its bits are reproducible. The CPU always does that.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn reproducible(mut self, reproducible: bool) -> Result<Self, device::Error> {
        self.order = if reproducible { Order::Fixed } else { Order::Arrival };
        if let Some(gpu) = &self.gpu {
            self.gpu = Some(HostRows::new(gpu.stream().gpu(), self.order)?);
        }
        Ok(self)
    }

    /// The GPU, if one computes.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref().map(|it| it.stream().gpu())
    }

    /// The order in which the GPU sums dQ.
    pub fn order(&self) -> Order {
        self.order
    }

    /// What computes, in words, for a log.
    pub fn description(&self) -> String {
        let cpu = format!("CPU, {}, threads: {}", cpu::instruction_set(), self.threads.0);
        match (&self.gpu, &self.without) {
            (Some(gpu), _) => {
                let gpu = gpu.stream().gpu();
                let (number, name, kernels) = (gpu.ordinal(), gpu.name(), gpu.kernels());
                format!("GPU {number}, {name}, {kernels}; what has no GPU kernel on {cpu}")
            }
            (None, Some(why)) => format!("{cpu}; no GPU: {why}"),
            (None, None) => cpu,
        }
    }

    /// Names what the bits of rows depend on, for rows in bf16 or f32: [`numerics_id`], and the GPU kernels where they compute
    /// such rows.
    pub fn numerics_id_of(&self, bf16: bool) -> String {
        if bf16 { self.numerics_id() } else { numerics_id() }
    }

    /// Names what the bits of any rows depend on.
    pub fn numerics_id(&self) -> String {
        let cpu = numerics_id();
        let Some(gpu) = self.gpu() else { return cpu };
        let mut digest = xxhash_rust::xxh3::Xxh3::new();
        let kernels = match gpu.family() {
            Family::Hopper => {
                for it in CUBINS {
                    digest.update(it.bytes);
                }
                "sm_90a".to_owned()
            }
            // The order of additions inside a product differs between GPU generations.
            Family::Portable => {
                let is_compiled = !runs_machine_code(gpu.capability());
                for it in PORTABLE {
                    digest.update(if is_compiled { it.ptx } else { it.cubin.bytes });
                }
                // The driver's compiler chooses which products and sums become one instruction.
                if is_compiled {
                    digest.update(compiler().as_bytes());
                }
                let (major, minor) = gpu.capability();
                format!("sm_{major}{minor} portable")
            }
        };
        format!("{cpu}{OF_GPU}{kernels} {:016x}", digest.digest())
    }

    /// The processor that computes rows with these heads, in bf16 or f32, by its name in calibrations.
    pub fn processor(&self, heads: Heads, bf16: bool) -> String {
        match self.gpu() {
            Some(gpu) if self.is_on_gpu(heads, bf16) => gpu.processor(),
            Some(_) | None => crate::processor(self.threads),
        }
    }

    /// Whether rows with these heads, bf16 or not, are computed on the GPU.
    pub fn is_on_gpu(&self, heads: Heads, bf16: bool) -> bool {
        bf16 && self.gpu().is_some_and(|it| it.family().takes_head_dim(heads.dim))
    }

    /// Cost of a full launch, in pairs × query heads × dim.
    pub fn launch_cost(&self, heads: Heads, bf16: bool) -> u64 {
        if self.is_on_gpu(heads, bf16) { GPU_LAUNCH } else { CPU_LAUNCH }
    }

    /// Why the CPU computed some launch although there is a GPU. Returned once.
    pub fn unfit(&mut self) -> Option<Refusal> {
        self.unfit.take()
    }

    /// As [`crate::forward`].
    ///
    /// # Errors
    ///
    /// The first task that no engine takes, before anything is computed; or the GPU's.
    pub fn forward(&mut self, tasks: &mut [Forward<'_>]) -> Result<(), EngineError> {
        for (task, it) in tasks.iter().enumerate() {
            check::forward(task, it)?;
        }
        if let Some(gpu) = &mut self.gpu {
            let family = gpu.stream().gpu().family();
            let fits = |(task, it)| device::host::fits_forward(family, task, it);
            match tasks.iter().enumerate().try_for_each(fits) {
                Ok(()) => return Ok(gpu.forward(tasks)?),
                Err(refusal) => self.unfit = self.unfit.take().or(Some(refusal)),
            }
        }
        Ok(forward(tasks, self.threads)?)
    }

    /// As [`crate::backward`]; the GPU takes whole bundles only.
    ///
    /// # Errors
    ///
    /// The first bundle that no engine takes, before anything is computed; or the GPU's.
    pub fn backward(&mut self, bundles: &mut [Backward<'_>]) -> Result<(), EngineError> {
        for (bundle, it) in bundles.iter().enumerate() {
            check::backward(bundle, it)?;
        }
        if let Some(gpu) = &mut self.gpu {
            let family = gpu.stream().gpu().family();
            let fits = |(bundle, it)| device::host::fits_backward(family, bundle, it);
            match bundles.iter().enumerate().try_for_each(fits) {
                Ok(()) => return Ok(gpu.backward(bundles)?),
                // The CPU's bits differ, so it does not take a bundle's key tiles that the GPU could compute as a whole bundle.
                Err(refusal @ Refusal::KeyTiles { .. }) => {
                    return Err(EngineError::Device(refusal.into()));
                }
                #[allow(clippy::wildcard_enum_match_arm)]
                Err(refusal) => self.unfit = self.unfit.take().or(Some(refusal)),
            }
        }
        Ok(backward(bundles, self.threads)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_taken_where_it_is_asked_for_and_says_so() {
        let engine = Engine::choose(Choice::Cpu, Threads::ONE).unwrap();
        assert!(engine.description().starts_with("CPU"));
        assert_eq!(engine.numerics_id(), numerics_id());
        assert!(!engine.is_on_gpu(Heads { query: 1, kv: 1, dim: 64 }, true));
        assert_eq!(engine.another().unwrap().numerics_id(), numerics_id());
    }

    #[test]
    fn a_launch_that_no_engine_takes_is_refused() {
        let mut engine = Engine::cpu(Threads::ONE);
        assert_eq!(engine.forward(&mut []), Ok(()));
        assert_eq!(engine.backward(&mut []), Ok(()));
        assert_eq!(engine.unfit(), None);
    }
}
