//! A worker's side of the stream, for code that is not async.
//!
//! In: who the worker is and what it has to say, through a bounded queue. Out: what the controller
//! says, through another. A thread of its own runs the stream and opens it again, with growing
//! pauses, when the controller goes away.
//!
//! ```text
//! attach ──► connecting ──► Hello sent ──► Welcome ──► attached ──Bye──► left
//!                ▲              │ refused ──► ended         │
//!                └───── pause ──┴───────────────────────────┘ stream broke
//! ```
//!
//! The hello of a later stream also says what the worker has got from the controller: the session and,
//! to a conductor, the last view. So a controller that keeps nothing goes on where another left off.
//!
//! A message is delivered at most once: those on their way when a stream breaks are lost, those
//! still queued are not. Nothing here blocks the sender.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use crate::endpoint::Endpoint;
use crate::proto::control_client::ControlClient;
use crate::proto::{
    Bye, ControllerMessage, Hello, Welcome, WorkerMessage, controller_message, worker_message,
};

/// Messages that wait for the controller; about an hour of progress and reports.
const OUTGOING: usize = 8192;
/// Messages that wait for the worker.
const INCOMING: usize = 256;

/// How patient a worker is.
pub struct Options {
    /// Longest wait for the first `Welcome`; none: as long as it takes, tried again and again.
    pub welcome: Option<Duration>,
    /// Longest wait for a connection, and for its `Welcome`, on later attempts.
    pub connect: Duration,
    /// First pause after a broken stream; doubles up to `longest_pause`.
    pub first_pause: Duration,
    /// Longest pause between attempts.
    pub longest_pause: Duration,
    /// Called after each message put into the receiver, to wake whoever polls it.
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
    let (outgoing, queue) = mpsc::channel(OUTGOING);
    let (inbox, receiver) = sync_channel(INCOMING);
    let (first, welcomed) = sync_channel(1);
    let end = Arc::new(End::default());
    let name = endpoint.to_string();
    let trouble = Arc::<Mutex<String>>::default();
    let last = Arc::clone(&trouble);
    let session =
        Session { endpoint, hello, options, queue, kept: None, inbox, first: Some(first), trouble };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Error::Start { source })?;
    let ended = Arc::clone(&end);
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || {
            runtime.block_on(session.run());
            ended.reached();
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
        if live && self.outgoing.capacity() < OUTGOING / 2 {
            return Ok(());
        }
        self.outgoing.try_send(message).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => Error::Full,
            mpsc::error::TrySendError::Closed(_) => Error::Ended,
        })
    }

    /// Says goodbye and waits until the controller has read everything, at most for `deadline`.
    pub fn leave(&self, deadline: Duration) -> Result<(), Error> {
        self.send(Bye {})?;
        if self.end.wait(deadline) { Ok(()) } else { Err(Error::Undelivered { deadline }) }
    }
}

/// Whether the session's thread is done.
#[derive(Debug, Default)]
struct End {
    done: Mutex<bool>,
    changed: Condvar,
}

impl End {
    fn reached(&self) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn wait(&self, deadline: Duration) -> bool {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(done, deadline, |done| !*done);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The stream's owner.
struct Session {
    endpoint: Endpoint,
    hello: Hello,
    options: Options,
    queue: mpsc::Receiver<WorkerMessage>,
    /// Taken from the queue, not yet in a stream.
    kept: Option<WorkerMessage>,
    inbox: SyncSender<ControllerMessage>,
    /// Where the first welcome or the refusal goes.
    first: Option<SyncSender<Result<Welcome, Error>>>,
    /// Why the last attempt came to nothing.
    trouble: Arc<Mutex<String>>,
}

/// How a stream ended.
enum Ended {
    /// The worker said goodbye, or nobody listens to it any more.
    Left,
    /// The controller does not want this worker.
    Refused(String),
    /// Something broke; worth another attempt.
    Broken(String),
}

impl Session {
    async fn run(mut self) {
        let mut pause = self.options.first_pause;
        loop {
            let before = self.first.is_some();
            match self.stream().await {
                Ended::Left => return,
                Ended::Refused(reason) => {
                    tracing::error!(%reason, "refused by the controller");
                    if let Some(first) = self.first.take() {
                        let _ = first.send(Err(Error::Refused { reason }));
                    }
                    return;
                }
                Ended::Broken(trouble) => self.complain(trouble),
            }
            if before && self.first.is_none() {
                pause = self.options.first_pause;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(self.options.longest_pause);
        }
    }

    /// Says why an attempt failed, unless the one before said the same.
    fn complain(&self, trouble: String) {
        let mut last = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != trouble {
            tracing::info!("the controller is away: {trouble}");
            *last = trouble;
        }
    }

    /// One stream, from its connection to its end.
    async fn stream(&mut self) -> Ended {
        let connect = self.options.connect;
        let channel = match self.endpoint.connect(connect).await {
            Ok(channel) => channel,
            Err(error) => return Ended::Broken(error.to_string()),
        };
        let authorization = match self.endpoint.authorization() {
            Ok(authorization) => authorization,
            Err(error) => return Ended::Broken(error.to_string()),
        };
        let (outgoing, stream) = mpsc::channel(16);
        let opening = async {
            // The channel has just been made and has room.
            let _ = outgoing.send(self.hello.clone().into()).await;
            let mut request = Request::new(ReceiverStream::new(stream));
            if let Some(authorization) = authorization {
                request.metadata_mut().insert("authorization", authorization);
            }
            ControlClient::new(channel).attach(request).await
        };
        let mut incoming = match tokio::time::timeout(connect, opening).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return self.ended(&status),
            Err(_late) => return Ended::Broken(format!("no answer within {connect:?}")),
        };
        self.talk(outgoing, &mut incoming).await
    }

    async fn talk(
        &mut self,
        outgoing: mpsc::Sender<WorkerMessage>,
        incoming: &mut Streaming<ControllerMessage>,
    ) -> Ended {
        loop {
            if let Some(message) = self.kept.take() {
                let leaves = matches!(message.message, Some(worker_message::Message::Bye(_)));
                if let Err(mpsc::error::SendError(message)) = outgoing.send(message).await {
                    self.kept = Some(message);
                    return Ended::Broken("the stream has ended".into());
                }
                if leaves {
                    drop(outgoing);
                    return self.drain(incoming).await;
                }
            }
            tokio::select! {
                said = incoming.message() => match said {
                    Ok(Some(message)) => if !self.deliver(message).await { return Ended::Left },
                    Ok(None) => return Ended::Broken("the stream has ended".into()),
                    Err(status) => return self.ended(&status),
                },
                message = self.queue.recv() => match message {
                    Some(message) => {
                        self.remember(&message);
                        self.kept = Some(message);
                    }
                    None => return Ended::Left,
                },
            }
        }
    }

    /// After `Bye`: the controller ends the stream once it has read everything.
    async fn drain(&mut self, incoming: &mut Streaming<ControllerMessage>) -> Ended {
        let rest = async { while let Ok(Some(_)) = incoming.message().await {} };
        let _ = tokio::time::timeout(self.options.connect, rest).await;
        Ended::Left
    }

    /// Tells a refusal, which stays one, from a fault of the moment. A worker that was welcome once tries
    /// again with a token that may be new by then.
    fn ended(&self, status: &Status) -> Ended {
        let mut refusals = vec![Code::FailedPrecondition, Code::InvalidArgument];
        if self.first.is_some() {
            refusals.extend([Code::PermissionDenied, Code::Unauthenticated]);
        }
        let text = status.message().to_owned();
        if refusals.contains(&status.code()) { Ended::Refused(text) } else { Ended::Broken(text) }
    }

    /// Addresses become part of the hello of later streams.
    fn remember(&mut self, message: &WorkerMessage) {
        if let Some(worker_message::Message::Listening(listening)) = &message.message {
            self.hello.exchange_address.clone_from(&listening.exchange_address);
            self.hello.ring_address.clone_from(&listening.ring_address);
        }
    }

    /// Hands a message to the worker; false when it no longer listens.
    async fn deliver(&mut self, message: ControllerMessage) -> bool {
        if let Some(first) = self.first.take() {
            if let Some(controller_message::Message::Welcome(welcome)) = message.message {
                self.hello.session.clone_from(&welcome.session);
                return first.send(Ok(welcome)).is_ok();
            }
            self.first = Some(first);
            tracing::warn!("the controller spoke before its Welcome");
            return true;
        }
        if let Some(controller_message::Message::View(view)) = &message.message {
            self.hello.view = Some(view.clone());
        }
        let mut message = message;
        loop {
            match self.inbox.try_send(message) {
                Ok(()) => {
                    (self.options.wake)();
                    return true;
                }
                Err(TrySendError::Disconnected(_)) => return false,
                Err(TrySendError::Full(back)) => message = back,
            }
            // The worker is slow: the stream's own flow control holds the controller back.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
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
    /// The controller said no.
    #[error("refused by the controller: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// Nobody answered.
    #[error(
        "no welcome from the controller at {endpoint} within {patience:?}; is it running? {trouble}"
    )]
    NoWelcome {
        /// Where it should be.
        endpoint: String,
        /// How long was waited.
        patience: Duration,
        /// What came of the last attempt.
        trouble: String,
    },
    /// The controller has been away for too long.
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
