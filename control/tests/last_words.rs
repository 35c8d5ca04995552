//! What a worker says before it leaves reaches a controller, however its streams end.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cadre_control::client::{self, Attachment, Options};
use cadre_control::proto::worker_message::Message;
use cadre_control::proto::{
    Bye, Finished, Hello, Notice, Progress, Role, Saved, Welcome, WorkerMessage,
};
use cadre_control::server::{self, Event, Link, LinkId, Running};
use cadre_control::{CONTROL_VERSION, DATA_VERSION, Endpoint};
use proptest::prelude::*;
use tokio::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(20);
/// How long a worker waits for one that stands still: longer than a busy machine does.
const STALL: Duration = Duration::from_secs(2);

/// A controller; what its workers say waits in a queue of this length.
struct Controller {
    _running: Running,
    events: mpsc::Receiver<Event>,
}

impl Controller {
    /// Takes the path from whoever listened there: from now on streams come here.
    fn at(path: &Path, queue: usize) -> Self {
        drop(std::fs::remove_file(path));
        let listener = UnixListener::bind(path).expect("a free path");
        let (sender, events) = mpsc::channel(queue);
        Self { _running: server::spawn(listener, DATA_VERSION, sender).expect("a thread"), events }
    }

    fn event(&mut self) -> Event {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let next = async { tokio::time::timeout(PATIENCE, self.events.recv()).await };
        let event = runtime.expect("a runtime").block_on(next);
        event.expect("something happens in time").expect("the server lives")
    }

    fn welcome(&mut self) -> Link {
        loop {
            if let Event::Attached { link, .. } = self.event() {
                link.send(Welcome::default()).expect("room");
                return link;
            }
        }
    }

    /// What a worker says on a stream until that ends, at most so much.
    fn hear(&mut self, of: LinkId, most: usize) -> Vec<Message> {
        let mut heard = Vec::new();
        while heard.len() < most {
            match self.event() {
                Event::Message { link, message } if link == of => heard.push(message),
                Event::Detached { link } if link == of => break,
                Event::Message { .. } | Event::Detached { .. } | Event::Attached { .. } => {}
            }
        }
        heard
    }
}

fn attach(path: &Path, connect: Duration) -> std::thread::JoinHandle<Attachment> {
    let hello = Hello {
        role: Role::Trainer.into(),
        control_version: CONTROL_VERSION,
        data_version: DATA_VERSION,
        ..Hello::default()
    };
    let endpoint = Endpoint::Unix(path.to_owned());
    let options = Options {
        connect,
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(5),
        ..Options::default()
    };
    std::thread::spawn(move || client::attach(endpoint, hello, options).expect("welcome"))
}

fn leave(
    attachment: Attachment,
    words: Vec<WorkerMessage>,
    deadline: Duration,
) -> std::thread::JoinHandle<Result<(), client::Error>> {
    std::thread::spawn(move || {
        let Attachment { sender, receiver, .. } = attachment;
        // Nobody reads what the controller still has to say.
        drop(receiver);
        words.into_iter().try_for_each(|it| sender.send(it))?;
        sender.leave(deadline)
    })
}

fn step(step: u64) -> Progress {
    Progress { step, ..Progress::default() }
}

/// The end of a worker that has made so many steps.
fn end(steps: u64) -> [Message; 3] {
    let (finished, bye) = (Message::Finished(Finished::default()), Message::Bye(Bye {}));
    [Message::Progress(step(steps)), finished, bye]
}

fn words(steps: u64) -> Vec<WorkerMessage> {
    end(steps)[..2].iter().map(|it| WorkerMessage { message: Some(it.clone()) }).collect()
}

#[test]
fn a_controller_that_has_died_unnoticed_costs_no_last_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    // Nobody takes more than the hello from it, and nothing ends the stream.
    let mut dead = Controller::at(&path, 1);
    let worker = attach(&path, STALL);
    let _link = dead.welcome();
    let worker = worker.join().expect("no panic");
    let mut next = Controller::at(&path, 64);

    let leaving = leave(worker, words(7), PATIENCE);
    let link = next.welcome();
    assert_eq!(next.hear(link.id(), usize::MAX), end(7));
    link.farewell();
    leaving.join().expect("no panic").expect("the next controller has read everything");
}

#[test]
fn a_controller_that_was_away_for_long_hears_the_last_checkpoint_and_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    let mut away = Controller::at(&path, 64);
    let worker = attach(&path, STALL);
    let link = away.welcome();
    let worker = worker.join().expect("no panic");
    drop((link, away));

    // More than any queue holds, and nobody reads them but the thread that looks for a controller.
    let said = |it: u64| Notice { text: it.to_string(), ..Notice::default() };
    let mut notices = 0;
    let began = Instant::now();
    while notices < 20_000 {
        assert!(began.elapsed() < PATIENCE, "nobody takes the messages: {notices}");
        match worker.sender.send(said(notices)) {
            Ok(()) => notices += 1,
            Err(client::Error::Full) => std::thread::yield_now(),
            Err(other) => panic!("{other}"),
        }
    }
    worker.sender.send(Saved { steps: 6 }).expect("room");
    let leaving = leave(worker, words(7), PATIENCE);
    let mut next = Controller::at(&path, 64);
    let link = next.welcome();
    let heard = next.hear(link.id(), usize::MAX);
    link.farewell();
    leaving.join().expect("no panic").expect("the next controller has read everything");

    // Those that were kept, and those that waited for the thread when a controller was there again.
    let newest = heard.len() - 4;
    assert!((1..=1024 + 8192).contains(&newest), "{newest} notices");
    let kept = (notices - newest as u64..notices).map(|it| Message::Notice(said(it)));
    let expected: Vec<Message> =
        kept.chain([Message::Saved(Saved { steps: 6 })]).chain(end(7)).collect();
    assert_eq!(heard, expected);
}

#[test]
fn what_a_lost_controller_had_read_is_said_to_the_next_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    let mut lost = Controller::at(&path, 64);
    let worker = attach(&path, STALL);
    let link = lost.welcome();
    let worker = worker.join().expect("no panic");
    worker.sender.send(step(7)).expect("room");
    assert_eq!(lost.hear(link.id(), 1), end(7)[..1]);
    drop((link, lost));

    let mut next = Controller::at(&path, 64);
    let link = next.welcome();
    assert_eq!(next.hear(link.id(), 1), end(7)[..1]);
}

#[test]
fn who_is_not_heard_says_so_at_the_deadline_and_tries_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    let mut deaf = Controller::at(&path, 1);
    let worker = attach(&path, STALL);
    let _link = deaf.welcome();
    let Attachment { sender, receiver, .. } = worker.join().expect("no panic");
    let refusal = sender.leave(Duration::from_millis(300)).expect_err("nobody reads");
    let text = "the controller did not take the last messages within 300ms";
    assert_eq!(refusal.to_string(), text);
    // Welcomes of later streams may wait there.
    while receiver.recv_timeout(PATIENCE).is_ok() {}
    assert!(matches!(sender.send(step(8)), Err(client::Error::Ended)));
}

#[test]
fn who_is_refused_while_leaving_was_not_heard() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control");
    let mut controller = Controller::at(&path, 64);
    let worker = attach(&path, STALL);
    let link = controller.welcome();
    let leaving = leave(worker.join().expect("no panic"), words(7), PATIENCE);
    assert_eq!(controller.hear(link.id(), usize::MAX), end(7));
    link.refuse("the job is not known here");
    let refusal = leaving.join().expect("no panic").expect_err("it was not heard");
    assert!(matches!(refusal, client::Error::Ended), "{refusal}");
}

/// What lasts of what a worker says, in order.
fn said_once(steps: u64) -> Vec<Message> {
    (1..steps).map(|it| Message::Progress(step(it))).chain(end(steps)).collect()
}

/// What a controller does to a stream, after so many messages of the worker.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Knows nothing of the worker yet.
    Postpones,
    /// Dies before it says Welcome.
    DiesEarly,
    Dies(usize),
    /// Lets go of the worker.
    LetsGo(usize),
    /// Reads nothing more, and nothing ends the stream.
    Stalls(usize),
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::Postpones),
        Just(Fault::DiesEarly),
        (0_usize..12).prop_map(Fault::Dies),
        (0_usize..12).prop_map(Fault::LetsGo),
        (0_usize..12).prop_map(Fault::Stalls),
    ]
}

/// One controller after the other takes the worker's streams; the last one has no fault, and serves until the worker has left.
/// What each has heard, and those that still stand.
fn suffer(
    path: &Path,
    faults: &[Fault],
    has_left: &AtomicBool,
) -> (Vec<Vec<Message>>, Vec<Controller>) {
    let (mut standing, mut links, mut heard) = (Vec::new(), Vec::new(), Vec::new());
    for &fault in faults {
        let mut controller = Controller::at(path, 1);
        if let Fault::Postpones | Fault::DiesEarly = fault {
            if let (Event::Attached { link, .. }, Fault::Postpones) = (controller.event(), fault) {
                link.postpone("not yet");
            }
            continue;
        }
        let link = controller.welcome();
        match fault {
            Fault::Dies(most) | Fault::LetsGo(most) | Fault::Stalls(most) => {
                heard.push(controller.hear(link.id(), most));
            }
            Fault::Postpones | Fault::DiesEarly => {}
        }
        match fault {
            Fault::LetsGo(_) => drop(link),
            Fault::Stalls(_) => {
                standing.push(controller);
                links.push(link);
            }
            Fault::Postpones | Fault::DiesEarly | Fault::Dies(_) => drop((controller, link)),
        }
    }
    let mut last = Controller::at(path, 64);
    // On a busy machine a worker may give a stream up before it was answered or heard out; it comes again.
    while !has_left.load(Ordering::Acquire) {
        let Ok(Event::Attached { link, .. }) = last.events.try_recv() else {
            std::thread::park_timeout(Duration::from_millis(1));
            continue;
        };
        if link.send(Welcome::default()).is_ok() {
            heard.push(last.hear(link.id(), usize::MAX));
            link.farewell();
        }
    }
    standing.push(last);
    (heard, standing)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn last_words_arrive_in_order_whichever_streams_break(
        faults in prop::collection::vec(fault(), 0..5),
        steps in 1_u64..8,
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control");
        let said = (1..=steps).flat_map(|it| {
            let notice = Notice { text: it.to_string(), ..Notice::default() };
            [WorkerMessage::from(notice), step(it).into()]
        });
        let said = said.chain([Finished::default().into()]).collect();
        let (there, breaks) = (path.clone(), faults.clone());
        let has_left = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&has_left);
        let controllers = std::thread::spawn(move || suffer(&there, &breaks, &over));
        let worker = attach(&path, Duration::from_millis(100)).join().expect("no panic");
        let leaving = leave(worker, said, PATIENCE);
        let left = leaving.join().expect("no panic");
        has_left.store(true, Ordering::Release);
        let (heard, _standing) = controllers.join().expect("no panic");
        prop_assert!(left.is_ok(), "{left:?}");

        let lasting = |heard: &[Message]| -> Vec<Message> {
            let lasts = |it: &&Message| !matches!(it, Message::Notice(_));
            heard.iter().filter(lasts).cloned().collect()
        };
        let whole = lasting(heard.last().expect("of the last one"));
        let tail: Vec<_> = whole.into_iter().skip_while(|it| *it != end(steps)[0]).collect();
        prop_assert_eq!(tail, end(steps));
        let order = said_once(steps);
        for heard in &heard {
            let heard = lasting(heard);
            let places: Vec<_> = heard.iter().map(|it| order.iter().position(|at| at == it)).collect();
            prop_assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
            let ends = heard.contains(&end(steps)[1]);
            prop_assert!(!ends || heard.contains(&end(steps)[0]), "no end without its last step");
        }
        let news = heard.iter().flatten().filter_map(|it| {
            if let Message::Notice(it) = it { it.text.parse::<u64>().ok() } else { None }
        });
        prop_assert!(news.is_sorted_by(|a, b| a < b), "news is told once");
    }
}
