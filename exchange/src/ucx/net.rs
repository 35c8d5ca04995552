//! UCX as a process uses it: a context, a worker that answers readers, and one that reads.
//!
//! In: memory to show, what owners said of theirs, reads. Out: what of the reads has ended.
//!
//! ```text
//! context ── memories (shown to readers)
//!    ├─ serving: its address is what readers get
//!    └─ reading ── ends: one for each owner ── keys of its memories ── reads under way
//! ```
//!
//! There is no way to call a read back but to close its end by force, and where UCX emulates reads even that waits for the owner.
//! So a close waits a little, and then the reading worker goes with all its ends: after that nothing is written any more. Owners
//! are not disturbed: they are served by the other worker.
//!
//! Invariant: a read is told once, by [`Net::begin`] or by [`Net::done`], and after that nothing is written for it.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cadre_ucx_sys::{Ucx, bindings as b};

use super::{Transports, UcxError};
use crate::shared::Stretch;

/// How long the close of an end may take before its worker goes.
const CLOSING: Duration = Duration::from_millis(20);

/// Turns of a worker before others have theirs.
const TURNS: usize = 256;

/// Zeros behind what a peer says, so that UCX reads no other memory when a length in it lies.
const MARGIN: usize = 4096;

/// Words of the longest read of [`Net::peek`].
const WORDS: usize = 64;

/// The way to an owner.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct EndId(u64);

/// Opens a memory of an owner to reads over its end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct KeyId(usize);

/// A read under way.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct GetId(u64);

/// Where a read is to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    pub(crate) end: EndId,
    pub(crate) key: KeyId,
    /// Address in the owner's process.
    pub(crate) from: u64,
}

/// A read that was begun.
pub(crate) enum Begun {
    /// It is over already.
    Over,
    /// [`Net::done`] tells its end.
    Flying(GetId),
}

/// A read that ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) get: GetId,
    /// What [`Net::peek`] has read.
    pub(crate) words: Vec<u64>,
    pub(crate) result: Result<(), String>,
}

/// What callbacks leave.
#[derive(Default)]
struct Told {
    done: Vec<(u64, b::ucs_status_t)>,
    /// Endpoints that failed.
    failed: Vec<(usize, b::ucs_status_t)>,
}

type Queue = Mutex<Told>;

/// What a callback of a read gets.
struct Note {
    queue: Arc<Queue>,
    get: u64,
    free: unsafe extern "C" fn(*mut c_void),
}

struct End {
    ep: b::ucp_ep_h,
    /// Whether `ep` was closed; it may still have reads under way.
    is_closed: bool,
    /// The close that is under way.
    closing: Option<NonNull<c_void>>,
    keys: Vec<b::ucp_rkey_h>,
    flying: usize,
}

struct Reading {
    worker: b::ucp_worker_h,
    queue: Arc<Queue>,
    ends: BTreeMap<u64, End>,
    /// Reads under way: of which end, and their words.
    gets: BTreeMap<u64, (u64, Option<Box<[u64; WORDS]>>)>,
}

/// See the module.
pub(crate) struct Net {
    ucx: &'static Ucx,
    context: b::ucp_context_h,
    serving: b::ucp_worker_h,
    reading: Option<Reading>,
    memories: Vec<(b::ucp_mem_h, Stretch)>,
    done: VecDeque<Done>,
    failed: VecDeque<(EndId, String)>,
    next: u64,
}

// SAFETY: the handles are used by whoever has the `Net`, one thread at a time; UCX keeps nothing in the thread that made them.
unsafe impl Send for Net {}

unsafe extern "C" fn ended(request: *mut c_void, status: b::ucs_status_t, note: *mut c_void) {
    // SAFETY: UCX gives back what `begin` gave it, once.
    let note = unsafe { Box::from_raw(note.cast::<Note>()) };
    note.queue.lock().unwrap_or_else(PoisonError::into_inner).done.push((note.get, status));
    // SAFETY: the request has ended, and nobody else has it.
    unsafe { (note.free)(request) };
}

unsafe extern "C" fn failed(queue: *mut c_void, ep: b::ucp_ep_h, status: b::ucs_status_t) {
    // SAFETY: the queue lives as long as the worker that calls this.
    let queue = unsafe { &*queue.cast::<Queue>() };
    let mut told = queue.lock().unwrap_or_else(PoisonError::into_inner);
    told.failed.push((ep as usize, status));
}

fn call(ucx: &Ucx, what: &'static str, status: b::ucs_status_t) -> Result<(), UcxError> {
    if status == b::UCS_OK {
        return Ok(());
    }
    Err(UcxError::Call { what, why: ucx.meaning(status) })
}

/// A context with these settings over those of the environment.
fn context(ucx: &Ucx, settings: &[(&str, &str)]) -> Result<b::ucp_context_h, (b::ucs_status_t, UcxError)> {
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
    // SAFETY: the stream is open while this runs.
    let printed =
        ucx.printed(|of, stream| unsafe { (of.ucp_context_print_info)(context, stream) });
    // SAFETY: it was just made, and nothing of it is left.
    unsafe { (ucx.functions.ucp_cleanup)(context) };
    Ok(printed)
}

impl Net {
    /// Opens the devices of these transports.
    pub(crate) fn open(transports: Transports) -> Result<Self, UcxError> {
        let ucx = cadre_ucx_sys::ucx().map_err(Clone::clone)?;
        let context = context(ucx, &transports.settings(ucx.version())).map_err(|it| match it {
            (b::UCS_ERR_NO_DEVICE, _) => UcxError::NoDevice { asked: transports.names() },
            (_, error) => error,
        })?;
        let (memories, done, failed) = (Vec::new(), VecDeque::new(), VecDeque::new());
        let serving = ptr::null_mut();
        let mut net =
            Self { ucx, context, serving, reading: None, memories, done, failed, next: 0 };
        net.serving = net.worker()?;
        Ok(net)
    }

    fn worker(&self) -> Result<b::ucp_worker_h, UcxError> {
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
        let status = unsafe { create(self.context, &raw const params, &raw mut worker) };
        call(self.ucx, "make a worker", status).map(|()| worker)
    }

    /// What readers get to know of this process.
    pub(crate) fn address(&self) -> Result<Vec<u8>, UcxError> {
        let of = &self.ucx.functions;
        let (mut address, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the worker is open; it writes both.
        let status =
            unsafe { (of.ucp_worker_get_address)(self.serving, &raw mut address, &raw mut bytes) };
        call(self.ucx, "say its address", status)?;
        // SAFETY: the address has so many bytes until it is released.
        let copy = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) }.to_vec();
        // SAFETY: it was just given, and is released once.
        unsafe { (of.ucp_worker_release_address)(self.serving, address) };
        Ok(copy)
    }

    /// Lets readers who get these bytes read a memory, as long as this lives.
    pub(crate) fn show(&mut self, memory: Stretch) -> Result<Vec<u8>, UcxError> {
        let of = &self.ucx.functions;
        let params = b::ucp_mem_map_params_t {
            field_mask: b::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | b::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | b::UCP_MEM_MAP_PARAM_FIELD_PROT,
            address: memory.address() as *mut c_void,
            length: memory.len_bytes(),
            flags: 0,
            prot: b::UCP_MEM_MAP_PROT_LOCAL_READ | b::UCP_MEM_MAP_PROT_REMOTE_READ,
            memory_type: 0,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the memory is mapped as long as the stretch lives, which is kept until it is no longer registered.
        let status = unsafe { (of.ucp_mem_map)(self.context, &raw const params, &raw mut handle) };
        call(self.ucx, "register memory; raise the limit of locked memory (ulimit -l)", status)?;
        self.memories.push((handle, memory));
        let (mut key, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the memory was just registered; it writes both.
        let status =
            unsafe { (of.ucp_rkey_pack)(self.context, handle, &raw mut key, &raw mut bytes) };
        call(self.ucx, "make a key of memory", status)?;
        // SAFETY: the key has so many bytes until it is released.
        let copy = unsafe { std::slice::from_raw_parts(key.cast::<u8>(), bytes) }.to_vec();
        // SAFETY: it was just given, and is released once.
        unsafe { (of.ucp_rkey_buffer_release)(key) };
        Ok(copy)
    }

    fn open_reading(&mut self) -> Result<&mut Reading, UcxError> {
        if self.reading.is_none() {
            let (worker, queue) = (self.worker()?, Arc::default());
            let (ends, gets) = (BTreeMap::new(), BTreeMap::new());
            self.reading = Some(Reading { worker, queue, ends, gets });
        }
        Ok(self.reading.as_mut().expect("just made"))
    }

    /// Opens a way to the owner with this address. Whether it is there shows the first read.
    pub(crate) fn connect(&mut self, address: &[u8]) -> Result<EndId, UcxError> {
        let id = self.next;
        let ucx = self.ucx;
        let reading = self.open_reading()?;
        let address = padded(address);
        let nothing = || b::ucs_sock_addr_t { addr: ptr::null(), addrlen: 0 };
        let params = b::ucp_ep_params_t {
            field_mask: b::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | b::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | b::UCP_EP_PARAM_FIELD_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: b::UCP_ERR_HANDLING_MODE_PEER,
            err_handler: b::ucp_err_handler_t {
                cb: Some(failed),
                arg: Arc::as_ptr(&reading.queue).cast_mut().cast(),
            },
            user_data: ptr::null_mut(),
            flags: 0,
            sockaddr: nothing(),
            conn_request: ptr::null_mut(),
            name: ptr::null(),
            local_sockaddr: nothing(),
        };
        let mut ep = ptr::null_mut();
        let create = ucx.functions.ucp_ep_create;
        // SAFETY: the worker is open, the address stays until it returns, and the mask says which fields count.
        let status = unsafe { create(reading.worker, &raw const params, &raw mut ep) };
        call(ucx, "reach the owner", status)?;
        let (keys, closing) = (Vec::new(), None);
        reading.ends.insert(id, End { ep, is_closed: false, closing, keys, flying: 0 });
        self.next += 1;
        Ok(EndId(id))
    }

    /// Takes what an owner says of a memory.
    pub(crate) fn unpack(&mut self, end: EndId, key: &[u8]) -> Result<KeyId, UcxError> {
        let gone = UcxError::Call { what: "use a key", why: "its way is closed".to_owned() };
        let end = self.reading.as_mut().and_then(|it| it.ends.get_mut(&end.0)).ok_or(gone)?;
        let packed = padded(key);
        let mut handle = ptr::null_mut();
        let unpack = self.ucx.functions.ucp_ep_rkey_unpack;
        // SAFETY: the endpoint is open, and the bytes stay until it returns.
        let status = unsafe { unpack(end.ep, packed.as_ptr().cast(), &raw mut handle) };
        call(self.ucx, "use a key", status)?;
        end.keys.push(handle);
        Ok(KeyId(end.keys.len() - 1))
    }

    /// Begins to read at most 64 whole words into memory of its own.
    pub(crate) fn peek(&mut self, read: Read, bytes: usize) -> Result<GetId, String> {
        assert!(bytes <= WORDS * 8, "{bytes} bytes are more than a look has");
        let mut words = Box::new([0; WORDS]);
        let to = NonNull::from(&mut *words).cast();
        // SAFETY: the words stay in the table of reads until this one has ended, or with the worker that it is of.
        match unsafe { self.begin(read, to, bytes) }? {
            Begun::Flying(get) => {
                let reading = self.reading.as_mut().expect("it reads");
                if let Some((_, kept)) = reading.gets.get_mut(&get.0) {
                    *kept = Some(words);
                }
                Ok(get)
            }
            Begun::Over => {
                let get = GetId(self.next);
                self.next += 1;
                self.done.push_back(Done { get, words: words.to_vec(), result: Ok(()) });
                Ok(get)
            }
        }
    }

    /// Begins a read.
    ///
    /// # Safety
    ///
    /// `to` may be written for `bytes` bytes, by nobody else, until the read has ended, or this is dropped.
    pub(super) unsafe fn begin(
        &mut self,
        read: Read,
        to: NonNull<u8>,
        bytes: usize,
    ) -> Result<Begun, String> {
        let closed = || "the way to the owner is closed".to_owned();
        let reading = self.reading.as_mut().ok_or_else(closed)?;
        let end = reading.ends.get_mut(&read.end.0).filter(|it| !it.is_closed);
        let end = end.ok_or_else(closed)?;
        let key = *end.keys.get(read.key.0).ok_or_else(closed)?;
        let (queue, get) = (Arc::clone(&reading.queue), self.next);
        self.next += 1;
        let note = Box::new(Note { queue, get, free: self.ucx.functions.ucp_request_free });
        let note = Box::into_raw(note);
        let param = request(
            b::UCP_OP_ATTR_FIELD_CALLBACK | b::UCP_OP_ATTR_FIELD_USER_DATA,
            0,
            Some(ended),
            note.cast(),
        );
        let (to, from) = (to.as_ptr().cast(), read.from);
        // SAFETY: the endpoint is open and the key is of it; the caller keeps the memory.
        let status = unsafe {
            (self.ucx.functions.ucp_get_nbx)(end.ep, to, bytes, from, key, &raw const param)
        };
        match taken(status) {
            Ok(Some(_)) => {
                end.flying += 1;
                reading.gets.insert(get, (read.end.0, None));
                Ok(Begun::Flying(GetId(get)))
            }
            over => {
                // SAFETY: no callback comes for it.
                drop(unsafe { Box::from_raw(note) });
                over.map(|_| Begun::Over).map_err(|it| self.ucx.meaning(it))
            }
        }
    }

    /// Lets both workers do what they can: whether there may be more.
    pub(crate) fn progress(&mut self) -> bool {
        let mut is_more = false;
        let reading = self.reading.as_ref().map_or(ptr::null_mut(), |it| it.worker);
        for worker in [self.serving, reading] {
            let mut turns = 0;
            // SAFETY: the worker is open.
            while !worker.is_null()
                && unsafe { (self.ucx.functions.ucp_worker_progress)(worker) } > 0
            {
                turns += 1;
                if turns == TURNS {
                    is_more = true;
                    break;
                }
            }
        }
        self.collect();
        is_more
    }

    /// Takes in what callbacks have left.
    fn collect(&mut self) {
        let Some(reading) = &mut self.reading else { return };
        let told = {
            let mut told = reading.queue.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *told)
        };
        for (get, status) in told.done {
            let Some((end, words)) = reading.gets.remove(&get) else { continue };
            if let Some(end) = reading.ends.get_mut(&end) {
                end.flying -= 1;
            }
            let words = words.map_or_else(Vec::new, |it| it.to_vec());
            let result =
                if status == b::UCS_OK { Ok(()) } else { Err(self.ucx.meaning(status)) };
            self.done.push_back(Done { get: GetId(get), words, result });
        }
        for (ep, status) in told.failed {
            let of = |it: &(&u64, &End)| it.1.ep as usize == ep && !it.1.is_closed;
            if let Some((id, _)) = reading.ends.iter().find(of) {
                self.failed.push_back((EndId(*id), self.ucx.meaning(status)));
            }
        }
    }

    /// The next read that has ended.
    pub(crate) fn done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// The next end whose owner is gone; it is to be closed.
    pub(crate) fn failed(&mut self) -> Option<(EndId, String)> {
        self.failed.pop_front()
    }

    /// Closes an end by force. When this returns, none of its reads is under way: [`Self::done`] tells each of them. Where UCX does
    /// not end them in time, all other ends are closed with it.
    pub(crate) fn close(&mut self, end: EndId) {
        let Some(reading) = &mut self.reading else { return };
        let Some(it) = reading.ends.get_mut(&end.0).filter(|it| !it.is_closed) else { return };
        it.is_closed = true;
        let param = request(
            b::UCP_OP_ATTR_FIELD_FLAGS,
            b::UCP_EP_CLOSE_FLAG_FORCE,
            None,
            ptr::null_mut(),
        );
        // SAFETY: the endpoint is open, and is not used after this.
        let status = unsafe { (self.ucx.functions.ucp_ep_close_nbx)(it.ep, &raw const param) };
        it.closing = taken(status).unwrap_or_default();
        let until = Instant::now() + CLOSING;
        while !self.is_over(end) {
            if Instant::now() >= until {
                return self.cut();
            }
            self.progress();
        }
    }

    /// Whether the close of an end has ended, with all its reads; then nothing of it is left.
    fn is_over(&mut self, id: EndId) -> bool {
        let of = &self.ucx.functions;
        let Some(reading) = &mut self.reading else { return true };
        let Some(end) = reading.ends.get_mut(&id.0) else { return true };
        if let Some(closing) = end.closing {
            // SAFETY: it is a request that was not freed yet.
            if unsafe { (of.ucp_request_check_status)(closing.as_ptr()) } == b::UCS_INPROGRESS {
                return false;
            }
            // SAFETY: it has ended, and nobody else has it.
            unsafe { (of.ucp_request_free)(closing.as_ptr()) };
            end.closing = None;
        }
        if end.flying > 0 {
            return false;
        }
        for key in std::mem::take(&mut end.keys) {
            // SAFETY: no read uses it any more.
            unsafe { (of.ucp_rkey_destroy)(key) };
        }
        reading.ends.remove(&id.0);
        true
    }

    /// Ends the reading worker with all its ends.
    fn cut(&mut self) {
        let Some(reading) = &mut self.reading else { return };
        let of = &self.ucx.functions;
        for end in reading.ends.values_mut() {
            for key in std::mem::take(&mut end.keys) {
                // SAFETY: what still uses it ends with the worker, before anything else is done with it.
                unsafe { (of.ucp_rkey_destroy)(key) };
            }
        }
        // SAFETY: it is destroyed once: nothing else has it after this.
        unsafe { (of.ucp_worker_destroy)(reading.worker) };
        self.collect();
        let Some(Reading { gets, ends, .. }) = self.reading.take() else { return };
        // Notes of these are never read again.
        for get in gets.into_keys() {
            let result = Err("its worker was ended".to_owned());
            self.done.push_back(Done { get: GetId(get), words: Vec::new(), result });
        }
        for (id, _) in ends.into_iter().filter(|it| !it.1.is_closed) {
            self.failed.push_back((EndId(id), "its worker was ended".to_owned()));
        }
    }

    /// What UCX prints of an end.
    pub(crate) fn lanes(&self, end: EndId) -> String {
        let end = self.reading.as_ref().and_then(|it| it.ends.get(&end.0));
        let Some(end) = end.filter(|it| !it.is_closed) else { return String::new() };
        // SAFETY: the endpoint is open, and the stream while this runs.
        self.ucx.printed(|of, stream| unsafe { (of.ucp_ep_print_info)(end.ep, stream) })
    }

    /// Readies the descriptors to wake who waits for them: false where there is something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        let reading = self.reading.as_ref().map_or(ptr::null_mut(), |it| it.worker);
        [self.serving, reading].into_iter().filter(|it| !it.is_null()).all(|worker| {
            // SAFETY: the worker is open.
            unsafe { (self.ucx.functions.ucp_worker_arm)(worker) != b::UCS_ERR_BUSY }
        })
    }

    /// What becomes readable when there is something to do: of the serving worker, and of the reading one if there is one.
    pub(crate) fn descriptors(&self) -> Result<(BorrowedFd<'_>, Option<BorrowedFd<'_>>), UcxError> {
        let of = |worker| {
            let mut descriptor = -1;
            // SAFETY: the worker is open; it writes the number.
            let status = unsafe {
                (self.ucx.functions.ucp_worker_get_efd)(worker, &raw mut descriptor)
            };
            call(self.ucx, "wake who waits for it", status)?;
            // SAFETY: it is open as long as its worker, which goes no sooner than what borrows from it.
            Ok::<_, UcxError>(unsafe { BorrowedFd::borrow_raw(descriptor) })
        };
        let reading = self.reading.as_ref().map(|it| of(it.worker)).transpose()?;
        Ok((of(self.serving)?, reading))
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.cut();
        let of = &self.ucx.functions;
        if !self.serving.is_null() {
            // SAFETY: it is destroyed once.
            unsafe { (of.ucp_worker_destroy)(self.serving) };
        }
        for (memory, _mapped) in self.memories.drain(..) {
            // SAFETY: it was registered once, and is mapped still.
            unsafe { (of.ucp_mem_unmap)(self.context, memory) };
        }
        // SAFETY: nothing of it is left.
        unsafe { (of.ucp_cleanup)(self.context) };
    }
}

fn padded(said: &[u8]) -> Vec<u8> {
    [said, &[0; MARGIN]].concat()
}

fn request(
    op_attr_mask: u32,
    flags: u32,
    cb: b::ucp_send_nbx_callback_t,
    user_data: *mut c_void,
) -> b::ucp_request_param_t {
    b::ucp_request_param_t {
        op_attr_mask,
        flags,
        request: ptr::null_mut(),
        cb,
        datatype: 0,
        user_data,
        reply_buffer: ptr::null_mut(),
        memory_type: 0,
        recv_info: ptr::null_mut(),
        memh: ptr::null_mut(),
    }
}

/// What UCX has answered: done, a request, or an error.
fn taken(status: b::ucs_status_ptr_t) -> Result<Option<NonNull<c_void>>, b::ucs_status_t> {
    let number = status as isize;
    if (isize::from(b::UCS_ERR_LAST)..0).contains(&number) {
        return Err(number as b::ucs_status_t);
    }
    Ok(NonNull::new(status))
}
