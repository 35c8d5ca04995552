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
//! UCX can cancel a read only by closing its endpoint by force, and where it emulates reads even that waits for the owner. So a
//! close waits a short time, and the endpoint may linger after it: its reads are returned as they end. An endpoint that lingers
//! for too long can be destroyed together with the reading worker and all its endpoints. Readers of this process are not
//! disturbed, since the other worker serves them.
//!
//! Invariant: the end of a read is returned once, by [`Net::begin`] or by [`Net::done`], and after that nothing writes for it.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cadre_ucx_sys::bindings as b;

use super::calls::{Note, Queue, ended, failed, padded, request, taken};
use super::context::{Context, call};
use super::{Transports, UcxError};
use crate::shared::Stretch;

/// Maximum turns of a worker before the rest of the poll is served.
const TURNS: usize = 256;

/// Longest wait of [`Net::close`] for the close of an endpoint.
const CLOSING: Duration = Duration::from_millis(20);

/// Words of the longest read of [`Net::peek`].
const WORDS: usize = 64;

/// The endpoint to an owner.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct EndId(pub(super) u64);

/// The key that opens an owner's memory to reads over one endpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct KeyId(usize);

/// A read under way.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct GetId(pub(super) u64);

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
    /// The read is over already.
    Over,
    /// The read is in flight; [`Net::done`] returns its end.
    Flying(GetId),
}

/// The end of a read.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) get: GetId,
    /// What [`Net::peek`] has read.
    pub(crate) words: Vec<u64>,
    pub(crate) result: Result<(), String>,
}

pub(super) struct End {
    pub(super) ep: b::ucp_ep_h,
    /// Whether a close of `ep` has begun; reads of it may still be in flight.
    pub(super) is_closed: bool,
    /// The close that is under way.
    pub(super) closing: Option<NonNull<c_void>>,
    pub(super) keys: Vec<b::ucp_rkey_h>,
    pub(super) flying: usize,
}

/// What a look reads.
type Words = Box<[u64; WORDS]>;

pub(super) struct Reading {
    pub(super) worker: b::ucp_worker_h,
    pub(super) queue: Arc<Queue>,
    /// Whether the worker's descriptor is watched.
    pub(super) is_watched: bool,
    pub(super) ends: BTreeMap<u64, End>,
    /// Closed endpoints whose close is not over.
    pub(super) lingering: Vec<EndId>,
    /// Reads in flight: the endpoint of each, and the words that it writes.
    pub(super) gets: BTreeMap<u64, (u64, Option<Words>)>,
}

/// See the module.
pub(crate) struct Net {
    pub(super) context: Context,
    /// Whether UCX emulates reads by messages, which the processors of owner and reader handle.
    pub(super) emulates: bool,
    pub(super) serving: b::ucp_worker_h,
    pub(super) reading: Option<Reading>,
    pub(super) done: VecDeque<Done>,
    pub(super) failed: VecDeque<(EndId, String)>,
    pub(super) lost: VecDeque<EndId>,
    /// Longest wait of a close for its reads.
    pub(crate) closing: Duration,
    pub(super) next: u64,
    /// Descriptors of destroyed or abandoned workers, to be unwatched.
    pub(super) left: Vec<BorrowedFd<'static>>,
}

// SAFETY: the handles are used by whoever has the `Net`, one thread at a time; UCX keeps nothing in the thread that made them.
unsafe impl Send for Net {}

impl Net {
    /// Opens the devices of these transports.
    pub(crate) fn open(transports: Transports) -> Result<Self, UcxError> {
        let context = Context::open(transports)?;
        let serving = context.worker()?;
        let (done, failed) = (VecDeque::new(), VecDeque::new());
        let emulates = transports != Transports::Rdma;
        Ok(Self {
            context,
            emulates,
            serving,
            reading: None,
            done,
            failed,
            lost: VecDeque::new(),
            closing: CLOSING,
            next: 0,
            left: Vec::new(),
        })
    }

    /// Registers memory that readers may read, as long as this lives, and returns its key of at most `longest` bytes. On an error
    /// nothing stays registered.
    pub(crate) fn show(&mut self, memory: Stretch, longest: usize) -> Result<Vec<u8>, UcxError> {
        self.context.show(memory, longest)
    }

    /// Registers memory that reads of this process may write, as long as this lives. UCX would register other memory at each
    /// read, and keep it registered after it is freed.
    pub(crate) fn hold(&mut self, memory: Stretch) -> Result<(), UcxError> {
        self.context.hold(memory)
    }

    /// Maximum bytes that one read may write from there on.
    pub(super) fn reach(&self, to: NonNull<u8>) -> usize {
        self.context.held(to.as_ptr() as usize).map_or(usize::MAX, |it| it.1)
    }

    /// Number of memories that readers can read, and of those that reads may write.
    #[cfg(test)]
    pub(crate) fn memories(&self) -> [usize; 2] {
        self.context.memories()
    }

    /// The address of the serving worker, for readers.
    pub(crate) fn address(&self) -> Result<Vec<u8>, UcxError> {
        let of = &self.context.ucx.functions;
        let (mut address, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the worker is open; it writes both.
        let status =
            unsafe { (of.ucp_worker_get_address)(self.serving, &raw mut address, &raw mut bytes) };
        call(self.context.ucx, "say its address", status)?;
        // SAFETY: the address has so many bytes until it is released.
        let copy = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) }.to_vec();
        // SAFETY: it was just given, and is released once.
        unsafe { (of.ucp_worker_release_address)(self.serving, address) };
        Ok(copy)
    }

    fn open_reading(&mut self) -> Result<&mut Reading, UcxError> {
        if self.reading.is_none() {
            let (worker, queue) = (self.context.worker()?, Arc::default());
            let (ends, gets, lingering) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
            self.reading =
                Some(Reading { worker, queue, is_watched: false, ends, lingering, gets });
        }
        Ok(self.reading.as_mut().expect("just made"))
    }

    /// Opens an endpoint to the owner with this address. Only the first read shows whether the owner is there.
    pub(crate) fn connect(&mut self, address: &[u8]) -> Result<EndId, UcxError> {
        let id = self.next;
        let ucx = self.context.ucx;
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

    /// Unpacks the key of an owner's memory.
    pub(crate) fn unpack(&mut self, end: EndId, key: &[u8]) -> Result<KeyId, UcxError> {
        let gone = UcxError::Call { what: "use a key", why: "its way is closed".to_owned() };
        let end = self.reading.as_mut().and_then(|it| it.ends.get_mut(&end.0)).ok_or(gone)?;
        let packed = padded(key);
        let mut handle = ptr::null_mut();
        let unpack = self.context.ucx.functions.ucp_ep_rkey_unpack;
        // SAFETY: the endpoint is open, and the bytes stay until it returns.
        let status = unsafe { unpack(end.ep, packed.as_ptr().cast(), &raw mut handle) };
        call(self.context.ucx, "use a key", status)?;
        end.keys.push(handle);
        Ok(KeyId(end.keys.len() - 1))
    }

    /// Begins to read at most 64 whole words into memory of its own.
    pub(crate) fn peek(&mut self, read: Read, bytes: usize) -> Result<GetId, String> {
        assert!(bytes <= WORDS * 8, "{bytes} bytes are more than a look has");
        let mut words = Box::new([0; WORDS]);
        let to = NonNull::from(&mut *words).cast();
        // SAFETY: the words stay in the table of reads until this one has ended, or with the worker that it is of.
        let begun = unsafe { self.begin(read, to, bytes) };
        match begun? {
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
        let note = Box::new(Note { queue, get, free: self.context.ucx.functions.ucp_request_free });
        let note = Box::into_raw(note);
        let mut param = request(
            b::UCP_OP_ATTR_FIELD_CALLBACK
                | b::UCP_OP_ATTR_FIELD_USER_DATA
                | b::UCP_OP_ATTR_FIELD_MEMORY_TYPE,
            0,
            Some(ended),
            note.cast(),
        );
        if let Some((held, _)) = self.context.held(to.as_ptr() as usize).filter(|it| bytes <= it.1)
        {
            param.op_attr_mask |= b::UCP_OP_ATTR_FIELD_MEMH;
            param.memh = held;
        }
        let (to, from) = (to.as_ptr().cast(), read.from);
        // SAFETY: the endpoint is open and the key is of it; the caller keeps the memory.
        let status = unsafe {
            (self.context.ucx.functions.ucp_get_nbx)(end.ep, to, bytes, from, key, &raw const param)
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
                over.map(|_| Begun::Over).map_err(|it| self.context.ucx.meaning(it))
            }
        }
    }

    /// Makes progress with both workers. Returns whether more can be done at once.
    pub(crate) fn progress(&mut self) -> bool {
        let mut is_more = false;
        let reading = self.reading.as_ref().map_or(ptr::null_mut(), |it| it.worker);
        for worker in [self.serving, reading].into_iter().filter(|it| !it.is_null()) {
            let mut turns = 0;
            loop {
                // SAFETY: the worker is open.
                let done = unsafe { (self.context.ucx.functions.ucp_worker_progress)(worker) };
                turns += 1;
                if done == 0 {
                    break;
                }
                if turns == TURNS {
                    is_more = true;
                    break;
                }
            }
        }
        self.collect();
        self.bury();
        is_more
    }

    /// Handles what callbacks have left.
    pub(super) fn collect(&mut self) {
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
                if status == b::UCS_OK { Ok(()) } else { Err(self.context.ucx.meaning(status)) };
            self.done.push_back(Done { get: GetId(get), words, result });
        }
        for (ep, status) in told.failed {
            let of = |it: &(&u64, &End)| it.1.ep as usize == ep && !it.1.is_closed;
            if let Some((id, _)) = reading.ends.iter().find(of) {
                self.failed.push_back((EndId(*id), self.context.ucx.meaning(status)));
            }
        }
    }

    /// The next read that ended.
    pub(crate) fn done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// The next endpoint that has failed because its owner is gone. The caller closes it.
    pub(crate) fn failed(&mut self) -> Option<(EndId, String)> {
        self.failed.pop_front()
    }

    /// The next endpoint that [`Self::cut`] destroyed together with another one. Nothing is wrong with its owner.
    pub(crate) fn lost(&mut self) -> Option<EndId> {
        self.lost.pop_front()
    }

    /// What UCX prints of an end.
    pub(crate) fn lanes(&self, end: EndId) -> String {
        let end = self.reading.as_ref().and_then(|it| it.ends.get(&end.0));
        let Some(end) = end.filter(|it| !it.is_closed) else { return String::new() };
        self.context.ucx.printed(|of, stream| {
            // SAFETY: the endpoint is open, and the stream while this runs.
            unsafe { (of.ucp_ep_print_info)(end.ep, stream) };
        })
    }
}
