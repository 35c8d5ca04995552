//! How neighbours of the ring find each other: each calls the next trainer and is called by the previous one.
//!
//! In: a listener, addresses, the job's secret. Out: both links. Greetings are the exchange's.
//!
//! ```text
//! to the next        resting ─▶ calling ─let in─▶ stands        (refused, late, cut: resting again)
//! from the previous  guest ─proved─▶ let in ─knows it─▶ stands  (cut: the next guest)
//! ```
//!
//! The previous trainer says one byte once it knows that it was let in: until then it may call again, so its link
//! may be replaced; after that it never does. Nobody is believed before the proof, and nobody is waited for: all guests
//! greet at once, each has [`GREETING_WITHIN`], and [`MAX_GUESTS`] at most; then the oldest makes room.
//!
//! Invariant: a stranger costs its slot, whatever it says or does not say.

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::time::{Duration, Instant};

use cadre_worker::session::links::{Caller, Guest, PeerId, Stream};
use rustix::event::{PollFd, PollFlags};

use super::{Links, Members, RingError, ready};

/// Longest greeting, on both sides.
const GREETING_WITHIN: Duration = Duration::from_secs(5);
/// Guests that greet at once.
const MAX_GUESTS: usize = 64;
/// Longest pause between two connection attempts. The first pause is [`SHORTEST_REST`]; each
/// further one is twice the one before.
const LONGEST_REST: Duration = Duration::from_secs(1);
/// See [`LONGEST_REST`].
const SHORTEST_REST: Duration = Duration::from_millis(10);
/// Pause of accepting connections after the process ran out of descriptors.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// Maximum reasons for refusing a connection that are logged, each once.
const MAX_REASONS_TOLD: usize = 64;
/// Byte that the previous trainer sends once it knows that it was accepted.
const ACCEPTED: u8 = 1;

/// Links this trainer with its neighbours.
pub(super) fn meet(members: &Members<'_>, within: Duration) -> Result<Links, RingError> {
    let (rank, world) = (usize::from(members.greeter.me().index), members.trainers.len());
    let now = Instant::now();
    let meeting = Meeting {
        members,
        to: (rank + 1) % world,
        from: (rank + world - 1) % world,
        next: Next::Resting { until: now, rest: SHORTEST_REST },
        previous: None,
        let_in: None,
        guests: VecDeque::new(),
        deaf_until: now,
        last: [None, None],
        told: BTreeSet::new(),
    };
    meeting.run(now, within)
}

struct Meeting<'a> {
    members: &'a Members<'a>,
    /// Ranks of the next and the previous trainer.
    to: usize,
    from: usize,
    next: Next,
    previous: Option<Stream>,
    /// The previous trainer, which may not know yet that it was let in.
    let_in: Option<Stream>,
    /// The oldest first.
    guests: VecDeque<Guest>,
    deaf_until: Instant,
    /// What came last of calling, and of being called.
    last: [Option<String>; 2],
    told: BTreeSet<String>,
}

enum Next {
    Resting { until: Instant, rest: Duration },
    Calling { caller: Caller, rest: Duration },
    Stands(Stream),
}

/// What a polled descriptor belongs to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum What {
    Interrupt,
    Listener,
    Caller,
    LetIn,
    /// The guest at this position of the queue.
    Guest(usize),
}

impl Meeting<'_> {
    fn run(mut self, begin: Instant, within: Duration) -> Result<Links, RingError> {
        let until = begin.checked_add(within);
        loop {
            let now = Instant::now();
            self.end_what_is_late(now);
            self.call(now);
            if let (Next::Stands(_), Some(_)) = (&self.next, &self.previous) {
                break;
            }
            if until.is_some_and(|it| it <= now) {
                return Err(self.apart(within));
            }
            let timer = self.next_timer(now).into_iter().chain(until).min();
            let limit = timer.map_or(Duration::MAX, |it| it.saturating_duration_since(now));
            for what in self.wait(limit)? {
                match what {
                    What::Interrupt => return Err(RingError::Interrupted),
                    What::Listener => self.take_in(now),
                    What::Caller => self.advance_call(),
                    What::LetIn => self.confirm(),
                    What::Guest(at) => self.advance_guest(at),
                }
            }
        }
        let (Next::Stands(next), Some(previous)) = (self.next, self.previous) else {
            unreachable!("the loop ends when both stand")
        };
        Ok(Links { next, previous, interrupt: self.members.interrupt.clone() })
    }

    /// Polls until something is ready. Guests come from the youngest to the oldest, since handling
    /// one may remove it, and new connections come last.
    fn wait(&self, limit: Duration) -> Result<Vec<What>, RingError> {
        let mut whats = vec![What::Interrupt];
        let mut fds = vec![PollFd::new(self.members.interrupt, PollFlags::IN)];
        if let Next::Calling { caller, .. } = &self.next {
            let flags = if caller.is_connecting() { PollFlags::OUT } else { PollFlags::IN };
            whats.push(What::Caller);
            fds.push(PollFd::new(caller.stream(), flags));
        }
        if self.previous.is_none() {
            if let Some(stream) = &self.let_in {
                whats.push(What::LetIn);
                fds.push(PollFd::new(stream, PollFlags::IN));
            }
            for (at, guest) in self.guests.iter().enumerate().rev() {
                whats.push(What::Guest(at));
                fds.push(PollFd::new(guest.stream(), PollFlags::IN));
            }
            if self.deaf_until <= Instant::now() {
                whats.push(What::Listener);
                fds.push(PollFd::new(self.members.listener, PollFlags::IN));
            }
        }
        ready(&mut fds, limit).map_err(|source| RingError::Link {
            peer: self.from,
            what: "meeting the neighbours",
            source,
        })?;
        let is_ready = |it: &(What, PollFd<'_>)| !it.1.revents().is_empty();
        Ok(whats.into_iter().zip(fds).filter(is_ready).map(|it| it.0).collect())
    }

    /// When something is due.
    fn next_timer(&self, now: Instant) -> Option<Instant> {
        let next = match &self.next {
            Next::Resting { until, .. } => Some(*until),
            Next::Calling { caller, .. } => Some(caller.since() + GREETING_WITHIN),
            Next::Stands(_) => None,
        };
        let guest = self.guests.front().map(|it| it.since() + GREETING_WITHIN);
        let deaf = Some(self.deaf_until).filter(|it| *it > now);
        [next, guest, deaf].into_iter().flatten().min()
    }

    fn end_what_is_late(&mut self, now: Instant) {
        let late = |since: Instant| since + GREETING_WITHIN <= now;
        if let Next::Calling { caller, rest } = &self.next
            && late(caller.since())
        {
            let rest = *rest;
            self.rest(rest, "it did not answer in time");
        }
        while let Some(guest) = self.guests.pop_front_if(|it| late(it.since())) {
            if guest.has_spoken() {
                self.turned_away(&guest, "its greeting was not over in time");
            }
        }
    }

    /// Calls the next trainer if that is due.
    fn call(&mut self, now: Instant) {
        let Next::Resting { until, rest } = self.next else { return };
        if until > now {
            return;
        }
        let (peer, address) = self.members.trainers[self.to];
        match self.members.greeter.dial(peer, address) {
            Ok(caller) => self.next = Next::Calling { caller, rest },
            Err(error) => self.rest(rest, &format!("cannot connect to {address}: {error}")),
        }
    }

    /// The call came to nothing: another one a while later.
    fn rest(&mut self, rest: Duration, why: &str) {
        let (peer, address) = self.members.trainers[self.to];
        let reason = format!("{peer} at {address}: {why}");
        if self.told.len() < MAX_REASONS_TOLD && self.told.insert(reason.clone()) {
            tracing::info!("the gradient ring connects again: {reason}");
        }
        self.last[0] = Some(reason);
        let until = Instant::now() + rest;
        self.next = Next::Resting { until, rest: (rest * 2).min(LONGEST_REST) };
    }

    fn advance_call(&mut self) {
        let Next::Calling { caller, rest } = &mut self.next else { return };
        let rest = *rest;
        match caller.advance(self.members.greeter) {
            Ok(false) => {}
            Ok(true) => {
                let resting = Next::Resting { until: Instant::now(), rest };
                let Next::Calling { caller, .. } = std::mem::replace(&mut self.next, resting)
                else {
                    return;
                };
                let mut stream = caller.into_stream();
                match stream.write_all(&[ACCEPTED]) {
                    Ok(()) => self.next = Next::Stands(stream),
                    Err(error) => self.rest(rest, &error.to_string()),
                }
            }
            Err(error) => self.rest(rest, &error.to_string()),
        }
    }

    /// Takes in guests, as many as have a slot; the others have their turn in the next round.
    fn take_in(&mut self, now: Instant) {
        for _ in 0..MAX_GUESTS {
            let (stream, address) = match self.members.listener.accept() {
                Ok(guest) => guest,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    tracing::warn!(%error, "the gradient ring accepts no connection: raise the limit of open files");
                    // Frees the descriptor of the oldest guest, which may be the one that accept
                    // lacked.
                    self.guests.pop_front();
                    self.deaf_until = now + ACCEPT_AGAIN_AFTER;
                    return;
                }
            };
            if self.guests.len() >= MAX_GUESTS {
                self.guests.pop_front();
            }
            // A connection that is broken already is dropped.
            if let Ok(guest) = Guest::new(self.members.greeter, stream, address) {
                self.guests.push_back(guest);
                self.advance_guest(self.guests.len() - 1);
            }
        }
    }

    fn advance_guest(&mut self, at: usize) {
        let Some(guest) = self.guests.get_mut(at) else { return };
        let advanced = guest.advance(self.members.greeter);
        if matches!(advanced, Ok(None)) {
            return;
        }
        let Some(guest) = self.guests.remove(at) else { return };
        let wanted = self.members.trainers[self.from].0;
        match advanced {
            Ok(Some(peer)) if peer == wanted => self.let_in(guest),
            Ok(Some(peer)) => self.unexpected(guest, peer, wanted),
            Err(error) if guest.has_spoken() => self.turned_away(&guest, &error.to_string()),
            Ok(None) | Err(_) => {}
        }
    }

    /// The previous trainer has proved its identity. If it has an older link, it gave that one up.
    fn let_in(&mut self, guest: Guest) {
        match guest.welcome() {
            Ok(stream) => self.let_in = Some(stream),
            Err(error) => self.last[1] = Some(error.to_string()),
        }
    }

    fn unexpected(&mut self, guest: Guest, found: PeerId, wanted: PeerId) {
        let why = format!("{wanted} is wanted, {found} came: the list of trainers is out of date");
        self.turned_away(&guest, &why);
        guest.turn_away(found, wanted);
    }

    fn turned_away(&mut self, guest: &Guest, why: &str) {
        if self.told.len() < MAX_REASONS_TOLD && self.told.insert(why.to_owned()) {
            tracing::warn!("{} was refused by the gradient ring: {why}", guest.address());
        }
        self.last[1] = Some(format!("{}: {why}", guest.address()));
    }

    /// The previous trainer knows that it was let in, or has gone.
    fn confirm(&mut self) {
        let Some(mut stream) = self.let_in.take() else { return };
        let mut said = [0];
        match stream.read(&mut said) {
            Ok(1) if said == [ACCEPTED] => {
                self.previous = Some(stream);
                self.guests.clear();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.let_in = Some(stream),
            Ok(_) | Err(_) => self.last[1] = Some("it left while it greeted".into()),
        }
    }

    /// The error for a missing neighbour; the one that this trainer connects to comes first.
    fn apart(self, after: Duration) -> RingError {
        let [called, came] = self.last;
        let silence = || "nobody came".to_owned();
        match self.next {
            Next::Stands(_) => {
                let why = came.unwrap_or_else(silence);
                RingError::Apart { peer: self.from, way: "from", after, why }
            }
            Next::Resting { .. } | Next::Calling { .. } => {
                let why = called.unwrap_or_else(|| "it did not answer yet".into());
                RingError::Apart { peer: self.to, way: "to", after, why }
            }
        }
    }
}
