//! The controller's side of the stream: accepts workers and passes on their messages.
//!
//! In: connections of any transport, and for a network a [`Gate`]. Out: [`Event`]s in a bounded queue,
//! one [`Link`] per worker to answer on.
//!
//! ```text
//! stream opened ──► admitted ──► Hello within the deadline, versions fit ──► Attached ──► Message* ──► Detached
//!             └──────────────┴──► refused with a status that says why
//! ```
//!
//! The reader of the events decides whether the worker is expected, what it is sent and when it is replaced. Every `Attached` is
//! followed by exactly one `Detached` of the same link, after all its messages. A worker that has sent `Bye` waits for
//! [`Link::farewell`]. If its stream ends in another way, it takes the stream for broken, and repeats its last messages in the
//! next one.

use std::future::Future;
use std::os::unix::net::UnixListener;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};

use crate::endpoint::KEEP_ALIVE;
use crate::gate::{Caller, Gate, bearer};
use crate::proto::control_server::{Control, ControlServer};
use crate::proto::{ControllerMessage, Hello, WorkerMessage, worker_message};
use crate::version;

/// Maximum messages that are queued for one worker. A worker that lets more pile up loses its link.
const MAX_QUEUED_MESSAGES: usize = 256;
/// Deadline of a worker's hello.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// Longest message of a worker: the header of a step as JSON. It has some 72 bytes for each document and stretch, of which the
/// conductor takes four million at most.
const MAX_MESSAGE_BYTES: usize = 512 << 20;

/// Number of a link. A server never uses it twice.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct LinkId(pub u64);

/// Events of the streams.
#[derive(Debug)]
pub enum Event {
    /// A worker of a known version said hello.
    Attached {
        /// Link on which to answer.
        link: Link,
        /// The identity that the worker claims.
        hello: Box<Hello>,
        /// The pod to which its token belongs; none without a gate.
        caller: Option<Caller>,
    },
    /// A worker sent a further message.
    Message {
        /// Link of the worker.
        link: LinkId,
        /// The message.
        message: worker_message::Message,
    },
    /// The stream of a worker ended, with or without `Bye`.
    Detached {
        /// Link of the worker.
        link: LinkId,
    },
}

/// The connection to one worker. Dropping it ends the stream with a fault, after which the worker tries again.
#[derive(Debug)]
pub struct Link {
    id: LinkId,
    control_version: u32,
    outgoing: mpsc::Sender<Result<ControllerMessage, Status>>,
    /// Whether the controller has read everything of the worker.
    heard: Arc<AtomicBool>,
}

impl Link {
    /// Names the link in later events.
    pub fn id(&self) -> LinkId {
        self.id
    }

    /// Control version of the worker, which decides the form of its settings.
    pub fn control_version(&self) -> u32 {
        self.control_version
    }

    /// Queues a message; never blocks.
    pub fn send(&self, message: impl Into<ControllerMessage>) -> Result<(), Error> {
        self.outgoing.try_send(Ok(message.into())).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => Error::Slow { link: self.id },
            mpsc::error::TrySendError::Closed(_) => Error::Gone { link: self.id },
        })
    }

    /// Ends the stream with a good status: the controller has read everything up to `Detached`. A
    /// worker that has said `Bye` then leaves and does not repeat anything.
    pub fn farewell(self) {
        self.heard.store(true, Ordering::Release);
    }

    /// Ends the stream with a reason, after which the worker does not try again.
    pub fn refuse(self, reason: &str) {
        // A link that is full or gone ends by the drop as well.
        let _ = self.outgoing.try_send(Err(Status::failed_precondition(reason)));
    }

    /// Ends the stream with a reason, after which the worker tries again.
    pub fn postpone(self, reason: &str) {
        let _ = self.outgoing.try_send(Err(Status::unavailable(reason)));
    }
}

/// Serves workers from `incoming` until `stop` resolves or the listener fails. Refuses workers of
/// another data version than `data_version`; if that is none, accepts all, and the reader of the
/// events compares versions.
///
/// `events` is bounded: while it is full, the service does not read from workers.
pub async fn serve<I, IO>(
    incoming: I,
    data_version: Option<u32>,
    gate: Option<Arc<dyn Gate>>,
    events: mpsc::Sender<Event>,
    stop: impl Future<Output = ()>,
) -> Result<(), Error>
where
    I: Stream<Item = std::io::Result<IO>>,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let service = Service { data_version, gate, events, next: Arc::new(AtomicU64::new(0)) };
    let [interval, timeout] = KEEP_ALIVE;
    let serving = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(interval))
        .http2_keepalive_timeout(Some(timeout))
        .serve_with_incoming(
            ControlServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES),
            incoming,
        );
    tokio::select! {
        ended = serving => ended.map_err(|source| Error::Listener { source }),
        () = stop => Ok(()),
    }
}

/// A server on a thread of its own; dropping it ends the server and every stream.
#[derive(Debug)]
pub struct Running {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves a Unix socket from a thread of its own.
pub fn spawn(
    listener: UnixListener,
    data_version: u32,
    events: mpsc::Sender<Event>,
) -> Result<Running, Error> {
    listener.set_nonblocking(true).map_err(|source| Error::Start { source })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Error::Start { source })?;
    let (stop, stopped) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("control-server".into())
        .spawn(move || {
            runtime.block_on(async {
                let listener = match tokio::net::UnixListener::from_std(listener) {
                    Ok(listener) => listener,
                    Err(error) => return tracing::error!(%error, "control socket cannot be polled"),
                };
                let incoming = UnixListenerStream::new(listener);
                let stopped = async { drop(stopped.await) };
                if let Err(error) = serve(incoming, Some(data_version), None, events, stopped).await
                {
                    tracing::error!(%error, "control service ended");
                }
            });
        })
        .map_err(|source| Error::Start { source })?;
    Ok(Running { stop: Some(stop), thread: Some(thread) })
}

/// Implements the generated trait. Each server has one, cloned by reference.
struct Service {
    data_version: Option<u32>,
    gate: Option<Arc<dyn Gate>>,
    events: mpsc::Sender<Event>,
    next: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Control for Service {
    type AttachStream =
        Pin<Box<dyn Stream<Item = Result<ControllerMessage, Status>> + Send + 'static>>;

    async fn attach(
        &self,
        request: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let caller = match &self.gate {
            Some(gate) => Some(gate.admit(bearer(request.metadata())?).await?),
            None => None,
        };
        let mut incoming = request.into_inner();
        let hello = first_hello(&mut incoming).await?;
        if let Err(mismatch) = version::check(&hello, self.data_version) {
            return Err(Status::failed_precondition(format!("{}: {mismatch}", hello.name())));
        }
        let id = LinkId(self.next.fetch_add(1, Ordering::Relaxed));
        let (outgoing, queued) = mpsc::channel(MAX_QUEUED_MESSAGES);
        let words = Words { queued, heard: Arc::default(), over: false };
        let (control_version, heard) = (hello.control_version, Arc::clone(&words.heard));
        let link = Link { id, control_version, outgoing, heard };
        let attached = Event::Attached { link, hello: Box::new(hello), caller };
        let events = self.events.clone();
        events
            .send(attached)
            .await
            .map_err(|_| Status::unavailable("the controller is shutting down"))?;
        tokio::spawn(read(incoming, id, events));
        Ok(Response::new(Box::pin(words)))
    }
}

/// Stream of messages to one worker, until its link is dropped.
struct Words {
    queued: mpsc::Receiver<Result<ControllerMessage, Status>>,
    heard: Arc<AtomicBool>,
    over: bool,
}

impl Stream for Words {
    type Item = Result<ControllerMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.queued.poll_recv(context));
        if next.is_some() || self.over || self.heard.load(Ordering::Acquire) {
            return Poll::Ready(next);
        }
        self.over = true;
        Poll::Ready(Some(Err(Status::unavailable("the controller has let go of this worker"))))
    }
}

/// Waits for the first message, which has to be `Hello`.
async fn first_hello(incoming: &mut Streaming<WorkerMessage>) -> Result<Hello, Status> {
    let first = tokio::time::timeout(HELLO_WITHIN, incoming.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no Hello came"))??;
    match first.and_then(|it| it.message) {
        Some(worker_message::Message::Hello(hello)) => Ok(hello),
        _ => Err(Status::invalid_argument("the first message of a worker is Hello")),
    }
}

/// Passes on a worker's messages until its stream ends.
async fn read(mut incoming: Streaming<WorkerMessage>, link: LinkId, events: mpsc::Sender<Event>) {
    while let Some(Ok(WorkerMessage { message })) = incoming.next().await {
        // A body of a newer version is unknown here and skipped.
        let Some(message) = message else { continue };
        let leaves = matches!(message, worker_message::Message::Bye(_));
        if events.send(Event::Message { link, message }).await.is_err() || leaves {
            break;
        }
    }
    // If nobody reads the events, nobody needs this one.
    let _ = events.send(Event::Detached { link }).await;
}

/// Why serving or sending failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket or the runtime could not be set up.
    #[error("control service cannot start: {source}; check the limits on open files and threads")]
    Start {
        /// What the system said.
        source: std::io::Error,
    },
    /// The listener failed.
    #[error("control service ended: {source}")]
    Listener {
        /// What the transport said.
        source: tonic::transport::Error,
    },
    /// The worker does not read.
    #[error("worker on link {} does not read its messages; its link is to be dropped", link.0)]
    Slow {
        /// Its link.
        link: LinkId,
    },
    /// The stream has ended.
    #[error("link {} has ended; wait for the worker to attach again", link.0)]
    Gone {
        /// Its link.
        link: LinkId,
    },
}
