//! A worker's side of the stream, for code that is not async.
//!
//! In: who the worker is and what it has to say, through a bounded queue. Out: what the controller
//! says, through another. A thread of its own runs the stream and opens it again, with growing
//! pauses, when the controller goes away.
//!
//! ```text
//! attach ──► connecting ──► Hello sent ──► Welcome ──► what was said before ──► attached ──Bye──► heard ──► left
//!                ▲              │ refused ──► ended              │                 │               │
//!                └───── pause ──┴────────────────────────────────┴─────────────────┴───────────────┘ stream broke
//! ```
//!
//! The hello of a later stream also says what the worker has got from the controller: the session and,
//! to a conductor, the last view. After its Welcome the worker says again what a controller has to know
//! (`said.rs`): the last step, its end, Bye. So a controller that keeps nothing goes on where
//! another left off, also when that one had read everything and was lost before anybody else knew.
//! Receipts for each message would not give that: what the lost one had read would not be said again.
//!
//! Guarantees: a worker has left when a controller has taken all that lasts, in order. That it may hear twice.
//! Of the rest each message is delivered at most once: those on their way when a stream breaks are
//! lost, and of those that come while no controller listens all but the newest 1,024. Nothing here blocks
//! the sender.

mod said;
mod session;

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};

use self::session::{Parting, Session};
use crate::endpoint::Endpoint;
use crate::proto::{Bye, ControllerMessage, Hello, Welcome, WorkerMessage, worker_message};

/// Messages that wait for the thread that talks to the controller.
const MAX_OUTGOING: usize = 8192;
/// Messages that wait while no controller listens, beside those that last.
const MAX_KEPT: usize = 1024;
/// Messages that wait for the worker.
const MAX_INCOMING: usize = 256;

/// How patient a worker is.
pub struct Options {
    /// Longest wait for the first `Welcome`; none: as long as it takes, tried again and again.
    pub welcome: Option<Duration>,
    /// Longest wait for a connection, and after `Bye` for the controller to have read everything, before
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

/// A worker known to its controller.
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
    /// Queues a message; never blocks. Live reports give way when half of the queue is taken.
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

    /// Says goodbye and waits until a controller has read everything that lasts, at most for `deadline`; the
    /// stream is over then.
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

/// How the session's thread has ended, if it has.
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
        /// What the system said.
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
        /// How long was waited.
        patience: Duration,
        /// What came of the last attempt.
        trouble: String,
    },
    /// More messages at once than the thread that talks to the controller takes.
    #[error("queue to the controller is full; the message is dropped")]
    Full,
    /// The stream is over.
    #[error("the stream to the controller has ended; the message is dropped")]
    Ended,
    /// The controller did not read everything in time.
    #[error("the controller did not take the last messages within {deadline:?}")]
    Undelivered {
        /// How long was waited.
        deadline: Duration,
    },
}
