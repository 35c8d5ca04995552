//! The calibration that a job is told of: a file of `cadre calibrate`, or a table that ships with Cadre.
//!
//! In: its name. Out: a [`Profile`] that was checked, and what the conductor writes into headers ([`Planned`]).
//!
//! Where nothing is told, costs are the nominal ones, and links are equal. Whoever makes headers asks here: the conductor, and
//! `cadre plan -f` and `cadre simulate -f` before the job runs.

use cadre_planner::{Costs, LinkMap, Profile, ProfileError};

/// Why a calibration cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("profile {name}: {why}; give a file of cadre calibrate, or one of {}", Profile::BUILTIN.join(", "))]
pub struct Error {
    name: String,
    why: Reason,
}

#[derive(Debug, thiserror::Error)]
enum Reason {
    #[error("{0}")]
    Unreadable(std::io::Error),
    #[error("{0}")]
    Malformed(serde_json::Error),
    #[error("{0}")]
    Refused(ProfileError),
}

impl Error {
    /// A calibration that is of something else.
    pub fn refused(name: &str, why: ProfileError) -> Self {
        Self { name: name.into(), why: Reason::Refused(why) }
    }
}

/// Reads a calibration.
///
/// # Errors
///
/// It cannot be read, or a number in it cannot be.
pub fn read(name: &str) -> Result<Profile, Error> {
    if let Some(profile) = Profile::builtin(name) {
        return Ok(profile);
    }
    let refuse = |why| Error { name: name.into(), why };
    let text = std::fs::read(name).map_err(|error| refuse(Reason::Unreadable(error)))?;
    let profile: Profile =
        serde_json::from_slice(&text).map_err(|error| refuse(Reason::Malformed(error)))?;
    profile.check().map_err(|error| refuse(Reason::Refused(error)))?;
    Ok(profile)
}

/// What a job plans with.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What tasks cost, by kind of layers.
    pub costs: Vec<Costs>,
    /// What is known of the links of its workers.
    pub links: LinkMap,
}

/// What a job of so many trainers plans with by a calibration; nominal costs and equal links if there is none. Kinds of layers
/// are told by the dim of their heads and, in a process that computes them, by its processor.
///
/// # Errors
///
/// As [`read`]; it has no tables of a head dim, is of another processor, or names a trainer that the job does not have.
pub fn planned<'a>(
    name: Option<&str>,
    kinds: impl IntoIterator<Item = (u16, Option<&'a str>)>,
    trainers: u16,
) -> Result<Planned, Error> {
    let kinds = kinds.into_iter();
    let Some(name) = name else {
        let costs = kinds.map(|_| Costs::default()).collect();
        return Ok(Planned { costs, links: LinkMap::default() });
    };
    let profile = read(name)?;
    let of_kind = |(dim, here): (u16, Option<&str>)| {
        if let Some(here) = here {
            profile.check_processor(here)?;
        }
        profile.costs(dim)
    };
    let costs = kinds.map(of_kind).collect::<Result<_, ProfileError>>();
    let planned = costs.and_then(|costs| {
        let links = profile.link_map(trainers)?;
        Ok(Planned { costs, links })
    });
    planned.map_err(|error| Error::refused(name, error))
}
