//! What is written, read, refused, and told to the version before.

use serde_json::json;

use super::*;

fn settings() -> Settings {
    Settings {
        job: "bible".into(),
        attempt: 2,
        trainers: 3,
        attention: AttentionPlace::Local,
        wire: Wire::Bf16,
        wire_is_open: Some(false),
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
    assert!(refusal.contains("memory: 8") && refusal.contains("control version 1"), "{refusal}");
    let mut known = with(json!(8));
    lower(&mut known, 2, LATER).unwrap();
    assert_eq!(known, with(json!(8)));
}

#[test]
fn workers_of_the_version_before_have_profile_and_tolerance_from_their_environment() {
    let text = settings().to_text(CONTROL_VERSION - 1).unwrap();
    assert!(!text.contains("profile") && !text.contains("tolerance"), "{text}");
    let read = Settings::parse(&text, CONTROL_VERSION - 1).unwrap();
    let before = Settings { profile: None, tolerance: None, wire_is_open: None, ..settings() };
    assert_eq!(read, before);
}

#[test]
fn rows_of_the_ranks_say_the_type_on_the_wire_only_where_no_manifest_does() {
    for (wire_is_open, expected) in
        [(Some(true), Wire::F32), (Some(false), Wire::Bf16), (None, Wire::Bf16)]
    {
        let settings = Settings { wire_is_open, ..settings() };
        assert_eq!(settings.wire_of(Some(Wire::F32)), expected, "{wire_is_open:?}");
        assert_eq!(settings.wire_of(None), Wire::Bf16);
    }
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
fn plans_are_made_as_the_job_says_or_as_the_environment_and_never_half_and_half() {
    let of = |profile: Option<&str>, tolerance: Option<Tolerance>| {
        let settings = Settings { profile: profile.map(Into::into), tolerance, ..settings() };
        Settings::parse(&settings.to_text(CONTROL_VERSION).unwrap(), CONTROL_VERSION)
    };
    let tolerance = Tolerance::USUAL;
    for profile in [None, Some("h200-hopper")] {
        let said = of(profile, Some(tolerance)).unwrap();
        assert_eq!(said.planning(), Planning::Said { profile, tolerance });
    }
    assert_eq!(of(None, None).unwrap().planning(), Planning::Environment);
    let refusal = of(Some("h200-hopper"), None).unwrap_err().to_string();
    assert!(refusal.contains("they say profile h200-hopper and no tolerance"), "{refusal}");
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
