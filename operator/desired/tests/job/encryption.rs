//! What links of an attempt are is fixed when it is made, whoever edits the job and whichever operator looks.

use cadre_crds::Encryption;
use cadre_crds::contract::ANNOTATION_ENCRYPTION;
use cadre_desired::job::encryption;
use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;

use super::cluster::{World, attempt_of};
use super::events::events;
use super::rest;

use Encryption::{Off, Required, Tcp};

/// What the newest attempt's pods are told, and what the status says of it.
fn links(world: &World) -> (Encryption, Option<Encryption>) {
    let newest = world.jobs.last().and_then(|it| it.spec.clone()).expect("an attempt");
    let pod = Pod { metadata: newest.template.metadata.unwrap_or_default(), ..Pod::default() };
    let told = encryption(&pod, Some(&world.job)).expect("a good annotation");
    (told, world.job.status.as_ref().and_then(|it| it.encryption))
}

fn next_attempt(world: &mut World) {
    world.disrupt(0, "EvictionByEvictionAPI");
    rest(world);
}

/// As an operator leaves it that knows nothing of this.
fn forget(world: &mut World) {
    for job in &mut world.jobs {
        let template = job.spec.as_mut().and_then(|it| it.template.metadata.as_mut());
        template.and_then(|it| it.annotations.as_mut()).expect("it has one").clear();
        let notes = job.metadata.annotations.as_mut().expect("it has some");
        notes.remove(ANNOTATION_ENCRYPTION);
    }
    world.job.status.as_mut().expect("it was reported").encryption = None;
}

#[test]
fn a_new_job_encrypts_and_one_that_says_no_does_not() {
    for (asked, expected) in
        [(None, Tcp), (Some(Tcp), Tcp), (Some(Required), Required), (Some(Off), Off)]
    {
        let mut world = World::new(false);
        world.job.spec.attention.encryption = asked;
        rest(&mut world);
        assert_eq!(links(&world), (expected, Some(expected)));
    }
}

#[test]
fn an_edit_counts_from_the_next_attempt_on_and_the_status_says_so() {
    let mut world = World::new(false);
    rest(&mut world);
    world.job.spec.attention.encryption = Some(Off);
    rest(&mut world);
    assert_eq!(links(&world), (Tcp, Some(Tcp)));
    let said = |world: &World| world.condition("Running").expect("it is told").message;
    let expected = "2 of 2 pods are ready; spec.attention.encryption Off counts from the next attempt on, this one has Tcp";
    assert_eq!(said(&world), expected);
    next_attempt(&mut world);
    assert_eq!((links(&world), said(&world)), ((Off, Some(Off)), "2 of 2 pods are ready".into()));
    // Left out again: as before.
    world.job.spec.attention.encryption = None;
    next_attempt(&mut world);
    assert_eq!(links(&world), (Off, Some(Off)));
}

#[test]
fn a_job_of_an_operator_that_wrote_nothing_goes_on_as_it_began() {
    for (asked, expected) in [(None, Off), (Some(Off), Off), (Some(Required), Required)] {
        let mut world = World::new(false);
        world.job.spec.attention.encryption = asked;
        rest(&mut world);
        forget(&mut world);
        rest(&mut world);
        assert_eq!(links(&world), (expected, Some(expected)), "{asked:?}");
        // An edit does not part those that come later from those that are there.
        let other = if expected == Required { Off } else { Required };
        world.job.spec.attention.encryption = Some(other);
        rest(&mut world);
        assert_eq!(links(&world), (expected, Some(expected)), "{asked:?}");
        world.job.spec.attention.encryption = asked;
        next_attempt(&mut world);
        assert_eq!(links(&world), (expected, Some(expected)), "{asked:?}");
    }
}

/// Before there were three words, `Tls` meant what `Required` means now.
#[test]
fn a_job_of_the_earlier_word_stays_as_it_was_and_may_be_eased() {
    let mut world = World::new(false);
    rest(&mut world);
    let say = |world: &mut World| {
        for job in &mut world.jobs {
            let template = job.spec.as_mut().and_then(|it| it.template.metadata.as_mut());
            for meta in [template.expect("it has some"), &mut job.metadata] {
                let notes = meta.annotations.get_or_insert_default();
                notes.insert(ANNOTATION_ENCRYPTION.to_owned(), "Tls".to_owned());
            }
        }
    };
    say(&mut world);
    let stored = serde_json::from_value(serde_json::json!("Tls")).expect("objects hold it");
    world.job.status.as_mut().expect("it was reported").encryption = stored;
    rest(&mut world);
    assert_eq!(links(&world), (Required, Some(Required)));
    next_attempt(&mut world);
    assert_eq!(links(&world), (Required, Some(Required)), "the default of new jobs is not its own");
    world.job.spec.attention.encryption = stored;
    rest(&mut world);
    let said = world.condition("Running").expect("it is told").message;
    assert_eq!(said, "2 of 2 pods are ready", "the same in another word is no edit");
    world.job.spec.attention.encryption = Some(Tcp);
    next_attempt(&mut world);
    assert_eq!(links(&world), (Tcp, Some(Tcp)));
}

#[test]
fn a_job_that_was_suspended_under_an_operator_that_wrote_nothing_goes_on_as_it_began() {
    let mut world = World::new(false);
    rest(&mut world);
    world.job.spec.suspend = true;
    rest(&mut world);
    assert_eq!(world.jobs, [], "no attempt is left to ask");
    forget(&mut world);
    world.job.spec.suspend = false;
    rest(&mut world);
    assert_eq!(links(&world), (Off, Some(Off)));
}

#[test]
fn pods_of_other_kinds_say_it_themselves_or_send_in_the_clear() {
    let mut pod = Pod::default();
    assert_eq!(encryption(&pod, None), Ok(Off));
    let mut says = |word: &str| {
        let note = (ANNOTATION_ENCRYPTION.to_owned(), word.to_owned());
        pod.metadata.annotations = Some([note].into());
        encryption(&pod, None)
    };
    assert_eq!((says("Tcp"), says("Off")), (Ok(Tcp), Ok(Off)));
    assert_eq!((says("Required"), says("Tls")), (Ok(Required), Ok(Required)), "an earlier word");
    let refused = says("tls").expect_err("no such word");
    let expected = "its annotation cadre.dev/encryption is tls; set it to Tcp, Required or Off";
    assert_eq!(refused, expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn all_pods_of_an_attempt_are_told_the_same_whenever_they_ask(
        events in events(),
        edits in prop::collection::vec(prop::option::of(prop_oneof![Just(Tcp), Just(Required), Just(Off)]), 0..60),
        older in any::<bool>(),
    ) {
        let mut world = World::new(false);
        rest(&mut world);
        if older {
            forget(&mut world);
            rest(&mut world);
        }
        let mut told = std::collections::BTreeMap::new();
        for (at, event) in events.iter().enumerate() {
            world.happen(event);
            if let Some(asked) = edits.get(at) {
                world.job.spec.attention.encryption = *asked;
            }
            let number = world.jobs.last().and_then(|it| attempt_of(&it.metadata)?.parse::<u32>().ok());
            let Some(number) = number else { continue };
            let now = links(&world).0;
            let first = *told.entry(number).or_insert(now);
            // Nothing of an attempt before the newest runs any more.
            let is_newest = told.last_key_value().is_some_and(|it| *it.0 == number);
            prop_assert!(now == first || !is_newest, "attempt {number}: {first:?}, then {now:?}");
        }
    }
}
