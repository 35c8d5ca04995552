//! Who may open a link: peers of this job, of this build, in their newest incarnation, and nobody else.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use cadre_exchange::{Buffer, Clock, Limits, PeerId, Provider, PullError, TcpConfig};
use common::{
    KEY, Node, SECRET, TRAINER, VERSION, config, connect, hello, noise_disturbs_nobody, proof,
    raw_accept, raw_open, receive, until,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Lets the server try to open a link, and checks what both sides say.
fn check(server: TcpConfig, claimed: PeerId, server_says: &str, trainer_says: &str) {
    let mut server = Node::with(server);
    let mut trainer = Node::new(TRAINER);
    server.tcp.connect(claimed, &trainer.tcp.address());
    until(&mut [&mut server, &mut trainer], |nodes| {
        nodes[0].closed(claimed).is_some() && !nodes[1].refusals().is_empty()
    });
    let said = server.closed(claimed).expect("just seen");
    assert!(said.contains(server_says), "{said}");
    let said = trainer.refusals()[0];
    assert!(said.contains(trainer_says), "{said}");
    assert!(!server.is_connected(claimed));
}

#[test]
fn a_peer_without_the_secret_is_turned_away() {
    let server = TcpConfig { secret: [1; 32], ..config(PeerId::server(0, 0)) };
    check(server, TRAINER, "does not know the job's secret", "knows the job's secret");
}

#[test]
fn a_peer_of_another_build_is_turned_away() {
    let server = TcpConfig { data_version: VERSION + 1, ..config(PeerId::server(0, 0)) };
    check(server, TRAINER, "data version is 7, ours is 8", "data version is 8, ours is 7");
}

#[test]
fn an_address_that_belongs_to_somebody_else_by_now_is_noticed() {
    let wanted = PeerId::trainer(1, 0);
    let found = "trainer 0 (incarnation 0) listens there";
    check(config(PeerId::server(0, 0)), wanted, found, "trainer 1 (incarnation 0) is wanted");
}

#[test]
fn a_proof_cannot_be_replayed() {
    let mut trainer = Node::new(TRAINER);
    let peer = PeerId::server(0, 0);
    let mut stream = TcpStream::connect(trainer.tcp.address()).expect("it listens");
    stream.write_all(&hello(VERSION, peer, TRAINER, 1)).expect("there is room");
    // What the trainer proves of itself is not what it wants to hear.
    let answer = common::receive(&mut trainer, &mut stream, 96);
    stream.write_all(&answer[64..]).expect("there is room");
    until(&mut [&mut trainer], |nodes| !nodes[0].refusals().is_empty());
    assert!(trainer.refusals()[0].contains("does not know the job's secret"));
}

#[test]
fn a_newer_incarnation_shuts_the_older_out() {
    let mut trainer = Node::new(TRAINER);
    let (old, new) = (PeerId::server(0, 3), PeerId::server(0, 4));
    let mut first = Node::new(old);
    connect(&mut first, &mut trainer);
    connect(&mut trainer, &mut first);
    let mut second = Node::new(new);
    connect(&mut second, &mut trainer);
    until(&mut [&mut first, &mut trainer], |nodes| {
        nodes[0].closed(TRAINER).is_some() && nodes[1].closed(old).is_some()
    });
    assert!(trainer.closed(old).is_some_and(|it| it.contains("has taken its place")));
    // The older one resumes and tries again, and the trainer does not open a link to it either.
    first.events.clear();
    first.tcp.connect(TRAINER, &trainer.tcp.address());
    until(&mut [&mut first, &mut trainer], |nodes| nodes[0].closed(TRAINER).is_some());
    assert!(first.closed(TRAINER).is_some_and(|it| it.contains("incarnation 4 has taken")));
    assert!(trainer.refusals()[0].contains("is stale"));
    trainer.events.clear();
    trainer.tcp.connect(old, &first.tcp.address());
    trainer.poll();
    assert!(trainer.closed(old).is_some_and(|it| it.contains("is stale")));
    // Other indexes are other peers, and the newer one is undisturbed.
    connect(&mut Node::new(PeerId::server(1, 0)), &mut trainer);
    second.tcp.ring(TRAINER, b"here").expect("there is room");
    until(&mut [&mut second, &mut trainer], |nodes| nodes[1].messages() == [b"here"]);
}

#[test]
fn a_second_link_of_a_peer_takes_the_place_of_the_first() {
    let mut trainer = Node::new(TRAINER);
    let peer = PeerId::server(0, 0);
    let mut first = raw_open(&mut trainer, peer);
    let mut second = raw_open(&mut trainer, peer);
    assert!(trainer.closed(peer).is_some_and(|it| it.contains("new link")));
    assert!(matches!(first.read(&mut [0; 1]), Ok(0) | Err(_)), "the first is closed");
    second.write_all(&[1, 0, 0, 0, 2, 0, 0, 0, 7, 8]).expect("there is room");
    until(&mut [&mut trainer], |nodes| nodes[0].messages() == [[7, 8]]);
}

#[test]
fn strangers_are_bounded_in_number_and_time() {
    let greeting = Duration::from_millis(50);
    let limits = Limits { strangers: 4, greeting, hello: greeting, ..Limits::default() };
    let mut trainer = Node::with(TcpConfig { limits, ..config(TRAINER) });
    let knock = || TcpStream::connect(trainer.tcp.address()).expect("it listens");
    let mut knocking: Vec<_> = (0..32).map(|_| knock()).collect();
    knocking[31].write_all(&hello(VERSION, PeerId::server(0, 0), TRAINER, 1)[..9]).expect("room");
    until(&mut [&mut trainer], |nodes| !nodes[0].refusals().is_empty());
    // Only the one that spoke is worth a word; all are gone.
    assert_eq!(trainer.refusals().len(), 1, "{:?}", trainer.refusals());
    assert!(trainer.refusals()[0].contains("took too long"));
    for stream in &mut knocking {
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)), "closed");
    }
}

#[test]
fn what_a_stranger_has_said_counts_though_the_door_stood_still() {
    let (clock, hand) = Clock::driven();
    let mut trainer = Node::at(config(TRAINER), clock);
    let mut stream = TcpStream::connect(trainer.tcp.address()).expect("it listens");
    trainer.poll();
    let ours = hello(VERSION, PeerId::server(0, 0), TRAINER, 1);
    stream.write_all(&ours).expect("there is room");
    hand.advance(Limits::default().hello);
    let answer = receive(&mut trainer, &mut stream, 96);
    let proof = proof(&SECRET, "opener", &ours, &answer[..64]);
    stream.write_all(&proof).expect("there is room");
    hand.advance(Limits::default().greeting);
    assert_eq!(receive(&mut trainer, &mut stream, 8), [0; 8], "welcome");
    assert!(trainer.refusals().is_empty(), "{:?}", trainer.refusals());
}

#[test]
fn noise_is_turned_away_at_its_first_bytes() {
    let mut trainer = Node::new(TRAINER);
    let mut stream = TcpStream::connect(trainer.tcp.address()).expect("it listens");
    stream.write_all(b"GE").expect("there is room");
    until(&mut [&mut trainer], |nodes| !nodes[0].refusals().is_empty());
    assert!(trainer.refusals()[0].contains("does not speak the exchange's protocol"));
}

#[test]
fn random_bytes_disturb_nobody() {
    let mut server = Node::new(PeerId::server(0, 0));
    let mut trainer = Node::new(TRAINER);
    connect(&mut server, &mut trainer);
    let nodes = std::cell::RefCell::new((server, trainer));
    let valid = hello(VERSION, PeerId::server(1, 0), TRAINER, 9);
    let start =
        prop_oneof![Just(Vec::new()), (0..65_usize).prop_map(move |it| valid[..it].to_vec())];
    let bytes = (start, prop::collection::vec(any::<u8>(), 1..300));
    let attack = |(start, noise): (Vec<u8>, Vec<u8>)| {
        noise_disturbs_nobody(&mut nodes.borrow_mut(), &[start, noise].concat(), |trainer| {
            !trainer.refusals().is_empty()
        })
    };
    let mut runner =
        TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    runner.run(&bytes, attack).expect("no bytes disturb others");
}

#[test]
fn replies_that_were_not_asked_for_close_the_link() {
    let reply = |pull: u64, status: u32, bytes: u64| {
        let head = [&pull.to_le_bytes()[..], &status.to_le_bytes(), &[0; 4]].concat();
        [&head[..], &bytes.to_le_bytes(), &[0; 8]].concat()
    };
    let (mut server, rogue) = (Node::new(PeerId::server(0, 0)), PeerId::trainer(3, 0));
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    for wrong in [reply(99, 0, 8), reply(0, 0, 9), reply(0, 3, 0), reply(0, 1, 8), vec![255; 32]] {
        server.events.clear();
        server.tcp.connect(rogue, &listener.local_addr().expect("bound").to_string());
        let mut stream = raw_accept(&mut server, rogue, &listener);
        let landing = server.tcp.land(Buffer::zeroed(8));
        let pull = server.pull(rogue, KEY, &[(0, 0, 8)], landing);
        let request = receive(&mut server, &mut stream, 8 + 24 + 16);
        let id = u64::from_le_bytes(*request[8..].first_chunk().expect("a request"));
        // The pull's identity goes where the table says 0.
        let mut wrong = wrong;
        if wrong[..8] == [0; 8] {
            wrong[..8].copy_from_slice(&id.to_le_bytes());
        }
        stream.write_all(&wrong).expect("there is room");
        until(&mut [&mut server], |nodes| nodes[0].closed(rogue).is_some());
        assert_eq!(server.result(pull), Some(Err(PullError::PeerFailed)));
        assert_eq!(server.tcp.take(landing).expect("free").bytes(), [0; 8], "nothing has landed");
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)), "our side is closed");
    }
}
