//! Carries actions out.
//!
//! In: the actions for an object, in order. Out: all done, or why the first was not, and the version that the object has
//! by then. What was written is remembered, so that the next look sees it.
//!
//! One action that is refused holds no other up: who may leave leaves though no further pod fits. Only what would be
//! made on top of it waits: a Job for its Service, a pod for the one before that was refused, both for the certificate
//! that they mount, a number of servers for the budget that says how many may be missing and when numbers were taken over.
//!
//! Done already counts as done: creating what is there and is ours, deleting what is gone. Pods are
//! written several at a time, everything else one after the other.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cadre_crds::contract::{ANNOTATION_DRAIN, ANNOTATION_DRAIN_SINCE, FINALIZER};
use cadre_desired::{Action, Kind, Object, Reference, SCALER};
use futures_util::{StreamExt as _, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Status;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::context::{Context, MANAGER};
use crate::error::{Error, is_code, status};

/// Pods written at the same time for one object.
const AT_ONCE: usize = 16;

/// What has become of the actions for an object.
#[derive(Debug)]
pub(crate) struct Done {
    /// Version of the object, where an action has changed it.
    pub(crate) version: Option<String>,
    /// The first failure; the others that there may be are met again in the next look.
    pub(crate) failed: Option<Error>,
    /// Whether a pod was not made.
    pub(crate) lacks_pods: bool,
}

/// Carries all actions for `owner` out, after `prepared` did or did not get ready what workers need.
pub(crate) async fn all<K>(
    context: &Context,
    owner: &K,
    actions: Vec<Action>,
    prepared: Result<(), Error>,
) -> Done
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let (pods, others): (Vec<_>, Vec<_>) = actions.into_iter().partition(|it| match it {
        Action::Create(object) | Action::Apply(object) => object.kind() == Kind::Pod,
        Action::Delete(which) => which.kind == Kind::Pod,
        Action::Drain { .. } => true,
        Action::Note { .. }
        | Action::Scale { .. }
        | Action::DeleteSelf
        | Action::Guard
        | Action::Release => false,
    });
    let no_more_pods = AtomicBool::new(prepared.is_err());
    let lacks_pods = AtomicBool::new(false);
    let (mut owner, mut version, mut result) = (owner.clone(), None, prepared);
    let mut lacks_budget = false;
    for action in others {
        let waits = match &action {
            Action::Create(Object::Job(_)) => result.is_err(),
            Action::Scale { .. } => lacks_budget,
            Action::Create(_)
            | Action::Apply(_)
            | Action::Delete(_)
            | Action::Drain { .. }
            | Action::Note { .. }
            | Action::DeleteSelf
            | Action::Guard
            | Action::Release => false,
        };
        if !waits {
            let is_budget = is_budget(&action);
            let done = Box::pin(one(context, &owner, action)).await;
            lacks_budget |= is_budget && done.is_err();
            if let Ok(Some(newer)) = &done {
                owner.meta_mut().resource_version = Some(newer.clone());
                version = Some(newer.clone());
            }
            result = Error::first(result, done.map(drop));
        }
    }
    let pod = async |action: Action| {
        let makes = matches!(action, Action::Create(_));
        let is_refused = makes && no_more_pods.load(Ordering::Relaxed);
        let done = if is_refused { Ok(()) } else { one(context, &owner, action).await.map(drop) };
        no_more_pods.fetch_or(makes && done.is_err(), Ordering::Relaxed);
        lacks_pods.fetch_or(makes && (is_refused || done.is_err()), Ordering::Relaxed);
        done
    };
    let pods: Vec<_> = stream::iter(pods).map(pod).buffered(AT_ONCE).collect().await;
    let failed = pods.into_iter().fold(result, Error::first).err();
    Done { version, failed, lacks_pods: lacks_pods.into_inner() }
}

fn is_budget(action: &Action) -> bool {
    match action {
        Action::Create(object) | Action::Apply(object) => object.kind() == Kind::Budget,
        Action::Delete(which) => which.kind == Kind::Budget,
        Action::Drain { .. }
        | Action::Note { .. }
        | Action::Scale { .. }
        | Action::DeleteSelf
        | Action::Guard
        | Action::Release => false,
    }
}

/// Carries one action out. Out: the owner's version, if the action has changed it.
async fn one<K>(context: &Context, owner: &K, action: Action) -> Result<Option<String>, Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let namespace = owner.namespace().unwrap_or_default();
    let client = &context.client;
    context.metrics.action(&action);
    match action {
        Action::Scale { replicas } => return scale(client, owner, replicas).await,
        Action::Guard => return finalizers(client, owner, true).await,
        Action::Release => return finalizers(client, owner, false).await,
        Action::Create(Object::Pod(pod)) => {
            if let Some(made) = create(client, owner, *pod).await? {
                context.recent_pods.wrote(made, Instant::now());
            }
        }
        Action::Create(Object::Job(job)) => {
            if let Some(made) = create(client, owner, *job).await? {
                context.recent_jobs.wrote(made, Instant::now());
            }
        }
        Action::Create(Object::Service(it)) => drop(create(client, owner, *it).await?),
        Action::Create(Object::Budget(it)) => drop(create(client, owner, *it).await?),
        Action::Create(Object::Revision(it)) => drop(create(client, owner, *it).await?),
        Action::Apply(Object::Pod(it)) => apply(client, &namespace, *it).await?,
        Action::Apply(Object::Job(it)) => apply(client, &namespace, *it).await?,
        Action::Apply(Object::Service(it)) => apply(client, &namespace, *it).await?,
        Action::Apply(Object::Budget(it)) => apply(client, &namespace, *it).await?,
        Action::Apply(Object::Revision(it)) => apply(client, &namespace, *it).await?,
        Action::Drain { pod, reason, since } => {
            let notes =
                json!({ANNOTATION_DRAIN: reason, ANNOTATION_DRAIN_SINCE: since.to_string()});
            let patch = json!({"metadata": {"uid": pod.uid, "annotations": notes}});
            let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
            match pods.patch(&pod.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(pod) => context.recent_pods.wrote(pod, Instant::now()),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(Error::api(format!("drain pod {}", pod.name), error)),
            }
        }
        Action::Note { object, annotation, text } => {
            let patch = json!({"metadata": {"uid": object.uid, "annotations": {annotation: text}}});
            let jobs = Api::<Job>::namespaced(client.clone(), &namespace);
            match jobs.patch(&object.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(job) => context.recent_jobs.wrote(job, Instant::now()),
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    return Err(Error::api(format!("note on Job {}", object.name), error));
                }
            }
        }
        Action::Delete(which) => match which.kind {
            Kind::Pod => {
                let left = delete::<Pod>(client, &namespace, &which).await?;
                context.recent_pods.deleted(&which.uid, left, Instant::now());
            }
            Kind::Job => {
                let left = delete::<Job>(client, &namespace, &which).await?;
                context.recent_jobs.deleted(&which.uid, left, Instant::now());
            }
            Kind::Service => drop(delete::<Service>(client, &namespace, &which).await?),
            Kind::Budget => drop(delete::<PodDisruptionBudget>(client, &namespace, &which).await?),
            Kind::Revision => drop(delete::<ControllerRevision>(client, &namespace, &which).await?),
        },
        Action::DeleteSelf => {
            delete_self(client, owner).await?;
        }
    }
    Ok(None)
}

/// Creates an object. Out: it; none if it is there already and is ours.
async fn create<T, K>(client: &Client, owner: &K, object: T) -> Result<Option<T>, Error>
where
    T: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    T: Clone + Debug + Serialize + DeserializeOwned,
    K: Resource<DynamicType = ()>,
{
    let name = object.name_any();
    let kind = T::kind(&());
    let api = Api::<T>::namespaced(client.clone(), &owner.namespace().unwrap_or_default());
    let parameters = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
    let refused = |name: &str, mut error: kube::Error| {
        let lasting = lasting_name::<T>(name);
        if let kube::Error::Api(status) = &mut error {
            status.message = status.message.replace(name, &lasting);
        }
        Error::api(format!("create {kind} {lasting}"), error)
    };
    match api.create(&parameters, &object).await {
        Ok(made) => Ok(Some(made)),
        Err(error) if is_code(&error, 409) => {
            let found = api.get_opt(&name).await;
            let found = found.map_err(|it| Error::api(format!("look at {kind} {name}"), it))?;
            let Some(found) = found else {
                // It has gone meanwhile; or other objects were counted at the same time, as a quota says it.
                let was_there = status(&error).is_some_and(|it| it.reason == "AlreadyExists");
                return Err(if was_there { Error::Stale } else { refused(&name, error) });
            };
            let ours =
                found.owner_references().iter().any(|it| Some(&it.uid) == owner.uid().as_ref());
            if !ours {
                let kind = match kind.as_ref() {
                    "Service" => "Service",
                    "Job" => "Job",
                    "Pod" => "Pod",
                    "ControllerRevision" => "ControllerRevision",
                    _ => "PodDisruptionBudget",
                };
                return Err(Error::NameTaken { kind, name });
            }
            show(&api, &found, object.labels()).await?;
            Ok(None)
        }
        Err(error) => Err(refused(&name, error)),
    }
}

/// Gives an object of ours back the labels that somebody has taken off it: without them the watches do not show it.
async fn show<T>(api: &Api<T>, found: &T, labels: &BTreeMap<String, String>) -> Result<(), Error>
where
    T: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    if labels.iter().all(|(key, value)| found.labels().get(key) == Some(value)) {
        return Ok(());
    }
    let (kind, name) = (T::kind(&()), found.name_any());
    let patch = json!({"metadata": {"uid": found.uid(), "labels": labels}});
    match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        Err(error) if is_gone(&error) => Err(Error::Stale),
        Err(error) => Err(Error::api(format!("give {kind} {name} its labels back"), error)),
    }
}

/// A name that does not change from one try to the next. The last part of a server's name changes
/// each second, and a status that named it would change as often.
fn lasting_name<T: Resource<DynamicType = ()>>(name: &str) -> String {
    match name.rsplit_once('-') {
        Some((slot, _)) if T::kind(&()) == "Pod" => format!("{slot}-*"),
        Some(_) | None => name.to_owned(),
    }
}

/// Brings an object to this content.
async fn apply<T>(client: &Client, namespace: &str, object: T) -> Result<(), Error>
where
    T: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    T: Clone + Debug + Serialize + DeserializeOwned,
{
    let name = object.name_any();
    let api = Api::<T>::namespaced(client.clone(), namespace);
    let parameters = PatchParams::apply(MANAGER).force();
    let result = api.patch(&name, &parameters, &Patch::Apply(&object)).await;
    result.map(drop).map_err(|it| Error::api(format!("apply {} {name}", T::kind(&())), it))
}

/// Deletes an object. Out: it as it is now, if it takes a while.
async fn delete<T>(client: &Client, namespace: &str, which: &Reference) -> Result<Option<T>, Error>
where
    T: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api = Api::<T>::namespaced(client.clone(), namespace);
    let uid = Some(which.uid.clone());
    let parameters =
        DeleteParams::background().preconditions(Preconditions { uid, resource_version: None });
    match api.delete(&which.name, &parameters).await {
        Ok(result) => Ok(result.left()),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(Error::api(format!("delete {} {}", T::kind(&()), which.name), error)),
    }
}

/// Deletes the object itself, unless it has changed since it was looked at: somebody may want to keep it, or have it go on.
async fn delete_self<K>(client: &Client, owner: &K) -> Result<(), Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let name = owner.name_any();
    let api = Api::<K>::namespaced(client.clone(), &owner.namespace().unwrap_or_default());
    let as_seen = Preconditions { uid: owner.uid(), resource_version: owner.resource_version() };
    let parameters = DeleteParams::background().preconditions(as_seen);
    match api.delete(&name, &parameters).await {
        Ok(_) => Ok(()),
        Err(error) if is_code(&error, 404) => Ok(()),
        Err(error) if is_code(&error, 409) => Err(Error::Stale),
        Err(error) => Err(Error::api(format!("delete {} {name}", K::kind(&())), error)),
    }
}

/// Writes the number of servers, unless the object has changed since it was looked at: somebody else may have written one. By
/// server-side apply, the only write that always leaves in `managedFields` whose number it is. Out: the object's version then.
async fn scale<K>(client: &Client, owner: &K, replicas: u32) -> Result<Option<String>, Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let name = owner.name_any();
    // With the uid, an object that is gone is not made anew.
    let patch = json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {
            "uid": owner.uid(),
            "resourceVersion": owner.resource_version(),
        },
        "spec": {"replicas": replicas},
    });
    let api = Api::<K>::namespaced(client.clone(), &owner.namespace().unwrap_or_default());
    match api.patch_metadata(&name, &PatchParams::apply(SCALER).force(), &Patch::Apply(patch)).await
    {
        Ok(scaled) => Ok(scaled.metadata.resource_version),
        Err(error) if is_gone(&error) => Err(Error::Stale),
        Err(error) => Err(Error::api(format!("write spec.replicas {replicas}"), error)),
    }
}

/// Whether the object is gone, or another of the same name has come: to a delete the API server says that as a conflict, to a
/// patch with the uid of the one before that nobody may change this field.
fn is_gone(error: &kube::Error) -> bool {
    let is_other = |it: &Status| it.code == 422 && it.message.contains("metadata.uid");
    is_code(error, 404) || is_code(error, 409) || status(error).is_some_and(is_other)
}

/// Puts our finalizer on the object, or takes it off; those of others stay. Out: the object's version then.
pub(crate) async fn finalizers<K>(
    client: &Client,
    owner: &K,
    ours: bool,
) -> Result<Option<String>, Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let mut finalizers = owner.finalizers().to_vec();
    finalizers.retain(|it| it != FINALIZER);
    if ours {
        finalizers.push(FINALIZER.to_owned());
    }
    let patch = json!({
        "metadata": {"resourceVersion": owner.resource_version(), "finalizers": finalizers},
    });
    let api = Api::<K>::namespaced(client.clone(), &owner.namespace().unwrap_or_default());
    match api.patch_metadata(&owner.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await
    {
        Ok(changed) => Ok(changed.metadata.resource_version),
        Err(error) if is_code(&error, 404) => Ok(None),
        Err(error) if is_code(&error, 409) => Err(Error::Stale),
        Err(error) => Err(Error::api("change the finalizers", error)),
    }
}
