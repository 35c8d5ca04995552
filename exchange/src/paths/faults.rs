//! Faults by seed, for tests of whole jobs: what a provider may do to its caller at any time, it does often.
//!
//! In: `CADRE_FAULTS`, any text; the pulls of a process. Out: pulls that begin late, or bring nothing though their rows are there;
//! links that break; ways that are lost, and tried anew; copies in small turns. Another process, or life, has other faults.
//!
//! Invariant: no byte is changed, and every pull ends once.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::remote::Onward;
use super::{Path, Paths};
use crate::peer::{PeerId, Role};
use crate::provider::PullError;
use crate::tcp::Pull;

/// See the module.
pub(super) struct Faults {
    random: u64,
    /// Pulls of which one is hit.
    one_in: u64,
    due: Vec<(Instant, Fault)>,
}

enum Fault {
    /// A pull begins.
    Begin(Pull),
    /// A pull ends.
    End(Pull, PullError),
    /// The links with a peer break.
    Cut(PeerId),
    /// Rows of a peer come over the link alone.
    Lose(PeerId),
    /// Better ways to a peer are tried.
    Try(PeerId),
}

impl Faults {
    /// Those of a process, if the environment asks for them.
    pub(super) fn asked(me: PeerId) -> Option<Self> {
        let said = std::env::var_os("CADRE_FAULTS")?;
        tracing::warn!("CADRE_FAULTS: pulls, links and ways fail by seed, which is for tests");
        Some(Self::new(&said.to_string_lossy(), me))
    }

    fn new(seed: &str, PeerId { role, index, incarnation }: PeerId) -> Self {
        let role = match role {
            Role::Trainer => 0,
            Role::Server => 1,
        };
        let me = format!("{seed} {role} {index} {incarnation}");
        // FNV-1a.
        let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let random = me.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
        let mut faults = Self { random, one_in: 0, due: Vec::new() };
        faults.one_in = [20, 100, 500][faults.below(3) as usize];
        faults
    }

    /// A number below `bound`, by SplitMix64 (Steele, Lea, Flood 2014).
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn soon(&mut self, now: Instant, most_millis: u64) -> Instant {
        now + Duration::from_micros(self.below(1000 * most_millis))
    }

    /// Bytes that are copied in a turn.
    pub(super) fn turn_bytes(&mut self) -> u64 {
        4096 << self.below(8)
    }

    /// Draws what becomes of a new pull: it is given back unless it is hit itself.
    fn hit(&mut self, pull: Pull, now: Instant) -> Option<Pull> {
        let peer = pull.peer();
        let fault = self.below(6 * self.one_in);
        let at = self.soon(now, [300, 20, 100, 20, 20, 20][fault.min(5) as usize]);
        let (fault, left) = match fault {
            0 => (Fault::Begin(pull), None),
            1 => (Fault::End(pull, PullError::Gone), None),
            2 => (Fault::End(pull, PullError::Deadline), None),
            3 => (Fault::Cut(peer), Some(pull)),
            4 => (Fault::Lose(peer), Some(pull)),
            5 => (Fault::Try(peer), Some(pull)),
            _ => return Some(pull),
        };
        self.due.push((at, fault));
        left
    }

    fn take(&mut self, now: Instant) -> Option<Fault> {
        let at = self.due.iter().position(|it| it.0 <= now)?;
        Some(self.due.swap_remove(at).1)
    }

    /// Takes the pulls from a peer that wait here.
    fn of(&mut self, peer: PeerId) -> Vec<Pull> {
        let theirs = |it: &mut (Instant, Fault)| match &it.1 {
            Fault::Begin(pull) | Fault::End(pull, _) => pull.peer() == peer,
            Fault::Cut(_) | Fault::Lose(_) | Fault::Try(_) => false,
        };
        let theirs = self.due.extract_if(.., theirs).filter_map(|it| match it.1 {
            Fault::Begin(pull) | Fault::End(pull, _) => Some(pull),
            Fault::Cut(_) | Fault::Lose(_) | Fault::Try(_) => None,
        });
        theirs.collect()
    }
}

impl Paths {
    /// Lets faults hit a new pull: it begins now if they give it back.
    pub(super) fn hit(&mut self, pull: Pull) -> Option<Pull> {
        let now = self.tcp.now();
        match &mut self.faults {
            None => Some(pull),
            Some(faults) => faults.hit(pull, now),
        }
    }

    /// Does what is due.
    pub(super) fn fail(&mut self, now: Instant) {
        while let Some(fault) = self.faults.as_mut().and_then(|it| it.take(now)) {
            match fault {
                Fault::Begin(pull) => self.begin(pull),
                Fault::End(pull, error) => self.tcp.end_copied(pull, Err(error)),
                Fault::Cut(peer) => self.tcp.cut(peer),
                Fault::Lose(peer) => self.lose(peer),
                Fault::Try(peer) if self.path(peer) == Path::Tcp => {
                    self.ask(peer);
                    if self.sharing.is_none() {
                        self.ask_card(peer);
                    }
                }
                Fault::Try(_) => {}
            }
        }
    }

    /// Leaves the better ways to a peer. Where there must be one, its links break.
    fn lose(&mut self, peer: PeerId) {
        let why = "a fault that CADRE_FAULTS asks for";
        if self.sharing.as_ref().is_some_and(|it| it.required)
            || self.remote.as_ref().is_some_and(|it| it.required)
        {
            return self.tcp.cut(peer);
        }
        let now = self.tcp.now();
        match self.path(peer) {
            Path::Shared => {
                let shut =
                    self.sharing.as_mut().map(|it| it.ways.shut(peer, why.into(), true, now));
                if let Some(answer) = shut {
                    self.take_answer(answer);
                }
            }
            Path::Ucx => self.leave(peer, why, true, &Onward::Link(BTreeSet::new())),
            Path::Asked | Path::Tcp => {}
        }
    }

    /// Ends the pulls from a peer that faults hold.
    pub(super) fn end_hit(&mut self, peer: PeerId, why: &PullError) {
        for pull in self.faults.iter_mut().flat_map(|it| it.of(peer)) {
            self.tcp.end_copied(pull, Err(why.clone()));
        }
    }

    /// How long nothing is due.
    pub(super) fn rest_of_faults(&self, now: Instant) -> Duration {
        let due = self.faults.iter().flat_map(|it| &it.due).map(|it| it.0).min();
        due.map_or(Duration::MAX, |it| it.saturating_duration_since(now))
    }
}
