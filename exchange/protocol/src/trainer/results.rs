//! Results of a trainer's phases: from the announcement to the phase that is whole.
//!
//! One pull at a time brings a result, whoever announced it; the first that counts wins, and every
//! other announcer is told that its copy is not wanted.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::link::Link;
use super::{Command, Open, Trainer};
use crate::{At, Message, Nanos, Peer, PullFailure, PullId, PullResult, Work};

/// A result on its way.
#[derive(Debug, Default)]
pub(super) struct Want {
    pub(super) state: State,
    /// Who has it too.
    others: Vec<Peer>,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum State {
    #[default]
    Wanted,
    Pulling(PullId, Peer),
    Have(Peer),
}

/// A pull that has not ended.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    peer: Peer,
    at: At,
    work: Work,
}

/// All pulls that have not ended; whether some are from a peer is known without a look at them.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    all: BTreeMap<PullId, Outstanding>,
    from: BTreeMap<Peer, usize>,
}

impl Pulls {
    fn insert(&mut self, pull: PullId, it: Outstanding) {
        *self.from.entry(it.peer).or_default() += 1;
        self.all.insert(pull, it);
    }

    fn remove(&mut self, pull: PullId) -> Option<Outstanding> {
        let it = self.all.remove(&pull)?;
        if let Entry::Occupied(mut from) = self.from.entry(it.peer) {
            *from.get_mut() -= 1;
            if *from.get() == 0 {
                from.remove();
            }
        }
        Some(it)
    }

    /// Whether a pull from a peer has not ended.
    pub(super) fn any_from(&self, peer: Peer) -> bool {
        self.from.contains_key(&peer)
    }
}

impl Trainer {
    pub(super) fn finished(
        &mut self,
        now: Nanos,
        from: Peer,
        at: At,
        works: &[Work],
        out: &mut Vec<Command>,
    ) {
        for &work in works {
            let first_wins = self.settings.rules.first_result_wins;
            let Some(open) = self.phases.get_mut(&at) else {
                if self.done >= Some(at) {
                    self.acknowledge(now, from, at, work);
                }
                continue;
            };
            // Only who was rung has this trainer's rows, and so results of them.
            if !open.rung.contains(&from) {
                return;
            }
            let Some(want) = open.wants.get_mut(&work) else { continue };
            match want.state {
                State::Have(_) if first_wins => self.acknowledge(now, from, at, work),
                State::Wanted | State::Have(_) => self.pull(now, from, at, work, out),
                State::Pulling(_, peer) => {
                    if peer != from && !want.others.contains(&from) {
                        want.others.push(from);
                    }
                    if peer != from && self.executor(at, work) == Some(from) {
                        // The slot has moved on: do not wait for a server that may be gone.
                        out.push(Command::Close(peer));
                    }
                }
            }
        }
    }

    fn pull(&mut self, now: Nanos, peer: Peer, at: At, work: Work, out: &mut Vec<Command>) {
        let pull = PullId(self.next_pull);
        self.next_pull += 1;
        self.pulls.insert(pull, Outstanding { peer, at, work });
        let open = self.phases.get_mut(&at).expect("only results of open phases are pulled");
        let want = open.wants.get_mut(&work).expect("only wanted results are pulled");
        want.state = State::Pulling(pull, peer);
        want.others.retain(|&it| it != peer);
        let deadline = now.after(self.settings.pull_span(Peer::Trainer(self.me), peer));
        out.push(Command::Pull { pull, peer, at, work, deadline });
    }

    pub(super) fn pulled(
        &mut self,
        now: Nanos,
        (pull, result): (PullId, PullResult),
        out: &mut Vec<Command>,
    ) {
        let Some(Outstanding { peer, at, work }) = self.pulls.remove(pull) else { return };
        self.tried(now, (peer, pull), (at, work), result);
        let wanted = self.phases.get_mut(&at).and_then(|it| {
            let want = it.wants.get_mut(&work)?;
            (want.state == State::Pulling(pull, peer)).then_some((&mut it.missing, want))
        });
        let Some((missing, want)) = wanted else {
            out.push(Command::Discard { pull });
            return;
        };
        let same =
            |found| found == peer.incarnation() || !self.settings.rules.pull_checks_incarnation;
        match result {
            Ok(found) if same(found) => {
                want.state = State::Have(peer);
                let others = std::mem::take(&mut want.others);
                *missing = missing.saturating_sub(1);
                let whole = *missing == 0;
                out.push(Command::Accept { pull, at, work, from: peer });
                self.links.change_known(peer, Link::mended);
                for other in others.into_iter().chain([peer]) {
                    self.acknowledge(now, other, at, work);
                }
                if whole && self.done < Some(at) {
                    self.complete(at, out);
                }
            }
            Ok(_) | Err(_) => {
                want.state = State::Wanted;
                let next = want.others.pop();
                out.push(Command::Discard { pull });
                let first = self.settings.retry_after;
                if self.links.fills(peer) {
                    self.links.change(peer, |it| it.say_again_later(now, first));
                }
                if result == Err(PullFailure::Deadline) {
                    out.push(Command::Close(peer));
                    self.suspect(now, peer, out);
                }
                if let Some(next) = next {
                    self.pull(now, next, at, work, out);
                }
            }
        }
    }

    /// The phase is whole. The prefix of whole phases may have grown.
    pub(super) fn complete(&mut self, at: At, out: &mut Vec<Command>) {
        out.push(Command::Complete(at));
        if !self.settings.rules.release_at_watermark {
            out.push(Command::Release(at));
        }
        let whole = |it: &(&At, &Open)| it.1.missing == 0;
        let prefix = self.phases.iter().take_while(whole).last().map(|it| *it.0);
        if prefix > self.done {
            self.done = prefix;
            if let Some(at) = prefix {
                out.push(Command::Send { to: Peer::CONDUCTOR, message: Message::PhaseDone { at } });
            }
        }
    }

    /// Who executes a work now.
    pub(super) fn executor(&self, at: At, work: Work) -> Option<Peer> {
        let live = self.steps.get(&at.step)?;
        let bundle = live.step.shape(at.phase).work(work).bundle;
        live.table.executor(live.step.shape_index(at.phase), bundle)
    }
}
