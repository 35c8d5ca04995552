//! The native half of the Python package `cadre`: a session for Python, and core attention in this process.
//!
//! In: tensors of PyTorch, f32 or bf16, read and written where they lie; those on a GPU in the order of a stream. Out: results in tensors
//! of the caller's, `ValueError` for what the caller can correct, `RuntimeError` for an end of the job; both with the session's own words.
//!
//! It knows no autograd, no model and no order of calls: `python/cadre` does, and the session checks it. Python goes on
//! with other threads while a call copies, waits or computes.

mod dlpack;
mod ending;
mod forked;
mod lent;
mod local;
mod on_gpu;
mod refusal;
mod session;
mod tensor;
mod turns;
mod wire;

use pyo3::prelude::*;

/// Makes this process exit with `code` where Python would exit with 0 or 1.
#[pyfunction]
fn exit_with(code: u8) {
    ending::exit_with(code);
}

/// Closes the sockets of the session in a forked child.
#[pyfunction]
fn close_sockets() {
    forked::close_sockets();
}

/// Makes this process leave the code that it exits with in a file.
#[pyfunction]
fn leave_code_in(file: std::path::PathBuf) {
    ending::leave_code_in(file);
}

/// SIGTERM does again what it did before this process joined a job, unless the script has installed a handler since.
#[pyfunction]
fn give_sigterm_back() {
    ending::give_sigterm_back();
}

/// See the package's `_native.pyi`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<session::Session>()?;
    module.add_class::<session::Ticket>()?;
    module.add("RefusedError", module.py().get_type::<refusal::RefusedError>())?;
    module.add_function(wrap_pyfunction!(exit_with, module)?)?;
    module.add_function(wrap_pyfunction!(close_sockets, module)?)?;
    module.add_function(wrap_pyfunction!(leave_code_in, module)?)?;
    module.add_function(wrap_pyfunction!(give_sigterm_back, module)?)?;
    module.add_function(wrap_pyfunction!(on_gpu::gpu_refuses, module)?)?;
    module.add_function(wrap_pyfunction!(on_gpu::gpu_forward, module)?)?;
    module.add_function(wrap_pyfunction!(on_gpu::gpu_backward, module)?)?;
    module.add_function(wrap_pyfunction!(tensor::are_usual, module)?)?;
    module.add_function(wrap_pyfunction!(local::local_forward, module)?)?;
    module.add_function(wrap_pyfunction!(local::local_backward, module)?)
}
