//! The machines of a job without faults: what begins them, and how a message becomes an event.
//!
//! In: a test that holds the machines and obeys their commands. Out: calls of it, an event each. In which order things happen is
//! the test's matter.

use std::sync::Arc;

use cadre_protocol::{Audience, Message, Peer, ServerId, Step, conductor, server, trainer};
use cadre_step::planned::{PlannedStep, filler};

/// All machines of a job, with what obeys them.
pub(crate) trait Machines {
    /// An event of the conductor.
    fn conduct(&mut self, event: conductor::Event);

    /// An event of a trainer.
    fn train(&mut self, me: usize, event: trainer::Event);

    /// An event of a server.
    fn serve(&mut self, me: usize, event: server::Event);

    /// The conductor learns who fills the slots, and that the header of the step is ready.
    fn start(&mut self, step: &Step, planned: &PlannedStep) {
        let fillers = planned.header.fillers.iter().map(|it| it.as_ref().map(filler)).collect();
        self.conduct(conductor::Event::View(fillers));
        let (step, phases) = (step.number(), planned.order.count() as u32);
        self.conduct(conductor::Event::HeaderReady { step, phases });
    }

    /// A worker has the header.
    fn begin(&mut self, worker: Peer, step: Arc<Step>) {
        match worker {
            Peer::Trainer(it) => self.train(it.0.into(), trainer::Event::Begin(step)),
            Peer::Server(it) => self.serve(it.index.into(), server::Event::Begin(step)),
        }
    }

    /// Everybody looks at the time: so many trainers and servers, and the conductor.
    fn tick(&mut self, trainers: usize, servers: usize) {
        (0..trainers).for_each(|it| self.train(it, trainer::Event::Tick));
        (0..servers).for_each(|it| self.serve(it, server::Event::Tick));
        self.conduct(conductor::Event::Tick);
    }

    /// A message arrives.
    fn deliver(&mut self, from: Peer, to: Peer, message: Message) {
        match (message.audience(), to) {
            (Audience::Conductor, _) => self.conduct(conductor::Event::Message { from, message }),
            (_, Peer::Trainer(it)) => {
                self.train(it.0.into(), trainer::Event::Message { from, message });
            }
            (_, Peer::Server(it)) => {
                self.serve(it.index.into(), server::Event::Message { from, message });
            }
        }
    }
}

/// The step as machines know it, every slot filled.
pub(crate) fn step_of(planned: &PlannedStep) -> Arc<Step> {
    let first = planned.assign(None, &vec![true; planned.header.slots.len()]).unwrap();
    Arc::new(planned.protocol_step(&first).unwrap())
}

pub(crate) fn server_id(index: usize) -> ServerId {
    ServerId { index: index as u16, incarnation: 0 }
}
