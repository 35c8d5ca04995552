//! An owner and a reader, in one process or in two: what the programs `shared`, `ucx` and `encrypted` do with them.
//!
//! In: nodes that take the path of the program, children. Out: what landed. Which path rows took is for the caller to ask.

use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{
    Buffer, Clock, Event, LandingId, PeerId, Provider as _, PullError, PullId, RegionKey, Sharing,
    Traffic,
};

use crate::children::{Told, say, word};
use crate::common::{KEY, Node, config, pattern, until};
pub(crate) use crate::common::{SERVER as READER, TRAINER as OWNER};

/// The name of rows that lie where those of [`KEY`] were.
const OTHER: RegionKey = RegionKey([9; 4]);
/// Bytes of the region that [`whole`] pulls.
pub(crate) const BYTES: usize = 300_000;

pub(crate) fn node(me: PeerId, sharing: Sharing) -> Node {
    Node::on(config(me), Clock::system(), sharing)
}

/// Pulls a whole region of [`BYTES`]: how it ended, and what landed.
pub(crate) fn whole(
    reader: &mut Node,
    owner: &mut Node,
    key: RegionKey,
) -> Result<Buffer, PullError> {
    let landing = reader.tcp.land(Buffer::zeroed(BYTES));
    let pull = reader.pull(owner.id, key, &[(0, 0, BYTES as u64)], landing);
    landed(&mut [reader, owner], pull, landing)
}

/// Polls until a pull of a whole region by the first node has ended: how, and what landed.
pub(crate) fn landed(
    nodes: &mut [&mut Node],
    pull: PullId,
    landing: LandingId,
) -> Result<Buffer, PullError> {
    until(nodes, |nodes| nodes[0].result(pull).is_some());
    let buffer = nodes[0].tcp.take(landing).expect("it ended");
    nodes[0].result(pull).expect("just seen").map(|bytes| {
        assert_eq!(bytes, buffer.bytes().len() as u64);
        buffer
    })
}

/// Rows of an arena come by the path of the program, the same region published anew in memory of the owner alone is sent, and none
/// comes of what is withdrawn. `moved` is the reader's traffic after the first and the second.
pub(crate) fn only_rows_in_arenas((reader, owner): (&mut Node, &mut Node), moved: [Traffic; 2]) {
    let region = owner.publish(KEY, BYTES, 1);
    assert!(region.is_shared());
    assert!(whole(reader, owner, KEY).expect("published") == *region);
    assert_eq!(reader.tcp.traffic(), moved[0]);
    let own = Arc::new(Buffer::clone(&pattern(BYTES, 2)));
    owner.tcp.publish(KEY, Arc::clone(&own));
    assert!(whole(reader, owner, KEY).expect("published") == *own);
    assert_eq!(reader.tcp.traffic(), moved[1]);
    drop(owner.tcp.withdraw(KEY));
    assert_eq!(whole(reader, owner, KEY).expect_err("withdrawn"), PullError::Gone);
}

/// A region is withdrawn in the middle of a pull, and published anew or not: no pull lands bytes of two publications.
///
/// `begin` begins a pull of the whole region into the landing, and returns when some of it has landed.
pub(crate) fn published_anew_in_the_middle(
    (reader, owner): (&mut Node, &mut Node),
    bytes: usize,
    begin: impl Fn(&mut Node, &mut Node, LandingId) -> PullId,
) {
    for anew in [true, false] {
        let first = owner.publish(KEY, bytes, 3);
        let landing = reader.tcp.land(Buffer::zeroed(bytes));
        let pull = begin(reader, owner, landing);
        assert_eq!(reader.result(pull), None);
        // The rest is another publication's, and the memory of the first is written again.
        drop(owner.tcp.withdraw(KEY));
        drop(first);
        let second = Arc::new(pattern(bytes, 4));
        if anew {
            owner.tcp.publish(KEY, Arc::clone(&second));
        }
        let came = landed(&mut [reader, owner], pull, landing);
        if anew {
            assert!(came.expect("published") == *second, "bytes of two publications");
        } else {
            assert_eq!(came.expect_err("withdrawn"), PullError::Gone);
        }
    }
    assert_eq!(reader.tcp.traffic().sent_anew, 2);
}

/// A child that publishes `bytes` of the seeds that it is told, each in place of the one before.
pub(crate) fn own_as_told(mut owner: Node, bytes: usize) {
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
        region = Some(owner.publish(KEY, bytes, seed));
        say("published");
    }
}

/// Links a reader to a child of [`own_as_told`], which publishes rows of seed 1.
pub(crate) fn reader_of(owner: &mut Told, mut reader: Node) -> Node {
    reach(&mut reader, OWNER, owner);
    reader
}

/// As [`reader_of`], to a child of any name.
pub(crate) fn reach(reader: &mut Node, id: PeerId, owner: &mut Told) {
    let address = owner.hear();
    owner.tell("1");
    assert_eq!(owner.hear(), "published");
    reader.tcp.connect(id, &address);
    until(&mut [reader], |nodes| nodes[0].is_connected(id));
}

/// Kills a child that owns what is pulled: the pull ends, and then its link.
pub(crate) fn kill_in_the_middle(owner: &mut Told, reader: &mut Node, pull: PullId) {
    owner.child.kill().expect("our own child");
    owner.child.wait().expect("our own child");
    until(&mut [reader], |nodes| nodes[0].closed(OWNER).is_some());
    assert_eq!(reader.result(pull), Some(Err(PullError::PeerFailed)));
    let place = |wanted: fn(&Event) -> bool| reader.events.iter().position(wanted);
    let ended = place(|it| matches!(it, Event::Pulled { result: Err(_), .. }));
    assert!(ended < place(|it| matches!(it, Event::Closed { .. })), "pulls end before their link");
}

/// Polls the owner until the child says something.
pub(crate) fn serve(owner: &mut Node, child: &mut Told) -> String {
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

/// A child that reads `bytes` is stopped in the middle twice: over rows that are reused meanwhile, and over rows that last.
pub(crate) fn stop_over_reused_rows(mut owner: Node, mut reader: Told, bytes: usize) {
    let mut region = owner.publish(KEY, bytes, 1);
    reader.tell(&owner.tcp.address());
    for lasts in [false, true] {
        // Links are served while it reads for the first time.
        assert_eq!(serve(&mut owner, &mut reader), "in the middle");
        reader.stop();
        if !lasts {
            // The same bytes of the arena are other rows now, under another name.
            drop(owner.tcp.withdraw(KEY));
            drop(region);
            owner.publish(OTHER, bytes, 2);
        }
        reader.go_on();
        reader.tell("go on");
        // Whoever stood still over rows that lasted has them.
        let right = if lasts { format!("Ok({bytes})") } else { "Err(Gone)".to_owned() };
        assert_eq!(serve(&mut owner, &mut reader), right);
        drop(owner.tcp.withdraw(OTHER));
        region = owner.publish(KEY, bytes, 1);
        reader.tell("again");
    }
    assert_eq!(serve(&mut owner, &mut reader), format!("{}", 2 * bytes));
}
