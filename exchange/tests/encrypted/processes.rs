//! Two processes with nothing but a link, plain or encrypted: one that is stopped and goes on changes no byte of the other, and takes
//! none that is wrong.
//!
//! In: children, which are this program with one ignored test, and words to them. Out: what the parent has, and what they say.

use std::time::Duration;

use cadre_exchange::{
    Buffer, Clock, Encryption, LandingId, PeerId, Provider as _, PullError, PullId, Sharing,
    TcpConfig,
};

use crate::children::{Told, say, word};
use crate::common::{KEY, Node, config, pattern, until};
use crate::pair::{
    OWNER, READER, kill_in_the_middle, landed, own_as_told, reader_of, stop_over_reused_rows,
};

/// More than the windows, and than what the system holds of a link.
const BYTES: usize = 40 << 20;
const BOTH: [Encryption; 2] = [Encryption::Off, Encryption::Tcp];

fn node(me: PeerId, encryption: Encryption) -> Node {
    let config = TcpConfig { encryption, ..config(me) };
    Node::on(config, Clock::system(), Sharing::Off)
}

/// Starts a child of the same encryption.
fn child(name: &str, encryption: Encryption) -> Told {
    let word = if encryption == Encryption::Off { "CADRE_PLAIN=1" } else { "CADRE_PLAIN=" };
    Told::start_by(&["env", word], name)
}

fn told() -> Encryption {
    let is_plain = std::env::var("CADRE_PLAIN").is_ok_and(|it| it == "1");
    if is_plain { Encryption::Off } else { Encryption::Tcp }
}

fn begin(reader: &mut Node, patience: Duration) -> (PullId, LandingId) {
    let landing = reader.tcp.land(Buffer::zeroed(BYTES));
    let whole = [(0, 0, BYTES as u64)];
    (reader.pull_until(OWNER, KEY, &whole, landing, patience), landing)
}

fn whole(reader: &mut Node) -> Result<Buffer, PullError> {
    let (pull, landing) = begin(reader, Duration::from_mins(1));
    landed(&mut [reader], pull, landing)
}

/// Polls until rows land.
fn until_in_the_middle(reader: &mut Node, (pull, landing): (PullId, LandingId)) {
    let reads = |it: &Node| it.tcp.landed(landing).expect("it is there").bytes()[1000] != 0;
    until(&mut [reader], |nodes| reads(nodes[0]));
    assert_eq!(reader.result(pull), None, "more than a window");
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_owns() {
    own_as_told(node(OWNER, told()), BYTES);
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_reads() {
    let mut reader = node(READER, told());
    reader.tcp.connect(OWNER, &word());
    until(&mut [&mut reader], |nodes| nodes[0].is_connected(OWNER));
    assert!(whole(&mut reader).expect("published") == pattern(BYTES, 1));
    for _ in 0..2 {
        let reads = begin(&mut reader, Duration::from_mins(1));
        until_in_the_middle(&mut reader, reads);
        say("in the middle");
        assert_eq!(word(), "go on");
        until(&mut [&mut reader], |nodes| nodes[0].result(reads.0).is_some());
        say(&format!("{:?}", reader.result(reads.0).expect("just seen")));
        assert_eq!(word(), "again");
    }
    say(&format!("{:?}", reader.tcp.traffic().tcp_bytes));
}

#[test]
fn an_owner_that_is_stopped_and_goes_on_changes_no_byte_of_ours() {
    for encryption in BOTH {
        let mut owner = child("processes::a_child_that_owns", encryption);
        let mut reader = reader_of(&mut owner, node(READER, encryption));
        let (pull, landing) = begin(&mut reader, Duration::from_millis(300));
        until_in_the_middle(&mut reader, (pull, landing));
        owner.stop();
        until(&mut [&mut reader], |nodes| nodes[0].result(pull).is_some());
        assert_eq!(reader.result(pull), Some(Err(PullError::Deadline)), "{encryption:?}");
        let mut ours = reader.tcp.take(landing).expect("it ended");
        ours.bytes_mut().fill(9);
        owner.tell("2");
        owner.go_on();
        assert_eq!(owner.hear(), "published");
        // What was on its way arrives before this, and is nobody's.
        assert!(whole(&mut reader).expect("published") == pattern(BYTES, 2));
        assert!(ours.bytes().iter().all(|it| *it == 9), "ours is ours");
        assert!(reader.closed(OWNER).is_none());
    }
}

#[test]
fn a_reader_that_is_stopped_and_goes_on_over_reused_rows_counts_nothing() {
    for encryption in BOTH {
        let reader = child("processes::a_child_that_reads", encryption);
        stop_over_reused_rows(node(OWNER, encryption), reader, BYTES);
    }
}

#[test]
fn a_killed_owner_ends_its_pulls() {
    for encryption in BOTH {
        let mut owner = child("processes::a_child_that_owns", encryption);
        let mut reader = reader_of(&mut owner, node(READER, encryption));
        let (pull, landing) = begin(&mut reader, Duration::from_mins(1));
        until_in_the_middle(&mut reader, (pull, landing));
        kill_in_the_middle(&mut owner, &mut reader, pull);
        assert!(reader.tcp.take(landing).is_ok());
    }
}
