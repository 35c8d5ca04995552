//! The settings of a job that a controller sends to each worker: one typed object, the same from `cadre run` and from the
//! operator.
//!
//! In: the job's objects. Out: the text of `Welcome.settings`, JSON with every field, and on the worker's side the same
//! [`Settings`] again. Options of the training itself are not here: they are arguments of the command.
//!
//! Invariant: no field has a silent default. A field that a later control version adds is listed in `ADDED`
//! with the value that means what the version before did: towards a worker of the version before it is left out
//! if it has that value, and else the worker is refused by the field's name. Where that worker has the same from its
//! environment, it is left out. Every other field that is missing or unknown is refused by its name too. A value that a later
//! version adds is told to a worker of the version before as what a job that says nothing was told by the controller of that
//! version: so [`Encryption::Tcp`], the default of new jobs in a cluster, as `Tls`, their default before. That worker then sends
//! no more in the clear than asked, and its links are those of the others.

use std::path::PathBuf;

use cadre_crds::{Encryption, OnPoolLoss, Wire};
use cadre_planner::{Direction, Tolerance};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::CONTROL_VERSION;
use crate::proto;

/// Where core attention is computed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionPlace {
    /// On the pool's slots.
    Pool,
    /// Every query row in its own trainer.
    Local,
}

/// A point of the run before a direction of a step, at which the conductor waits for the controller.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    /// Step, from 0.
    pub step: u64,
    /// Pass.
    pub direction: Direction,
}

impl Moment {
    /// From a message of the control service.
    ///
    /// # Errors
    ///
    /// The message says no direction, or one that this release does not know.
    pub fn of(step: u64, direction: proto::Direction) -> Result<Self, NoDirection> {
        let direction = match direction {
            proto::Direction::Backward => Direction::Backward,
            proto::Direction::Forward => Direction::Forward,
            proto::Direction::Unspecified => return Err(NoDirection { step }),
        };
        Ok(Self { step, direction })
    }
}

/// A moment without a direction.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "the moment of step {step} says no direction; run worker and controller of the same release"
)]
pub struct NoDirection {
    /// The step.
    pub step: u64,
}

/// The job as its workers need to know it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Name of the job.
    pub job: String,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Trainers of the job.
    pub trainers: u16,
    /// Where core attention is computed.
    pub attention: AttentionPlace,
    /// Type of rows on the wire.
    pub wire: Wire,
    /// Whether no manifest says that type: then the rows of the ranks have it, if they say theirs. None: the controller is of a
    /// control version whose word counts.
    #[serde(deserialize_with = "Option::deserialize")]
    pub wire_is_open: Option<bool>,
    /// Nominal weights, servers of one numerics id.
    pub reproducible: bool,
    /// Whether traffic between workers is encrypted.
    #[serde(serialize_with = "encryption")]
    pub encryption: Encryption,
    /// What to do when no server is left.
    pub on_pool_loss: OnPoolLoss,
    /// How long to wait for a server.
    pub pool_wait_seconds: u32,
    /// Silence after which a server is suspected to be lost.
    pub suspect_after_milliseconds: u32,
    /// Silence after which a trainer, or the conductor, is dead.
    pub trainer_suspect_after_seconds: u32,
    /// Time without the call that is due after which a trainer's main thread stands still and the
    /// job ends.
    pub stalled_after_seconds: u32,
    /// Folder of checkpoints; empty if the worker's environment names it.
    pub checkpoints: PathBuf,
    /// Checkpoints that stay.
    pub checkpoints_kept: u32,
    /// Slots that the job had lost before this worker came.
    pub failovers: u32,
    /// Checkpoint that the job resumes from.
    #[serde(deserialize_with = "Option::deserialize")]
    pub resume: Option<PathBuf>,
    /// Header log to replay.
    #[serde(deserialize_with = "Option::deserialize")]
    pub headers: Option<PathBuf>,
    /// Calibration of the plans; none: nominal costs. Read it by [`Self::planning`].
    #[serde(deserialize_with = "Option::deserialize")]
    pub profile: Option<String>,
    /// Tolerance of uneven plans. None where no manifest describes the job: then the environment of its rank 0 has both values.
    /// Read it by [`Self::planning`].
    #[serde(deserialize_with = "Option::deserialize")]
    pub tolerance: Option<Tolerance>,
    /// Moments at which the conductor sends `PhaseReached` and waits for `FaultsFired`.
    pub faults: Vec<Moment>,
}

/// Where the calibration and the tolerance of plans come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Planning<'a> {
    /// The job's settings.
    Said {
        /// The calibration; none: nominal costs.
        profile: Option<&'a str>,
        /// How uneven plans may be.
        tolerance: Tolerance,
    },
    /// The environment of the job's rank 0. No manifest describes the job, or its controller has a control version without these
    /// fields.
    Environment,
}

/// The earlier name of [`Encryption::Required`].
const TLS: &str = "Tls";
/// The first control version with three values of encryption.
const THREE_WORDS: u32 = 3;

/// Writes [`Encryption::Required`] by its earlier name. Workers that know only two values need that one; later ones know both
/// names.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn encryption<S: Serializer>(it: &Encryption, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match it {
        Encryption::Required => TLS,
        Encryption::Tcp | Encryption::Off => it.word(),
    })
}

/// A field that a control version added.
#[derive(Clone, Copy, Debug)]
struct Added {
    /// The first version that has it.
    since: u32,
    /// Name of the field in the JSON.
    field: &'static str,
    /// The value that means what the version before did. None where workers of that version do the same whatever it is: `profile`
    /// and `tolerance` are in the environment of their rank 0, and they know no other type of rows on the wire than `wire`.
    before: Option<fn() -> Value>,
}

/// Fields that control version 2 did not have.
const ADDED: &[Added] = &[
    Added { since: 3, field: "profile", before: None },
    Added { since: 3, field: "tolerance", before: None },
    Added { since: 3, field: "wire_is_open", before: None },
];

impl Settings {
    /// The text of `Welcome.settings` for a worker that speaks `version`.
    ///
    /// # Errors
    ///
    /// The worker does not know a field, and its value differs from what the worker would do.
    pub fn to_text(&self, version: u32) -> Result<String, Error> {
        let value = serde_json::to_value(self).expect("settings are plain data");
        let Value::Object(mut fields) = value else { unreachable!("a struct is an object") };
        if version < THREE_WORDS && self.encryption == Encryption::Tcp {
            fields.insert("encryption".into(), TLS.into());
        }
        lower(&mut fields, version, ADDED)?;
        Ok(Value::Object(fields).to_string())
    }

    /// Reads the text of `Welcome.settings`, written by a controller for `version`.
    ///
    /// # Errors
    ///
    /// Not the settings of that version: a field is missing, unknown or of another type.
    pub fn parse(text: &str, version: u32) -> Result<Self, Error> {
        let malformed = |source| Error::Malformed { source };
        let mut fields: Map<String, Value> = serde_json::from_str(text).map_err(malformed)?;
        raise(&mut fields, version, ADDED);
        let settings: Self = serde_json::from_value(Value::Object(fields)).map_err(malformed)?;
        if settings.tolerance.is_none()
            && let Some(profile) = settings.profile
        {
            return Err(Error::Half { profile });
        }
        Ok(settings)
    }

    /// The job's type of rows on the wire, where those of the ranks have type `rows`.
    pub fn wire_of(&self, rows: Option<Wire>) -> Wire {
        rows.filter(|_| self.wire_is_open == Some(true)).unwrap_or(self.wire)
    }

    /// Where the calibration and the tolerance of the job's plans come from.
    pub fn planning(&self) -> Planning<'_> {
        match self.tolerance {
            Some(tolerance) => Planning::Said { profile: self.profile.as_deref(), tolerance },
            None => Planning::Environment,
        }
    }
}

/// Removes the fields that a worker of `version` does not know.
fn lower(fields: &mut Map<String, Value>, version: u32, added: &[Added]) -> Result<(), Error> {
    for it in added.iter().filter(|it| it.since > version) {
        let value = fields.remove(it.field);
        let Some(before) = it.before.map(|it| it()) else { continue };
        if let Some(value) = value.filter(|value| *value != before) {
            let (field, value, before) = (it.field, value.to_string(), before.to_string());
            return Err(Error::Unknown { field, value, before, worker: version });
        }
    }
    Ok(())
}

/// Adds the fields that a controller of `version` did not have. Present fields stay.
fn raise(fields: &mut Map<String, Value>, version: u32, added: &[Added]) {
    for it in added.iter().filter(|it| it.since > version) {
        fields.entry(it.field).or_insert_with(|| it.before.map_or(Value::Null, |it| it()));
    }
}

/// Why settings are refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not the JSON of settings.
    #[error(
        "settings of the job are malformed: {source}; run worker and controller of the same release"
    )]
    Malformed {
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The job has a calibration without a tolerance, so that half of the plans' input would come from the environment.
    #[error(
        "settings of the job are malformed: they say profile {profile} and no tolerance; run worker and controller of the \
         same release"
    )]
    Half {
        /// The calibration.
        profile: String,
    },
    /// The worker does not know the field, and would act differently from what the job asks.
    #[error(
        "the job says {field}: {value}; workers of control version {worker} do not know that field and act as if it were \
         {before}: start workers of control version {CONTROL_VERSION}"
    )]
    Unknown {
        /// The field.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// What the worker does without it.
        before: String,
        /// The worker's version.
        worker: u32,
    },
}

#[cfg(test)]
mod tests;
