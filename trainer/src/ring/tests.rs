//! Rings over real sockets: sums, neighbours that go, are late, or are somebody else, and strangers at the port.

mod strangers;

use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::Barrier;
use std::thread;

use cadre_worker::session::links::{Encryption, Purpose};

use super::*;

const SOON: Duration = Duration::from_mins(1);
const SECRET: [u8; 32] = [7; 32];
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn trainer(rank: usize) -> PeerId {
    PeerId::trainer(rank as u16, 3)
}

fn greeter(me: PeerId) -> Greeter {
    Greeter::new(Purpose::Ring, me, SECRET, 1)
}

/// A trainer before it has met the others.
struct Alone {
    listener: TcpListener,
    greeter: Greeter,
    interrupt: Waker,
    job: u64,
}

impl Alone {
    fn new(me: PeerId) -> Self {
        let listener = Greeter::listen(HERE).unwrap();
        Self { listener, greeter: greeter(me), interrupt: Waker::new().unwrap(), job: 7 }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    fn meet(
        &self,
        trainers: &[(PeerId, SocketAddr)],
        within: Duration,
        deadline: Duration,
    ) -> Result<Ring, RingError> {
        let Self { listener, greeter, interrupt, job } = self;
        let members = Members { greeter, listener, trainers, job: *job, interrupt };
        Ring::connect(&members, within, deadline)
    }
}

fn places(world: usize) -> (Vec<Alone>, Vec<(PeerId, SocketAddr)>) {
    let places: Vec<_> = (0..world).map(|rank| Alone::new(trainer(rank))).collect();
    let list = places.iter().map(|it| (it.greeter.me(), it.address())).collect();
    (places, list)
}

/// Runs one thread per trainer, each with its end of a ring.
fn ring<T: Send>(
    world: usize,
    deadline: Duration,
    run: impl Fn(usize, Ring) -> T + Sync,
) -> Vec<T> {
    ring_of(Encryption::Off, world, deadline, run)
}

/// The same over links that are encrypted or not.
fn ring_of<T: Send>(
    encryption: Encryption,
    world: usize,
    deadline: Duration,
    run: impl Fn(usize, Ring) -> T + Sync,
) -> Vec<T> {
    let (mut places, list) = places(world);
    for place in &mut places {
        place.greeter = greeter(place.greeter.me()).with(encryption);
    }
    let start = |rank: usize| run(rank, places[rank].meet(&list, SOON, deadline).unwrap());
    together(world, start)
}

/// Runs one thread for each number.
fn together<T: Send>(count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|it| scope.spawn(move || run(it))).collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

/// What trainers that meet sum up to; trainer n gives n + 1.
fn sums(list: &[(PeerId, SocketAddr)], places: &[Alone]) -> Vec<u32> {
    together(places.len(), |rank| sum(&places[rank], list, rank as f32 + 1.0))
}

fn sum(place: &Alone, list: &[(PeerId, SocketAddr)], value: f32) -> u32 {
    let mut values = [value];
    place.meet(list, SOON, SOON).unwrap().all_reduce(&mut values).unwrap();
    values[0] as u32
}

#[test]
fn sums_have_the_same_bits_everywhere_and_every_time() {
    let value = |rank: usize, index: usize| ((rank * 31 + index * 7) as f32).sqrt() - 3.0;
    for (world, length) in [(1, 5), (2, 0), (2, 1), (2, 100_001), (3, 2), (3, 70_000), (5, 999)] {
        let sum = |rank: usize, mut ring: Ring| {
            let mut bits = Vec::new();
            for _ in 0..2 {
                let mut values: Vec<_> = (0..length).map(|it| value(rank, it)).collect();
                ring.all_reduce(&mut values).unwrap();
                bits.push(values.iter().map(|it| it.to_bits()).collect::<Vec<_>>());
            }
            assert_eq!(bits[0], bits[1]);
            bits.remove(0)
        };
        let sums = ring(world, SOON, sum);
        assert_eq!(ring_of(Encryption::Tcp, world, SOON, sum), sums, "encrypted");
        assert!(sums.iter().all(|it| *it == sums[0]), "{world} trainers, {length} numbers");
        for (index, &sum) in sums[0].iter().enumerate() {
            let expected: f64 = (0..world).map(|it| f64::from(value(it, index))).sum();
            assert!((f64::from(f32::from_bits(sum)) - expected).abs() < 1e-3);
        }
    }
}

/// Passes on a little at a time what callers say to the one behind it, and at once what it answers. Out: its address.
fn slow_way(to: SocketAddr) -> SocketAddr {
    let between = TcpListener::bind((HERE, 0)).unwrap();
    let address = between.local_addr().unwrap();
    let pass = |mut from: TcpStream, mut to: TcpStream, most: usize| {
        let mut bytes = vec![0; most];
        while let Ok(count) = from.read(&mut bytes)
            && count > 0
            && to.write_all(&bytes[..count]).is_ok()
        {}
    };
    // It ends with its connections.
    thread::spawn(move || {
        let (caller, _) = between.accept().unwrap();
        let callee = TcpStream::connect(to).unwrap();
        let (back, to_caller) = (callee.try_clone().unwrap(), caller.try_clone().unwrap());
        thread::spawn(move || pass(caller, callee, 1 << 10));
        pass(back, to_caller, 1 << 16);
    });
    address
}

#[test]
fn a_sum_ends_when_the_last_bytes_waited_for_a_slow_way() {
    for encryption in [Encryption::Off, Encryption::Tcp] {
        let (mut places, list) = places(2);
        for place in &mut places {
            place.greeter = greeter(place.greeter.me()).with(encryption);
        }
        // Trainer 0 has all that it receives long before all that it sends is out.
        let bent = [list[0], (list[1].0, slow_way(list[1].1))];
        let lists = [&bent[..], &list[..]];
        together(2, |rank| {
            let mut values = vec![1.0; 1 << 22];
            let mut ring = places[rank].meet(lists[rank], SOON, SOON).unwrap();
            for _ in 0..2 {
                ring.all_reduce(&mut values).unwrap_or_else(|it| panic!("{encryption:?}: {it}"));
            }
            assert!(values.iter().all(|it| *it as u32 == 4));
        });
    }
}

#[test]
fn a_trainer_that_goes_is_an_error_of_all_others_at_once() {
    let errors = ring(4, SOON, |rank, mut ring| {
        if rank == 2 {
            return String::new();
        }
        ring.all_reduce(&mut vec![1.0; 1 << 20]).unwrap_err().to_string()
    });
    for (rank, error) in errors.iter().enumerate().filter(|&(rank, _)| rank != 2) {
        assert!(error.contains("closed its link"), "{rank}: {error}");
    }
}

#[test]
fn trainers_that_train_something_else_do_not_sum() {
    let (mut places, list) = places(3);
    places[1].job = 8;
    let errors = together(3, |rank| {
        let mut ring = places[rank].meet(&list, SOON, SOON).unwrap();
        ring.all_reduce(&mut [1.0; 8]).err().map(|it| it.to_string())
    });
    assert!(errors.iter().all(Option::is_some), "{errors:?}");
    let named = errors.iter().flatten().filter(|it| it.contains("trains something else"));
    assert!(named.count() >= 2, "{errors:?}");
}

#[test]
fn a_silent_trainer_is_late() {
    let silent = Barrier::new(2);
    let errors = ring(2, Duration::from_millis(30), |rank, mut ring| {
        let error = (rank == 0).then(|| ring.all_reduce(&mut [1.0; 8]).unwrap_err());
        silent.wait();
        error
    });
    let error = errors[0].as_ref().unwrap().to_string();
    assert!(error.contains("trainer 1 sent nothing"), "{error}");
}

#[test]
fn a_trainer_that_comes_late_to_a_sum_finds_its_links() {
    let silence = Duration::from_secs(1);
    let (mut places, list) = places(3);
    for place in &mut places {
        place.greeter = greeter(place.greeter.me()).closing_after(silence);
    }
    let sums = together(3, |rank| {
        let mut ring = places[rank].meet(&list, SOON, SOON).unwrap();
        // More than trainer 2 has room for while it reads nothing.
        let mut values = vec![1.0; 300_000];
        if rank == 2 {
            // As busy as its main thread may be, unless its link goes meanwhile.
            let links = ring.links.as_ref().unwrap();
            ready(&mut [PollFd::new(&links.previous, PollFlags::RDHUP)], 3 * silence).unwrap();
        }
        ring.all_reduce(&mut values).map(|()| values)
    });
    for sum in sums {
        assert!(sum.unwrap().iter().all(|it| *it as u32 == 3));
    }
}

#[test]
fn another_vector_is_refused() {
    let errors = ring(2, SOON, |rank, mut ring| {
        ring.all_reduce(&mut vec![0.0; rank + 1]).unwrap_err().to_string()
    });
    assert!(errors.iter().any(|it| it.contains("trains something else")), "{errors:?}");
}

#[test]
fn a_wait_in_a_sum_ends_when_the_job_does() {
    let (places, list) = places(2);
    let silent = Barrier::new(2);
    let error = thread::scope(|scope| {
        let other = scope.spawn(|| {
            let ring = places[1].meet(&list, SOON, SOON).unwrap();
            silent.wait();
            drop(ring);
        });
        let mut ring = places[0].meet(&list, SOON, SOON).unwrap();
        scope.spawn(|| places[0].interrupt.wake());
        let error = ring.all_reduce(&mut vec![1.0; 1 << 22]).unwrap_err();
        let again = ring.all_reduce(&mut [1.0]).unwrap_err();
        silent.wait();
        other.join().unwrap();
        assert!(matches!(again, RingError::Interrupted), "an end stays one: {again}");
        error
    });
    assert!(matches!(error, RingError::Interrupted), "{error}");
}

#[test]
fn a_wait_for_a_neighbour_ends_when_the_job_does() {
    let (places, list) = places(2);
    let error = thread::scope(|scope| {
        scope.spawn(|| places[0].interrupt.wake());
        places[0].meet(&list, SOON, SOON).unwrap_err()
    });
    assert!(matches!(error, RingError::Interrupted), "{error}");
}

/// A listener on a port that the system gives to no call of its own accord, so that nobody else has it meanwhile: neither a
/// call of another test, nor the very call that tries this port, which would reach itself.
fn listener_of_a_quiet_port() -> TcpListener {
    let first = std::process::id() % 10_000;
    let mut ports = (0..10_000).map(|it| 12_000 + ((first + it) % 10_000) as u16);
    ports.find_map(|port| TcpListener::bind((HERE, port)).ok()).expect("a port is free")
}

#[test]
fn a_trainer_calls_before_the_other_listens() {
    let (first, early) = (Alone::new(trainer(0)), listener_of_a_quiet_port());
    let address = early.local_addr().unwrap();
    let list = [(trainer(0), first.address()), (trainer(1), address)];
    let sums = thread::scope(|scope| {
        let calling = scope.spawn(|| sum(&first, &list, 1.0));
        // The first call comes to somebody who hangs up; then nobody is there for a while.
        early.set_nonblocking(false).unwrap();
        drop(early.accept().unwrap());
        drop(early);
        assert!(TcpStream::connect(address).is_err(), "nobody listens there any more");
        let listener = TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let late = Alone { listener, ..Alone::new(trainer(1)) };
        let sum = sum(&late, &list, 2.0);
        [calling.join().unwrap(), sum]
    });
    assert_eq!(sums, [3, 3]);
}

/// What trainer 0 says of a ring whose trainer 1 greets as `greeter`, and what that one says.
fn refused(greeter: Greeter, within: Duration) -> [String; 2] {
    let (one, mut two) = (Alone::new(trainer(0)), Alone::new(trainer(1)));
    two.greeter = greeter;
    let me = two.greeter.me();
    let seen_by_one = [(trainer(0), one.address()), (trainer(1), two.address())];
    let mut seen_by_two = vec![(me, two.address()); usize::from(me.index) + 1];
    seen_by_two[0] = (trainer(0), one.address());
    thread::scope(|scope| {
        let one = scope.spawn(|| one.meet(&seen_by_one, within, SOON).unwrap_err().to_string());
        let two = two.meet(&seen_by_two, within, SOON).unwrap_err().to_string();
        [one.join().unwrap(), two]
    })
}

#[test]
fn neighbours_of_another_job_attempt_build_or_rank_are_refused_by_name() {
    // A machine under load may need more time for a greeting.
    let check = |greeter: Greeter, expected: [&str; 2]| {
        let mut within = Duration::from_millis(100);
        loop {
            let said = refused(greeter.clone(), within);
            let apart = |it: &String| it.contains("the gradient ring has no link to trainer");
            assert!(said.iter().all(apart), "{said:?}");
            let named = said.iter().zip(expected).all(|(said, it)| said.contains(it));
            if named {
                return;
            }
            assert!(within < SOON, "{said:?}, not {expected:?}");
            within *= 4;
        }
    };
    let me = trainer(1);
    check(Greeter::new(Purpose::Ring, me, [8; 32], 1), ["does not know the job's secret"; 2]);
    check(Greeter::new(Purpose::Ring, me, SECRET, 2), ["its data version is"; 2]);
    check(Greeter::new(Purpose::Exchange, me, SECRET, 1), ["it greets for"; 2]);
    let older =
        ["but trainer 1 (incarnation 2) listens there", "incarnation 3 has taken its place"];
    check(greeter(PeerId { incarnation: 2, ..me }), older);
    let other = ["but trainer 2 (incarnation 3) listens there", "is not whom it waits for"];
    check(greeter(trainer(2)), other);
}
