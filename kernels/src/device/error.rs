//! Why the GPU did not compute, and which of these reasons end a server.
//!
//! In: what the driver answered and what was asked of it. Out: an [`Error`] that names the call, the kernel and the batch.
//!
//! Invariant: after [`Error::is_lost`] nothing more can be asked of the GPU by this process.

use std::path::PathBuf;

use super::check::Refusal;

/// Why the GPU did not compute.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// There is no driver library.
    #[error("this machine has no CUDA driver (libcuda.so.1); install one, or compute on the CPU")]
    NoDriver,
    /// The driver is older than the kernels' compiler.
    #[error(
        "the CUDA driver is for CUDA {found}, the kernels need {needed}; install driver 580 or newer"
    )]
    OldDriver {
        /// Version of the driver, 1000 · major + 10 · minor.
        found: i32,
        /// Version that the kernels need.
        needed: i32,
    },
    /// There is no such GPU.
    #[error(
        "there is no GPU {ordinal}, this process may see {count}, counted from 0; name another one, or look at \
         CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// Which was asked for.
        ordinal: usize,
        /// How many there are.
        count: i32,
    },
    /// A GPU was named, and the CPU is to compute.
    #[error(
        "GPU {ordinal} is named, and --engine cpu uses none; leave out --gpu, or say --engine gpu"
    )]
    CpuAsked {
        /// Which was named.
        ordinal: usize,
    },
    /// The GPU is too old.
    #[error(
        "GPU {name} has compute capability {major}.{minor}, the kernels are for 8.0 and newer (A100, RTX 30 and later); use \
         the CPU (--engine cpu)"
    )]
    Generation {
        /// What the driver calls it.
        name: String,
        /// Major compute capability.
        major: i32,
        /// Minor compute capability.
        minor: i32,
    },
    /// Kernels are asked for that this GPU does not run.
    #[error(
        "CADRE_GPU_KERNELS is {asked:?}, and GPU {name} of compute capability {major}.{minor} does not run such; leave it \
         out, or say portable (hopper: on compute capability 9.0)"
    )]
    Family {
        /// What is asked for.
        asked: String,
        /// What the driver calls the GPU.
        name: String,
        /// Major compute capability.
        major: i32,
        /// Minor compute capability.
        minor: i32,
    },
    /// The build has no GPU kernels.
    #[error("this build has no GPU kernels; run `make kernels` and build again")]
    NoKernels,
    /// The kernels of another form cannot be read, or are of another build.
    #[error("{}: {why}; build the forms again with scripts/kernels --forms", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        why: String,
    },
    /// There is no library for matrix products.
    #[error(
        "this machine has no cuBLASLt (libcublasLt.so), which a trainer's linear layers need on the GPU; put the folder that \
         has it (of CUDA, or of PyTorch's packages) on LD_LIBRARY_PATH, or say --engine cpu"
    )]
    NoBlas,
    /// The library for matrix products refused or failed.
    #[error("{call} failed{what}: {name} ({code}); run with --engine cpu, and report the shapes")]
    Blas {
        /// Function of the library.
        call: &'static str,
        /// The product, after a comma; may be empty.
        what: String,
        /// The library's name of the error.
        name: String,
        /// The library's number of the error.
        code: u32,
    },
    /// Device memory is short.
    #[error(
        "GPU memory is short of {bytes} bytes for {what}, {free} are free; hand in fewer rows at once"
    )]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// How much was asked for.
        bytes: usize,
        /// How much is free.
        free: usize,
    },
    /// The machine has no memory to pin.
    #[error(
        "this machine cannot pin {bytes} bytes of its memory, which copies need ({text}); hand in fewer rows at once, or raise its \
         limit on locked memory (ulimit -l)"
    )]
    Unpinned {
        /// How much was asked for.
        bytes: usize,
        /// The driver's words.
        text: String,
    },
    /// A call failed; others may succeed.
    #[error("{call} failed{after}: {name} ({code}), {text}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// Kernel and batch that the stream ran last, after a comma; may be empty.
        after: String,
        /// The driver's name of the error.
        name: String,
        /// The driver's number of the error.
        code: u32,
        /// The driver's words.
        text: String,
    },
    /// The GPU or its context is lost to this process.
    #[error(
        "the GPU is lost: {call} failed{after}: {name} ({code}), {text}; start the process again, and look at dmesg for Xid"
    )]
    Lost {
        /// The driver's function.
        call: &'static str,
        /// Kernel and batch that the stream ran last, after a comma; may be empty.
        after: String,
        /// The driver's name of the error.
        name: String,
        /// The driver's number of the error.
        code: u32,
        /// The driver's words.
        text: String,
    },
    /// A launch that the kernels cannot do; nothing was computed.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl Error {
    /// Whether nothing more can be asked of the GPU.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Whether a smaller batch may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }
}

/// Codes of `CUresult` after which a context answers every call with the same error, or is gone.
pub(super) fn is_fatal(code: u32) -> bool {
    // Deinitialised; device unavailable, missing, invalid; context invalid; ECC, NVLink and contained errors; illegal
    // address; time-out; context destroyed; assert to launch failed; external device; unknown.
    matches!(
        code,
        4 | 46 | 100 | 101 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 911 | 999
    )
}
