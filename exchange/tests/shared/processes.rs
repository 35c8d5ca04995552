//! Two processes: one that is stopped, killed or out of descriptors takes no byte from the other, and gives none that is wrong.
//!
//! In: children, which are this program with one ignored test, and words to them. Out: what the parent has, and what they say.

use std::time::Duration;

use cadre_exchange::{
    Buffer, Clock, Event, LandingId, Path, PeerId, Provider, PullError, PullId, RegionKey, Sharing,
};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::children::{Told, say, word};
use crate::common::{KEY, Node, config, pattern, until};

const OWNER: PeerId = PeerId { role: cadre_exchange::Role::Trainer, index: 0, incarnation: 0 };
const READER: PeerId = PeerId { role: cadre_exchange::Role::Server, index: 0, incarnation: 0 };
const OTHER: RegionKey = RegionKey([9; 4]);
/// Many turns of copying.
const BYTES: usize = 32 << 20;

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_owns() {
    let mut owner = Node::on(config(OWNER), Clock::system(), Sharing::Auto);
    say(&owner.tcp.address());
    let (words, heard) = std::sync::mpsc::channel();
    let waker = owner.tcp.waker();
    std::thread::spawn(move || {
        loop {
            let word = word();
            let is_over = word.is_empty();
            words.send(word).expect("it is polled");
            waker.wake();
            if is_over {
                return;
            }
        }
    });
    let mut region = None;
    loop {
        owner.tcp.poll(Duration::from_secs(10), &mut owner.events);
        let Ok(word) = heard.try_recv() else { continue };
        let Ok(seed) = word.parse() else { return };
        // The same memory, with other rows.
        drop(owner.tcp.withdraw(KEY));
        drop(region.take());
        region = Some(owner.publish(KEY, BYTES, seed));
        say("published");
    }
}

/// A reader whose owner is a child, and publishes rows of seed 1.
fn reader(owner: &mut Told) -> Node {
    let address = owner.hear();
    owner.tell("1");
    assert_eq!(owner.hear(), "published");
    let mut reader = Node::on(config(READER), Clock::system(), Sharing::Required);
    reader.tcp.connect(OWNER, &address);
    until(&mut [&mut reader], |nodes| nodes[0].is_connected(OWNER));
    reader
}

fn begin(reader: &mut Node, key: RegionKey) -> (PullId, LandingId) {
    let landing = reader.tcp.land(Buffer::zeroed(BYTES));
    (reader.pull(OWNER, key, &[(0, 0, BYTES as u64)], landing), landing)
}

fn whole(reader: &mut Node) -> Result<Buffer, PullError> {
    let (pull, landing) = begin(reader, KEY);
    until(&mut [reader], |nodes| nodes[0].result(pull).is_some());
    let landed = reader.tcp.take(landing).expect("it ended");
    reader.result(pull).expect("just seen").map(|_| landed)
}

#[test]
fn an_owner_that_is_stopped_and_goes_on_changes_no_byte_of_ours() {
    let mut owner = Told::start("processes::a_child_that_owns");
    let mut reader = reader(&mut owner);
    let [first, second] = [1, 2].map(|seed| pattern(BYTES, seed));
    assert!(whole(&mut reader).expect("published") == first);
    owner.stop();
    // It answers nobody, and its rows are there all the same.
    let before = whole(&mut reader).expect("published");
    assert!(before == first);
    owner.tell("2");
    owner.go_on();
    assert_eq!(owner.hear(), "published");
    assert!(before == first, "ours is ours");
    assert!(whole(&mut reader).expect("published") == second);
    assert_eq!(reader.tcp.traffic().shared_bytes, 3 * BYTES as u64);
}

#[test]
fn a_killed_owner_ends_its_pulls_and_its_memory_stays_to_be_read() {
    let mut owner = Told::start("processes::a_child_that_owns");
    let mut reader = reader(&mut owner);
    assert!(whole(&mut reader).expect("published") == pattern(BYTES, 1));
    let (pull, landing) = begin(&mut reader, KEY);
    reader.poll();
    assert_eq!(reader.result(pull), None, "a turn of many");
    owner.child.kill().expect("our own child");
    owner.child.wait().expect("our own child");
    until(&mut [&mut reader], |nodes| nodes[0].closed(OWNER).is_some());
    assert_eq!(reader.result(pull), Some(Err(PullError::PeerFailed)));
    let place = |wanted: fn(&Event) -> bool| reader.events.iter().position(wanted);
    let ended = place(|it| matches!(it, Event::Pulled { result: Err(_), .. }));
    assert!(ended < place(|it| matches!(it, Event::Closed { .. })), "pulls end before their link");
    assert!(reader.tcp.take(landing).is_ok());
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_reads() {
    let mut reader = Node::on(config(READER), Clock::system(), Sharing::Required);
    reader.tcp.connect(OWNER, &word());
    until(&mut [&mut reader], |nodes| nodes[0].is_connected(OWNER));
    assert!(whole(&mut reader).expect("published") == pattern(BYTES, 1));
    for _ in 0..2 {
        let (pull, _) = begin(&mut reader, KEY);
        reader.poll();
        assert_eq!(reader.result(pull), None, "a turn of many");
        say("in the middle");
        assert_eq!(word(), "go on");
        until(&mut [&mut reader], |nodes| nodes[0].result(pull).is_some());
        say(&format!("{:?}", reader.result(pull).expect("just seen")));
        assert_eq!(word(), "again");
    }
    say(&format!("{:?}", reader.tcp.traffic().shared_bytes));
}

/// Serves links until the child says something.
fn serve(owner: &mut Node, child: &mut Told) -> String {
    let waker = owner.tcp.waker();
    std::thread::scope(|scope| {
        let hearing = scope.spawn(|| {
            let heard = child.hear();
            waker.wake();
            heard
        });
        while !hearing.is_finished() {
            // The wake comes just before the thread is finished.
            owner.tcp.poll(Duration::from_millis(100), &mut owner.events);
        }
        hearing.join().expect("it says")
    })
}

#[test]
fn a_reader_that_is_stopped_and_goes_on_over_reused_rows_counts_nothing() {
    let mut owner = Node::on(config(OWNER), Clock::system(), Sharing::Auto);
    let mut region = owner.publish(KEY, BYTES, 1);
    let mut reader = Told::start("processes::a_child_that_reads");
    reader.tell(&owner.tcp.address());
    for lasts in [false, true] {
        // Links are served while it reads for the first time.
        let heard = serve(&mut owner, &mut reader);
        assert_eq!(heard, "in the middle");
        reader.stop();
        if !lasts {
            // The same bytes of the arena are other rows now, under another name.
            drop(owner.tcp.withdraw(KEY));
            drop(region);
            owner.publish(OTHER, BYTES, 2);
        }
        reader.go_on();
        reader.tell("go on");
        let heard = serve(&mut owner, &mut reader);
        // Whoever stood still over rows that lasted has them.
        let right = if lasts { format!("Ok({BYTES})") } else { "Err(Gone)".to_owned() };
        assert_eq!(heard, right);
        drop(owner.tcp.withdraw(OTHER));
        region = owner.publish(KEY, BYTES, 1);
        reader.tell("again");
    }
    assert_eq!(reader.hear(), format!("{}", 2 * BYTES));
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_has_no_descriptor_left() {
    let mut reader = Node::on(config(READER), Clock::system(), Sharing::Auto);
    reader.tcp.connect(OWNER, &word());
    until(&mut [&mut reader], |nodes| nodes[0].tcp.path(OWNER) == Path::Shared);
    let mut all = true;
    while reader.tcp.traffic().shared_bytes == 0 {
        all &= whole(&mut reader).expect("published") == pattern(BYTES, 1);
    }
    // From here on nothing can be opened.
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), maximum: Some(3) }).expect("lower");
    say("has the first");
    assert_eq!(word(), "go on");
    for _ in 0..3 {
        all &= whole(&mut reader).expect("published") == pattern(BYTES, 2);
    }
    let traffic = reader.tcp.traffic();
    let path = reader.tcp.path(OWNER);
    say(&format!(
        "{all} {path:?} {} {}",
        traffic.shared_bytes,
        traffic.tcp_bytes > 2 * BYTES as u64
    ));
}

#[test]
fn a_way_that_is_lost_in_the_middle_is_left_for_tcp_without_a_wrong_byte() {
    let mut owner = Node::on(config(OWNER), Clock::system(), Sharing::Auto);
    let region = owner.publish(KEY, BYTES, 1);
    let mut reader = Told::start("processes::a_child_that_has_no_descriptor_left");
    reader.tell(&owner.tcp.address());
    for turn in 0..2 {
        let heard = serve(&mut owner, &mut reader);
        if turn == 0 {
            assert_eq!(heard, "has the first");
            // In an arena that the reader does not have, as the first is still in use.
            owner.publish(KEY, BYTES, 2);
            reader.tell("go on");
        } else {
            assert_eq!(heard, format!("true Tcp {BYTES} true"));
        }
    }
    drop(region);
}
