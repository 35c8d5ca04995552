//! What others change of the objects that a pool is made of.

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::cluster::World;
use super::rest;

#[test]
fn each_field_of_the_service_and_the_budget_that_somebody_changes_is_set_back() {
    let changes: [fn(&mut World); 8] = [
        |it| service(it).spec.get_or_insert_default().selector = None,
        |it| service(it).spec.get_or_insert_default().publish_not_ready_addresses = None,
        |it| service(it).spec.get_or_insert_default().cluster_ip = Some("10.0.0.1".into()),
        |it| service(it).metadata.labels = None,
        |it| budget(it).spec.get_or_insert_default().max_unavailable = Some(IntOrString::Int(9)),
        |it| budget(it).spec.get_or_insert_default().selector = None,
        |it| budget(it).spec.get_or_insert_default().unhealthy_pod_eviction_policy = None,
        |it| budget(it).metadata.labels = None,
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut world = World::new(2);
        rest(&mut world);
        let all = |it: &mut World| {
            let (service, budget) = (service(it).clone(), budget(it).clone());
            (service.spec, service.metadata.labels, budget.spec, budget.metadata.labels)
        };
        let ours = all(&mut world);
        change(&mut world);
        rest(&mut world);
        assert_eq!(all(&mut world), ours, "{at}");
        // What others add is theirs.
        let labels = service(&mut world).metadata.labels.get_or_insert_default();
        labels.insert("team".into(), "a".into());
        assert!(world.reconcile(usize::MAX), "{at}");
    }
}

fn service(world: &mut World) -> &mut Service {
    world.service.as_mut().expect("it was made")
}

fn budget(world: &mut World) -> &mut PodDisruptionBudget {
    world.budget.as_mut().expect("it was made")
}
