//! Calls of several threads: who polls or asks comes through, whatever others wait for or compute.

use std::sync::mpsc::{RecvTimeoutError, channel};

use cadre_protocol::Filler;

use super::*;
use crate::io::queues::MAX_REQUESTS;
use crate::launch::BundleRows;

/// A thread that is not through by then never is.
const STUCK: Duration = Duration::from_secs(30);

const FIRST: PhaseAt = PhaseAt { layer: 0, nano: 0, direction: Direction::Forward };
const SECOND: PhaseAt = PhaseAt { layer: 1, ..FIRST };

/// A thread whose end can be waited for.
struct Beside<T>(Receiver<T>);

impl<T: Send + 'static> Beside<T> {
    fn run(act: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        std::thread::spawn(move || sender.send(act()));
        Self(receiver)
    }

    fn end(self, what: &str) -> T {
        match self.0.recv_timeout(STUCK) {
            Ok(it) => it,
            Err(RecvTimeoutError::Timeout) => panic!("{what} waits for another thread"),
            Err(RecvTimeoutError::Disconnected) => panic!("{what} panicked"),
        }
    }
}

/// Until what is owed by the threads of a rank is so.
fn until_owed(outlet: &Outlet<HostRows>, expected: Owed) {
    let start = std::time::Instant::now();
    while outlet.owed() != expected {
        assert!(start.elapsed() < STUCK, "{:?} is owed, not {expected:?}", outlet.owed());
        std::thread::yield_now();
    }
}

/// Has a thread of the rank take a notice: so it is inside a call that waits.
fn until_taken(outlet: &mut Outlet<HostRows>) {
    outlet.tell(Notice::Trainers(Vec::new()));
    until_owed(outlet, Owed::Nothing);
}

fn submit(rank: &Rank, phase: PhaseAt) -> Ticket {
    let (q, kv) = (vec![0.5; QUERY], vec![0.5; KV]);
    let (q, kv) = (Rows::f32(&q), Rows::f32(&kv));
    rank.submit(phase, Inputs::Forward { q, k: kv, v: kv }).unwrap()
}

fn wait(rank: &Arc<Rank>, ticket: Ticket) -> Beside<()> {
    let rank = Arc::clone(rank);
    Beside::run(move || {
        let (mut o, mut lse) = (vec![0.0; QUERY], vec![0.0; QUERY / 8]);
        let room = Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) };
        rank.wait(ticket, room).unwrap();
    })
}

fn whole(at: At) -> Notice<HostRows> {
    let [o, lse] = [QUERY, QUERY / 8].map(|it| Buffer::zeroed(4 * it));
    let landed = Landed::Forward { o, lse, own: Vec::new() };
    Notice::Whole(Box::new(Whole { at, landed, makers: (0..9).map(maker).collect() }))
}

fn maker(work: u32) -> (Work, Peer) {
    (Work(work), Peer::Server(ServerId { index: 0, incarnation: 0 }))
}

#[test]
fn who_polls_or_asks_never_waits_for_a_thread_that_waits() {
    let (rank, _requests, mut outlet) = rank(0);
    let rank = Arc::new(rank);
    rank.announce(lengths(0)).unwrap();
    let begins = {
        let rank = Arc::clone(&rank);
        Beside::run(move || matches!(rank.begin(0), Next::Step(_)))
    };
    until_taken(&mut outlet);
    // What that one waits for comes only when these are through.
    let asks = Arc::clone(&rank);
    let polls = Beside::run(move || {
        assert!(asks.poll_begin(0).is_none());
        assert!(!asks.advance(), "the thread that waits takes what comes");
        asks.exposed_wait() + asks.header_wait()
    });
    polls.end("a poll beside begin");
    outlet.tell(Notice::Step(planned(0)));
    assert!(begins.end("begin"));

    let [first, second] = [FIRST, SECOND].map(|it| submit(&rank, it));
    let (at, next) = (first.at, second.at);
    let waits = wait(&rank, first);
    until_taken(&mut outlet);
    let asks = Arc::clone(&rank);
    let polls = Beside::run(move || {
        assert!(!asks.is_ready(&second) && !asks.advance());
        asks.exposed_wait();
        second
    });
    let second = polls.end("a poll beside wait");
    // Two wait: each goes on with its own, whichever of them takes it.
    let other = wait(&rank, second);
    outlet.tell(whole(next));
    other.end("the wait for the later phase");
    outlet.tell(whole(at));
    waits.end("the wait for the earlier phase");
}

#[test]
fn a_phase_that_is_being_submitted_holds_up_no_thread_that_waits_for_another() {
    let (rank, requests, mut outlet) = rank(0);
    let rank = Arc::new(rank);
    rank.announce(lengths(0)).unwrap();
    outlet.tell(Notice::Step(planned(0)));
    assert!(matches!(rank.begin(0), Next::Step(_)));
    let first = submit(&rank, FIRST);
    let at = first.at;
    while requests.try_recv().is_ok() {}
    // It is held where it hands over its rows: nobody takes them.
    (0..MAX_REQUESTS).for_each(|_| rank.busy(Duration::ZERO));
    let asks = Arc::clone(&rank);
    let submits = Beside::run(move || submit(&asks, SECOND));
    let start = std::time::Instant::now();
    while rank.submits.try_lock().is_ok() {
        assert!(start.elapsed() < STUCK, "nobody submits");
        std::thread::yield_now();
    }
    outlet.tell(whole(at));
    wait(&rank, first).end("the wait for another phase");
    assert!(rank.submits.try_lock().is_err(), "it is submitted still");
    while requests.try_recv().is_ok() {}
    let _ = submits.end("the submission");
}

#[test]
fn a_thread_that_computes_says_so_and_nobody_waits_for_it() {
    let (rank, requests, mut outlet) = rank(0);
    let rank = Arc::new(rank);
    let header = Header { fillers: vec![Some(Member::InPlace(0))], ..(*planned(0).header).clone() };
    let planned = Arc::new(PlannedStep::new(Arc::new(header)).unwrap());
    rank.announce(lengths(0)).unwrap();
    outlet.tell(Notice::Step(Arc::clone(&planned)));
    assert!(matches!(rank.begin(0), Next::Step(_)));
    requests.try_recv().unwrap();
    let [first, second] = [FIRST, SECOND].map(|it| submit(&rank, it));
    let [Ok(Asked::Submit(at, rows)), Ok(_)] = [requests.try_recv(), requests.try_recv()] else {
        panic!("two phases were submitted")
    };
    // The thread that computes is held where it hands over its results: nobody takes them.
    (0..MAX_REQUESTS).for_each(|_| rank.busy(Duration::ZERO));
    let works = planned.works_of(at.phase, Filler::InPlace(TrainerId(0))) as u32;
    for work in 0..works {
        let PhaseRows { q, k, v, .. } = rows.clone();
        let rows = BundleRows::Home(PhaseRows { q, k, v, gradients: None });
        let planned = Arc::clone(&planned);
        let work = crate::launch::Work { planned, phase: at.phase, work, rows, promise: None };
        outlet.tell(Notice::Work(Box::new(work)));
    }
    assert_eq!(outlet.owed(), Owed::Works);
    let waits = wait(&rank, first);
    until_owed(&outlet, Owed::Computing);
    let asks = Arc::clone(&rank);
    let polls = Beside::run(move || {
        assert!(!asks.is_ready(&second) && !asks.advance());
        asks.exposed_wait() + asks.header_wait()
    });
    polls.end("a poll beside a launch");
    assert_eq!(outlet.owed(), Owed::Computing, "the launch goes on");
    let mut ran = 0;
    while ran < works {
        ran += u32::from(matches!(requests.recv_timeout(STUCK).unwrap(), Asked::Ran(_)));
    }
    until_owed(&outlet, Owed::Nothing);
    outlet.tell(whole(at));
    waits.end("the wait for the phase");
}

#[test]
fn a_step_that_two_threads_ask_for_begins_once_and_neither_waits_for_ever() {
    let (rank, requests, mut outlet) = rank(0);
    let rank = Arc::new(rank);
    rank.announce(lengths(0)).unwrap();
    let begins = || {
        let rank = Arc::clone(&rank);
        Beside::run(move || rank.begin(0))
    };
    let both = [begins(), begins()];
    until_taken(&mut outlet);
    outlet.tell(Notice::Step(planned(0)));
    let both = both.map(|it| it.end("begin"));
    let steps = both.iter().filter(|it| matches!(it, Next::Step(_))).count();
    assert_eq!(steps, 1);
    let refused = |it: &Next| matches!(it, Next::End(Ending::Failed { reason, bad_input: true }) if reason.contains("step 0"));
    assert!(both.iter().any(refused), "{both:?}");
    let told = std::iter::from_fn(|| requests.try_recv().ok());
    let refusal = |it: Asked<HostRows>| matches!(it, Asked::For(Request::Refuse(_)));
    assert!(told.into_iter().any(refusal), "the job ends everywhere");
}

#[test]
fn a_panic_of_the_thread_that_computes_ends_the_job_by_its_rank() {
    let (rank, requests, mut outlet) = rank(0);
    rank.announce(lengths(0)).unwrap();
    let planned = planned(0);
    outlet.tell(Notice::Step(Arc::clone(&planned)));
    assert!(matches!(rank.begin(0), Next::Step(_)));
    let _ticket = submit(&rank, FIRST);
    let rows = std::iter::from_fn(|| requests.try_recv().ok()).find_map(|it| {
        let Asked::Submit(_, rows) = it else { return None };
        Some(rows)
    });
    let PhaseRows { q, k, v, .. } = rows.expect("a phase was submitted");
    let rows = BundleRows::Home(PhaseRows { q, k, v, gradients: None });
    // The plan has no such work.
    let phase = cadre_protocol::Phase(0);
    let work = crate::launch::Work { planned, phase, work: u32::MAX, rows, promise: None };
    outlet.tell(Notice::Work(Box::new(work)));
    let computes = std::panic::AssertUnwindSafe(|| rank.advance());
    assert!(std::panic::catch_unwind(computes).is_err(), "a launch of no work");
    let Ok(Asked::For(Request::Fail(reason))) = requests.try_recv() else { panic!("it goes on") };
    assert!(reason.contains("the thread that computes for rank 0 panicked"), "{reason}");
    assert_eq!(outlet.owed(), Owed::Nothing);
}

#[test]
fn a_lease_counts_every_call_that_was_sent_before_it() {
    for steps in [None, Some(2)] {
        let (rank, requests, _outlet) = rank_of(0, steps);
        rank.announce(lengths(0)).unwrap();
        rank.busy(Duration::ZERO);
        let mut sent = 0;
        let counted = loop {
            let asked = requests.try_recv().expect("it says that it is busy");
            if let Asked::For(Request::Busy(_, calls)) = asked {
                break calls;
            }
            sent += 1;
        };
        assert_eq!(counted, sent, "{steps:?}");
    }
}

#[test]
fn nothing_comes_any_more_once_the_job_has_ended() {
    let (rank, _requests, mut outlet) = rank(0);
    outlet.tell(Notice::End(Ending::Completed));
    assert!(rank.advance(), "its end came");
    assert!(!rank.advance(), "a loop until nothing comes ends");
    assert!(matches!(rank.poll_begin(0), Some(Next::End(Ending::Completed))));
}
