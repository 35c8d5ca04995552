//! Strangers at the door: connections of silence, noise and cut greetings, hundreds at once, keep no peer out.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use cadre_exchange::{Buffer, Encryption, Event, Limits, PeerId, Provider, TcpConfig};
use common::{KEY, Node, TRAINER, VERSION, config, hello, until};

const STRANGERS: usize = 600;
const BOTH: [Encryption; 2] = [Encryption::Off, Encryption::Tcp];

/// What an encrypted link begins with.
fn beginning() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let mut node = Node::with(TcpConfig { encryption: Encryption::Tcp, ..config(TRAINER) });
    node.tcp.connect(PeerId::server(0, 0), &listener.local_addr().expect("bound").to_string());
    node.poll();
    let (mut stream, _) = listener.accept().expect("it dials");
    let mut said = vec![0; 4096];
    let bytes = stream.read(&mut said).expect("it says something");
    said.truncate(bytes);
    said
}

/// What strangers say.
fn kinds() -> [(&'static str, Vec<u8>); 6] {
    let encrypted = beginning();
    let whole = hello(VERSION, PeerId::server(7, 0), TRAINER, 9);
    [
        ("silence", Vec::new()),
        ("noise", b"GET / HTTP/1.1\r\nHost: cadre\r\n\r\n".repeat(20)),
        ("cut greetings", whole[..40].to_vec()),
        ("greetings without proof", whole),
        ("cut beginnings of encryption", encrypted[..encrypted.len() / 2].to_vec()),
        ("beginnings of encryption", encrypted),
    ]
}

/// Peers that have begun to dial, before the door has seen any of them.
fn dial(trainer: &Node, peers: u16, encryption: Encryption) -> Vec<Node> {
    // In how many rounds they come is looked at, not how long one thread takes for that.
    let limits = Limits { greeting: Duration::from_mins(1), ..Limits::default() };
    let dial = |index| {
        let me = PeerId::server(index, 0);
        let mut server = Node::with(TcpConfig { encryption, limits, ..config(me) });
        server.tcp.connect(TRAINER, &trainer.tcp.address());
        server.poll();
        server
    };
    (0..peers).map(dial).collect()
}

fn until_all(trainer: &mut Node, servers: &mut [Node], done: impl Fn(&Node) -> bool) {
    let mut nodes: Vec<_> = servers.iter_mut().chain([trainer]).collect();
    let peers = nodes.len() - 1;
    until(&mut nodes, |nodes| nodes[..peers].iter().all(|it| done(it)));
}

/// Every server pulls a row from the trainer, over a link that never broke.
fn exchange(trainer: &mut Node, servers: &mut [Node]) {
    until_all(trainer, servers, |it| it.is_connected(TRAINER) || it.closed(TRAINER).is_some());
    let region = trainer.publish(KEY, 4096, 1);
    let pull = |it: &mut Node| {
        let landing = it.tcp.land(Buffer::zeroed(4096));
        it.pull(TRAINER, KEY, &[(0, 0, 4096)], landing);
        landing
    };
    let landings: Vec<_> = servers.iter_mut().map(pull).collect();
    let pulled = |it: &Node| it.events.iter().any(|it| matches!(it, Event::Pulled { .. }));
    until_all(trainer, servers, pulled);
    for (server, landing) in servers.iter_mut().zip(landings) {
        assert_eq!(server.closed(TRAINER), None, "{}", server.id);
        assert!(server.tcp.take(landing).expect("it ended") == *region, "the bytes differ");
    }
}

#[test]
fn strangers_that_crowd_in_behind_peers_keep_none_of_them_out() {
    let cases = kinds().into_iter().flat_map(|it| BOTH.map(|encryption| (it.clone(), encryption)));
    for ((kind, words), encryption) in cases {
        println!("{kind}, {encryption:?}");
        let mut trainer = Node::with(TcpConfig { encryption, ..config(TRAINER) });
        let knock = |trainer: &Node| -> Vec<TcpStream> {
            let knock = |_| {
                let mut stream = TcpStream::connect(trainer.tcp.address()).expect("it listens");
                stream.write_all(&words).expect("there is room");
                stream
            };
            (0..STRANGERS).map(knock).collect()
        };
        // Some are there before the peers, some come while these greet.
        let before = knock(&trainer);
        let mut servers = dial(&trainer, 4, encryption);
        let behind = knock(&trainer);
        exchange(&mut trainer, &mut servers);
        drop((before, behind));
    }
}

#[test]
fn far_more_peers_than_places_wait_for_their_turn_and_no_link_breaks() {
    // Far fewer places than peers that come at once. A handshake takes more rounds, and here one thread polls all peers in turn.
    for (encryption, strangers) in [(Encryption::Off, 2), (Encryption::Tcp, 16)] {
        let limits = Limits { strangers, ..Limits::default() };
        let mut trainer = Node::with(TcpConfig { limits, encryption, ..config(TRAINER) });
        let mut servers = dial(&trainer, 64, encryption);
        exchange(&mut trainer, &mut servers);
    }
}

#[test]
fn a_peer_that_never_has_room_is_no_broken_link_but_says_so() {
    let limits = Limits { greeting: Duration::from_secs(2), ..Limits::default() };
    let mut server = Node::with(TcpConfig { limits, ..config(PeerId::server(0, 0)) });
    let full = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    full.set_nonblocking(true).expect("a socket of ours");
    server.tcp.connect(TRAINER, &full.local_addr().expect("bound").to_string());
    until(&mut [&mut server], |nodes| {
        // Closes whoever comes.
        drop(full.accept());
        nodes[0].closed(TRAINER).is_some()
    });
    let said = server.closed(TRAINER).expect("just seen");
    assert!(said.contains("turned the link away") && said.contains("no room"), "{said}");
}
