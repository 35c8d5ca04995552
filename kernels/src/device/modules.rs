//! The kernels' machine code in the driver: files, entry points, launches.
//!
//! In: the cubins of this build, or those of a form that stand in for some of them. Out: [`Modules`] with every entry point of
//! [`KERNELS`], and how each is launched.
//!
//! It chooses no GPU: a context is current. Invariant: all entry points are there, or there is an error.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::{CString, c_uint, c_void};
use std::path::Path;

use cudarc::driver::sys;

use super::driver::call;
use super::error::Error;
use super::tables::Launch;
use crate::cubins::{CUBINS, Cubin};

/// Modules that are loaded, and their entry points.
#[derive(Default)]
pub(super) struct Modules {
    modules: Vec<sys::CUmodule>,
    kernels: Vec<Kernel>,
}

/// An entry point and how it is launched.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    function: sys::CUfunction,
    pub(super) launch: Launch,
}

/// Entry points of the forward kernel for dims 64, 128 and 256, without and with a softcap.
pub(super) const FORWARD: [[&str; 3]; 2] = [
    ["cadre_forward_64", "cadre_forward_128", "cadre_forward_256"],
    ["cadre_forward_64_softcap", "cadre_forward_128_softcap", "cadre_forward_256_softcap"],
];
/// Names of the backward kernels, in the same order.
pub(super) const BACKWARD: [[&str; 3]; 2] = [
    ["cadre_backward_64", "cadre_backward_128", "cadre_backward_256"],
    ["cadre_backward_64_softcap", "cadre_backward_128_softcap", "cadre_backward_256_softcap"],
];

/// Entry points by cubin; all of them are there or the GPU is not opened.
const KERNELS: [(&str, &[&str]); 3] = [
    ("forward", FORWARD.as_flattened()),
    ("backward", BACKWARD.as_flattened()),
    (
        "rows",
        &[
            "cadre_merge",
            "cadre_finish_dq",
            "cadre_sink",
            "cadre_copy_rows_16",
            "cadre_copy_rows_4",
        ],
    ),
];

impl Modules {
    /// Loads files; with an error, what was loaded stays until [`Self::unload`].
    pub(super) fn load(&mut self, cubins: &[Cubin]) -> Result<(), Error> {
        for (file, names) in KERNELS {
            let cubin = cubins.iter().find(|it| it.name == file).ok_or(Error::NoKernels)?;
            let mut module = std::ptr::null_mut();
            // SAFETY: a whole ELF file; the driver reads as much as its header says.
            let code = unsafe {
                sys::cuModuleLoadData(&raw mut module, cubin.bytes.as_ptr().cast::<c_void>())
            };
            call("cuModuleLoadData", || format!(", {file}.cubin"), code)?;
            self.modules.push(module);
            for name in names {
                self.kernels.push(kernel(module, cubin, name)?);
            }
        }
        Ok(())
    }

    /// Modules that were loaded.
    pub(super) fn all(&self) -> impl Iterator<Item = sys::CUmodule> {
        self.modules.iter().copied()
    }

    /// An entry point by name.
    pub(super) fn kernel(&self, name: &str) -> Kernel {
        let found = self.kernels.iter().find(|it| it.name == name);
        *found.expect("all kernels are loaded when a GPU is opened")
    }

    /// Unloads all of them.
    pub(super) fn unload(&mut self) {
        for module in self.modules.drain(..) {
            // SAFETY: loaded by `load`; who launches its kernels holds the GPU.
            let _ = unsafe { sys::cuModuleUnload(module) };
        }
    }
}

impl Kernel {
    /// Puts one launch of `grid` blocks on `stream`.
    ///
    /// # Safety
    ///
    /// `arguments` point to what the kernel's head comment says, and every address in them is valid until the launch ends.
    pub(super) unsafe fn launch(
        &self,
        grid: u32,
        stream: sys::CUstream,
        arguments: &mut [*mut c_void],
        after: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        let Launch { threads, shared_bytes, .. } = self.launch;
        // SAFETY: the caller's promise; threads and shared memory are those that the cubin says.
        let code = unsafe {
            sys::cuLaunchKernel(
                self.function,
                grid as c_uint,
                1,
                1,
                threads as c_uint,
                1,
                1,
                shared_bytes as c_uint,
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        call("cuLaunchKernel", after, code)
    }
}

/// The cubins of this build, or what `folder` has in their place. They stay in memory: few forms are opened, in checks only.
pub(super) fn cubins_of(folder: &Path) -> Result<Vec<Cubin>, Error> {
    let read = |it: &Cubin| {
        let path = folder.join(format!("{}.cubin", it.name));
        if !path.exists() {
            return Ok(*it);
        }
        let unreadable = |why: String| Error::Form { path: path.clone(), why };
        let bytes = std::fs::read(&path).map_err(|error| unreadable(error.to_string()))?;
        if !bytes.starts_with(b"\x7fELF") {
            return Err(unreadable("it is no ELF file".to_owned()));
        }
        let found = Cubin { name: it.name, bytes: bytes.leak() };
        let [theirs, ours] = [&found, it].map(build_of);
        if theirs != ours {
            return Err(unreadable(format!("it is of build {theirs}, this program of {ours}")));
        }
        Ok(found)
    };
    CUBINS.iter().map(read).collect()
}

/// Names the sources that a file was built of, whatever its form.
fn build_of(cubin: &Cubin) -> String {
    let words: Option<[i32; 2]> = cubin.constant("cadre_build");
    words.map_or_else(|| "no name".to_owned(), |[low, high]| format!("{high:08x}{low:08x}"))
}

fn kernel(module: sys::CUmodule, cubin: &Cubin, name: &'static str) -> Result<Kernel, Error> {
    let after = || format!(", {name}");
    let mut function = std::ptr::null_mut();
    let entry = CString::new(name).expect("names of kernels hold no 0");
    // SAFETY: the module is loaded, the name ends with 0.
    let code = unsafe { sys::cuModuleGetFunction(&raw mut function, module, entry.as_ptr()) };
    call("cuModuleGetFunction", after, code)?;
    let [threads, shared_bytes, rows, keys] =
        cubin.constant(&format!("{name}_launch")).ok_or(Error::NoKernels)?;
    let launch = Launch { threads, shared_bytes, rows, keys };
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: a loaded function; the driver refuses what it does not have.
    let code = unsafe { sys::cuFuncSetAttribute(function, attribute, launch.shared_bytes) };
    call("cuFuncSetAttribute", after, code)?;
    // Otherwise the first launch would: it would wait for the whole GPU, and could not be recorded.
    // SAFETY: a function of a loaded module.
    call("cuFuncLoad", after, unsafe { sys::cuFuncLoad(function) })?;
    Ok(Kernel { name, function, launch })
}
