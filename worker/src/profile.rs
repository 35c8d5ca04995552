//! The calibration that a job is told of: a file of `cadre calibrate`, or a table that ships with Cadre.
//!
//! In: its name. Out: a [`Profile`] that was checked, and the [`Costs`] that the conductor writes into headers.
//!
//! Where nothing is told, costs are the nominal ones.

use cadre_planner::{Costs, Profile, ProfileError};

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

/// What tasks of heads of `dim` cost by a calibration; the nominal costs if there is none.
///
/// # Errors
///
/// As [`read`]; it has no tables of the head dim.
pub fn costs(name: Option<&str>, dim: u16) -> Result<Costs, Error> {
    let Some(name) = name else { return Ok(Costs::default()) };
    read(name)?.costs(dim).map_err(|error| Error::refused(name, error))
}

/// As [`costs`], for a process that computes with `processor`.
///
/// # Errors
///
/// As [`costs`]; it is of another processor.
pub fn costs_here(name: Option<&str>, dim: u16, processor: &str) -> Result<Costs, Error> {
    if let Some(name) = name {
        read(name)?.check_processor(processor).map_err(|error| Error::refused(name, error))?;
    }
    costs(name, dim)
}
