//! Owns the stream: opens it, sends what waits, passes on what it receives, and opens it again.
//!
//! In: a queue of messages. Out: the controller's messages and, at the end, whether it has read all of the worker's. It has no
//! deadline for leaving: whoever waits for the end drops the session.
//!
//! Invariant: `next` holds the messages that were taken from the queue and are in no stream yet; the lasting ones are also in
//! `said`. Before the Welcome only the hello is sent, since a controller that does not know the worker does not read. The queue
//! is read meanwhile all the same: a full one would refuse what comes last, a checkpoint or the end.

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use super::said::{Said, lasts};
use super::{Error, MAX_KEPT, Options};
use crate::endpoint::Endpoint;
use crate::proto::control_client::ControlClient;
use crate::proto::{
    ControllerMessage, Hello, Welcome, WorkerMessage, controller_message, worker_message,
};

/// See the module.
pub(super) struct Session {
    endpoint: Endpoint,
    hello: Hello,
    options: Options,
    queue: mpsc::Receiver<WorkerMessage>,
    /// Whether all senders of the queue are gone.
    is_over: bool,
    next: VecDeque<WorkerMessage>,
    /// Messages that were dropped since the last welcome.
    dropped: u64,
    said: Said,
    inbox: SyncSender<ControllerMessage>,
    /// Receiver of the first welcome or of the refusal.
    first: Option<SyncSender<Result<Welcome, Error>>>,
    /// Why the last attempt failed.
    trouble: Arc<Mutex<String>>,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Parting {
    /// The worker sent `Bye`, and a controller has read everything.
    Heard,
    /// The controller refused the worker, or the worker stopped without `Bye`.
    Unheard,
}

/// How a stream ended.
enum Ended {
    /// The session is over.
    Left(Parting),
    /// The controller does not want this worker.
    Refused(String),
    /// The stream broke; another attempt may succeed.
    Broken(String),
}

impl Session {
    pub(super) fn new(
        (endpoint, hello): (Endpoint, Hello),
        options: Options,
        (queue, inbox): (mpsc::Receiver<WorkerMessage>, SyncSender<ControllerMessage>),
        first: SyncSender<Result<Welcome, Error>>,
        trouble: Arc<Mutex<String>>,
    ) -> Self {
        let (next, said, first) = (VecDeque::new(), Said::default(), Some(first));
        let (is_over, dropped) = (false, 0);
        Self {
            endpoint,
            hello,
            options,
            queue,
            is_over,
            next,
            dropped,
            said,
            inbox,
            first,
            trouble,
        }
    }

    pub(super) async fn run(mut self) -> Parting {
        let mut pauses = Pauses::new(&self.options);
        loop {
            let (ended, was_welcome) = self.stream().await;
            match ended {
                Ended::Left(parting) => return parting,
                Ended::Refused(reason) => {
                    tracing::error!(%reason, "refused by the controller");
                    if let Some(first) = self.first.take() {
                        let _ = first.send(Err(Error::Refused { reason }));
                    }
                    return Parting::Unheard;
                }
                Ended::Broken(trouble) => self.complain(trouble),
            }
            self.wait(pauses.next(was_welcome)).await;
        }
    }

    /// Waits for a pause to end, and keeps what the worker says meanwhile.
    async fn wait(&mut self, pause: Duration) {
        let pause = tokio::time::sleep(pause);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => return,
                message = self.queue.recv(), if !self.is_over => self.keep(message),
            }
        }
    }

    /// Keeps a message while no controller listens. Lasting ones go to `said`, the newest of each kind. Of the others the newest
    /// [`MAX_KEPT`] wait, with one report of the load.
    fn keep(&mut self, message: Option<WorkerMessage>) {
        let Some(message) = message else {
            self.is_over = true;
            return;
        };
        self.remember(&message);
        if lasts(&message) {
            return;
        }
        if is_report(&message) {
            self.next.retain(|it| !is_report(it));
        }
        self.next.push_back(message);
        if self.next.len() > MAX_KEPT {
            self.next.pop_front();
            self.dropped += 1;
        }
    }

    /// Logs why a connection failed, unless the last one failed for the same reason.
    fn complain(&self, trouble: String) {
        let mut last = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != trouble {
            tracing::info!("the controller is away: {trouble}");
            *last = trouble;
        }
    }

    /// Runs one stream from its connection to its end. Returns also whether the controller welcomed
    /// the worker in it.
    async fn stream(&mut self) -> (Ended, bool) {
        let (outgoing, mut incoming) = match self.open().await {
            Ok(both) => both,
            Err(ended) => return (ended, false),
        };
        let mut welcome = false;
        let ended = self.talk(outgoing, &mut incoming, &mut welcome).await;
        (ended, welcome)
    }

    async fn open(
        &self,
    ) -> Result<(mpsc::Sender<WorkerMessage>, Streaming<ControllerMessage>), Ended> {
        let connect = self.options.connect;
        let channel = self.endpoint.connect(connect).await;
        let channel = channel.map_err(|it| Ended::Broken(it.to_string()))?;
        let authorization = self.endpoint.authorization();
        let authorization = authorization.map_err(|it| Ended::Broken(it.to_string()))?;
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
        match tokio::time::timeout(connect, opening).await {
            Ok(Ok(response)) => Ok((outgoing, response.into_inner())),
            Ok(Err(status)) => Err(self.ended(&status)),
            Err(_late) => Err(Ended::Broken(format!("no answer within {connect:?}"))),
        }
    }

    async fn talk(
        &mut self,
        outgoing: mpsc::Sender<WorkerMessage>,
        incoming: &mut Streaming<ControllerMessage>,
        welcome: &mut bool,
    ) -> Ended {
        // If there is a Bye, it is the last message.
        self.next.retain(|it| !lasts(it));
        let mut is_begun = false;
        loop {
            if *welcome && self.is_over && self.next.is_empty() {
                return Ended::Left(Parting::Unheard);
            }
            tokio::select! {
                said = incoming.message() => match said {
                    Ok(Some(message)) => {
                        *welcome |= is_welcome(&message);
                        if *welcome && !std::mem::replace(&mut is_begun, true) {
                            self.begin();
                        }
                        if !self.deliver(message).await {
                            return Ended::Left(Parting::Unheard);
                        }
                    }
                    Ok(None) => return Ended::Broken("the stream has ended".into()),
                    Err(status) => return self.ended(&status),
                },
                room = outgoing.reserve(), if *welcome && !self.next.is_empty() => {
                    let Ok(room) = room else {
                        return Ended::Broken("the stream has ended".into());
                    };
                    let Some(message) = self.next.pop_front() else { continue };
                    let leaves = matches!(message.message, Some(worker_message::Message::Bye(_)));
                    room.send(message);
                    if leaves {
                        break;
                    }
                }
                message = self.queue.recv(), if !self.is_over && (!*welcome || self.next.is_empty()) => {
                    match message {
                        Some(message) if *welcome => {
                            self.remember(&message);
                            self.next.push_back(message);
                        }
                        message => self.keep(message),
                    }
                }
            }
        }
        drop(outgoing);
        self.drain(incoming).await
    }

    /// Queues the lasting messages behind what waits, since Bye is the last message that a controller reads.
    fn begin(&mut self) {
        self.next.extend(self.said.again());
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            tracing::warn!(
                "{dropped} notices were dropped while the controller was away, the oldest first"
            );
        }
    }

    /// Waits for the end of the stream after `Bye`. A controller that has read everything ends the
    /// stream with a good status. A controller that is lost, or has dropped the worker before, does
    /// not; the transport alone would end the stream without a status.
    async fn drain(&mut self, incoming: &mut Streaming<ControllerMessage>) -> Ended {
        let patience = self.options.connect;
        match tokio::time::timeout(patience, incoming.trailers()).await {
            Ok(Ok(Some(_well))) => Ended::Left(Parting::Heard),
            Ok(Ok(None)) => Ended::Broken("the stream has ended before it was heard out".into()),
            Ok(Err(status)) => self.ended(&status),
            Err(_late) => Ended::Broken(format!("not heard out within {patience:?}")),
        }
    }

    /// Tells a refusal, which is final, from a passing fault. A worker that was welcome before tries again after a refused token,
    /// since its token may be renewed by then.
    fn ended(&self, status: &Status) -> Ended {
        let mut refusals = vec![Code::FailedPrecondition, Code::InvalidArgument];
        if self.first.is_some() {
            refusals.extend([Code::PermissionDenied, Code::Unauthenticated]);
        }
        let text = status.message().to_owned();
        if refusals.contains(&status.code()) { Ended::Refused(text) } else { Ended::Broken(text) }
    }

    /// Keeps a message for later streams: addresses become part of the hello, lasting messages are repeated.
    fn remember(&mut self, message: &WorkerMessage) {
        if let Some(worker_message::Message::Listening(listening)) = &message.message {
            self.hello.exchange_address.clone_from(&listening.exchange_address);
            self.hello.ring_address.clone_from(&listening.ring_address);
        }
        self.said.note(message);
    }

    /// Hands a message to the worker. A worker that is about to leave does not read it, but still
    /// sends its last messages. Returns false if the worker no longer waits for its first welcome.
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
                Err(TrySendError::Disconnected(_)) => return true,
                Err(TrySendError::Full(back)) => message = back,
            }
            // The worker is slow: the stream's own flow control holds the controller back.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn is_report(message: &WorkerMessage) -> bool {
    matches!(message.message, Some(worker_message::Message::ServerReport(_)))
}

fn is_welcome(message: &ControllerMessage) -> bool {
    matches!(message.message, Some(controller_message::Message::Welcome(_)))
}

/// The growing pauses between streams.
struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Pauses {
    fn new(options: &Options) -> Self {
        let Options { first_pause: first, longest_pause: longest, .. } = *options;
        Self { first, longest, next: first }
    }

    /// Pause after a broken stream. It starts from the shortest again if the worker was welcome in
    /// that stream: only one of two operators leads, so a worker may need a few tries to find it.
    fn next(&mut self, was_welcome: bool) -> Duration {
        if was_welcome {
            self.next = self.first;
        }
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_the_worker_is_welcome_and_then_begin_anew_each_time() {
        let second = Duration::from_secs;
        let options =
            Options { first_pause: second(1), longest_pause: second(3), ..Options::default() };
        let mut pauses = Pauses::new(&options);
        let broken = [false, false, false, true, false, true, true, false];
        let all: Vec<u64> = broken.map(|it| pauses.next(it).as_secs()).into();
        assert_eq!(all, [1, 2, 3, 1, 2, 1, 1, 2]);
    }
}
