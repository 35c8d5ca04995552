//! How two processes of one job recognise each other when a link opens.
//!
//! In: bytes of the other side. Out: who it is, or why it is turned away. No socket here.
//!
//! ```text
//! opener                                        acceptor
//!   Hello (who I am, whom I want, nonce)   ───▶
//!                                          ◀───   Hello, proof of the secret over both hellos
//!   proof of the secret over both hellos   ───▶
//!                                          ◀───   Verdict
//! ```
//!
//! A proof is BLAKE3 keyed with the job's secret over the side's name, both hellos and, on an encrypted link, the channel's own
//! secret, so it is good for this link, this direction and these two processes only. The secret itself is never sent. Both sides prove: the
//! opener will pull data from whoever listens there now.
//!
//! Invariant: nothing about the opener is believed, and nothing of ours is changed, before its proof is right.

use super::tls::{ChannelSecret, Tls};
use crate::peer::{PeerId, Role};

pub(super) const HELLO_BYTES: usize = 64;
pub(super) const PROOF_BYTES: usize = 32;
pub(super) const ANSWER_BYTES: usize = HELLO_BYTES + PROOF_BYTES;
pub(super) const VERDICT_BYTES: usize = 8;
const MAGIC: [u8; 8] = *b"cadrex01";

/// What a link is for. Both hellos say it, so a greeting that is led to a port of another purpose is turned away there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Rings and pulls of the exchange.
    Exchange,
    /// Sums of gradients between neighbours.
    Ring,
}

impl Purpose {
    fn code(self) -> u32 {
        match self {
            Self::Exchange => 0,
            Self::Ring => 1,
        }
    }

    fn of(code: u32) -> Option<Self> {
        [Self::Exchange, Self::Ring].into_iter().find(|it| it.code() == code)
    }
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Exchange => "the exchange",
            Self::Ring => "the gradient ring",
        })
    }
}

/// What a process needs to be recognised.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) me: PeerId,
    pub(super) secret: [u8; 32],
    pub(super) data_version: u32,
    pub(super) purpose: Purpose,
    /// Absent where links are not encrypted.
    pub(super) tls: Option<Tls>,
}

/// First message of either side.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Hello {
    pub(super) data_version: u32,
    pub(super) from: PeerId,
    pub(super) to: PeerId,
    pub(super) purpose: Purpose,
    pub(super) nonce: [u8; 32],
}

impl Hello {
    /// The hello of `me` to `to`.
    pub(super) fn new(me: &Identity, to: PeerId, nonce: [u8; 32]) -> Self {
        let Identity { me: from, data_version, purpose, .. } = *me;
        Self { data_version, from, to, purpose, nonce }
    }

    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&self.data_version.to_le_bytes());
        put_peer(&mut out[12..20], self.from);
        put_peer(&mut out[20..28], self.to);
        out[28..32].copy_from_slice(&self.purpose.code().to_le_bytes());
        out[32..].copy_from_slice(&self.nonce);
        out
    }

    pub(super) fn decode(input: &[u8; HELLO_BYTES]) -> Result<Self, GreetingError> {
        let version = u32::from_le_bytes(*input[8..].first_chunk().expect("64 bytes"));
        let (from, to) = (peer(&input[12..20]), peer(&input[20..28]));
        let purpose =
            Purpose::of(u32::from_le_bytes(*input[28..].first_chunk().expect("64 bytes")));
        let (Some(from), Some(to), Some(purpose), true) = (from, to, purpose, input[..8] == MAGIC)
        else {
            return Err(GreetingError::NoPeer);
        };
        let nonce = *input[32..].first_chunk().expect("64 bytes");
        Ok(Self { data_version: version, from, to, purpose, nonce })
    }
}

/// Whether these can be the first bytes of a hello.
pub(super) fn may_begin(input: &[u8]) -> bool {
    let bytes = input.len().min(MAGIC.len());
    input[..bytes] == MAGIC[..bytes]
}

/// Whether these are first bytes of TLS: of a handshake, or of an alert.
pub(super) fn is_encrypted(input: &[u8]) -> bool {
    matches!(input.first(), Some(21 | 22))
}

/// The alert `handshake_failure` of TLS.
pub(super) const REFUSAL_OF_TLS: [u8; 7] = [21, 3, 3, 0, 2, 2, 40];

fn put_peer(out: &mut [u8], peer: PeerId) {
    out[0] = match peer.role {
        Role::Trainer => 0,
        Role::Server => 1,
    };
    out[2..4].copy_from_slice(&peer.index.to_le_bytes());
    out[4..8].copy_from_slice(&peer.incarnation.to_le_bytes());
}

fn peer(input: &[u8]) -> Option<PeerId> {
    let role = match input[0] {
        0 => Role::Trainer,
        1 => Role::Server,
        _ => return None,
    };
    let index = u16::from_le_bytes(*input[2..].first_chunk()?);
    let incarnation = u32::from_le_bytes(*input[4..].first_chunk()?);
    Some(PeerId { role, index, incarnation })
}

/// Which side of a link proves.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Opener,
    Acceptor,
}

/// What only a holder of the secret can say, about these two hellos and this channel.
pub(super) fn proof(
    secret: &[u8; 32],
    side: Side,
    (opener, acceptor): (&Hello, &Hello),
    channel: &ChannelSecret,
) -> blake3::Hash {
    let mut mac = blake3::Hasher::new_keyed(secret);
    mac.update(match side {
        Side::Opener => b"cadre exchange opener",
        Side::Acceptor => b"cadre exchange accept",
    });
    mac.update(&opener.encode());
    mac.update(&acceptor.encode());
    if let Some(channel) = channel {
        mac.update(channel);
    }
    mac.finalize()
}

/// Acceptor: checks the opener's hello as far as it can without the proof.
pub(super) fn check_opener(me: &Identity, opener: &Hello) -> Result<(), GreetingError> {
    if opener.data_version != me.data_version {
        return Err(GreetingError::Version { theirs: opener.data_version, ours: me.data_version });
    }
    check_purpose(me, opener)?;
    if opener.to != me.me {
        return Err(GreetingError::OtherPeer { wanted: opener.to, found: me.me });
    }
    Ok(())
}

/// Opener: checks the acceptor's hello and proof.
pub(super) fn check_acceptor(
    me: &Identity,
    sent: &Hello,
    answer: &[u8; ANSWER_BYTES],
    channel: &ChannelSecret,
) -> Result<Hello, GreetingError> {
    let hello = Hello::decode(answer.first_chunk().expect("96 bytes"))?;
    if hello.data_version != me.data_version {
        return Err(GreetingError::Version { theirs: hello.data_version, ours: me.data_version });
    }
    check_purpose(me, &hello)?;
    if hello.from != sent.to {
        return Err(GreetingError::OtherPeer { wanted: sent.to, found: hello.from });
    }
    let proven = answer.last_chunk().expect("96 bytes");
    check_proof(me, Side::Acceptor, (sent, &hello), channel, proven)?;
    Ok(hello)
}

fn check_purpose(me: &Identity, other: &Hello) -> Result<(), GreetingError> {
    if other.purpose == me.purpose {
        return Ok(());
    }
    Err(GreetingError::Purpose { theirs: other.purpose, ours: me.purpose })
}

/// Checks the other side's proof, in constant time.
pub(super) fn check_proof(
    me: &Identity,
    side: Side,
    hellos: (&Hello, &Hello),
    channel: &ChannelSecret,
    proven: &[u8; PROOF_BYTES],
) -> Result<(), GreetingError> {
    // Comparing with `blake3::Hash` takes constant time.
    if proof(&me.secret, side, hellos, channel) == *proven {
        Ok(())
    } else {
        Err(GreetingError::Secret)
    }
}

/// Last word of the acceptor, once the opener's proof was right.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Verdict {
    Welcome,
    /// A newer incarnation of the opener was here.
    Stale {
        newest: u32,
    },
    /// The acceptor waits for another one.
    Unexpected,
}

impl Verdict {
    pub(super) fn encode(self) -> [u8; VERDICT_BYTES] {
        let (code, newest) = match self {
            Self::Welcome => (0_u32, 0),
            Self::Stale { newest } => (1, newest),
            Self::Unexpected => (2, 0),
        };
        let mut out = [0; VERDICT_BYTES];
        out[..4].copy_from_slice(&code.to_le_bytes());
        out[4..].copy_from_slice(&newest.to_le_bytes());
        out
    }

    /// # Errors
    ///
    /// The refusal that the verdict states.
    pub(super) fn check(input: &[u8], opener: PeerId) -> Result<(), GreetingError> {
        match input {
            [0, 0, 0, 0, 0, 0, 0, 0] => Ok(()),
            [1, 0, 0, 0, a, b, c, d] => {
                let newest = u32::from_le_bytes([*a, *b, *c, *d]);
                Err(GreetingError::Stale { peer: opener, newest })
            }
            [2, 0, 0, 0, 0, 0, 0, 0] => Err(GreetingError::Unexpected { peer: opener }),
            _ => Err(GreetingError::NoPeer),
        }
    }
}

/// Why a link does not open.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum GreetingError {
    #[error("it does not speak the exchange's protocol: is something else on this port?")]
    NoPeer,
    #[error("its data version is {theirs}, ours is {ours}: run one build in all workers of a job")]
    Version { theirs: u32, ours: u32 },
    #[error("{wanted} is wanted, but {found} listens there: the address is out of date")]
    OtherPeer { wanted: PeerId, found: PeerId },
    #[error("it greets for {theirs}, this link is for {ours}: the address is of another port")]
    Purpose { theirs: Purpose, ours: Purpose },
    #[error(
        "it encrypts the link, and we do not: encryption has to be the same in all processes of a job"
    )]
    Encrypted,
    #[error(
        "it does not know the job's secret: give all workers of a job the same one; if they have it, somebody stands between us"
    )]
    Secret,
    #[error("{peer} is stale: incarnation {newest} has taken its place")]
    Stale { peer: PeerId, newest: u32 },
    #[error("{peer} is not whom it waits for: is the list of trainers of another attempt?")]
    Unexpected { peer: PeerId },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(me: PeerId, secret: u8, data_version: u32) -> Identity {
        let (secret, purpose) = ([secret; 32], Purpose::Exchange);
        Identity { me, secret, data_version, purpose, tls: None }
    }

    fn hello(from: PeerId, to: PeerId, data_version: u32) -> Hello {
        let nonce = [from.index as u8 + 40; 32];
        Hello { data_version, from, to, purpose: Purpose::Exchange, nonce }
    }

    fn answer(acceptor: &Identity, opener: &Hello) -> [u8; ANSWER_BYTES] {
        let hello = hello(acceptor.me, opener.from, acceptor.data_version);
        let mut out = [0; ANSWER_BYTES];
        out[..HELLO_BYTES].copy_from_slice(&hello.encode());
        let proof = proof(&acceptor.secret, Side::Acceptor, (opener, &hello), &None);
        out[HELLO_BYTES..].copy_from_slice(proof.as_bytes());
        out
    }

    #[test]
    fn acceptors_are_recognised_or_turned_away_with_a_reason() {
        let (a, b) = (PeerId::trainer(0, 1), PeerId::server(1, 2));
        let me = identity(a, 7, 3);
        let sent = hello(a, b, 3);
        let check =
            |acceptor: Identity| check_acceptor(&me, &sent, &answer(&acceptor, &sent), &None);
        assert_eq!(check(identity(b, 7, 3)), Ok(hello(b, a, 3)));
        assert_eq!(check(identity(b, 8, 3)), Err(GreetingError::Secret));
        assert_eq!(check(identity(b, 7, 4)), Err(GreetingError::Version { theirs: 4, ours: 3 }));
        let found = PeerId::server(1, 3);
        let expected = Err(GreetingError::OtherPeer { wanted: b, found });
        assert_eq!(check(identity(found, 7, 3)), expected);
        assert_eq!(
            check_acceptor(&me, &sent, &[9; ANSWER_BYTES], &None),
            Err(GreetingError::NoPeer)
        );
    }

    #[test]
    fn openers_are_checked_before_they_prove() {
        let (a, b) = (PeerId::trainer(0, 1), PeerId::server(1, 2));
        let me = identity(b, 7, 3);
        assert_eq!(check_opener(&me, &hello(a, b, 3)), Ok(()));
        let expected = GreetingError::Version { theirs: 2, ours: 3 };
        assert_eq!(check_opener(&me, &hello(a, b, 2)), Err(expected));
        let ring = Hello { purpose: Purpose::Ring, ..hello(a, b, 3) };
        let expected = GreetingError::Purpose { theirs: Purpose::Ring, ours: Purpose::Exchange };
        assert_eq!(check_opener(&me, &ring), Err(expected));
        let expected = GreetingError::OtherPeer { wanted: a, found: b };
        assert_eq!(check_opener(&me, &hello(a, a, 3)), Err(expected));
    }

    #[test]
    fn a_proof_is_good_for_one_side_one_pair_of_hellos_and_one_channel() {
        let (a, b) = (PeerId::trainer(0, 1), PeerId::server(1, 2));
        let (one, two) = (hello(a, b, 3), hello(b, a, 3));
        let proof = |side, one, two, channel| proof(&[7; 32], side, (&one, &two), &channel);
        let right = proof(Side::Opener, one, two, Some([5; 32]));
        assert_ne!(right, proof(Side::Acceptor, one, two, Some([5; 32])));
        let other = Hello { nonce: [0; 32], ..two };
        assert_ne!(right, proof(Side::Opener, one, other, Some([5; 32])));
        let ring = |it| Hello { purpose: Purpose::Ring, ..it };
        assert_ne!(right, proof(Side::Opener, ring(one), ring(two), Some([5; 32])));
        assert_ne!(right, proof(Side::Opener, one, two, Some([6; 32])));
        assert_ne!(right, proof(Side::Opener, one, two, None));
        let (me, proven) = (identity(b, 7, 3), right.as_bytes());
        let check = |channel| check_proof(&me, Side::Opener, (&one, &two), &channel, proven);
        assert_eq!(check(Some([5; 32])), Ok(()));
        assert_eq!(check(Some([6; 32])), Err(GreetingError::Secret));
    }

    #[test]
    fn verdicts_are_read_as_written() {
        let peer = PeerId::server(1, 2);
        let check = |verdict: Verdict| Verdict::check(&verdict.encode(), peer);
        assert_eq!(check(Verdict::Welcome), Ok(()));
        let expected = Err(GreetingError::Stale { peer, newest: 5 });
        assert_eq!(check(Verdict::Stale { newest: 5 }), expected);
        let expected = Err(GreetingError::Unexpected { peer });
        assert_eq!(check(Verdict::Unexpected), expected);
        assert_eq!(Verdict::check(&[2; 8], peer), Err(GreetingError::NoPeer));
    }
}
