//! The CUDA driver: probed, opened, and called with named errors.
//!
//! In: which GPU. Out: a [`Gpu`] with the kernels of this build loaded ([`super::modules`]). The library is opened at run
//! time; without it, with an old one, or with another GPU, there is an error and no panic.
//!
//! It allocates and launches nothing, see [`super::memory`] and [`super::plan`]. Invariant: every call of the driver goes
//! through [`call`] with the GPU's context current, which it shares with frameworks of the same process.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::error::{Error, is_fatal};
use super::family::{FAMILY_VARIABLE, Family};
use super::modules::{Kernel, Modules};
use crate::cubins::{CUBINS, PORTABLE};

/// CUDA version that the kernels need, 1000 · major + 10 · minor.
const NEEDED: i32 = 13_000;

/// A GPU with the kernels loaded; clones are the same one.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Modules,
    ordinal: usize,
    name: String,
    uuid: String,
    processors: u32,
    family: Family,
    capability: (i32, i32),
}

// SAFETY: handles of the driver, which may be used from any thread; `bind` makes the context current first.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing is changed after `open`.
unsafe impl Sync for Inner {}

/// Turns the driver's result into an error.
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
    /// No driver, an old one, no such GPU, one that is older than the kernels, or a build without kernels.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        Self::open_with(ordinal, None)
    }

    /// Opens a GPU for the process with number `turn` among those of its machine. The processes take the visible GPUs in turn.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn open_in_turn(turn: usize) -> Result<Self, Error> {
        let ordinal = match count() {
            Ok(count) => turn % count.max(1).cast_unsigned() as usize,
            Err(error) => return Err(unlost(error, 0)),
        };
        Self::open(ordinal)
    }

    /// As [`Self::open`], but files `NAME.cubin` of `folder` replace those of this build. It is for checks that compare forms of
    /// the kernels. [`crate::Engine::numerics_id`] promises nothing for the bits of a form.
    ///
    /// # Errors
    ///
    /// As [`Self::open`], and [`Error::Form`] for files that cannot be read.
    pub fn open_form(ordinal: usize, folder: &Path) -> Result<Self, Error> {
        Self::open_with(ordinal, Some(folder))
    }

    fn open_with(ordinal: usize, form: Option<&Path>) -> Result<Self, Error> {
        Self::opened(ordinal, form).map_err(|error| unlost(error, ordinal))
    }

    fn opened(ordinal: usize, form: Option<&Path>) -> Result<Self, Error> {
        let count = count()?;
        let index = c_int::try_from(ordinal).ok().filter(|it| *it < count);
        let index = index.ok_or(Error::NoDevice { ordinal, count })?;
        let mut device: sys::CUdevice = 0;
        // SAFETY: writes one number.
        call("cuDeviceGet", alone, unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
        Self::of(ordinal, device, form)
    }

    fn of(ordinal: usize, device: sys::CUdevice, form: Option<&Path>) -> Result<Self, Error> {
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
        let capability = (major, minor);
        let asked = std::env::var_os(FAMILY_VARIABLE);
        let asked = asked.as_ref().map(|it| it.to_string_lossy());
        let family = Family::of(&name, capability, asked.as_deref())?;
        if CUBINS.is_empty() || PORTABLE.is_empty() {
            return Err(Error::NoKernels);
        }
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let mut context = std::ptr::null_mut();
        // SAFETY: the context that every user of the device in this process shares; released in `drop`.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        call("cuDevicePrimaryCtxRetain", alone, code)?;
        let modules = Modules::default();
        let mut inner =
            Inner { device, context, modules, ordinal, name, uuid, processors, family, capability };
        inner.bind()?;
        inner.modules.load(family, capability, form)?;
        Ok(Self(Arc::new(inner)))
    }

    /// Ordinal among the GPUs that the process can see.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// UUID of the GPU as nvidia-smi prints it: `GPU-` and 32 digits in five groups.
    pub fn uuid(&self) -> &str {
        &self.0.uuid
    }

    /// Which kernels run on it.
    pub fn family(&self) -> Family {
        self.0.family
    }

    /// Compute capability, major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.0.capability
    }

    /// Describes which kernels run on the GPU, and why.
    pub fn kernels(&self) -> String {
        let (major, minor) = self.0.capability;
        match (self.0.family, (major, minor)) {
            (Family::Hopper, _) => "kernels for Hopper".to_owned(),
            (Family::Portable, (9, 0)) => format!("portable kernels, as {FAMILY_VARIABLE} says"),
            (Family::Portable, _) => {
                format!("portable kernels, as compute capability {major}.{minor} has no others")
            }
        }
    }

    /// Names the kind of GPU, as calibrations do, and the portable kernels where it runs those.
    pub fn processor(&self) -> String {
        let kernels = match self.0.family {
            Family::Hopper => "",
            Family::Portable => "-portable",
        };
        format!("gpu-{}{kernels}", self.name().to_lowercase().replace(' ', "-"))
    }

    /// Number of streaming multiprocessors.
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

    /// Device addresses of the modules' pointers to the memory of a [`super::Watch`]. None where the kernels were built without
    /// it.
    pub(super) fn watch_places(&self) -> Result<Vec<u64>, Error> {
        self.bind()?;
        let mut places = Vec::new();
        for module in self.0.modules.all() {
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

    /// The driver's number of the GPU, for memory locations.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.0.device
    }

    /// Makes the GPU's context current in the calling thread.
    pub(super) fn bind(&self) -> Result<(), Error> {
        self.0.bind()
    }

    /// An entry point by name.
    pub(super) fn kernel(&self, name: &str) -> Kernel {
        self.0.modules.kernel(name)
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
}

/// Starts the driver, and counts the GPUs that this process may see.
fn count() -> Result<c_int, Error> {
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
    Ok(count)
}

/// Turns a loss that is reported while a GPU is being opened into another error: that GPU was never ours to lose.
fn unlost(error: Error, ordinal: usize) -> Error {
    let Error::Lost { call, after, name, code, text } = error else { return error };
    // The driver returns this code where there is no GPU.
    if code == 100 {
        return Error::NoDevice { ordinal, count: 0 };
    }
    Error::Call { call, after, name, code, text }
}

fn words_of(uuid: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(uuid));
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|it| &digits[it]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A GPU that is lost has nothing to unload.
        if self.bind().is_err() {
            return;
        }
        self.modules.unload();
        // SAFETY: retained once by `of`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
