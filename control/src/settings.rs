//! What a controller tells a worker of its job: one typed object, the same from `cadre run` and from the operator.
//!
//! In: the job's objects. Out: the text of `Welcome.settings`, JSON in which every field is written out, and on
//! the worker's side the same [`Settings`] again. Options of the training itself are arguments of the command,
//! not here.
//!
//! Invariant: no field has a silent default. A field that a later control version adds is listed in `ADDED`
//! with the value that means what the version before did: towards a worker of the version before it is left out
//! if it has that value, and else the worker is refused by the field's name. Where that worker has the same from its
//! environment, it is left out. Every other field that is missing or unknown is refused by its name too.

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

/// A point of the run at which the conductor waits for the controller: before this pass of this step.
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

/// A moment that is none.
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
    /// Nominal weights, servers of one numerics id.
    pub reproducible: bool,
    /// Whether what workers send each other is encrypted.
    #[serde(serialize_with = "encryption")]
    pub encryption: Encryption,
    /// What to do when no server is left.
    pub on_pool_loss: OnPoolLoss,
    /// How long to wait for one.
    pub pool_wait_seconds: u32,
    /// Silence after which a server is suspected.
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
    /// Slots lost in the job before this worker came.
    pub failovers: u32,
    /// Checkpoint to go on from.
    #[serde(deserialize_with = "Option::deserialize")]
    pub resume: Option<PathBuf>,
    /// Header log to replay.
    #[serde(deserialize_with = "Option::deserialize")]
    pub headers: Option<PathBuf>,
    /// Calibration that plans are made with; none: nominal costs, or what the environment of a pod that no job describes says.
    #[serde(deserialize_with = "Option::deserialize")]
    pub profile: Option<String>,
    /// How uneven plans may be; none: as usual, or what the environment of a pod that no job describes says.
    #[serde(deserialize_with = "Option::deserialize")]
    pub tolerance: Option<Tolerance>,
    /// Moments at which the conductor sends `PhaseReached` and waits for `FaultsFired`.
    pub faults: Vec<Moment>,
}

/// The earlier word for [`Encryption::Required`].
const TLS: &str = "Tls";
/// The control version since when workers know three words for what is encrypted.
const THREE_WORDS: u32 = 3;

/// Workers that know two words alone have the earlier one for [`Encryption::Required`]; later ones know both.
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
    /// The value that means what the version before did; none: workers of that version have theirs from their environment.
    before: Option<fn() -> Value>,
}

/// Fields that control version 2 did not have.
const ADDED: &[Added] = &[
    Added { since: 3, field: "profile", before: None },
    Added { since: 3, field: "tolerance", before: None },
];

impl Settings {
    /// The text of `Welcome.settings` for a worker that speaks `version`.
    ///
    /// # Errors
    ///
    /// A field that the worker does not know says something else than the worker would do.
    pub fn to_text(&self, version: u32) -> Result<String, Error> {
        let value = serde_json::to_value(self).expect("settings are plain data");
        let Value::Object(mut fields) = value else { unreachable!("a struct is an object") };
        if version < THREE_WORDS && self.encryption == Encryption::Tcp {
            // The links are the same, and no more goes in the clear than asked.
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
        serde_json::from_value(Value::Object(fields)).map_err(malformed)
    }
}

/// Takes away what a worker of `version` does not know.
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

/// Adds what a controller of `version` could not say. What it did say stays.
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
mod tests {
    use serde_json::json;

    use super::*;

    fn settings() -> Settings {
        Settings {
            job: "bible".into(),
            attempt: 2,
            trainers: 3,
            attention: AttentionPlace::Local,
            wire: Wire::Bf16,
            reproducible: true,
            encryption: Encryption::Required,
            on_pool_loss: OnPoolLoss::Fail,
            pool_wait_seconds: 7,
            suspect_after_milliseconds: 900,
            trainer_suspect_after_seconds: 20,
            stalled_after_seconds: 60,
            checkpoints: "out".into(),
            checkpoints_kept: 4,
            failovers: 5,
            resume: None,
            headers: Some("log".into()),
            profile: Some("h200-hopper".into()),
            tolerance: Some("1.05".parse().unwrap()),
            faults: vec![Moment { step: 3, direction: Direction::Backward }],
        }
    }

    fn fields() -> Map<String, Value> {
        let Ok(Value::Object(fields)) = serde_json::to_value(settings()) else { panic!() };
        fields
    }

    #[test]
    fn what_is_written_is_read_again() {
        let text = settings().to_text(CONTROL_VERSION).unwrap();
        assert_eq!(Settings::parse(&text, CONTROL_VERSION).unwrap(), settings());
        for encryption in [Encryption::Tcp, Encryption::Off] {
            let settings = Settings { encryption, ..settings() };
            let text = settings.to_text(CONTROL_VERSION).unwrap();
            assert_eq!(Settings::parse(&text, CONTROL_VERSION).unwrap(), settings);
        }
    }

    #[test]
    fn workers_that_know_two_words_of_encryption_hear_their_own_for_required() {
        let text = settings().to_text(CONTROL_VERSION).unwrap();
        assert!(text.contains(r#""encryption":"Tls""#), "{text}");
        let later = text.replace("Tls", "Required");
        assert_eq!(Settings::parse(&later, CONTROL_VERSION).unwrap(), settings());
    }

    #[test]
    fn workers_that_know_two_words_of_encryption_encrypt_all_where_links_are_asked_for() {
        let links = Settings { encryption: Encryption::Tcp, ..settings() };
        let text = |version| links.to_text(version).unwrap();
        assert!(text(CONTROL_VERSION).contains(r#""encryption":"Tcp""#));
        assert!(text(THREE_WORDS - 1).contains(r#""encryption":"Tls""#));
        let clear = Settings { encryption: Encryption::Off, ..settings() };
        assert!(clear.to_text(THREE_WORDS - 1).unwrap().contains(r#""encryption":"Off""#));
    }

    #[test]
    fn a_missing_field_is_refused_by_its_name() {
        for name in fields().keys() {
            let mut fields = fields();
            fields.remove(name);
            let text = Value::Object(fields).to_string();
            let refusal = Settings::parse(&text, CONTROL_VERSION).unwrap_err().to_string();
            assert!(refusal.contains(&format!("missing field `{name}`")), "{name}: {refusal}");
        }
    }

    #[test]
    fn an_unknown_field_and_a_cut_text_are_refused() {
        let mut fields = fields();
        fields.insert("of_the_future".into(), json!(1));
        let check = |text: &str, expected: &str| {
            let refusal = Settings::parse(text, CONTROL_VERSION).unwrap_err().to_string();
            assert!(refusal.contains(expected), "{refusal}");
            assert!(refusal.starts_with("settings of the job are malformed"), "{refusal}");
        };
        check(&Value::Object(fields).to_string(), "unknown field `of_the_future`");
        check("{", "EOF");
    }

    const LATER: &[Added] = &[Added { since: 2, field: "memory", before: Some(|| json!(4)) }];

    #[test]
    fn a_field_of_the_next_version_is_left_out_only_where_it_changes_nothing() {
        let with = |value: Value| Map::from_iter([("memory".to_owned(), value)]);
        let mut same = with(json!(4));
        lower(&mut same, 1, LATER).unwrap();
        assert!(same.is_empty());
        let refusal = lower(&mut with(json!(8)), 1, LATER).unwrap_err().to_string();
        assert!(
            refusal.contains("memory: 8") && refusal.contains("control version 1"),
            "{refusal}"
        );
        let mut known = with(json!(8));
        lower(&mut known, 2, LATER).unwrap();
        assert_eq!(known, with(json!(8)));
    }

    #[test]
    fn workers_of_the_version_before_have_profile_and_tolerance_from_their_environment() {
        let text = settings().to_text(CONTROL_VERSION - 1).unwrap();
        assert!(!text.contains("profile") && !text.contains("tolerance"), "{text}");
        let read = Settings::parse(&text, CONTROL_VERSION - 1).unwrap();
        assert_eq!(read, Settings { profile: None, tolerance: None, ..settings() });
    }

    #[test]
    fn a_tolerance_that_is_no_ratio_is_refused() {
        for wrong in [json!(0.5), json!(2.5), json!("1.05")] {
            let mut fields = fields();
            fields.insert("tolerance".into(), wrong);
            let text = Value::Object(fields).to_string();
            assert!(Settings::parse(&text, CONTROL_VERSION).is_err(), "{text}");
        }
    }

    #[test]
    fn a_moment_says_its_direction() {
        let backward = Moment { step: 3, direction: Direction::Backward };
        assert_eq!(Moment::of(3, proto::Direction::Backward), Ok(backward));
        let refusal = Moment::of(3, proto::Direction::Unspecified).unwrap_err().to_string();
        assert!(refusal.starts_with("the moment of step 3 says no direction"), "{refusal}");
    }

    #[test]
    fn a_controller_of_the_version_before_means_what_it_did() {
        let mut absent = Map::new();
        raise(&mut absent, 1, LATER);
        assert_eq!(absent, Map::from_iter([("memory".to_owned(), json!(4))]));
        let mut from_now = Map::new();
        raise(&mut from_now, 2, LATER);
        assert!(from_now.is_empty(), "of version 2 it may not be missing");
    }
}
