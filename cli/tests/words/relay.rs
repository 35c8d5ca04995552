//! A relay before a worker's exchange: hands everything on, but cuts the link in the place of the first word of each kind that one
//! worker says to the other.
//!
//! It reads the opener's frames as docs/exchange.md describes them; replies pass unread. Invariant: what it counts as lost was not
//! handed on, and nor was anything after it on that link.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use cadre_step::envelope::{Envelope, Said};
use cadre_step::words::Body;

/// What a relay does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Loss {
    /// All is handed on.
    Nothing,
    /// The first word of each kind between two workers is lost with the link.
    FirstOfEachKind,
}

/// A word that was lost.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Lost {
    /// What it said.
    pub(crate) kind: &'static str,
    from: Vec<u8>,
    to: Vec<u8>,
}

/// What all relays of a job have lost.
pub(crate) type Losses = Arc<Mutex<BTreeSet<Lost>>>;

/// Bytes of the opener's hello and proof.
const GREETING: usize = 64 + 32;
/// Where the hello says who opens the link, and to whom.
const FROM: std::ops::Range<usize> = 12..20;
const TO: std::ops::Range<usize> = 20..28;
const RING: u32 = 1;

/// Starts a relay to `address`; says where it listens. It ends with the test's process.
pub(crate) fn relay(address: &str, loss: Loss, losses: &Losses) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("an address").to_string();
    let (address, losses) = (address.to_owned(), Arc::clone(losses));
    std::thread::spawn(move || {
        for opener in listener.incoming().flatten() {
            let Ok(acceptor) = TcpStream::connect(&address) else { continue };
            for stream in [&opener, &acceptor] {
                stream.set_nodelay(true).ok();
            }
            let losses = Arc::clone(&losses);
            std::thread::spawn(move || pass(&opener, &acceptor, loss, &losses));
        }
    });
    own
}

fn pass(opener: &TcpStream, acceptor: &TcpStream, loss: Loss, losses: &Losses) {
    let (Ok(replies), Ok(back)) = (acceptor.try_clone(), opener.try_clone()) else { return };
    let answers = std::thread::spawn(move || {
        let (mut from, mut to) = (replies, back);
        std::io::copy(&mut from, &mut to).ok();
        to.shutdown(Shutdown::Both).ok();
    });
    requests(opener, acceptor, loss, losses);
    for stream in [opener, acceptor] {
        stream.shutdown(Shutdown::Both).ok();
    }
    answers.join().ok();
}

/// Hands frames on until one is to be lost, or the link ends.
fn requests(mut opener: &TcpStream, mut acceptor: &TcpStream, loss: Loss, losses: &Losses) {
    let mut greeting = [0; GREETING];
    // The acceptor answers the hello before the proof comes.
    let (hello, proof) = greeting.split_at_mut(64);
    for part in [&mut *hello, proof] {
        if opener.read_exact(part).is_err() || acceptor.write_all(part).is_err() {
            return;
        }
    }
    let (from, to) = (hello[FROM].to_vec(), hello[TO].to_vec());
    loop {
        let mut frame = vec![0; 8];
        if opener.read_exact(&mut frame).is_err() {
            return;
        }
        let word = |at: usize| u32::from_le_bytes(frame[at..at + 4].try_into().expect("4 bytes"));
        let (kind, length) = (word(0), word(4) as usize);
        frame.resize(8 + length, 0);
        if opener.read_exact(&mut frame[8..]).is_err() {
            return;
        }
        if loss == Loss::FirstOfEachKind
            && kind == RING
            && let Some(kind) = kind_of(&frame[8..])
        {
            let lost = Lost { kind, from: from.clone(), to: to.clone() };
            if losses.lock().expect("no panic").insert(lost) {
                return;
            }
        }
        if acceptor.write_all(&frame).is_err() {
            return;
        }
    }
}

fn kind_of(message: &[u8]) -> Option<&'static str> {
    match postcard::from_bytes(message).expect("workers say envelopes") {
        Envelope::Word { body: Body::Here(bytes), .. } => {
            let said: Said = postcard::from_bytes(&bytes).expect("words are readable");
            Some(said.name())
        }
        Envelope::Word { body: Body::There(_), .. } => Some("a long word"),
        Envelope::Heard { .. } => Some("that it heard"),
        Envelope::Protocol(_) | Envelope::Beat { .. } => None,
    }
}
