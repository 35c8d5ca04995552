//! The part of the C face that opens other forms of the kernels, and tells where the warps of one wait that does not end.
//!
//! In: a folder of cubins. Out: a GPU with them; JSON of who waits for what. Invariant: that of the crate.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use cadre_kernels::device::{Gpu, WaitingWarp, Watch};
use serde_json::{Value, json};

use super::{given, guard};

thread_local! {
    static TOLD: RefCell<CString> = RefCell::default();
}

/// As [`crate::cadre_open`], with the kernels of the files `NAME.cubin` of a folder in the place of this build's.
///
/// # Safety
///
/// `folder` is a path that ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_open_form(ordinal: u32, folder: *const c_char) -> *mut Gpu {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let folder = unsafe { CStr::from_ptr(folder) }.to_string_lossy();
        Ok(Box::into_raw(Box::new(Gpu::open_form(ordinal as usize, Path::new(&*folder))?)))
    })
}

/// Lets the kernels of a GPU tell where they wait; lives as long as the process. Null on error, and for kernels that do not tell.
///
/// # Safety
///
/// `gpu` comes from [`cadre_open_form`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_watch(gpu: *const Gpu) -> *const Watch {
    guard(std::ptr::null(), || {
        // SAFETY: the caller's promise.
        let gpu = unsafe { given(gpu, "gpu") }?;
        Ok(Watch::new(gpu)?.map_or(std::ptr::null(), |it| Box::into_raw(Box::new(it)).cast_const()))
    })
}

/// The report of a launch of `kernel` as JSON; empty if no wait took too long, null on error. Valid
/// until the next call of this thread.
///
/// # Safety
///
/// `watch` comes from [`cadre_watch`]; `kernel` ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_told(watch: *const Watch, kernel: *const c_char) -> *const c_char {
    guard(std::ptr::null(), || {
        // SAFETY: the caller's promise.
        let watch = unsafe { given(watch, "watch") }?;
        // SAFETY: the caller's promise.
        let kernel = unsafe { CStr::from_ptr(kernel) }.to_string_lossy();
        let warp = |it: &WaitingWarp| json!({"block": it.block, "warp": it.warp, "waits_for": it.waits_for});
        let told = watch.told(&kernel).map(|it| {
            let (block, thread) = it.first;
            let warps: Vec<Value> = it.places.iter().map(warp).collect();
            json!({"kernel": kernel, "block": block, "thread": thread, "warps": warps}).to_string()
        });
        TOLD.set(CString::new(told.unwrap_or_default())?);
        Ok(TOLD.with_borrow(|it| it.as_ptr()))
    })
}
