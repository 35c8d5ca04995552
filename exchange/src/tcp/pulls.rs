//! The pulls of one link: which part is asked for next, and which one a reply is for.
//!
//! In: pulls, room, headers of replies and counts of their bytes. Out: requests, ended pulls. No socket here.
//!
//! ```text
//! waiting ──part by part──▶ asked, in the order of their replies ──last part──▶ ended
//!    ▲                        │ of another publication: from byte 0
//!    └────────────────────────┘
//! ```
//!
//! Invariants: parts under way have at most the window's bytes, but one small part may always be; what comes for a pull
//! that has ended or begun again lands nowhere.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use super::frame::{self, MAX_OUTSTANDING_PULLS, ReplyHeader, Status};
use super::ledger::Ledger;
use super::pull::Pull;
use super::socket::LinkError;
use crate::provider::{PullError, PullId};

/// Bytes that a link with nothing outstanding may ask for, however full the windows are.
const IDLE_PART_BYTES: u64 = 64 << 10;

/// See the module.
#[derive(Default)]
pub(super) struct Pulls {
    outstanding: BTreeMap<PullId, Pull>,
    /// Pulls whose last part was not asked for.
    waiting: VecDeque<PullId>,
    asked: VecDeque<Part>,
    asked_bytes: u64,
    next_part: u64,
}

/// A part that was asked for.
struct Part {
    number: u64,
    pull: PullId,
    attempt: u32,
    bytes: u64,
}

impl Pulls {
    pub(super) fn add(&mut self, pull: Pull) {
        self.waiting.push_back(pull.id);
        self.outstanding.insert(pull.id, pull);
    }

    /// Bytes that were requested and have not come.
    pub(super) fn asked_bytes(&self) -> u64 {
        self.asked_bytes
    }

    /// Appends requests for as many parts as there is room for, in the `window` of this link too. Returns whether `room` is all
    /// that the next part lacks.
    pub(super) fn ask(
        &mut self,
        mut room: u64,
        window: u64,
        part_bytes: u64,
        out: &mut Vec<u8>,
    ) -> bool {
        while let Some(&id) = self.waiting.front() {
            let Some(pull) = self.outstanding.get_mut(&id) else {
                self.waiting.pop_front();
                continue;
            };
            let part = pull.unasked().min(part_bytes);
            let fits = part <= window.saturating_sub(self.asked_bytes);
            let most = if self.asked.len() >= MAX_OUTSTANDING_PULLS {
                return false;
            } else if fits && part <= room {
                part
            } else if self.asked.is_empty() {
                part.min(IDLE_PART_BYTES)
            } else {
                return fits;
            };
            let (spans, bytes) = pull.cut(most);
            let (number, attempt) = (self.next_part, pull.attempt());
            self.next_part += 1;
            frame::put_pull(out, number, pull.wish.key, &spans);
            if pull.is_asked() {
                self.waiting.pop_front();
            }
            self.asked.push_back(Part { number, pull: id, attempt, bytes });
            self.asked_bytes += bytes;
            room = room.saturating_sub(bytes);
        }
        false
    }

    /// The pull that gets the next bytes of data; none if it has ended or begun again.
    pub(super) fn target(&mut self) -> Option<&mut Pull> {
        let part = self.asked.front()?;
        self.outstanding.get_mut(&part.pull).filter(|it| it.attempt() == part.attempt)
    }

    /// A reply begins: how many bytes of data it has.
    pub(super) fn header(
        &mut self,
        header: ReplyHeader,
        ledger: &mut Ledger,
    ) -> Result<u64, LinkError> {
        let ReplyHeader { pull: number, status, bytes, publication } = header;
        let part = self.asked.front().filter(|it| it.number == number);
        let part = part.ok_or(LinkError::WrongReply)?;
        let (asked, id) = (part.bytes, part.pull);
        match status {
            Status::Data if bytes != asked => return Err(LinkError::WrongReply),
            Status::Data => {
                if self.is_of_another_publication(publication) {
                    self.begin_again(id);
                }
                if bytes == 0 {
                    self.part_is_here(ledger);
                }
            }
            Status::Gone => self.refused(PullError::Gone, ledger),
            Status::OutOfBounds => {
                let reason = "a piece ends behind the peer's region".to_owned();
                self.refused(PullError::Refused { reason }, ledger);
            }
        }
        Ok(bytes)
    }

    /// Whether the bytes that have landed are of another publication than the next part. Where none have landed, the pull takes
    /// the new publication.
    fn is_of_another_publication(&mut self, publication: u64) -> bool {
        let Some(pull) = self.target() else { return false };
        *pull.publication.get_or_insert(publication) != publication
    }

    fn begin_again(&mut self, id: PullId) {
        let Some(pull) = self.outstanding.get_mut(&id) else { return };
        tracing::debug!("pull {} begins again: its region was published anew", id.0);
        if pull.is_asked() {
            self.waiting.push_front(id);
        }
        pull.restart();
    }

    /// The next part has no data.
    fn refused(&mut self, error: PullError, ledger: &mut Ledger) {
        let counts = self.target().is_some();
        let Some(part) = self.asked.pop_front() else { return };
        self.asked_bytes -= part.bytes;
        if counts {
            self.end(part.pull, error, ledger);
        }
    }

    /// Counts data of the first part, of which `left` bytes are still to come.
    pub(super) fn came(&mut self, bytes: u64, left: u64, ledger: &mut Ledger) {
        self.asked_bytes -= bytes;
        if let Some(pull) = self.target() {
            pull.land(bytes);
        }
        if let Some(part) = self.asked.front_mut() {
            // Other bytes of the part were counted.
            part.bytes = left;
        }
        if left == 0 {
            self.part_is_here(ledger);
        }
    }

    fn part_is_here(&mut self, ledger: &mut Ledger) {
        let whole = self.target().is_some_and(|it| it.is_whole());
        let Some(part) = self.asked.pop_front() else { return };
        if whole && let Some(pull) = self.outstanding.remove(&part.pull) {
            let bytes = pull.wish.bytes;
            ledger.end(pull, Ok(bytes));
        }
    }

    /// When a pull is late if the last byte came at `heard`.
    pub(super) fn deadline(&self, id: PullId, heard: Instant) -> Option<Instant> {
        self.outstanding.get(&id).map(|it| it.deadline(heard))
    }

    /// Looks at a pull again at `at`.
    pub(super) fn look_again(&mut self, id: PullId, at: Instant, ledger: &mut Ledger) {
        if let Some(pull) = self.outstanding.get_mut(&id) {
            pull.look_at = at;
            ledger.watch(pull);
        }
    }

    /// Ends one pull; what still comes for it lands nowhere.
    pub(super) fn end(&mut self, id: PullId, error: PullError, ledger: &mut Ledger) {
        if let Some(pull) = self.outstanding.remove(&id) {
            ledger.end(pull, Err(error));
        }
    }

    /// Ends every pull, as the link is closed.
    pub(super) fn end_all(self, error: &PullError, ledger: &mut Ledger) {
        for pull in self.outstanding.into_values() {
            ledger.end(pull, Err(error.clone()));
        }
    }
}
