//! A member that lies: a server of the pool that says what only others may say, again and again, and does no work.
//!
//! In: what it says. Out: rings to every worker, until it is dropped. The conductor takes it for lost when its heartbeats do not come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use cadre_control::DATA_VERSION;
use cadre_exchange::{
    Buffer, Encryption, Limits, PeerId, Provider as _, RegionKey, Tcp, TcpConfig,
};
use cadre_step::envelope::{Envelope, Said};
use cadre_step::words::{Body, Life, Stream};

use super::controller::SECRET;

/// Which server it is.
pub(crate) const ME: PeerId =
    PeerId { role: cadre_exchange::Role::Server, index: 1, incarnation: 0 };
const PACE: Duration = Duration::from_millis(20);

/// See the module.
pub(crate) struct Liar {
    links: Tcp,
    envelopes: Vec<Envelope>,
    words: u64,
}

/// A liar at work.
pub(crate) struct Lying {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Liar {
    /// One that has nothing to say yet.
    pub(crate) fn new() -> Self {
        Self::named(ME)
    }

    /// One that calls itself this.
    pub(crate) fn named(me: PeerId) -> Self {
        let bind = std::net::Ipv4Addr::LOCALHOST.into();
        let (secret, data_version, limits) = (SECRET, DATA_VERSION, Limits::default());
        let encryption = Encryption::Off;
        let links = Tcp::open(TcpConfig { bind, me, secret, data_version, encryption, limits });
        Self { links: links.expect("a port"), envelopes: Vec::new(), words: 0 }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> String {
        self.links.address()
    }

    /// Will say this.
    pub(crate) fn will_ring(&mut self, envelope: Envelope) {
        self.envelopes.push(envelope);
    }

    /// Will say this word.
    pub(crate) fn will_say(&mut self, said: &Said) {
        self.will_tell(Body::Here(postcard::to_stdvec(said).expect("plain data")));
    }

    /// Will say a word with this body.
    pub(crate) fn will_tell(&mut self, body: Body) {
        let stream = Stream { life: Life(1), era: 0 };
        self.envelopes.push(Envelope::Word { stream, number: self.words, body });
        self.words += 1;
    }

    /// Lets others read zeroes.
    pub(crate) fn publish(&mut self, key: RegionKey, bytes: usize) {
        self.links.publish(key, Arc::new(Buffer::zeroed(bytes)));
    }

    /// Says it to all of them.
    pub(crate) fn lie(mut self, workers: Vec<(PeerId, String)>) -> Lying {
        let over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&over);
        let messages: Vec<_> =
            self.envelopes.iter().map(|it| postcard::to_stdvec(it).expect("plain data")).collect();
        let thread = std::thread::spawn(move || {
            let mut events = Vec::new();
            while !until.load(Ordering::Relaxed) {
                for (peer, address) in &workers {
                    self.links.connect(*peer, address);
                    for message in &messages {
                        // Who left, or reads too slowly, is told less.
                        self.links.ring(*peer, message).ok();
                    }
                }
                self.links.poll(PACE, &mut events);
                events.clear();
            }
        });
        Lying { over, thread: Some(thread) }
    }
}

impl Drop for Lying {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
