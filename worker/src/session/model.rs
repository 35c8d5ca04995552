//! What every rank says alike of the model.
//!
//! In: what this rank says, a header. Out: the first thing that rank 0 says otherwise. It ends no job.

use cadre_crds::Wire;
use cadre_step::header::Header;
use cadre_step::layers::Layers;

use super::call::Error;

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Model {
    /// As [`super::Join::layers`].
    pub layers: Layers,
    /// As [`super::Join::seed`].
    pub seed: u64,
    /// Type of the job's rows on the wire.
    pub wire: Wire,
}

impl Model {
    /// What rank `rank` says otherwise than rank 0 does in the header.
    pub(super) fn differs(&self, rank: u16, header: &Header) -> Option<Error> {
        let step = header.step;
        if self.layers != header.layers {
            let (own, job) = (self.layers.to_string(), header.layers.to_string());
            return Some(Error::Layers { rank, step, own, job });
        }
        let (own, job) = (self.wire, header.wire);
        if own != job {
            return Some(Error::Wire { rank, step, own, job });
        }
        let (own, job) = (self.seed, header.seed);
        (own != job).then_some(Error::Seed { rank, step, own, job })
    }
}
