//! As many jobs as somebody asks for, in all weathers, from drawn seeds, on all cores: `make soak PARTS=shell`.
//!
//! In: how many and which share of them ([`Asked`], of the environment). Out: a line of progress each minute, for each job that went
//! wrong its reason and the command that repeats it, and at the end how many ran of which commit. It goes on after a job that went
//! wrong, until too many have.
//!
//! A job that never ends is named as one that is under way for long. Seeds follow from the number that was drawn and from where they
//! stand: a share runs the same jobs whoever runs the others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::faults::Weather;
use crate::job::BRIEF;
use crate::random::hash;
use crate::{kept, number, repeat};

const MINUTE: Duration = Duration::from_mins(1);

/// One job of so many is as those of `make test`, the others are brief.
const LONG_OF: u64 = 40;

/// Of ten jobs.
const WEATHERS: [Weather; 10] = [
    Weather::Calm,
    Weather::Stormy,
    Weather::Burst,
    Weather::Relay,
    Weather::Stormy,
    Weather::Calm,
    Weather::Stormy,
    Weather::Burst,
    Weather::Narrow,
    Weather::Hostile,
];

/// What the environment asks for.
struct Asked {
    runs: u64,
    drawn: u64,
    /// This one of so many shares, counted from 1.
    share: (u64, u64),
    threads: u64,
    /// Jobs that may go wrong before it gives up.
    bound: usize,
    commit: String,
}

impl Asked {
    fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |it| it.get() as u64);
        let word = |name: &str| std::env::var(name).ok().filter(|it| !it.is_empty());
        let share = word("CADRE_SOAK_SHARE").unwrap_or_else(|| "1/1".into());
        let parsed =
            share.split_once('/').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let sound = parsed.filter(|(share, of)| (1..=*of).contains(share));
        Self {
            runs: number("CADRE_SOAK_RUNS").unwrap_or(10_000),
            drawn: number("CADRE_SOAK_SEED").unwrap_or(1),
            share: sound.unwrap_or_else(|| {
                panic!("CADRE_SOAK_SHARE is {share}; name one of several shares, such as 1/2")
            }),
            threads: number("CADRE_SOAK_THREADS").unwrap_or(cores).max(1),
            bound: number("CADRE_SOAK_FAILURES").unwrap_or(50) as usize,
            commit: word("CADRE_COMMIT").unwrap_or_else(|| "that is not named".into()),
        }
    }

    /// Which job stands there.
    fn job(&self, index: u64) -> (Weather, u64) {
        let first = hash(&[self.drawn]) >> 16;
        let kind = if (index / 10).is_multiple_of(LONG_OF) { 0 } else { BRIEF };
        (WEATHERS[(index % 10) as usize], first + index + kind)
    }
}

/// What a thread says: the job that it begins, or how the one that it had begun has ended.
enum News {
    Begins(u64),
    Ended(Result<(), String>),
}

#[test]
#[ignore = "takes hours: make soak PARTS=shell"]
fn jobs_of_all_weathers() {
    let asked = Asked::new();
    let Asked { runs, drawn, share: (share, of), threads, bound, ref commit } = asked;
    let (first, end) = (runs * (share - 1) / of, runs * share / of);
    let (next, give_up) = (AtomicU64::new(first), AtomicU64::new(end));
    let began = Instant::now();
    let (mut done, mut wrong, mut told) = (0_u64, Vec::new(), began);
    let line = |done: u64, wrong: usize| {
        let seconds = began.elapsed().as_secs_f64();
        let each = seconds * threads as f64 / done.max(1) as f64 * 1000.0;
        println!(
            "shell: {done} of {} jobs ran, {wrong} went wrong, share {share} of {of} of {runs} from seed {drawn}, commit {commit}: \
             {seconds:.0} s on {threads} threads, {each:.2} s of a thread per 1,000",
            end - first
        );
    };
    let work = |thread: u64, said: std::sync::mpsc::Sender<(u64, News)>| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= give_up.load(Ordering::Relaxed) {
                break;
            }
            said.send((thread, News::Begins(index))).ok();
            let (weather, seed) = asked.job(index);
            let ended = kept(seed, weather).map(drop);
            said.send((thread, News::Ended(ended))).ok();
        }
    };
    std::thread::scope(|scope| {
        let (said, news) = channel();
        for thread in 0..threads {
            let said = said.clone();
            scope.spawn(move || work(thread, said));
        }
        drop(said);
        let mut under_way = BTreeMap::new();
        loop {
            match news.recv_timeout(MINUTE) {
                Ok((thread, News::Begins(index))) => {
                    under_way.insert(thread, (index, Instant::now()));
                }
                Ok((thread, News::Ended(ended))) => {
                    done += 1;
                    let begun = under_way.remove(&thread);
                    if let (Err(reason), Some((index, _))) = (ended, begun) {
                        let (weather, seed) = asked.job(index);
                        println!("{weather:?}: seed {seed}: {reason}\n{}", repeat(weather, seed));
                        wrong.push((weather, seed));
                        if wrong.len() >= bound {
                            give_up.store(0, Ordering::Relaxed);
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if told.elapsed() >= MINUTE {
                told = Instant::now();
                line(done, wrong.len());
                for (index, since) in under_way.values().filter(|it| it.1.elapsed() >= MINUTE) {
                    let (weather, seed) = asked.job(*index);
                    let seconds = since.elapsed().as_secs();
                    println!("under way for {seconds} s: {}", repeat(weather, seed));
                }
            }
        }
    });
    for (weather, seed) in &wrong {
        println!("{}", repeat(*weather, *seed));
    }
    line(done, wrong.len());
    assert!(wrong.is_empty(), "{} jobs went wrong", wrong.len());
    assert_eq!(done, end - first, "every job of the share ran");
}
