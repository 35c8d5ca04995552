//! A thousand peers of one process: all of them come at once, none is kept out, each has its rows.

mod common;

use std::time::{Duration, Instant};

use cadre_exchange::{
    Buffer, Encryption, Event, Limits, PeerId, Provider, Tcp, TcpConfig, allow_links,
};
use common::{KEY, Node, TRAINER, config, wish};

const PEERS: u16 = 1_024;
const ROW: u64 = 4_096;

#[test]
fn a_thousand_peers_that_start_at_once_are_all_let_in_and_served() {
    if let Err(error) = allow_links(4 * u64::from(PEERS)) {
        println!("skipped: {error}");
        return;
    }
    for encryption in [Encryption::Off, Encryption::Tcp] {
        all_are_served(encryption);
    }
}

fn all_are_served(encryption: Encryption) {
    let mut trainer = Node::with(TcpConfig { encryption, ..config(TRAINER) });
    let region = trainer.publish(KEY, ROW as usize, 1);
    let open = |index| {
        // One thread greets for all of them.
        let limits = Limits { greeting: Duration::from_mins(2), ..Limits::default() };
        let config = TcpConfig { encryption, limits, ..config(PeerId::server(index, 0)) };
        let mut tcp = Tcp::open(config).expect("loopback is there");
        tcp.connect(TRAINER, &trainer.tcp.address());
        let landing = tcp.land(Buffer::zeroed(ROW as usize));
        tcp.pull(wish((TRAINER, KEY), &[(0, 0, ROW)], landing, Duration::from_mins(1)));
        (tcp, landing, Vec::new())
    };
    let mut peers: Vec<_> = (0..PEERS).map(open).collect();
    // All have dialled before the trainer looks.
    let limit = Instant::now() + Duration::from_mins(2);
    let served = |events: &Vec<Event>| events.iter().any(|it| matches!(it, Event::Pulled { .. }));
    while !peers.iter().all(|it| served(&it.2)) {
        for (tcp, _, events) in &mut peers {
            if !served(events) {
                tcp.poll(Duration::ZERO, events);
            }
        }
        trainer.tcp.poll(Duration::ZERO, &mut trainer.events);
        assert!(
            Instant::now() < limit,
            "{} are served",
            peers.iter().filter(|it| served(&it.2)).count()
        );
    }
    assert_eq!(trainer.events, [], "nobody was turned away, no link broke");
    for (tcp, landing, events) in &mut peers {
        assert_eq!(events[0], Event::Connected(TRAINER));
        assert_eq!(events.len(), 2, "{events:?}");
        assert!(tcp.take(*landing).expect("it ended") == *region, "the bytes differ");
    }
}
