//! What others change of the objects that a job is made of.

use k8s_openapi::api::core::v1::Service;

use super::cluster::World;
use super::rest;

#[test]
fn each_field_of_the_service_that_somebody_changes_is_set_back() {
    let changes: [fn(&mut Service); 4] = [
        |it| it.spec.get_or_insert_default().selector = None,
        |it| it.spec.get_or_insert_default().publish_not_ready_addresses = Some(false),
        |it| it.spec.get_or_insert_default().cluster_ip = Some("10.0.0.1".into()),
        |it| drop(it.metadata.labels.get_or_insert_default().remove("cadre.dev/pool")),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut world = World::new(false);
        rest(&mut world);
        let ours = world.service.clone().expect("it was made");
        change(world.service.as_mut().expect("it was made"));
        rest(&mut world);
        let now = world.service.clone().expect("it is there");
        assert_eq!((now.spec, now.metadata.labels), (ours.spec, ours.metadata.labels), "{at}");
        // What others add is theirs.
        let labels = &mut world.service.as_mut().expect("it is there").metadata.labels;
        labels.get_or_insert_default().insert("team".into(), "a".into());
        world.done.clear();
        assert!(world.reconcile(usize::MAX), "{at}");
    }
}
