//! Two processes: one that is stopped, killed or out of descriptors takes no byte from the other, and gives none that is wrong.
//!
//! In: children, which are this program with one ignored test, and words to them. Out: what the parent has, and what they say.

use cadre_exchange::{Buffer, LandingId, Provider, PullError, PullId, RegionKey, Sharing};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::children::{Told, say, word};
use crate::common::{KEY, Node, pattern, until};
use crate::pair::{
    OWNER, READER, kill_in_the_middle, landed, node, own_as_told, reader_of, serve,
    stop_over_reused_rows,
};

/// Many turns of copying.
const BYTES: usize = 32 << 20;

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_owns() {
    own_as_told(node(OWNER, Sharing::Auto), BYTES);
}

/// A reader whose owner is a child, and publishes rows of seed 1.
fn reader(owner: &mut Told) -> Node {
    reader_of(owner, node(READER, Sharing::Required))
}

fn begin(reader: &mut Node, key: RegionKey) -> (PullId, LandingId) {
    let landing = reader.tcp.land(Buffer::zeroed(BYTES));
    (reader.pull(OWNER, key, &[(0, 0, BYTES as u64)], landing), landing)
}

fn whole(reader: &mut Node) -> Result<Buffer, PullError> {
    let (pull, landing) = begin(reader, KEY);
    landed(&mut [reader], pull, landing)
}

#[test]
fn an_owner_that_is_stopped_and_goes_on_changes_no_byte_of_ours() {
    let mut owner = Told::start("processes::a_child_that_owns");
    let mut reader = reader(&mut owner);
    let [first, second] = [1, 2].map(|seed| pattern(BYTES, seed));
    assert!(whole(&mut reader).expect("published") == first);
    owner.stop();
    // An owner that stands still answers nobody, and its rows are there all the same.
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
    kill_in_the_middle(&mut owner, &mut reader, pull);
    assert!(reader.tcp.take(landing).is_ok());
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_reads() {
    let mut reader = node(READER, Sharing::Required);
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

#[test]
fn a_reader_that_is_stopped_and_goes_on_over_reused_rows_counts_nothing() {
    let reader = Told::start("processes::a_child_that_reads");
    stop_over_reused_rows(node(OWNER, Sharing::Auto), reader, BYTES);
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_asks_for_an_arena() {
    let mut reader = node(READER, Sharing::Required);
    reader.tcp.connect(OWNER, &word());
    until(&mut [&mut reader], |nodes| nodes[0].is_connected(OWNER));
    say("has the board");
    assert_eq!(word(), "ask");
    let (pull, landing) = begin(&mut reader, KEY);
    say("asks");
    let came = landed(&mut [&mut reader], pull, landing);
    let is_right = came.is_ok_and(|it| it == pattern(BYTES, 1));
    say(&format!("{is_right} {:?} {:?}", reader.tcp.path(OWNER), reader.closed(OWNER)));
}

/// Waits until a thread of this name of a child waits for something.
fn until_a_thread_sleeps(child: &Told, name: &str) {
    let threads = format!("/proc/{}/task", child.child.id());
    let sleeps = |thread: &std::path::Path| {
        let says = |file: &str, what: &str| {
            std::fs::read_to_string(thread.join(file)).is_ok_and(|it| it.contains(what))
        };
        says("comm", name) && says("stat", ") S ")
    };
    let threads = || std::fs::read_dir(&threads).expect("our own child");
    while !threads().any(|it| it.is_ok_and(|it| sleeps(&it.path()))) {
        std::thread::yield_now();
    }
}

#[test]
fn a_reader_that_is_stopped_while_it_asks_at_a_door_goes_on_asking() {
    let mut owner = Told::start("processes::a_child_that_owns");
    let address = owner.hear();
    owner.tell("1");
    assert_eq!(owner.hear(), "published");
    let mut reader = Told::start("processes::a_child_that_asks_for_an_arena");
    reader.tell(&address);
    assert_eq!(reader.hear(), "has the board");
    owner.stop();
    reader.tell("ask");
    assert_eq!(reader.hear(), "asks");
    until_a_thread_sleeps(&reader, "arena");
    reader.stop();
    reader.go_on();
    owner.go_on();
    assert_eq!(reader.hear(), "true Shared None");
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_has_no_descriptor_left() {
    let mut reader = node(READER, Sharing::Auto);
    reader.tcp.connect(OWNER, &word());
    until(&mut [&mut reader], |nodes| nodes[0].is_connected(OWNER));
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
    let mut owner = node(OWNER, Sharing::Auto);
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
