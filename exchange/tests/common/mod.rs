//! Providers on loopback, polled in turn by one test thread, and a peer that speaks raw bytes.
//!
//! In the program `shared` the same cases take shared memory, in `ucx` UCX: nodes require it, and what they publish lies in arenas.
//! In `encrypted` links are encrypted.
//!
//! The raw peer writes the greeting down a second time, from `docs/exchange.md`, so that page and code are compared.

// Every test file compiles this one for itself and uses a part of it.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use cadre_exchange::{
    Buffer, Clock, Encryption, Event, LandingId, Limits, Paths, PathsConfig, PeerId, Piece, Pool,
    Provider, PullError, PullId, PullRequest, RegionKey, Role, Sharing, TcpConfig, Transports,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

pub(crate) const SECRET: [u8; 32] = [42; 32];
pub(crate) const VERSION: u32 = 7;
pub(crate) const KEY: RegionKey = RegionKey([1, 2, 3, 4]);
pub(crate) const TRAINER: PeerId = PeerId { role: Role::Trainer, index: 0, incarnation: 0 };
pub(crate) const SERVER: PeerId = PeerId { role: Role::Server, index: 0, incarnation: 0 };

/// Arenas of a length that makes them many.
static ARENAS: LazyLock<Arc<Pool>> =
    LazyLock::new(|| Pool::shared_and_poisoned(1 << 20).expect("shared memory"));

/// Which paths the nodes of this program take.
pub(crate) fn sharing() -> Sharing {
    match env!("CARGO_CRATE_NAME") {
        "shared" => Sharing::Required,
        "ucx" => ucx(),
        _ => Sharing::Off,
    }
}

/// What the nodes of this program encrypt.
pub(crate) fn encryption() -> Encryption {
    match env!("CARGO_CRATE_NAME") {
        "encrypted" => Encryption::Tcp,
        _ => Encryption::Off,
    }
}

/// UCX, over what `CADRE_UCX_OVER` says (`rdma`, `tcp`, else shared memory), or links where this machine has none.
fn ucx() -> Sharing {
    static HERE: LazyLock<bool> = LazyLock::new(|| match cadre_exchange::ucx_here() {
        Ok(_) => true,
        Err(why) => {
            println!("skipped: {why}");
            false
        }
    });
    if !*HERE {
        return Sharing::Off;
    }
    let asked = Transports::asked().expect("as the page says");
    let is_unasked = matches!(asked, Transports::Rdma) && !is_rdma();
    Sharing::Ucx(if is_unasked { Transports::SharedMemory } else { asked })
}

/// Whether nodes of UCX take a device for RDMA, which reads without the owner's processor: in the guest of `scripts/rdma`.
pub(crate) fn is_rdma() -> bool {
    std::env::var("CADRE_UCX_OVER").as_deref() == Ok("rdma")
}

/// A provider and what it has reported.
pub(crate) struct Node {
    pub(crate) id: PeerId,
    pub(crate) tcp: Paths,
    pub(crate) events: Vec<Event>,
}

pub(crate) fn config(me: PeerId) -> TcpConfig {
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let (encryption, limits) = (encryption(), Limits::default());
    TcpConfig { bind, me, secret: SECRET, data_version: VERSION, encryption, limits }
}

/// Noise at the port of the second node disturbs no message of the first, whose link to it stands. It is over when the second has
/// the message, and has seen of the noise what `seen` says.
pub(crate) fn noise_disturbs_nobody(
    (server, trainer): &mut (Node, Node),
    noise: &[u8],
    seen: impl Fn(&Node) -> bool,
) -> Result<(), TestCaseError> {
    trainer.events.clear();
    let mut stream = TcpStream::connect(trainer.tcp.address()).expect("it listens");
    // The stranger may be turned away before it has said everything.
    let _ = stream.write_all(noise);
    drop(stream);
    server.tcp.ring(trainer.id, b"undisturbed").expect("there is room");
    until(&mut [server, trainer], |nodes| !nodes[1].messages().is_empty() && seen(nodes[1]));
    prop_assert_eq!(trainer.messages(), [b"undisturbed"]);
    prop_assert_eq!(trainer.closed(server.id), None);
    Ok(())
}

/// What a pull asks for, its pieces as (remote, local, bytes).
pub(crate) fn wish(
    (peer, key): (PeerId, RegionKey),
    pieces: &[(u64, u64, u64)],
    landing: LandingId,
    patience: Duration,
) -> PullRequest {
    let piece = |&(remote, local, bytes): &_| Piece { remote, local, bytes };
    PullRequest { peer, key, pieces: pieces.iter().map(piece).collect(), landing, patience }
}

impl Node {
    pub(crate) fn new(id: PeerId) -> Self {
        Self::with(config(id))
    }

    pub(crate) fn with(config: TcpConfig) -> Self {
        Self::at(config, Clock::system())
    }

    pub(crate) fn at(config: TcpConfig, clock: Clock) -> Self {
        Self::on(config, clock, sharing())
    }

    pub(crate) fn on(config: TcpConfig, clock: Clock, sharing: Sharing) -> Self {
        let paths = PathsConfig { tcp: config, sharing };
        let tcp = Paths::open_at(paths, clock).expect("loopback is there");
        Self { id: config.me, tcp, events: Vec::new() }
    }

    pub(crate) fn poll(&mut self) {
        self.tcp.poll(Duration::from_millis(1), &mut self.events);
    }

    /// Publishes bytes of a pattern that differs by `seed`.
    pub(crate) fn publish(&mut self, key: RegionKey, bytes: usize, seed: usize) -> Arc<Buffer> {
        let memory = Arc::new(pattern(bytes, seed));
        self.tcp.publish(key, Arc::clone(&memory));
        memory
    }

    pub(crate) fn pull(
        &mut self,
        from: PeerId,
        key: RegionKey,
        pieces: &[(u64, u64, u64)],
        to: LandingId,
    ) -> PullId {
        self.pull_until(from, key, pieces, to, Duration::from_mins(1))
    }

    pub(crate) fn pull_until(
        &mut self,
        from: PeerId,
        key: RegionKey,
        pieces: &[(u64, u64, u64)],
        to: LandingId,
        patience: Duration,
    ) -> PullId {
        self.tcp.pull(wish((from, key), pieces, to, patience))
    }

    /// How the pull ended, if it did. It may not have ended twice.
    pub(crate) fn result(&self, wanted: PullId) -> Option<Result<u64, PullError>> {
        let mut end = None;
        for event in &self.events {
            if let Event::Pulled { pull, result } = event
                && *pull == wanted
            {
                assert_eq!(end, None, "a pull ends once");
                end = Some(result.clone());
            }
        }
        end
    }

    pub(crate) fn is_connected(&self, to: PeerId) -> bool {
        self.events.contains(&Event::Connected(to))
    }

    pub(crate) fn messages(&self) -> Vec<Vec<u8>> {
        let message = |event: &Event| {
            if let Event::Message { bytes, .. } = event { Some(bytes.clone()) } else { None }
        };
        self.events.iter().filter_map(message).collect()
    }

    /// Why a peer has no path of the kind that has to be there.
    pub(crate) fn unfit(&self, wanted: PeerId) -> Option<&str> {
        self.why(wanted, |it| {
            if let Event::Unfit { peer, reason } = it { Some((*peer, reason)) } else { None }
        })
    }

    /// Why the links with `wanted` were closed.
    pub(crate) fn closed(&self, wanted: PeerId) -> Option<&str> {
        self.why(wanted, |it| {
            if let Event::Closed { peer, error } = it { Some((*peer, error)) } else { None }
        })
    }

    /// What the first event that `told` picks says of a peer.
    fn why(
        &self,
        wanted: PeerId,
        told: impl Fn(&Event) -> Option<(PeerId, &String)>,
    ) -> Option<&str> {
        let mut all = self.events.iter().filter_map(told);
        all.find(|it| it.0 == wanted).map(|it| it.1.as_str())
    }

    pub(crate) fn refusals(&self) -> Vec<&str> {
        let mut refusals = Vec::new();
        for event in &self.events {
            if let Event::Refused { reason, .. } = event {
                refusals.push(reason.as_str());
            }
        }
        refusals
    }
}

/// Polls all nodes in turn until `done`.
pub(crate) fn until(nodes: &mut [&mut Node], mut done: impl FnMut(&[&mut Node]) -> bool) {
    let limit = Instant::now() + Duration::from_mins(1);
    while !done(nodes) {
        for node in &mut *nodes {
            node.poll();
        }
        let events = || nodes.iter().map(|it| (it.id, &it.events)).collect::<Vec<_>>();
        assert!(Instant::now() < limit, "it never came to it: {:?}", events());
    }
}

/// Opens the link from the first node to the second.
pub(crate) fn connect(from: &mut Node, to: &mut Node) {
    from.tcp.connect(to.id, &to.tcp.address());
    let id = to.id;
    until(&mut [from, to], |nodes| nodes[0].is_connected(id));
}

/// A server with a link to a trainer.
pub(crate) fn pair() -> (Node, Node) {
    let (mut server, mut trainer) = (Node::new(SERVER), Node::new(TRAINER));
    connect(&mut server, &mut trainer);
    (server, trainer)
}

pub(crate) fn pattern(bytes: usize, seed: usize) -> Buffer {
    let mut memory = match sharing() {
        Sharing::Off => Buffer::zeroed(bytes),
        Sharing::Auto | Sharing::Required | Sharing::Ucx(_) => ARENAS.take(bytes),
    };
    for (at, byte) in memory.bytes_mut().iter_mut().enumerate() {
        *byte = (at.wrapping_mul(31) ^ (at >> 8).wrapping_mul(17) ^ seed.wrapping_mul(101)) as u8;
    }
    memory
}

/// A first word of a greeting, by the page.
pub(crate) fn hello(version: u32, from: PeerId, to: PeerId, nonce: u8) -> Vec<u8> {
    let peer = |it: PeerId| {
        let role = match it.role {
            Role::Trainer => 0,
            Role::Server => 1,
        };
        [&[role, 0][..], &it.index.to_le_bytes(), &it.incarnation.to_le_bytes()].concat()
    };
    let nonce = [nonce; 32];
    [&b"cadrex01"[..], &version.to_le_bytes(), &peer(from), &peer(to), &[0; 4], &nonce].concat()
}

pub(crate) fn proof(secret: &[u8; 32], side: &str, opener: &[u8], acceptor: &[u8]) -> [u8; 32] {
    let said = [format!("cadre exchange {side}").as_bytes(), opener, acceptor].concat();
    *blake3::keyed_hash(secret, &said).as_bytes()
}

/// Opens a link by raw bytes; the node has to be polled meanwhile.
pub(crate) fn raw_open(node: &mut Node, me: PeerId) -> TcpStream {
    let mut stream = TcpStream::connect(node.tcp.address()).expect("it listens");
    let ours = hello(VERSION, me, node.id, 1);
    stream.write_all(&ours).expect("there is room");
    let answer = receive(node, &mut stream, 96);
    let theirs = &answer[..64];
    assert_eq!(answer[64..], proof(&SECRET, "accept", &ours, theirs));
    stream.write_all(&proof(&SECRET, "opener", &ours, theirs)).expect("there is room");
    assert_eq!(receive(node, &mut stream, 8), [0; 8], "welcome");
    stream
}

/// Accepts a link by raw bytes; the node has to be polled meanwhile.
pub(crate) fn raw_accept(node: &mut Node, me: PeerId, listener: &TcpListener) -> TcpStream {
    let stream = raw_welcome(node, me, listener);
    until(&mut [node], |nodes| nodes[0].is_connected(me));
    stream
}

/// As above, until the node has been let in, which it may not know yet.
pub(crate) fn raw_welcome(node: &mut Node, me: PeerId, listener: &TcpListener) -> TcpStream {
    node.poll();
    let (mut stream, _) = listener.accept().expect("the node connects");
    let theirs = receive(node, &mut stream, 64);
    let ours = hello(VERSION, me, node.id, 2);
    let answer = [&ours[..], &proof(&SECRET, "accept", &theirs, &ours)].concat();
    stream.write_all(&answer).expect("there is room");
    assert_eq!(receive(node, &mut stream, 32), proof(&SECRET, "opener", &theirs, &ours));
    stream.write_all(&[0; 8]).expect("there is room");
    stream
}

/// Reads `bytes` bytes while the node is polled.
pub(crate) fn receive(node: &mut Node, stream: &mut TcpStream, bytes: usize) -> Vec<u8> {
    stream.set_nonblocking(true).expect("a socket of ours");
    let (mut all, mut filled) = (vec![0; bytes], 0);
    until(&mut [node], |_| {
        match stream.read(&mut all[filled..]) {
            Ok(read) => filled += read,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        filled == bytes
    });
    stream.set_nonblocking(false).expect("a socket of ours");
    all
}
