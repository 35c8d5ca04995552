//! Which kernels a process computes with: those of its GPU where they fit, those of the CPU otherwise.
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

/// What a process is asked to compute with.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice {
    /// The GPU, if there is one that the kernels are for.
    #[default]
    Auto,
    /// The CPU, whatever there is.
    Cpu,
    /// The GPU, or nothing.
    Gpu,
}

/// Which of the GPUs that a process may see it computes on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum WhichGpu {
    /// The one with this number. Nothing else stands in for it, also under [`Choice::Auto`].
    Number(usize),
    /// The one on which the process with this number falls, when all of a machine take turns.
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

/// Why a launch gave nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    /// No engine takes it.
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
    /// Why the first of the launches that went to the CPU did, although there is a GPU.
    unfit: Option<Refusal>,
}

/// Begins what a numerics id says of a GPU.
const OF_GPU: &str = ", gpu ";

/// What a process with this [`Engine::numerics_id`] computes rows by that no GPU takes.
pub fn numerics_of_cpu(id: &str) -> &str {
    id.split_once(OF_GPU).map_or(id, |it| it.0)
}

/// Cost of a launch in pairs × query heads × dim: some tens of milliseconds of one CPU core, some milliseconds of a GPU.
const CPU_LAUNCH: u64 = 1 << 30;
const GPU_LAUNCH: u64 = 1 << 40;

impl Engine {
    /// The kernels of the CPU.
    pub fn cpu(threads: Threads) -> Self {
        Self { threads, gpu: None, order: Order::Fixed, without: None, unfit: None }
    }

    /// Opens the engine that `choice` names, on the first GPU if on one; the CPU engine uses `threads`.
    ///
    /// # Errors
    ///
    /// Why there is no GPU, where one is demanded.
    pub fn choose(choice: Choice, threads: Threads) -> Result<Self, device::Error> {
        Self::choose_on(WhichGpu::default(), choice, threads)
    }

    /// The same, on the GPU `which` if on one.
    ///
    /// # Errors
    ///
    /// Why there is no GPU, where one is demanded or named; a GPU that is named beside [`Choice::Cpu`]; kernels that are asked for
    /// and do not run on the GPU.
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
                // What was asked for by name is not left out for the CPU.
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

    /// Whether dQ is summed in one order, so that its bits are promised; the CPU always does.
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

    /// In which order dQ is summed on the GPU.
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

    /// Names what the bits of rows depend on, bf16 or not: as [`numerics_id`], and the GPU kernels where such rows go there.
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
            // Products add up in an order of each generation's own.
            Family::Portable => {
                let is_compiled = !runs_machine_code(gpu.capability());
                for it in PORTABLE {
                    digest.update(if is_compiled { it.ptx } else { it.cubin.bytes });
                }
                // It chooses which products and sums become one instruction.
                if is_compiled {
                    digest.update(compiler().as_bytes());
                }
                let (major, minor) = gpu.capability();
                format!("sm_{major}{minor} portable")
            }
        };
        format!("{cpu}{OF_GPU}{kernels} {:016x}", digest.digest())
    }

    /// What computes rows with these heads, bf16 or not, by the name that a calibration of it has.
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

    /// Cost at which a launch is long enough, in pairs × query heads × dim.
    pub fn launch_cost(&self, heads: Heads, bf16: bool) -> u64 {
        if self.is_on_gpu(heads, bf16) { GPU_LAUNCH } else { CPU_LAUNCH }
    }

    /// Why some launch went to the CPU although there is a GPU; told once.
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
                // Some key tiles of a bundle that the GPU could do would be other bits here.
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
