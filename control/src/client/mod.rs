//! A worker's side of the stream, for code that is not async.
//!
//! In: the worker's hello, and its messages through a bounded queue. Out: the controller's messages, through another queue. A
//! thread of its own runs the stream. When the controller goes away it opens the stream again, with growing pauses.
//!
//! ```text
//! attach ──► connecting ──► Hello sent ──► Welcome ──► what was said before ──► attached ──Bye──► heard ──► left
//!                ▲              │ refused ──► ended              │                 │               │
//!                └───── pause ──┴────────────────────────────────┴─────────────────┴───────────────┘ stream broke
//! ```
//!
//! The hello of a later stream also has what the controller gave to the worker: the session and, for a conductor, the last view.
//! After its Welcome the worker repeats what a controller has to know (`said.rs`): the last step, its end, Bye. So a controller
//! that keeps no state goes on where another left off, also when that one had read everything and was lost before anybody else
//! knew. Receipts for single messages would not achieve that: a worker would not repeat what the lost controller had read.
//!
//! Guarantees: a worker leaves only after a controller has read all lasting messages, in order; it may read them twice. Other
//! messages arrive at most once. Those in flight are lost when a stream breaks. While no controller listens, only the newest
//! 1,024 are kept. Nothing here blocks the sender.

mod said;
mod session;

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};

use self::session::{Parting, Session};
use crate::endpoint::Endpoint;
use crate::proto::{Bye, ControllerMessage, Hello, Welcome, WorkerMessage, worker_message};

/// Maximum messages that wait for the thread of the stream.
const MAX_OUTGOING: usize = 8192;
/// Maximum messages that are kept while no controller listens, beside the lasting ones.
const MAX_KEPT: usize = 1024;
/// Maximum messages that wait for the worker.
const MAX_INCOMING: usize = 256;

/// Deadlines and pauses of a worker's stream.
pub struct Options {
    /// Longest wait for the first `Welcome`; none waits and retries without end.
    pub welcome: Option<Duration>,
    /// Longest wait for a connection. It is also the longest wait after `Bye` for the controller to read everything, before
    /// another attempt.
    pub connect: Duration,
    /// First pause after a broken stream; doubles up to `longest_pause`.
    pub first_pause: Duration,
    /// Longest pause between attempts.
    pub longest_pause: Duration,
    /// Wakes the thread that polls the receiver; called after each message is put into it.
    pub wake: Box<dyn Fn() + Send>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            welcome: Some(Duration::from_secs(30)),
            connect: Duration::from_secs(5),
            first_pause: Duration::from_millis(50),
            longest_pause: Duration::from_secs(2),
            wake: Box::new(|| {}),
        }
    }
}

/// The attachment of a worker to its controller.
#[derive(Debug)]
pub struct Attachment {
    /// The first welcome. Those of later streams come through the receiver.
    pub welcome: Welcome,
    /// To the controller.
    pub sender: Sender,
    /// From the controller; disconnected once the worker has left or was refused.
    pub receiver: Receiver<ControllerMessage>,
}

/// Opens the stream and waits for the controller's welcome.
///
/// Starts one thread, which ends after [`Sender::leave`], when every sender is dropped, or when the
/// controller refuses the worker.
pub fn attach(endpoint: Endpoint, hello: Hello, options: Options) -> Result<Attachment, Error> {
    let patience = options.welcome;
    let (outgoing, queue) = mpsc::channel(MAX_OUTGOING);
    let (inbox, receiver) = sync_channel(MAX_INCOMING);
    let (first, welcomed) = sync_channel(1);
    let end = Arc::new(End::default());
    let name = endpoint.to_string();
    let trouble = Arc::<Mutex<String>>::default();
    let last = Arc::clone(&trouble);
    let session = Session::new((endpoint, hello), options, (queue, inbox), first, trouble);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Error::Start { source })?;
    let ended = Arc::clone(&end);
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || {
            let parting = runtime.block_on(async {
                tokio::select! {
                    parting = session.run() => parting,
                    () = ended.given_up.notified() => Parting::Unheard,
                }
            });
            ended.reached(parting);
        })
        .map_err(|source| Error::Start { source })?;
    let answer = match patience {
        Some(patience) => welcomed.recv_timeout(patience),
        None => welcomed.recv().map_err(|_| RecvTimeoutError::Disconnected),
    };
    match answer {
        Ok(Ok(welcome)) => Ok(Attachment { welcome, sender: Sender { outgoing, end }, receiver }),
        Ok(Err(refusal)) => Err(refusal),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            let trouble = last.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let patience = patience.unwrap_or_default();
            Err(Error::NoWelcome { endpoint: name, patience, trouble })
        }
    }
}

/// Queues messages for the controller.
#[derive(Clone, Debug)]
pub struct Sender {
    outgoing: mpsc::Sender<WorkerMessage>,
    end: Arc<End>,
}

impl Sender {
    /// Queues a message; never blocks. It drops reports of the live load when half of the queue is full.
    pub fn send(&self, message: impl Into<WorkerMessage>) -> Result<(), Error> {
        let message = message.into();
        let live = matches!(message.message, Some(worker_message::Message::ServerReport(_)));
        if live && self.outgoing.capacity() < MAX_OUTGOING / 2 {
            return Ok(());
        }
        self.outgoing.try_send(message).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => Error::Full,
            mpsc::error::TrySendError::Closed(_) => Error::Ended,
        })
    }

    /// Sends `Bye` and waits until a controller has read all lasting messages, at most for `deadline`. The stream is over then.
    ///
    /// # Errors
    ///
    /// The deadline has passed, or the controller has refused the worker meanwhile.
    pub fn leave(&self, deadline: Duration) -> Result<(), Error> {
        self.send(Bye {})?;
        match self.end.wait(deadline) {
            Some(Parting::Heard) => Ok(()),
            Some(Parting::Unheard) => Err(Error::Ended),
            None => {
                self.end.given_up.notify_one();
                Err(Error::Undelivered { deadline })
            }
        }
    }
}

/// The result of the session's thread, once it has ended.
#[derive(Debug, Default)]
struct End {
    parting: Mutex<Option<Parting>>,
    changed: Condvar,
    /// Wakes the session's thread when the worker stops waiting for it.
    given_up: Notify,
}

impl End {
    fn reached(&self, parting: Parting) {
        *self.parting.lock().unwrap_or_else(PoisonError::into_inner) = Some(parting);
        self.changed.notify_all();
    }

    fn wait(&self, deadline: Duration) -> Option<Parting> {
        let parting = self.parting.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(parting, deadline, |it| it.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Why a worker cannot talk to its controller.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No thread or no runtime.
    #[error("control client cannot start: {source}; check the limits on open files and threads")]
    Start {
        /// The system's error.
        source: std::io::Error,
    },
    /// The controller refused the worker.
    #[error("refused by the controller: {reason}")]
    Refused {
        /// The controller's reason.
        reason: String,
    },
    /// No controller answered in time.
    #[error(
        "no welcome from the controller at {endpoint} within {patience:?}; is it running? {trouble}"
    )]
    NoWelcome {
        /// Address of the controller.
        endpoint: String,
        /// The time that was waited.
        patience: Duration,
        /// Why the last attempt failed.
        trouble: String,
    },
    /// The queue to the thread of the stream is full.
    #[error("queue to the controller is full; the message is dropped")]
    Full,
    /// The stream is over.
    #[error("the stream to the controller has ended; the message is dropped")]
    Ended,
    /// The controller did not read everything in time.
    #[error("the controller did not take the last messages within {deadline:?}")]
    Undelivered {
        /// The time that was waited.
        deadline: Duration,
    },
}
