//! A hostile member speaks in the simulated cluster, and its process is ended for it.
//!
//! In: who speaks, and how often. Out: messages at processes of its choice; names under which it has spoken.

use cadre_exchange::{Event, PeerId};
use cadre_protocol::Message;
use cadre_step::envelope::Envelope;
use cadre_worker::io::shared::peer_of;

use super::Hostile;
use crate::faults::Who;
use crate::world::{World, remark};

impl World {
    /// A member says so many things to processes of its choice.
    pub(crate) fn speak(&mut self, who: Who, count: u32) {
        let Some(life) = self.newest(who) else { return };
        let me = self.processes[&life].id;
        let seed = self.job.seed;
        let mut hostile = self.hostile.take().unwrap_or_else(|| Hostile::new(seed));
        let all: Vec<_> = self.processes.values().map(|it| (it.life, it.id)).collect();
        hostile.voices.insert(me);
        for _ in 0..count {
            let (to, to_id) = *hostile.random.pick(&all);
            if to == life {
                continue;
            }
            let spied = self.net.borrow().spied.get(&(life, to_id)).copied();
            let (envelope, published) = hostile.envelope(&self.job, me, spied);
            let other = hostile.random.chance(hostile.others);
            let from = if other { hostile.somebody(&self.job) } else { me };
            let bytes = hostile.bytes(&envelope);
            if bytes.len() > cadre_exchange::MAX_MESSAGE_BYTES {
                continue;
            }
            remark(format_args!("{me} as {from} to {:?}: {envelope:?}", peer_of(to_id)));
            hostile.voices.insert(from);
            hostile.lets_go |= from == PeerId::trainer(0, 0) && may_let_go(&envelope, &bytes);
            let mut net = self.net.borrow_mut();
            if let Some((key, rows)) = published {
                net.publish(life, key, std::sync::Arc::new(rows));
            }
            net.say(to, Event::Message { from, bytes });
        }
        self.hostile = Some(hostile);
    }

    /// Ends the processes for which a hostile member has spoken, once: whether there were any.
    pub(crate) fn end_hostile(&mut self) -> bool {
        let Some(hostile) = &mut self.hostile else { return false };
        if std::mem::replace(&mut self.hostile_is_over, true) {
            return false;
        }
        let heard = |it: &&crate::process::Process| hostile.speaks_for(it.id);
        let lives: Vec<_> = self.processes.values().filter(heard).map(|it| it.life).collect();
        remark(format_args!("{} processes end for which somebody else has spoken", lives.len()));
        for life in lives {
            self.kill(life, false);
        }
        self.progress = self.net.borrow().now;
        true
    }
}

/// Whether rows may be let go for what the conductor says so: for watermarks, rounds and headers. What is spoilt may be any of these.
fn may_let_go(envelope: &Envelope, bytes: &[u8]) -> bool {
    let is_spoilt = postcard::to_stdvec(envelope).expect("plain data") != bytes;
    is_spoilt
        || match envelope {
            Envelope::Protocol(it) => matches!(
                it,
                Message::Watermark { .. }
                    | Message::Pulse { .. }
                    | Message::Spare { .. }
                    | Message::Round { .. }
                    | Message::Heartbeat(_)
            ),
            Envelope::Beat { .. } | Envelope::Word { .. } => true,
            Envelope::Heard { .. } => false,
        }
}
