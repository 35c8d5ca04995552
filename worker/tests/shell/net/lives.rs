//! Ends and pauses of processes, as their links and peers see them.

use cadre_exchange::{Event, RegionKey};

use super::pulls::{WORDS, is_result};
use super::{Happening, Life, Net, Signal};
use crate::faults::Pulled;

impl Net {
    /// A process is gone. `silently`: as if its machine had no power any more.
    pub(crate) fn die(&mut self, life: Life, silently: bool) {
        let end = &mut self.endpoints[life];
        if !std::mem::replace(&mut end.alive, false) {
            return;
        }
        end.answers = !silently;
        end.regions.clear();
        end.landings.clear();
        end.pulls.clear();
        end.results.clear();
        end.events.clear();
        end.held.clear();
        let links: Vec<_> = end.links.values().flatten().flatten().copied().collect();
        end.links.clear();
        for link in links {
            let it = &mut self.links[link];
            let other = if it.opener == life {
                it.opener_holds = false;
                it.acceptor
            } else {
                it.acceptor_holds = false;
                Some(it.opener)
            };
            if let Some(other) = other.filter(|_| !silently) {
                let when = self.now + self.delay();
                self.at(when, Happening::Signal(Signal::Farewell(other, link)));
            }
        }
    }

    /// Whether what is pulled of somebody never comes.
    pub(super) fn is_dry(&self, owner: Life, to: Life, key: RegionKey) -> bool {
        let is = |it: &(Life, Life, Pulled)| match it.2 {
            Pulled::Words => key.0[..2] == WORDS,
            Pulled::Results => is_result(key),
        };
        self.dry.iter().any(|it| (it.0, it.1) == (owner, to) && is(it))
    }

    pub(crate) fn pause(&mut self, life: Life) {
        self.endpoints[life].paused = true;
    }

    pub(crate) fn resume(&mut self, life: Life) {
        if !self.endpoints[life].alive || !self.endpoints[life].paused {
            return;
        }
        self.endpoints[life].paused = false;
        let read = (0..self.links.len()).filter(|it| self.links[*it].acceptor == Some(life));
        for link in read.collect::<Vec<_>>() {
            self.links[link].unread = 0;
            self.has_room(link);
        }
        if self.random.chance(50) {
            // Data is looked at before messages: old beliefs meet new rows.
            self.endpoints[life].events.sort_by_key(|it| !matches!(it, Event::Pulled { .. }));
        }
        for signal in std::mem::take(&mut self.endpoints[life].held) {
            self.at(self.now, Happening::Signal(signal));
        }
        self.wake(life);
    }
}
