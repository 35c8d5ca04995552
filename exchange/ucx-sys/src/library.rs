//! Finds the UCX library, checks it, and opens it once.
//!
//! In: the loader's path. Out: its functions and version, or why there is none.
//!
//! It is opened with `RTLD_LOCAL` and `RTLD_DEEPBIND`, so that the UCX of another part of the process (torch, MPI, NIXL) cannot
//! replace its symbols. Two copies of libucs in one process still share signals and memory hooks, so a second copy is refused.
//! Signal handlers that the library sets while it is opened are restored.
//!
//! Invariant: an opened library stays open as long as the process.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::bindings::{Functions, ucs_status_t};

/// The oldest version that the bindings fit.
pub const OLDEST: (u32, u32) = (1, 13);

/// `dlopen` flag: the library's own dependencies resolve its symbols before those of the process.
const RTLD_DEEPBIND: c_int = 8;

unsafe extern "C" {
    fn open_memstream(text: *mut *mut c_char, bytes: *mut usize) -> *mut c_void;
    fn fclose(stream: *mut c_void) -> c_int;
    fn free(memory: *mut c_void);
}

/// Why there is no UCX.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Absent {
    /// The loader does not find it.
    #[error("UCX cannot be opened ({reason}): install libucx0 (Debian) or ucx (RPM)")]
    NotOpened {
        /// The loader's message.
        reason: String,
    },
    /// The library is too old.
    #[error(
        "UCX {version} is too old: install {}.{} or newer", OLDEST.0, OLDEST.1
    )]
    Old {
        /// The version that was found.
        version: String,
    },
    /// A library of this name is no UCX, or lacks a function.
    #[error("the UCX library lacks {symbol}: install a whole UCX {}.{} or newer", OLDEST.0, OLDEST.1)]
    Lacks {
        /// The missing function.
        symbol: &'static str,
    },
    /// Another UCX is mapped in the process.
    #[error(
        "this process has two copies of UCX ({paths}): run with one, or without --exchange ucx"
    )]
    Second {
        /// Paths of its files.
        paths: String,
    },
}

/// An UCX.
pub struct Ucx {
    /// The functions of the library.
    pub functions: Functions,
    version: (u32, u32, u32),
    _library: Library,
}

impl fmt::Debug for Ucx {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Ucx").field("version", &self.version).finish_non_exhaustive()
    }
}

/// The UCX of this machine. The first call opens it.
///
/// # Errors
///
/// [`Absent`].
pub fn ucx() -> Result<&'static Ucx, &'static Absent> {
    static UCX: OnceLock<Result<Ucx, Absent>> = OnceLock::new();
    UCX.get_or_init(|| {
        let ucx = Ucx::open("libucp.so.0")?;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        if let Err(second) = one_copy(&maps) {
            // Constructors of the library have run: it stays open as long as the process lives.
            std::mem::forget(ucx);
            return Err(second);
        }
        Ok(ucx)
    })
    .as_ref()
}

/// Refuses a second libucs that is mapped.
fn one_copy(maps: &str) -> Result<(), Absent> {
    let is_ucs = |path: &&str| path.rsplit('/').next().is_some_and(|it| it.starts_with("libucs"));
    // The path is the sixth field. Names of mappings without a file have no slash.
    let paths = maps.lines().filter_map(|it| it.find('/').map(|at| &it[at..]));
    // Libraries of signals, profiling and the like belong to the same UCX.
    let whole = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or_default();
        name.starts_with("libucs.so") || name.starts_with("libucs-")
    };
    let all: BTreeSet<_> = paths.filter(is_ucs).filter(whole).collect();
    if all.len() > 1 {
        let paths = all.into_iter().collect::<Vec<_>>().join(", ");
        return Err(Absent::Second { paths });
    }
    Ok(())
}

impl Ucx {
    fn open(name: impl AsRef<OsStr>) -> Result<Self, Absent> {
        let flags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
        // SAFETY: what its constructors do is UCX's; it is opened as every program does that is linked with it.
        let library = unsafe { Library::open(Some(name.as_ref()), flags) };
        let library = library.map_err(|error| {
            // The loader's own message follows its prefix.
            let reason = std::error::Error::source(&error).map(ToString::to_string);
            Absent::NotOpened { reason: reason.unwrap_or_else(|| error.to_string()) }
        })?;
        let find = |symbol: &'static str| {
            // SAFETY: the address of a symbol is taken, and nothing is done with it here.
            let found = unsafe { library.get::<*mut c_void>(symbol) }.ok()?;
            Some(found.as_raw_ptr()).filter(|it| !it.is_null())
        };
        let lacks = |symbol| Absent::Lacks { symbol };
        // The version is checked before the other functions: an older library lacks some of them.
        let version = find("ucp_get_version").ok_or(lacks("ucp_get_version"))?;
        let version = {
            type Version = unsafe extern "C" fn(*mut u32, *mut u32, *mut u32);
            // SAFETY: this is the type of a function of this name in every UCX.
            let version = unsafe { std::mem::transmute::<*mut c_void, Version>(version) };
            let (mut major, mut minor, mut release) = (0, 0, 0);
            // SAFETY: it writes three numbers.
            unsafe { version(&raw mut major, &raw mut minor, &raw mut release) };
            (major, minor, release)
        };
        if (version.0, version.1) < OLDEST {
            let (major, minor, release) = version;
            return Err(Absent::Old { version: format!("{major}.{minor}.{release}") });
        }
        // SAFETY: a library that has these names and this version is UCX, and it is never closed once it was found whole.
        let functions = unsafe { Functions::find(find) }.map_err(lacks)?;
        if let Some(disable) = find("ucs_debug_disable_signals") {
            // SAFETY: it takes nothing and gives nothing, in every UCX that has it.
            let disable =
                unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(disable) };
            // SAFETY: it puts back the handlers that were there before the library was opened.
            unsafe { disable() };
        }
        Ok(Self { functions, version, _library: library })
    }

    /// Major, minor, release.
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// UCX's text for a status.
    pub fn meaning(&self, status: ucs_status_t) -> String {
        // SAFETY: it takes any number.
        let text = unsafe { (self.functions.ucs_status_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: it is a text of the library, or one of its thread that stays until the next call.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// What a UCX function prints to a stream (`FILE *`).
    pub fn printed(&self, print: impl FnOnce(&Functions, *mut c_void)) -> String {
        let (mut text, mut bytes) = (std::ptr::null_mut(), 0);
        // SAFETY: both stay until the stream is closed.
        let stream = unsafe { open_memstream(&raw mut text, &raw mut bytes) };
        if stream.is_null() {
            return String::new();
        }
        print(&self.functions, stream);
        // SAFETY: it was just opened, and is closed once.
        unsafe { fclose(stream) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: a closed stream leaves a text that ends with a zero.
        let printed = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: the text is ours, by malloc.
        unsafe { free(text.cast()) };
        printed
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    /// A library of this C source.
    fn library(folder: &tempfile::TempDir, source: &str) -> PathBuf {
        let (from, to) = (folder.path().join("it.c"), folder.path().join("libit.so"));
        std::fs::write(&from, source).unwrap();
        let mut build = Command::new("cc");
        let built = build.args(["-shared", "-fPIC", "-o"]).arg(&to).arg(&from).status();
        assert!(built.expect("the linker of Rust").success());
        to
    }

    fn refused(source: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        Ucx::open(library(&folder, source)).unwrap_err().to_string()
    }

    #[test]
    fn a_library_that_is_no_whole_ucx_is_refused_by_what_it_lacks() {
        let absent = Ucx::open("/nowhere/libucp.so.0").unwrap_err().to_string();
        assert!(absent.starts_with("UCX cannot be opened (/nowhere/libucp.so.0"), "{absent}");
        assert!(absent.ends_with("install libucx0 (Debian) or ucx (RPM)"), "{absent}");
        let whole = "install a whole UCX 1.13 or newer";
        assert_eq!(
            refused("int nothing;"),
            format!("the UCX library lacks ucp_get_version: {whole}")
        );
        let version = |minor| {
            format!(
                "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) {{ *a = 1; *b = {minor}; *c = 3; }}"
            )
        };
        assert_eq!(refused(&version(12)), "UCX 1.12.3 is too old: install 1.13 or newer");
        assert_eq!(
            refused(&version(13)),
            format!("the UCX library lacks ucs_status_string: {whole}")
        );
    }

    #[test]
    fn two_copies_in_a_process_are_refused_with_their_places() {
        let line = |path| format!("7f00-7f01 r-xp 00000000 fe:00 12   {path}\n");
        let one = line("/usr/lib/libucs.so.0.0.0") + &line("/usr/lib/libucs_signal.so.0");
        assert_eq!(one_copy(&(one.clone() + &line("/usr/lib/libucs.so.0.0.0"))), Ok(()));
        let two = one + &line("/opt/torch/libucs-4d00.so.0");
        let refused = one_copy(&two).unwrap_err().to_string();
        assert!(
            refused.contains("(/opt/torch/libucs-4d00.so.0, /usr/lib/libucs.so.0.0.0)"),
            "{refused}"
        );
    }
}
