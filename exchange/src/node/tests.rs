//! The work of a node does not grow with the pulls that wait.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::rc::Rc;

use super::*;
use crate::peer::Piece;
use crate::tcp::{Encryption, Limits};

const OWNER: PeerId = PeerId { role: Role::Trainer, index: 0, incarnation: 0 };
const BYTES: u64 = 64;

/// A device that copies nothing, and is done when the test says so.
#[derive(Default)]
struct Idle(Rc<Cell<bool>>);

impl Device for Idle {
    type Memory = ();
    type Imported = ();
    type Copy = ();
    type Error = io::Error;

    fn place(&self, (): &()) -> Place {
        Place { arena: 1, arena_bytes: BYTES, at: 0, bytes: BYTES }
    }

    fn export(&self, (): &()) -> io::Result<OwnedFd> {
        File::open("/dev/null").map(Into::into)
    }

    fn import(&self, _: &OwnedFd, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn copy(&mut self, (): &(), (): &(), _: &[Piece]) -> io::Result<()> {
        Ok(())
    }

    fn is_over(&self, (): &()) -> io::Result<bool> {
        Ok(self.0.get())
    }
}

fn open(me: PeerId, sockets: PathBuf, device: Idle) -> Node<Idle> {
    let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
    let (secret, encryption) = ([1; 32], Encryption::Off);
    let tcp = TcpConfig { bind, me, secret, data_version: 1, encryption, limits };
    Node::open(NodeConfig { tcp, sockets }, device).unwrap()
}

/// How many pulls ten polls look at, while so many are copied, or wait at a door that is silent.
fn looked_at(pulls: u64, is_silent: bool) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let is_over = Rc::new(Cell::new(false));
    let mut owner = open(OWNER, folder.path().into(), Idle::default());
    let mut reader = open(PeerId::server(0, 0), folder.path().into(), Idle(Rc::clone(&is_over)));
    let silent = folder.path().join("silent.sock");
    let _door = UnixListener::bind(&silent).unwrap();
    let (links, door) = (owner.tcp.address(), if is_silent { &silent } else { &owner.path });
    reader.connect(OWNER, &format!("{links}@{}", door.display()));
    owner.publish(RegionKey::default(), Arc::new(()));
    for _ in 0..pulls {
        let (landing, key, patience) =
            (reader.land(()), RegionKey::default(), Duration::from_mins(1));
        let pieces = vec![Piece { remote: 0, local: 0, bytes: BYTES }];
        reader.pull(PullRequest { peer: OWNER, key, pieces, landing, patience });
    }
    let (mut events, mut polls) = (Vec::new(), 0..100_000);
    let begun = |events: &[Event]| {
        events.iter().filter(|it| matches!(it, Event::Begun { .. })).count() as u64
    };
    while !reader.looks.is_empty() || (!is_silent && begun(&events) < pulls) {
        assert!(polls.next().is_some(), "it never came to it: {events:?}");
        owner.poll(Duration::ZERO, &mut Vec::new());
        reader.poll(Duration::from_millis(1), &mut events);
    }
    reader.pulls.steps.set(0);
    for _ in 0..10 {
        reader.poll(Duration::ZERO, &mut events);
    }
    let steps = reader.pulls.steps.get();
    if !is_silent {
        is_over.set(true);
        let ended = |it: &&Event| matches!(it, Event::Pulled { result: Ok(BYTES), .. });
        while (events.iter().filter(ended).count() as u64) < pulls {
            assert!(polls.next().is_some(), "it never came to it: {events:?}");
            owner.poll(Duration::ZERO, &mut Vec::new());
            reader.poll(Duration::from_millis(1), &mut events);
        }
    }
    steps
}

#[test]
fn a_poll_looks_at_the_oldest_copy_alone_however_many_pulls_wait() {
    // Each poll looks before and after its links.
    assert_eq!([2, 200].map(|it| looked_at(it, false)), [20; 2]);
    assert_eq!([2, 200].map(|it| looked_at(it, true)), [0; 2]);
}
