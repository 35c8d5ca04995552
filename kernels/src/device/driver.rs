//! The CUDA driver: probed, opened, and called with named errors.
//!
//! In: which GPU. Out: a [`Gpu`] with the kernels of this build loaded. The library is opened at run time; without it, with
//! an old one, or with another GPU, there is an error and no panic.
//!
//! It allocates and launches nothing, see [`super::memory`] and [`super::plan`]. Invariant: every call of the driver goes
//! through [`call`] with the GPU's context current, which it shares with frameworks of the same process.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::error::{Error, is_fatal};
use super::tables::Launch;
use crate::cubins::{CUBINS, Cubin};

/// CUDA of the kernels' compiler, as the driver counts.
const NEEDED: i32 = 13_000;

/// A GPU with the kernels loaded; clones are the same one.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Vec<sys::CUmodule>,
    kernels: Vec<Kernel>,
    name: String,
    uuid: String,
    processors: u32,
}

/// An entry point and how it is launched.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    function: sys::CUfunction,
    pub(super) launch: Launch,
}

// SAFETY: handles of the driver, which may be used from any thread; `bind` makes the context current first.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing is changed after `open`.
unsafe impl Sync for Inner {}

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

/// Turns what the driver answered into an error.
pub(super) fn call(
    name: &'static str,
    after: impl FnOnce() -> String,
    code: CUresult,
) -> Result<(), Error> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |of: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver writes a pointer to a static string, or null.
        let known = unsafe { of(code, &raw mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        if !known {
            return String::new();
        }
        // SAFETY: it is not null, and static.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    let (call, after, number) = (name, after(), code as u32);
    let (name, text) = (text(sys::cuGetErrorName), text(sys::cuGetErrorString));
    Err(if is_fatal(number) {
        Error::Lost { call, after, name, code: number, text }
    } else {
        Error::Call { call, after, name, code: number, text }
    })
}

fn alone() -> String {
    String::new()
}

impl Gpu {
    /// Opens GPU `ordinal` of those that the process may see and loads the kernels.
    ///
    /// # Errors
    ///
    /// No driver, an old one, no such GPU, one that is no Hopper, or a build without kernels.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        Self::open_with(ordinal, None)
    }

    /// The same with kernels of another form: files `NAME.cubin` of `folder` stand in for those of this build. For checks that
    /// compare forms; the bits of a form are no promise of [`crate::Engine::numerics_id`].
    ///
    /// # Errors
    ///
    /// As [`Self::open`], and [`Error::Form`] for files that cannot be read.
    pub fn open_form(ordinal: usize, folder: &Path) -> Result<Self, Error> {
        Self::open_with(ordinal, Some(folder))
    }

    fn open_with(ordinal: usize, form: Option<&Path>) -> Result<Self, Error> {
        Self::opened(ordinal, form).map_err(|error| {
            // What was never had is not lost.
            let Error::Lost { call, after, name, code, text } = error else { return error };
            // A driver without a GPU answers so.
            if code == 100 {
                return Error::NoDevice { ordinal, count: 0 };
            }
            Error::Call { call, after, name, code, text }
        })
    }

    fn opened(ordinal: usize, form: Option<&Path>) -> Result<Self, Error> {
        // SAFETY: opens the driver library, which initialises nothing yet.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        // SAFETY: no precondition; what follows may be called after it.
        call("cuInit", alone, unsafe { sys::cuInit(0) })?;
        let mut found: c_int = 0;
        // SAFETY: writes one number.
        call("cuDriverGetVersion", alone, unsafe { sys::cuDriverGetVersion(&raw mut found) })?;
        if found < NEEDED {
            return Err(Error::OldDriver { found, needed: NEEDED });
        }
        let mut count: c_int = 0;
        // SAFETY: writes one number.
        call("cuDeviceGetCount", alone, unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        let index = c_int::try_from(ordinal).ok().filter(|it| *it < count);
        let index = index.ok_or(Error::NoDevice { ordinal, count })?;
        let mut device: sys::CUdevice = 0;
        // SAFETY: writes one number.
        call("cuDeviceGet", alone, unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
        Self::of(device, form)
    }

    fn of(device: sys::CUdevice, form: Option<&Path>) -> Result<Self, Error> {
        use sys::CUdevice_attribute_enum as Attribute;
        let attribute = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: writes one number about a device that exists.
            let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
            call("cuDeviceGetAttribute", alone, code).map(|()| value)
        };
        let mut name = [0; 128];
        // SAFETY: writes a string of at most 128 bytes, the last one 0.
        let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) };
        call("cuDeviceGetName", alone, code)?;
        // SAFETY: the driver ended it with 0.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        let code = unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) };
        call("cuDeviceGetUuid", alone, code)?;
        let uuid = words_of(uuid.bytes.map(|it| it as u8));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if (major, minor) != (9, 0) {
            return Err(Error::Generation { name, major, minor });
        }
        if CUBINS.is_empty() {
            return Err(Error::NoKernels);
        }
        let cubins = form.map_or_else(|| Ok(CUBINS.to_vec()), cubins_of)?;
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let mut context = std::ptr::null_mut();
        // SAFETY: the context that every user of the device in this process shares; released in `drop`.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        call("cuDevicePrimaryCtxRetain", alone, code)?;
        let (modules, kernels) = (Vec::new(), Vec::new());
        let mut inner = Inner { device, context, modules, kernels, name, uuid, processors };
        inner.bind()?;
        inner.load(&cubins)?;
        Ok(Self(Arc::new(inner)))
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Which one it is of all that there are, as nvidia-smi has it: `GPU-` and 32 digits in five groups.
    pub fn uuid(&self) -> &str {
        &self.0.uuid
    }

    /// Names its kind, as calibrations do.
    pub fn processor(&self) -> String {
        format!("gpu-{}", self.name().to_lowercase().replace(' ', "-"))
    }

    /// Streaming multiprocessors: as many blocks of a kernel run at once.
    pub fn processors(&self) -> u32 {
        self.0.processors
    }

    /// Bytes of its memory that are free, and all of them.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        let code = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        call("cuMemGetInfo", alone, code).map(|()| (free, total))
    }

    /// Places of the modules' pointers to the memory of a [`super::Watch`]; none where the kernels were built without.
    pub(super) fn watch_places(&self) -> Result<Vec<u64>, Error> {
        self.bind()?;
        let mut places = Vec::new();
        for &module in &self.0.modules {
            let (mut place, mut bytes) = (0, 0);
            // SAFETY: a loaded module, a name that ends with 0; writes two numbers.
            let code = unsafe {
                sys::cuModuleGetGlobal_v2(
                    &raw mut place,
                    &raw mut bytes,
                    module,
                    c"cadre_watch".as_ptr(),
                )
            };
            if code == CUresult::CUDA_ERROR_NOT_FOUND {
                continue;
            }
            call("cuModuleGetGlobal", || ", cadre_watch".to_owned(), code)?;
            places.push(place);
        }
        Ok(places)
    }

    /// Number of the GPU, for positions of memory.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.0.device
    }

    /// Makes the context that of the calling thread.
    pub(super) fn bind(&self) -> Result<(), Error> {
        self.0.bind()
    }

    /// An entry point by name.
    pub(super) fn kernel(&self, name: &str) -> Kernel {
        let found = self.0.kernels.iter().find(|it| it.name == name);
        *found.expect("all kernels are loaded when a GPU is opened")
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gpu").field(&self.0.name).finish()
    }
}

impl Inner {
    fn bind(&self) -> Result<(), Error> {
        // SAFETY: the context is retained as long as `self` lives.
        call("cuCtxSetCurrent", alone, unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    fn load(&mut self, cubins: &[Cubin]) -> Result<(), Error> {
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
}

fn words_of(uuid: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(uuid));
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|it| &digits[it]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// The cubins of this build, or what `folder` has in their place. They stay in memory: few forms are opened, in checks only.
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
        Ok(Cubin { name: it.name, bytes: bytes.leak() })
    };
    CUBINS.iter().map(read).collect()
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
    Ok(Kernel { name, function, launch })
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A GPU that is lost has nothing to unload.
        if self.bind().is_err() {
            return;
        }
        for module in self.modules.drain(..) {
            // SAFETY: loaded by `load`; who launches its kernels holds the GPU.
            let _ = unsafe { sys::cuModuleUnload(module) };
        }
        // SAFETY: retained once by `of`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
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
