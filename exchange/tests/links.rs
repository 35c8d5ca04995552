//! Links: rings in order and bounded, and everything ends when a link does.

mod common;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use cadre_exchange::{
    Buffer, Encryption, Event, Limits, MAX_MESSAGE_BYTES, PeerId, Provider, PullError, RingError,
    TcpConfig,
};
use common::{KEY, Node, SERVER, TRAINER, config, connect, encryption, pair, raw_open, until};
use socket2::{Domain, Socket, Type};

#[test]
fn rings_arrive_in_order_in_both_directions() {
    let (mut server, mut trainer) = pair();
    trainer.tcp.connect(SERVER, &server.tcp.address());
    // Queued before the link stands, of all sizes.
    let messages: Vec<Vec<u8>> = (0..300).map(|it| vec![it as u8; it * 37]).collect();
    for message in &messages {
        server.tcp.ring(TRAINER, message).expect("there is room");
        trainer.tcp.ring(SERVER, message).expect("there is room");
    }
    let all = messages.len();
    until(&mut [&mut server, &mut trainer], |it| it.iter().all(|it| it.messages().len() == all));
    assert!(server.messages() == messages && trainer.messages() == messages);
}

#[test]
fn the_longest_message_arrives_and_longer_ones_are_refused() {
    let (mut server, mut trainer) = pair();
    let message = vec![3; MAX_MESSAGE_BYTES];
    server.tcp.ring(TRAINER, &message).expect("just short enough");
    until(&mut [&mut server, &mut trainer], |nodes| !nodes[1].messages().is_empty());
    assert!(trainer.messages() == [message]);
    let bytes = MAX_MESSAGE_BYTES + 1;
    let refused = server.tcp.ring(TRAINER, &vec![0; bytes]);
    assert_eq!(refused, Err(RingError::TooLong { bytes }));
    let refused = trainer.tcp.ring(SERVER, b"no link");
    assert_eq!(refused, Err(RingError::NotConnected { peer: SERVER }));
}

#[test]
fn rings_do_not_wait_behind_data() {
    let (mut server, mut trainer) = pair();
    connect(&mut trainer, &mut server);
    let bytes = 64 << 20;
    trainer.publish(KEY, bytes, 1);
    let landing = server.tcp.land(Buffer::zeroed(bytes));
    let pull = server.pull(TRAINER, KEY, &[(0, 0, bytes as u64)], landing);
    server.poll();
    trainer.poll();
    trainer.tcp.ring(SERVER, b"first").expect("there is room");
    until(&mut [&mut server, &mut trainer], |nodes| !nodes[0].messages().is_empty());
    assert_eq!(server.result(pull), None, "the data is still on its way");
}

#[test]
fn queues_of_a_stopped_peer_are_bounded() {
    let limits = Limits { queued_bytes: 1 << 16, ..Limits::default() };
    let mut server = Node::with(TcpConfig { limits, ..config(SERVER) });
    let mut trainer = Node::new(TRAINER);
    connect(&mut server, &mut trainer);
    // Nobody polls the trainer: the sockets fill, then the queue.
    let mut rung = 0_u32;
    let refused = loop {
        match server.tcp.ring(TRAINER, &[rung.to_le_bytes(); 1000].concat()) {
            Ok(()) => rung += 1,
            Err(error) => break error,
        }
        assert!(rung < 100_000, "the queue has no bound");
        if rung.is_multiple_of(8) {
            server.poll();
        }
    };
    assert!(matches!(refused, RingError::Full { queued, .. } if queued > (1 << 16) - 4100));
    let room = Event::Room { peer: TRAINER };
    assert!(!server.events.contains(&room));
    until(&mut [&mut server, &mut trainer], |it| it[1].messages().len() == rung as usize);
    let first = |it: &Vec<u8>| u32::from_le_bytes(*it.first_chunk().expect("4000 bytes"));
    assert!(trainer.messages().iter().map(first).eq(0..rung), "nothing is lost or turned around");
    // Who was refused is told, once, that there is room: or what it did not say would stay unsaid.
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].events.contains(&room));
    server.tcp.ring(TRAINER, b"again").expect("there is room");
    until(&mut [&mut server, &mut trainer], |nodes| nodes[1].messages().len() > rung as usize);
    assert_eq!(server.events.iter().filter(|it| **it == room).count(), 1);
}

#[test]
fn a_forced_close_ends_everything_at_once() {
    let (mut server, mut trainer) = pair();
    connect(&mut trainer, &mut server);
    trainer.publish(KEY, 32 << 20, 2);
    let landing = server.tcp.land(Buffer::zeroed(32 << 20));
    let pulls = [
        server.pull(TRAINER, KEY, &[(0, 0, 16 << 20)], landing),
        server.pull(TRAINER, KEY, &[(0, 16 << 20, 16 << 20)], landing),
    ];
    server.poll();
    trainer.poll();
    server.tcp.close(TRAINER);
    assert!(server.tcp.take(landing).is_ok(), "the landing is free at once");
    server.poll();
    assert_eq!(pulls.map(|it| server.result(it)), [const { Some(Err(PullError::Cancelled)) }; 2]);
    assert_eq!(server.closed(TRAINER), None);
    until(&mut [&mut trainer], |nodes| nodes[0].closed(SERVER).is_some());
    // Both peers may open links again.
    server.events.clear();
    connect(&mut server, &mut trainer);
    server.tcp.ring(TRAINER, b"back").expect("there is room");
    until(&mut [&mut server, &mut trainer], |nodes| nodes[1].messages() == [b"back"]);
}

#[test]
fn a_killed_peer_ends_its_pulls_and_no_others() {
    let (mut server, mut trainer) = pair();
    let mut other = Node::new(PeerId::trainer(1, 0));
    connect(&mut server, &mut other);
    trainer.publish(KEY, 32 << 20, 3);
    other.publish(KEY, 100, 4);
    let landings = [32 << 20, 100].map(|it| server.tcp.land(Buffer::zeroed(it)));
    let dying = server.pull(TRAINER, KEY, &[(0, 0, 32 << 20)], landings[0]);
    server.poll();
    trainer.poll();
    drop(trainer);
    let living = server.pull(other.id, KEY, &[(0, 0, 100)], landings[1]);
    until(&mut [&mut server, &mut other], |nodes| {
        nodes[0].result(living).is_some() && nodes[0].closed(TRAINER).is_some()
    });
    assert_eq!(server.result(living), Some(Ok(100)));
    assert_eq!(server.result(dying), Some(Err(PullError::PeerFailed)));
    let place = |wanted: fn(&Event) -> bool| server.events.iter().position(wanted);
    let ended = place(|it| matches!(it, Event::Pulled { result: Err(_), .. }));
    assert!(ended < place(|it| matches!(it, Event::Closed { .. })), "pulls end before their link");
    assert!(server.tcp.take(landings[0]).is_ok());
    let unreachable = server.pull(TRAINER, KEY, &[(0, 0, 1)], landings[1]);
    server.poll();
    assert_eq!(server.result(unreachable), Some(Err(PullError::PeerFailed)));
}

#[test]
fn links_that_cannot_open_say_why() {
    let limits = Limits { greeting: Duration::from_millis(20), ..Limits::default() };
    let mut server = Node::with(TcpConfig { limits, ..config(SERVER) });
    // A port whose owner does not listen, one whose owner is silent, and what is no address.
    let deaf = Socket::new(Domain::IPV4, Type::STREAM, None).expect("loopback");
    deaf.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("loopback");
    let port = deaf.local_addr().expect("bound").as_socket().expect("of IPv4");
    assert!(TcpListener::bind(port).is_err(), "another test could listen there");
    let silent = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let addresses = [
        (port.to_string(), "refused"),
        (silent.local_addr().expect("bound").to_string(), "took too long"),
        ("nowhere".to_owned(), "is not IP:PORT"),
    ];
    for (index, (address, reason)) in (0..).zip(&addresses) {
        let peer = PeerId::trainer(index, 0);
        server.tcp.connect(peer, address);
        until(&mut [&mut server], |nodes| nodes[0].closed(peer).is_some());
        let error = server.closed(peer).expect("just seen");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_peer_that_breaks_the_rules_loses_its_own_link_only() {
    // Raw bytes are no frames where links are encrypted.
    if encryption() != Encryption::Off {
        return;
    }
    let (mut server, mut trainer) = pair();
    let frames: [&[u8]; 4] = [
        &[9; 64],
        &[1, 0, 0, 0, 255, 255, 255, 255],
        &[
            2, 0, 0, 0, 25, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5,
            6, 7, 8, 9,
        ],
        &[2, 0, 0, 0, 24, 0, 0, 0].into_iter().chain([0; 24]).collect::<Vec<_>>().repeat(2000),
    ];
    for (index, frame) in (1..).zip(frames) {
        let rogue = PeerId::trainer(index, 0);
        let mut stream = raw_open(&mut server, rogue);
        stream.write_all(frame).expect("there is room");
        until(&mut [&mut server], |nodes| nodes[0].closed(rogue).is_some());
    }
    server.tcp.ring(TRAINER, b"still there").expect("there is room");
    until(&mut [&mut server, &mut trainer], |nodes| nodes[1].messages() == [b"still there"]);
}

#[test]
fn wakers_end_a_poll_from_other_threads() {
    let mut server = Node::new(SERVER);
    let waker = server.tcp.waker();
    let other = std::thread::spawn(move || waker.wake());
    // Without the wake this would take an hour.
    server.tcp.poll(Duration::from_hours(1), &mut server.events);
    other.join().expect("it only wakes");
    let before = Instant::now();
    server.tcp.poll(Duration::ZERO, &mut server.events);
    assert!(before.elapsed() < Duration::from_mins(1) && server.events.is_empty());
}

#[test]
fn links_open_over_ipv6_where_the_machine_has_it() {
    let bind = IpAddr::V6(Ipv6Addr::LOCALHOST);
    if std::net::TcpListener::bind((bind, 0)).is_err() {
        println!("skipped: this machine has no IPv6 loopback");
        return;
    }
    let mut server = Node::with(TcpConfig { bind, ..config(SERVER) });
    let mut trainer = Node::with(TcpConfig { bind, ..config(TRAINER) });
    connect(&mut server, &mut trainer);
    server.tcp.ring(TRAINER, b"six").expect("there is room");
    until(&mut [&mut server, &mut trainer], |nodes| nodes[1].messages() == [b"six"]);
}

#[test]
fn addresses_of_other_machines_cannot_be_bound() {
    let bind = IpAddr::from([192, 0, 2, 1]);
    let error = cadre_exchange::Tcp::open(TcpConfig { bind, ..config(SERVER) }).err();
    let error = error.expect("that address is for documentation").to_string();
    assert!(error.contains("cannot open the exchange on 192.0.2.1"), "{error}");
}
