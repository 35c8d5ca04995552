//! Works that are handed out before their rows count: who is answered, and when.
//!
//! In: a [`Case`]. Out: one answer for a promise that is kept, none for one that is broken or refused.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use cadre_exchange::{Provider as _, Tcp};
use cadre_kernels::device::{Gpu, Rooms};
use cadre_kernels::{Choice, Engine, Threads};
use cadre_protocol::At;
use cadre_step::phases::Direction;
use cadre_worker::compute::{Compute, Progress};
use cadre_worker::io::{Asked, Handle};
use cadre_worker::launch::{Flying, Launcher as _, Promise, Word, Work};
use cadre_worker::memory::{GpuRows, OnGpu};
use cadre_worker::trace::Tracer;

use super::case::{Case, promised};
use super::{READER, links};

/// Runs until `progress` stays: nothing moves but by a word then, or nothing is left.
fn settle(compute: &mut Compute<GpuRows>, progress: Progress) {
    let limit = Instant::now() + Duration::from_mins(1);
    let mut stays = 0;
    // More often than a launch has steps on an emulated stream.
    while stays < 100 {
        let now = compute.run();
        stays = if now == progress { stays + 1 } else { 0 };
        assert!(
            now == progress || now != Progress::Idle,
            "nothing is left: {progress:?} never comes"
        );
        assert!(Instant::now() < limit, "{progress:?} never came");
    }
}

fn answers_of(requests: &Receiver<Asked<GpuRows>>) -> Vec<(bool, u32)> {
    let answer = |it| {
        if let Asked::Ran(done) = it {
            return (true, done.work.work);
        }
        let Asked::Dropped(work) = it else { panic!("{it:?}") };
        (false, work.work)
    };
    requests.try_iter().map(answer).collect()
}

#[test]
#[ignore = "needs a GPU; the other test runs it over the emulated one"]
fn answers() {
    let engine = Engine::choose(Choice::Gpu, Threads::ONE).expect("the driver has a GPU");
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let place = OnGpu::new(&Rooms::new(&gpu, 1 << 20)).expect("a stream");
    let launcher = Flying::new(engine, &place).expect("streams");
    let links = Tcp::open(links(READER)).expect("loopback listens");
    let (handle, requests) = Handle::channel(links.waker());
    let mut compute = Compute::new(launcher, "test", handle, Tracer::off());
    let case = Case::new();
    let rows = Case::rows(&place, 1);
    let works = case.home(0, Direction::Forward, &rows);
    let at = |it: &Work<GpuRows>| At { step: it.planned.header.step, phase: it.phase };

    // Kept after its launch is over: the answer waits for the word. One without a promise waits for nothing.
    let (work, promise) = promised(&works[2]);
    compute.push(work);
    compute.push(works[1].clone());
    settle(&mut compute, Progress::Flying);
    let limit = Instant::now() + Duration::from_mins(1);
    while compute.account().ran(at(&works[2])) < 1 {
        compute.run();
        assert!(Instant::now() < limit, "the one without a promise never ran");
    }
    assert_eq!(answers_of(&requests), [(true, 1)]);
    assert!(promise.keep());
    settle(&mut compute, Progress::Idle);
    assert_eq!(answers_of(&requests), [(true, 2)]);
    assert_eq!(compute.account().ran(at(&works[2])), 2);

    // Broken before and after its launch: no answer, and its rows go.
    for early in [true, false] {
        let (work, promise) = promised(&works[2]);
        compute.push(work);
        if !early {
            settle(&mut compute, Progress::Flying);
        }
        promise.break_();
        settle(&mut compute, Progress::Idle);
        assert_eq!(answers_of(&requests), []);
    }

    // Cancelled in the queue: answered if its rows count already, else never to be kept.
    let promises: Vec<Promise> = [1, 2]
        .map(|it| {
            let (work, promise) = promised(&works[it]);
            compute.push(work);
            promise
        })
        .into();
    assert!(promises[0].keep());
    compute.cancel(at(&works[0]));
    assert_eq!(answers_of(&requests), [(false, 1)]);
    assert!(!promises[1].keep());
    // Late ones, too.
    let (work, promise) = promised(&works[2]);
    compute.push(work);
    assert_eq!((promise.word(), answers_of(&requests)), (Word::Refused, vec![]));
    settle(&mut compute, Progress::Idle);
}
