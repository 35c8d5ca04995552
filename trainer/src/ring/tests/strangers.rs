//! Who does not belong to the ring comes to its ports, and changes nothing.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use proptest::prelude::*;

use super::*;

/// Somebody who connects to a port of the ring and never belongs there.
#[derive(Clone, Debug)]
enum Stranger {
    Silence,
    Noise(Vec<u8>),
    /// The first bytes of a right greeting, then silence, or the end of the connection.
    Cut {
        bytes: usize,
        hangs_up: bool,
    },
    /// A right greeting that was said before, to another.
    Replay,
}

fn stranger() -> impl Strategy<Value = Stranger> {
    prop_oneof![
        Just(Stranger::Silence),
        prop::collection::vec(any::<u8>(), 1..200).prop_map(Stranger::Noise),
        (1_usize..=96, any::<bool>())
            .prop_map(|(bytes, hangs_up)| Stranger::Cut { bytes, hangs_up }),
        Just(Stranger::Replay),
    ]
}

/// What trainer 1 says to trainer 0 when they meet: hello and proof, as they pass somebody between them.
fn overheard() -> Vec<u8> {
    let (places, list) = places(2);
    let between = TcpListener::bind((HERE, 0)).unwrap();
    let bent = [(trainer(0), between.local_addr().unwrap()), list[1]];
    thread::scope(|scope| {
        scope.spawn(|| places[0].meet(&list, SOON, SOON).unwrap());
        scope.spawn(|| places[1].meet(&bent, SOON, SOON).unwrap());
        let (mut caller, _) = between.accept().unwrap();
        let mut callee = TcpStream::connect(list[0].1).unwrap();
        let mut said = vec![0; 96];
        let (hello, proof) = said.split_at_mut(64);
        caller.read_exact(hello).unwrap();
        callee.write_all(hello).unwrap();
        let mut answer = [0; 96];
        callee.read_exact(&mut answer).unwrap();
        caller.write_all(&answer).unwrap();
        caller.read_exact(proof).unwrap();
        callee.write_all(proof).unwrap();
        let mut verdict = [0; 8];
        callee.read_exact(&mut verdict).unwrap();
        caller.write_all(&verdict).unwrap();
        let mut last = [0; 1];
        caller.read_exact(&mut last).unwrap();
        callee.write_all(&last).unwrap();
        said
    })
}

/// Comes as a stranger; what has to stay open is returned.
fn come(stranger: &Stranger, to: SocketAddr, greeting: &[u8]) -> Option<TcpStream> {
    // A port that takes nobody for a while is no fault of the ring.
    let mut stream = TcpStream::connect(to).ok()?;
    // Whoever is turned away may see a broken link.
    match stranger {
        Stranger::Silence => {}
        Stranger::Noise(bytes) => drop(stream.write_all(bytes)),
        Stranger::Cut { bytes, hangs_up } => {
            let _ = stream.write_all(&greeting[..*bytes]);
            if *hangs_up {
                return None;
            }
        }
        Stranger::Replay => drop(stream.write_all(greeting)),
    }
    Some(stream)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn strangers_at_the_port_change_nothing(
        strangers in prop::collection::vec((stranger(), 0_usize..3), 0..40),
    ) {
        static GREETING: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(overheard);
        let (places, list) = places(3);
        let come = |(who, at): &(Stranger, usize)| come(who, list[*at].1, &GREETING);
        let before: Vec<_> = strangers.iter().map(come).collect();
        prop_assert_eq!(sums(&list, &places), [6; 3]);
        drop(before);
    }
}

#[test]
fn six_hundred_strangers_at_once_from_the_first_moment_change_nothing() {
    let greeting = overheard();
    let (places, list) = places(2);
    let (over, came) = (AtomicBool::new(false), AtomicUsize::new(0));
    let kinds = [
        Stranger::Silence,
        Stranger::Noise(vec![9; 64]),
        Stranger::Cut { bytes: 64, hangs_up: false },
        Stranger::Cut { bytes: 63, hangs_up: true },
        Stranger::Replay,
    ];
    let flood = || {
        let mut open = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let number = came.fetch_add(1, Ordering::Relaxed);
            let to = list[number / kinds.len() % 2].1;
            open.push(come(&kinds[number % kinds.len()], to, &greeting));
            if open.len() == 300 {
                open.clear();
            }
        }
    };
    let start = Instant::now();
    let sums = thread::scope(|scope| {
        // All of them before the ring's first moment, and no end of others while it is made.
        let before: Vec<_> = (0..600)
            .map(|it| come(&kinds[it % kinds.len()], list[it / kinds.len() % 2].1, &greeting))
            .collect();
        scope.spawn(flood);
        let sums = sums(&list, &places);
        over.store(true, Ordering::Relaxed);
        drop(before);
        sums
    });
    assert_eq!(sums, [3, 3]);
    println!("after {:?} and {} more strangers", start.elapsed(), came.into_inner());
}
