//! The bindings against the header of the UCX that is installed: sizes, places of fields, constants.
//!
//! In: `ucp/api/ucp.h` (Debian: libucx-dev), a C compiler. Out: a table that a C program prints, equal to ours. Without the header it
//! says that it is skipped.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::process::Command;

use cadre_ucx_sys::bindings::{
    UCP_EP_CLOSE_FLAG_FORCE, UCP_EP_PARAM_FIELD_ERR_HANDLER, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, UCP_ERR_HANDLING_MODE_PEER, UCP_FEATURE_RMA,
    UCP_FEATURE_WAKEUP, UCP_MEM_MAP_PARAM_FIELD_ADDRESS, UCP_MEM_MAP_PARAM_FIELD_LENGTH,
    UCP_MEM_MAP_PARAM_FIELD_PROT, UCP_MEM_MAP_PROT_LOCAL_READ, UCP_MEM_MAP_PROT_LOCAL_WRITE,
    UCP_MEM_MAP_PROT_REMOTE_READ, UCP_OP_ATTR_FIELD_CALLBACK, UCP_OP_ATTR_FIELD_FLAGS,
    UCP_OP_ATTR_FIELD_MEMH, UCP_OP_ATTR_FIELD_MEMORY_TYPE, UCP_OP_ATTR_FIELD_USER_DATA,
    UCP_PARAM_FIELD_FEATURES, UCP_WORKER_PARAM_FIELD_THREAD_MODE, UCS_ERR_BUSY, UCS_ERR_CANCELED,
    UCS_ERR_LAST, UCS_ERR_NO_DEVICE, UCS_INPROGRESS, UCS_MEMORY_TYPE_HOST, UCS_OK,
    UCS_THREAD_MODE_SERIALIZED, ucp_ep_params_t, ucp_err_handler_t, ucp_mem_map_params_t,
    ucp_params_t, ucp_request_param_t, ucp_worker_params_t, ucs_sock_addr_t, ucs_status_t,
};

const HEADER: &str = "/usr/include/ucp/api/ucp.h";

/// Our number for each C expression.
fn ours() -> Vec<(String, i64)> {
    let mut all = Vec::new();
    macro_rules! fields {
        ($type:ident { $($field:ident),* }) => {
            all.push((format!("sizeof({})", stringify!($type)), size_of::<$type>() as i64));
            $(all.push((
                format!("offsetof({}, {})", stringify!($type), stringify!($field)),
                offset_of!($type, $field) as i64,
            ));)*
        };
    }
    macro_rules! constants {
        ($($name:ident)*) => {
            $(all.push((stringify!($name).to_owned(), i64::from($name)));)*
        };
    }
    fields!(ucp_params_t {
        field_mask,
        features,
        request_size,
        request_init,
        request_cleanup,
        tag_sender_mask,
        mt_workers_shared,
        estimated_num_eps,
        estimated_num_ppn,
        name
    });
    fields!(ucp_worker_params_t {
        field_mask,
        thread_mode,
        cpu_mask,
        events,
        user_data,
        event_fd,
        flags,
        name,
        am_alignment,
        client_id
    });
    fields!(ucp_err_handler_t { cb, arg });
    fields!(ucs_sock_addr_t { addr, addrlen });
    fields!(ucp_ep_params_t {
        field_mask,
        address,
        err_mode,
        err_handler,
        user_data,
        flags,
        sockaddr,
        conn_request,
        name,
        local_sockaddr
    });
    fields!(ucp_mem_map_params_t { field_mask, address, length, flags, prot, memory_type });
    fields!(ucp_request_param_t {
        op_attr_mask,
        flags,
        request,
        cb,
        datatype,
        user_data,
        reply_buffer,
        memory_type,
        recv_info,
        memh
    });
    all.push(("sizeof(ucs_status_t)".to_owned(), size_of::<ucs_status_t>() as i64));
    constants! {
        UCS_OK UCS_INPROGRESS UCS_ERR_NO_DEVICE UCS_ERR_BUSY UCS_ERR_CANCELED UCS_ERR_LAST
        UCP_ERR_HANDLING_MODE_PEER UCS_THREAD_MODE_SERIALIZED UCP_OP_ATTR_FIELD_CALLBACK
        UCP_OP_ATTR_FIELD_USER_DATA UCP_OP_ATTR_FIELD_FLAGS UCP_EP_CLOSE_FLAG_FORCE
        UCP_MEM_MAP_PROT_LOCAL_READ UCP_MEM_MAP_PROT_LOCAL_WRITE UCP_MEM_MAP_PROT_REMOTE_READ
        UCP_OP_ATTR_FIELD_MEMORY_TYPE UCP_OP_ATTR_FIELD_MEMH UCS_MEMORY_TYPE_HOST
    }
    macro_rules! masks {
        ($($name:ident)*) => {
            $(all.push((stringify!($name).to_owned(), $name as i64));)*
        };
    }
    masks! {
        UCP_PARAM_FIELD_FEATURES UCP_FEATURE_RMA UCP_FEATURE_WAKEUP
        UCP_WORKER_PARAM_FIELD_THREAD_MODE UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE UCP_EP_PARAM_FIELD_ERR_HANDLER
        UCP_MEM_MAP_PARAM_FIELD_ADDRESS UCP_MEM_MAP_PARAM_FIELD_LENGTH UCP_MEM_MAP_PARAM_FIELD_PROT
    }
    all
}

#[test]
fn the_bindings_are_those_of_the_header() {
    if !std::path::Path::new(HEADER).exists() {
        return println!("skipped: this machine has no header of UCX (Debian: libucx-dev)");
    }
    let ours = ours();
    let mut source =
        "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\nint main(void) {\n"
            .to_owned();
    for (name, _) in &ours {
        writeln!(source, "printf(\"%lld\\n\", (long long)({name}));").expect("it grows");
    }
    source += "return 0; }\n";
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (folder.path().join("it.c"), folder.path().join("it"));
    std::fs::write(&from, source).expect("ours");
    let built = Command::new("cc").arg("-o").arg(&to).arg(&from).status();
    assert!(built.expect("the linker of Rust").success());
    let printed = Command::new(&to).output().expect("it was just built").stdout;
    let printed = String::from_utf8(printed).expect("numbers");
    let theirs = printed.lines().map(|it| it.parse::<i64>().expect("a number"));
    for ((name, ours), theirs) in ours.iter().zip(theirs) {
        assert_eq!(*ours, theirs, "{name}");
    }
    assert_eq!(printed.lines().count(), ours.len());
}
