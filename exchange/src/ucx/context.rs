//! The devices of a process that UCX may use, and the memory that readers may read there.
//!
//! In: settings; stretches of memory. Out: workers, and keys for readers.
//!
//! Invariant: a memory stays mapped as long as it is registered.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_uint, c_void};
use std::ptr;

use cadre_ucx_sys::{Ucx, bindings as b};

use super::{Transports, UcxError};
use crate::shared::Stretch;

/// The UCX context of this process.
pub(super) struct Context {
    pub(super) ucx: &'static Ucx,
    handle: b::ucp_context_h,
    memories: Vec<(b::ucp_mem_h, Stretch)>,
    /// Memory of this process that reads may write to, by the address of its first byte.
    held: BTreeMap<usize, (b::ucp_mem_h, Stretch)>,
    /// Whether the context has a worker that must not be destroyed. Then the context stays until the process ends.
    pub(super) is_abandoned: bool,
}

impl Context {
    /// Opens the devices of these transports.
    pub(super) fn open(transports: Transports) -> Result<Self, UcxError> {
        let ucx = cadre_ucx_sys::ucx().map_err(Clone::clone)?;
        let handle = context(ucx, &transports.settings(ucx.version())).map_err(|it| match it {
            (b::UCS_ERR_NO_DEVICE, _) => UcxError::NoDevice { asked: transports.names() },
            (_, error) => error,
        })?;
        let (memories, held) = (Vec::new(), BTreeMap::new());
        Ok(Self { ucx, handle, memories, held, is_abandoned: false })
    }

    /// A new worker, which is to be destroyed before this is dropped.
    pub(super) fn worker(&self) -> Result<b::ucp_worker_h, UcxError> {
        let params = b::ucp_worker_params_t {
            field_mask: b::UCP_WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode: b::UCS_THREAD_MODE_SERIALIZED,
            cpu_mask: [0; 16],
            events: 0,
            user_data: ptr::null_mut(),
            event_fd: -1,
            flags: 0,
            name: ptr::null(),
            am_alignment: 0,
            client_id: 0,
        };
        let mut worker = ptr::null_mut();
        let create = self.ucx.functions.ucp_worker_create;
        // SAFETY: the context is open, and the mask says which fields count.
        let status = unsafe { create(self.handle, &raw const params, &raw mut worker) };
        call(self.ucx, "make a worker", status).map(|()| worker)
    }

    /// Registers memory that readers may read, as long as this lives, and returns its key of at most `longest` bytes. On an error
    /// nothing stays registered.
    pub(super) fn show(&mut self, memory: Stretch, longest: usize) -> Result<Vec<u8>, UcxError> {
        let of = &self.ucx.functions;
        let may = b::UCP_MEM_MAP_PROT_LOCAL_READ | b::UCP_MEM_MAP_PROT_REMOTE_READ;
        let handle = self.register(&memory, may)?;
        let key = self.key(handle).and_then(|key| match key.len() {
            bytes if bytes <= longest => Ok(key),
            bytes => Err(UcxError::Call {
                what: "show memory",
                why: format!("its key has {bytes} bytes, and there is room for {longest}"),
            }),
        });
        if key.is_ok() {
            self.memories.push((handle, memory));
        } else {
            // SAFETY: it was just registered, and nobody has its key.
            unsafe { (of.ucp_mem_unmap)(self.handle, handle) };
        }
        key
    }

    /// Registers memory that reads of this process may write, as long as this lives.
    pub(super) fn hold(&mut self, memory: Stretch) -> Result<(), UcxError> {
        let may = b::UCP_MEM_MAP_PROT_LOCAL_READ | b::UCP_MEM_MAP_PROT_LOCAL_WRITE;
        let handle = self.register(&memory, may)?;
        self.held.insert(memory.address() as usize, (handle, memory));
        Ok(())
    }

    /// The registered memory that a byte lies in, and the contiguous bytes from there on.
    pub(super) fn held(&self, at: usize) -> Option<(b::ucp_mem_h, usize)> {
        let (start, (handle, memory)) = self.held.range(..=at).next_back()?;
        let end = start + memory.len_bytes();
        (at < end).then(|| (*handle, end - at))
    }

    /// Registers memory. The caller keeps it mapped until it is deregistered.
    fn register(&self, memory: &Stretch, prot: c_uint) -> Result<b::ucp_mem_h, UcxError> {
        let params = b::ucp_mem_map_params_t {
            field_mask: b::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | b::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | b::UCP_MEM_MAP_PARAM_FIELD_PROT,
            address: memory.address() as *mut c_void,
            length: memory.len_bytes(),
            flags: 0,
            prot,
            memory_type: 0,
        };
        let (map, mut handle) = (self.ucx.functions.ucp_mem_map, ptr::null_mut());
        // SAFETY: the memory is mapped as long as the stretch lives, which the caller keeps.
        let status = unsafe { map(self.handle, &raw const params, &raw mut handle) };
        call(self.ucx, "register memory; raise the limit of locked memory (ulimit -l)", status)?;
        Ok(handle)
    }

    /// What opens a registered memory to readers.
    fn key(&self, memory: b::ucp_mem_h) -> Result<Vec<u8>, UcxError> {
        let of = &self.ucx.functions;
        let (mut key, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the memory is registered; it writes both.
        let status =
            unsafe { (of.ucp_rkey_pack)(self.handle, memory, &raw mut key, &raw mut bytes) };
        call(self.ucx, "make a key of memory", status)?;
        // SAFETY: the key has so many bytes until it is released.
        let copy = unsafe { std::slice::from_raw_parts(key.cast::<u8>(), bytes) }.to_vec();
        // SAFETY: it was just given, and is released once.
        unsafe { (of.ucp_rkey_buffer_release)(key) };
        Ok(copy)
    }

    /// Number of memories that readers can read, and of those that reads may write.
    #[cfg(test)]
    pub(super) fn memories(&self) -> [usize; 2] {
        [self.memories.len(), self.held.len()]
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_abandoned {
            std::mem::forget(std::mem::take(&mut self.memories));
            return std::mem::forget(std::mem::take(&mut self.held));
        }
        let of = &self.ucx.functions;
        let held = std::mem::take(&mut self.held).into_values();
        for (memory, _mapped) in self.memories.drain(..).chain(held) {
            // SAFETY: it was registered once, and is mapped still.
            unsafe { (of.ucp_mem_unmap)(self.handle, memory) };
        }
        // SAFETY: nothing of it is left.
        unsafe { (of.ucp_cleanup)(self.handle) };
    }
}

pub(super) fn call(ucx: &Ucx, what: &'static str, status: b::ucs_status_t) -> Result<(), UcxError> {
    if status == b::UCS_OK {
        return Ok(());
    }
    Err(UcxError::Call { what, why: ucx.meaning(status) })
}

/// A context with these settings over those of the environment.
fn context(
    ucx: &Ucx,
    settings: &[(&str, &str)],
) -> Result<b::ucp_context_h, (b::ucs_status_t, UcxError)> {
    let failed = |what, status| (status, call(ucx, what, status).expect_err("it failed"));
    let of = &ucx.functions;
    let mut config = ptr::null_mut();
    // SAFETY: it writes the pointer; null stands for the default.
    let status = unsafe { (of.ucp_config_read)(ptr::null(), ptr::null(), &raw mut config) };
    if status != b::UCS_OK {
        return Err(failed("read its settings", status));
    }
    for (name, value) in settings {
        let [name, value] = [name, value].map(|it| CString::new(*it).expect("no zero in ours"));
        // SAFETY: the settings were just read, and both are texts. One that this version does not know changes nothing.
        unsafe { (of.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) };
    }
    let params = b::ucp_params_t {
        field_mask: b::UCP_PARAM_FIELD_FEATURES,
        features: b::UCP_FEATURE_RMA | b::UCP_FEATURE_WAKEUP,
        request_size: 0,
        request_init: None,
        request_cleanup: None,
        tag_sender_mask: 0,
        mt_workers_shared: 0,
        estimated_num_eps: 0,
        estimated_num_ppn: 0,
        name: ptr::null(),
    };
    let mut context = ptr::null_mut();
    let (major, minor) = (b::UCP_API_MAJOR, b::UCP_API_MINOR);
    // SAFETY: the structure is of the version that is named, and its mask says which fields count.
    let status =
        unsafe { (of.ucp_init_version)(major, minor, &raw const params, config, &raw mut context) };
    // SAFETY: it was read above, and nobody uses it any more.
    unsafe { (of.ucp_config_release)(config) };
    if status == b::UCS_OK { Ok(context) } else { Err(failed("open its devices", status)) }
}

/// What UCX prints of all that it could use here.
pub(super) fn print_all(ucx: &Ucx) -> Result<String, UcxError> {
    let context = context(ucx, &[("LOG_LEVEL", "fatal"), ("TLS", "all")]).map_err(|it| it.1)?;
    let printed = ucx.printed(|of, stream| {
        // SAFETY: the context is open, and the stream while this runs.
        unsafe { (of.ucp_context_print_info)(context, stream) };
    });
    // SAFETY: it was just made, and nothing of it is left.
    unsafe { (ucx.functions.ucp_cleanup)(context) };
    Ok(printed)
}
