//! Types, constants and functions of `ucp/api/ucp.h` and `ucs/type/status.h`, UCX 1.13: those that are called, and no others.
//!
//! Written by hand, after what this prints for `#include <ucp/api/ucp.h>`:
//! `bindgen wrapper.h --dynamic-loading UcpLib --default-enum-style consts --no-prepend-enum-name`.
//! The header documents each item.
//!
//! Invariant: every structure has a mask that says which of its fields count.

#![allow(missing_docs, non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`; an enumeration of one byte.
pub type ucs_status_t = i8;
/// Null means done, a small negative number an error, anything else a request.
pub type ucs_status_ptr_t = *mut c_void;

pub const UCS_OK: ucs_status_t = 0;
pub const UCS_INPROGRESS: ucs_status_t = 1;
pub const UCS_ERR_NO_DEVICE: ucs_status_t = -14;
pub const UCS_ERR_BUSY: ucs_status_t = -15;
pub const UCS_ERR_CANCELED: ucs_status_t = -16;
pub const UCS_ERR_LAST: ucs_status_t = -100;

macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque! { ucp_context ucp_config ucp_worker ucp_ep ucp_rkey ucp_mem ucp_address }

pub type ucp_context_h = *mut ucp_context;
pub type ucp_worker_h = *mut ucp_worker;
pub type ucp_ep_h = *mut ucp_ep;
pub type ucp_rkey_h = *mut ucp_rkey;
pub type ucp_mem_h = *mut ucp_mem;

pub type ucp_send_nbx_callback_t = Option<
    unsafe extern "C" fn(request: *mut c_void, status: ucs_status_t, user_data: *mut c_void),
>;
pub type ucp_err_handler_cb_t =
    Option<unsafe extern "C" fn(arg: *mut c_void, ep: ucp_ep_h, status: ucs_status_t)>;

pub const UCP_API_MAJOR: c_uint = 1;
pub const UCP_API_MINOR: c_uint = 13;

pub const UCP_PARAM_FIELD_FEATURES: u64 = 1;
pub const UCP_FEATURE_RMA: u64 = 2;
pub const UCP_FEATURE_WAKEUP: u64 = 16;

#[repr(C)]
pub struct ucp_params_t {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: Option<unsafe extern "C" fn(request: *mut c_void)>,
    pub request_cleanup: Option<unsafe extern "C" fn(request: *mut c_void)>,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
}

pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1;
pub const UCS_THREAD_MODE_SERIALIZED: c_uint = 1;

#[repr(C)]
pub struct ucp_worker_params_t {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; 16],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}

pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 2;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 4;
pub const UCP_ERR_HANDLING_MODE_PEER: c_uint = 1;

#[repr(C)]
pub struct ucp_err_handler_t {
    pub cb: ucp_err_handler_cb_t,
    pub arg: *mut c_void,
}

#[repr(C)]
pub struct ucs_sock_addr_t {
    pub addr: *const c_void,
    pub addrlen: c_uint,
}

#[repr(C)]
pub struct ucp_ep_params_t {
    pub field_mask: u64,
    pub address: *const ucp_address,
    pub err_mode: c_uint,
    pub err_handler: ucp_err_handler_t,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: ucs_sock_addr_t,
    pub conn_request: *mut c_void,
    pub name: *const c_char,
    pub local_sockaddr: ucs_sock_addr_t,
}

pub const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1;
pub const UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 2;
pub const UCP_MEM_MAP_PARAM_FIELD_PROT: u64 = 8;
pub const UCP_MEM_MAP_PROT_LOCAL_READ: c_uint = 1;
pub const UCP_MEM_MAP_PROT_LOCAL_WRITE: c_uint = 2;
pub const UCP_MEM_MAP_PROT_REMOTE_READ: c_uint = 256;

#[repr(C)]
pub struct ucp_mem_map_params_t {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub flags: c_uint,
    pub prot: c_uint,
    pub memory_type: c_uint,
}

pub const UCP_OP_ATTR_FIELD_CALLBACK: u32 = 2;
pub const UCP_OP_ATTR_FIELD_USER_DATA: u32 = 4;
pub const UCP_OP_ATTR_FIELD_FLAGS: u32 = 16;
pub const UCP_OP_ATTR_FIELD_MEMORY_TYPE: u32 = 64;
pub const UCP_OP_ATTR_FIELD_MEMH: u32 = 256;
pub const UCS_MEMORY_TYPE_HOST: c_uint = 0;
pub const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1;

#[repr(C)]
pub struct ucp_request_param_t {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    /// A union of callbacks; this is the one of sends.
    pub cb: ucp_send_nbx_callback_t,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    /// A union of pointers.
    pub recv_info: *mut c_void,
    pub memh: ucp_mem_h,
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of the library.
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument: $type),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Loads all functions by their names. The error is the first name that is missing.
            ///
            /// # Safety
            ///
            /// `find` returns the address of the function of that name, and the function stays loaded.
            pub(crate) unsafe fn find(
                find: impl Fn(&'static str) -> Option<*mut c_void>,
            ) -> Result<Self, &'static str> {
                Ok(Self {$(
                    $name: {
                        let found = find(stringify!($name)).ok_or(stringify!($name))?;
                        // SAFETY: a function of this name has this type by the header, as the caller promises.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) $(-> $result)?>(found) }
                    },
                )*})
            }
        }
    };
}

functions! {
    ucp_get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
    ucs_status_string(status: ucs_status_t) -> *const c_char;
    ucp_config_read(prefix: *const c_char, file: *const c_char, config: *mut *mut ucp_config) -> ucs_status_t;
    ucp_config_modify(config: *mut ucp_config, name: *const c_char, value: *const c_char) -> ucs_status_t;
    ucp_config_release(config: *mut ucp_config);
    ucp_init_version(major: c_uint, minor: c_uint, params: *const ucp_params_t, config: *const ucp_config, context: *mut ucp_context_h) -> ucs_status_t;
    ucp_cleanup(context: ucp_context_h);
    ucp_context_print_info(context: ucp_context_h, stream: *mut c_void);
    ucp_worker_create(context: ucp_context_h, params: *const ucp_worker_params_t, worker: *mut ucp_worker_h) -> ucs_status_t;
    ucp_worker_destroy(worker: ucp_worker_h);
    ucp_worker_progress(worker: ucp_worker_h) -> c_uint;
    ucp_worker_get_efd(worker: ucp_worker_h, descriptor: *mut c_int) -> ucs_status_t;
    ucp_worker_arm(worker: ucp_worker_h) -> ucs_status_t;
    ucp_worker_get_address(worker: ucp_worker_h, address: *mut *mut ucp_address, bytes: *mut usize) -> ucs_status_t;
    ucp_worker_release_address(worker: ucp_worker_h, address: *mut ucp_address);
    ucp_mem_map(context: ucp_context_h, params: *const ucp_mem_map_params_t, memory: *mut ucp_mem_h) -> ucs_status_t;
    ucp_mem_unmap(context: ucp_context_h, memory: ucp_mem_h) -> ucs_status_t;
    ucp_rkey_pack(context: ucp_context_h, memory: ucp_mem_h, buffer: *mut *mut c_void, bytes: *mut usize) -> ucs_status_t;
    ucp_rkey_buffer_release(buffer: *mut c_void);
    ucp_ep_create(worker: ucp_worker_h, params: *const ucp_ep_params_t, ep: *mut ucp_ep_h) -> ucs_status_t;
    ucp_ep_close_nbx(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_ep_print_info(ep: ucp_ep_h, stream: *mut c_void);
    ucp_ep_rkey_unpack(ep: ucp_ep_h, buffer: *const c_void, rkey: *mut ucp_rkey_h) -> ucs_status_t;
    ucp_rkey_destroy(rkey: ucp_rkey_h);
    ucp_get_nbx(ep: ucp_ep_h, buffer: *mut c_void, count: usize, remote: u64, rkey: ucp_rkey_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_request_check_status(request: *mut c_void) -> ucs_status_t;
    ucp_request_free(request: *mut c_void);
}
