//! The kernels' machine code in the driver: files, entry points, launches.
//!
//! In: which [`Family`]; a folder with a form's cubins that stand in for some. Out: [`Modules`] with every entry point of the
//! family, and how each is launched.
//!
//! It chooses no GPU: a context is current. Invariant: all entry points are there, or there is an error.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::{CString, c_uint, c_void};
use std::path::Path;

use cudarc::driver::sys;

use super::driver::call;
use super::error::Error;
use super::family::{Family, runs_machine_code};
use super::tables::Launch;
use crate::cubins::{CUBINS, Cubin, PORTABLE};

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
    /// Blocks that a processor runs at once.
    pub(super) resident: u32,
}

/// A file of kernels, in the form that the driver loads.
struct File {
    cubin: Cubin,
    image: &'static [u8],
    name: String,
}

/// Entry points of the kernels that move rows, the same in both families.
const ROWS: [&str; 5] =
    ["cadre_merge", "cadre_finish_dq", "cadre_sink", "cadre_copy_rows_16", "cadre_copy_rows_4"];

/// The files of a family for a GPU of this compute capability.
fn files(family: Family, capability: (i32, i32), form: Option<&Path>) -> Result<Vec<File>, Error> {
    match (family, form) {
        (Family::Hopper, _) => {
            let cubins = form.map_or_else(|| Ok(CUBINS.to_vec()), cubins_of)?;
            let name = |it: &Cubin| format!("{}.cubin", it.name);
            Ok(cubins
                .iter()
                .map(|&cubin| File { cubin, image: cubin.bytes, name: name(&cubin) })
                .collect())
        }
        (Family::Portable, Some(path)) => {
            let why = "forms are of the kernels for Hopper, and this GPU runs the portable ones";
            Err(Error::Form { path: path.to_owned(), why: why.to_owned() })
        }
        (Family::Portable, None) => Ok(PORTABLE
            .iter()
            .map(|it| {
                let (image, kind) = if runs_machine_code(capability) {
                    (it.cubin.bytes, "cubin")
                } else {
                    (it.ptx, "fatbin")
                };
                let name = format!("portable/{}.{kind}", it.cubin.name);
                File { cubin: it.cubin, image, name }
            })
            .collect()),
    }
}

impl Modules {
    /// Loads the kernels of `family` for a GPU of this compute capability. After an error, the loaded modules stay until
    /// [`Self::unload`].
    pub(super) fn load(
        &mut self,
        family: Family,
        capability: (i32, i32),
        form: Option<&Path>,
    ) -> Result<(), Error> {
        let files = files(family, capability, form)?;
        let (forward, backward) = (family.forward(), family.backward());
        let kernels: [(&str, &[&'static str]); 3] = [
            ("forward", forward.as_flattened()),
            ("backward", backward.as_flattened()),
            ("rows", &ROWS),
        ];
        for (file, names) in kernels {
            let file = files.iter().find(|it| it.cubin.name == file).ok_or(Error::NoKernels)?;
            let mut module = std::ptr::null_mut();
            // SAFETY: a whole ELF file or fatbin; the driver reads as much as its header says.
            let code = unsafe {
                sys::cuModuleLoadData(&raw mut module, file.image.as_ptr().cast::<c_void>())
            };
            call("cuModuleLoadData", || format!(", {}", file.name), code)?;
            self.modules.push(module);
            for name in names {
                self.kernels.push(kernel(module, &file.cubin, name)?);
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
    /// Enqueues a launch of `grid` blocks on `stream`.
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

/// The cubins of this build, each replaced by the file of its name in `folder`, if there is one. They stay in memory: checks
/// alone open forms, and only a few.
fn cubins_of(folder: &Path) -> Result<Vec<Cubin>, Error> {
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

/// The digest of the sources that a file was built from, the same for all forms.
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
    // The kernel is loaded now. Otherwise the first launch would load it, wait for the whole GPU, and could not be recorded.
    // SAFETY: a function of a loaded module.
    call("cuFuncLoad", after, unsafe { sys::cuFuncLoad(function) })?;
    let mut resident = 0;
    // SAFETY: writes one number about a loaded function.
    let code = unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &raw mut resident,
            function,
            threads,
            shared_bytes as usize,
        )
    };
    call("cuOccupancyMaxActiveBlocksPerMultiprocessor", after, code)?;
    Ok(Kernel { name, function, launch, resident: resident.max(1).cast_unsigned() })
}
