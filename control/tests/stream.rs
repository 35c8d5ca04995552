//! Both sides of the control stream over a real Unix socket.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cadre_control::client::{self, Attachment, Options};
use cadre_control::proto::{
    Conductor, Hello, Listening, Role, ServerReport, Stop, Welcome, controller_message,
    worker_message::Message,
};
use cadre_control::server::{self, Event, Link, Running};
use cadre_control::{CONTROL_VERSION, DATA_VERSION, Endpoint};
use tokio::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(20);

/// A path for one socket, removed with its folder.
struct Socket(PathBuf);

impl Socket {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("cadre-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).expect("a folder of this test");
        Self(folder.join("control"))
    }

    fn serve(&self) -> (Running, mpsc::Receiver<Event>) {
        // A server that was dropped leaves its path behind.
        drop(std::fs::remove_file(&self.0));
        let listener = UnixListener::bind(&self.0).expect("a free path");
        let (events, received) = mpsc::channel(64);
        (server::spawn(listener, DATA_VERSION, events).expect("a thread"), received)
    }

    fn attach(&self, hello: Hello) -> std::thread::JoinHandle<Result<Attachment, client::Error>> {
        let endpoint = Endpoint::Unix(self.0.clone());
        std::thread::spawn(move || client::attach(endpoint, hello, Options::default()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(self.0.parent().expect("made with a folder")));
    }
}

fn hello() -> Hello {
    Hello {
        role: Role::Server.into(),
        index: 1,
        pid: std::process::id(),
        control_version: CONTROL_VERSION,
        data_version: DATA_VERSION,
        ..Hello::default()
    }
}

/// What happens next, in bounded time.
fn next(events: &mut mpsc::Receiver<Event>) -> Event {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let next = async { tokio::time::timeout(2 * PATIENCE, events.recv()).await };
    let event = runtime.expect("a runtime").block_on(next);
    event.expect("something happens in time").expect("the server lives")
}

fn attached(events: &mut mpsc::Receiver<Event>) -> (Link, Hello) {
    loop {
        match next(events) {
            Event::Attached { link, hello, .. } => return (link, *hello),
            Event::Message { .. } | Event::Detached { .. } => {}
        }
    }
}

fn joined(
    thread: std::thread::JoinHandle<Result<Attachment, client::Error>>,
) -> Result<Attachment, client::Error> {
    thread.join().expect("attaching does not panic")
}

#[test]
fn both_sides_hear_each_other_in_order_and_part() {
    let socket = Socket::new();
    let (_running, mut events) = socket.serve();
    let client = socket.attach(hello());
    let (link, heard) = attached(&mut events);
    assert_eq!(heard, hello());
    link.send(Welcome { job_secret: vec![7; 32], ..Welcome::default() }).expect("room");
    link.send(Conductor { exchange_address: "a:1".into(), ..Conductor::default() }).expect("room");
    link.send(Stop { checkpoint: true }).expect("room");

    let Attachment { welcome, sender, receiver } = joined(client).expect("welcome");
    assert_eq!(welcome.job_secret, [7; 32]);
    let first = receiver.recv_timeout(PATIENCE).expect("conductor").message;
    assert!(matches!(first, Some(controller_message::Message::Conductor(_))), "{first:?}");
    let second = receiver.recv_timeout(PATIENCE).expect("stop").message;
    assert_eq!(second, Some(controller_message::Message::Stop(Stop { checkpoint: true })));

    for step in 0..100 {
        sender.send(ServerReport { step, ..ServerReport::default() }).expect("room");
    }
    let leaving = std::thread::spawn(move || sender.leave(PATIENCE));
    let mut steps = Vec::new();
    loop {
        match next(&mut events) {
            Event::Message { message: Message::ServerReport(report), .. } => {
                steps.push(report.step);
            }
            Event::Message { .. } | Event::Attached { .. } => {}
            Event::Detached { .. } => break,
        }
    }
    link.farewell();
    assert_eq!(steps, (0..100).collect::<Vec<_>>());
    leaving.join().expect("no panic").expect("everything was read");
    assert!(receiver.recv_timeout(PATIENCE).is_err(), "the stream is over");
}

#[test]
fn a_worker_of_another_data_version_is_refused_with_both_named() {
    let socket = Socket::new();
    let (_running, _events) = socket.serve();
    let stranger = Hello { data_version: DATA_VERSION + 41, ..hello() };
    let refusal = joined(socket.attach(stranger)).expect_err("another version").to_string();
    let versions = format!("data version {}, the job {DATA_VERSION}", DATA_VERSION + 41);
    assert!(refusal.contains(&versions), "{refusal}");
}

#[test]
fn the_controller_may_refuse_a_worker_it_does_not_know() {
    let socket = Socket::new();
    let (_running, mut events) = socket.serve();
    let client = socket.attach(hello());
    attached(&mut events).0.refuse("not started by this run");
    let refusal = joined(client).expect_err("refused").to_string();
    assert_eq!(refusal, "refused by the controller: not started by this run");
}

#[test]
fn a_worker_finds_a_controller_that_comes_back_and_tells_its_address_again() {
    let socket = Socket::new();
    let (running, mut events) = socket.serve();
    let client = socket.attach(hello());
    let (link, _) = attached(&mut events);
    link.send(Welcome::default()).expect("room");
    let Attachment { sender, receiver, .. } = joined(client).expect("welcome");
    let listening = Listening { exchange_address: "a:1".into(), ring_address: String::new() };
    sender.send(listening).expect("room");
    while !matches!(next(&mut events), Event::Message { message: Message::Listening(_), .. }) {}
    drop((link, running, events));

    let (_running, mut events) = socket.serve();
    let (link, heard) = attached(&mut events);
    assert_eq!(heard.exchange_address, "a:1");
    link.send(Welcome { settings: "{}".into(), ..Welcome::default() }).expect("room");
    let again = receiver.recv_timeout(PATIENCE).expect("welcome again").message;
    assert!(matches!(again, Some(controller_message::Message::Welcome(_))), "{again:?}");
}

#[test]
fn nobody_at_the_address_is_an_error_after_the_deadline() {
    let socket = Socket::new();
    let options = Options { welcome: Some(Duration::from_millis(100)), ..Options::default() };
    let refusal = client::attach(Endpoint::Unix(socket.0.clone()), hello(), options);
    let refusal = refusal.expect_err("nobody listens").to_string();
    assert!(refusal.starts_with("no welcome from the controller at "), "{refusal}");
}

#[test]
fn a_worker_that_does_not_read_loses_its_link_and_nobody_waits() {
    let socket = Socket::new();
    let (_running, mut events) = socket.serve();
    let client = socket.attach(hello());
    let (link, _) = attached(&mut events);
    link.send(Welcome::default()).expect("room");
    let _unread = joined(client).expect("welcome");
    let conductor = Conductor { exchange_address: "x".repeat(10_000), ..Conductor::default() };
    let refused = (0..1_000_000).find_map(|_| link.send(conductor.clone()).err());
    assert!(matches!(refused, Some(server::Error::Slow { .. })), "{refused:?}");
}
