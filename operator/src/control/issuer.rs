//! Brings the certificate of the control service's issuer to the namespaces of pools and jobs.
//!
//! In: the file that the chart mounts, and a namespace. Out: a `ConfigMap` there with `ca.crt`, which pods
//! mount. It is written for each object that is first seen, when the file has changed, and every so often, in
//! case somebody has removed it; otherwise nothing is asked of the API server. No Secret is read.
//!
//! Issuers overlap. The one before stays beside a new one for a day, since a standby may still have its certificate; and the
//! leader's own is used only some time after it has changed, when kubelets have brought its issuer to the workers. What there
//! was before stands in the `ConfigMap`, so an operator that starts in between knows it, too.

use std::sync::Arc;
use std::time::Duration;

use cadre_control::expiry::good_after;
use cadre_desired::job::Decision;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource, ResourceExt as _};
use serde_json::json;

use crate::context::{Context, MANAGER};
use crate::error::Error;

/// Key in the `ConfigMap`, and name of the file.
pub(crate) const FILE: &str = "ca.crt";
/// Pause between two looks at the file.
const LOOK: Duration = Duration::from_secs(2);
/// How long a new certificate waits before it is used, unless it is the first one. A kubelet brings
/// a changed `ConfigMap` to its pods within a minute and a half.
pub(crate) const SETTLES: Duration = Duration::from_mins(3);
/// How long former issuers stay in the `ConfigMap`.
const OVERLAP_SECONDS: i64 = 24 * 60 * 60;
/// Maximum former issuers that stay.
const FORMER: usize = 2;
/// Annotation of the `ConfigMap`: the time since when the first issuer in it differs from the
/// others, RFC 3339.
const CHANGED: &str = "cadre.dev/issuer-changed";

/// Sees to it that an object's namespace has the certificate, if the object has workers. Pods that are made after this
/// find it when they start. Out: after how long that is to be seen to again.
pub(crate) async fn bring<K: Resource>(
    context: &Context,
    object: &K,
    decision: &Decision,
) -> Result<Option<Duration>, Error> {
    let folder = context.issuer.folder.as_ref().filter(|_| decision.has_workers);
    let Some(folder) = folder else { return Ok(None) };
    let namespace = object.namespace().unwrap_or_default();
    let place = (namespace.clone(), object.uid().unwrap_or_default());
    let path = folder.join(FILE);
    let certificate = tokio::fs::read_to_string(&path).await;
    let certificate = certificate.map_err(|source| Error::Issuer { path: path.clone(), source })?;
    let lasts = context.issuer.lasts(&place, &certificate);
    if lasts.is_some() {
        return Ok(lasts);
    }
    let name = &context.settings.control_ca;
    let api = Api::<ConfigMap>::namespaced(context.client.clone(), &namespace);
    let found = api.get_opt(name).await;
    let found =
        found.map_err(|it| Error::api(format!("look at ConfigMap {namespace}/{name}"), it))?;
    let (text, changed) = overlap(&certificate, found.as_ref(), Timestamp::now());
    let notes = changed.map_or_else(|| json!({}), |it| json!({CHANGED: it.to_string()}));
    let object = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGER},
            "annotations": notes,
        },
        "data": {FILE: text},
    });
    let parameters = PatchParams::apply(MANAGER).force();
    let applied = api.patch(name, &parameters, &Patch::Apply(&object)).await;
    applied.map_err(|it| Error::api(format!("write ConfigMap {namespace}/{name}"), it))?;
    Ok(Some(context.issuer.wrote(place, certificate)))
}

/// The issuers for a namespace: ours, then the former ones from its `ConfigMap`, with the time of
/// the change. Former ones stay for a day, as long as they are valid.
fn overlap(own: &str, found: Option<&ConfigMap>, now: Timestamp) -> (String, Option<Timestamp>) {
    let text = found.and_then(|it| it.data.as_ref()?.get(FILE)).map_or("", String::as_str);
    let mut former = good_after(text, now.as_second());
    former.retain(|it| !own.contains(it));
    former.truncate(FORMER);
    let noted = found.and_then(|it| it.metadata.annotations.as_ref()?.get(CHANGED));
    // Ours comes first. If the text begins with it already, the recorded change is still the last
    // one.
    let changed = noted.and_then(|it| it.parse().ok()).filter(|_| text.starts_with(own.trim_end()));
    // A time to come is of a leader whose clock went ahead.
    let changed = changed.filter(|it: &Timestamp| *it <= now).unwrap_or(now);
    let is_over = changed.as_second() + OVERLAP_SECONDS <= now.as_second();
    if former.is_empty() || is_over {
        return (own.to_owned(), None);
    }
    let mut all = own.trim_end().to_owned();
    for it in former {
        all.push('\n');
        all.push_str(it);
    }
    all.push('\n');
    (all, Some(changed))
}

/// Triggers a reconcile of every object when the file has changed: otherwise a namespace in which
/// nothing happens would keep the old issuer.
pub(crate) async fn watch(context: Arc<Context>) {
    let Some(folder) = context.issuer.folder.clone() else { return std::future::pending().await };
    let path = folder.join(FILE);
    let mut last = tokio::fs::read_to_string(&path).await.ok();
    loop {
        tokio::time::sleep(LOOK).await;
        let now = tokio::fs::read_to_string(&path).await.ok();
        if now.is_none() || now == last {
            continue;
        }
        last = now;
        tracing::info!("the issuer in {} has changed", path.display());
        let key = |it: &ObjectMeta| {
            (it.namespace.clone().unwrap_or_default(), it.name.clone().unwrap_or_default())
        };
        let caches = &context.caches;
        for pool in caches.pools.state() {
            caches.pool_triggers.put(key(&pool.object.metadata));
        }
        for job in caches.trainings.state() {
            caches.job_triggers.put(key(&job.object.metadata));
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn issuer(until: i32) -> String {
        let mut params = CertificateParams::new(vec!["a".to_owned()]).expect("a name");
        params.not_after = date_time_ymd(until, 1, 1);
        params.self_signed(&KeyPair::generate().expect("entropy")).expect("a certificate").pem()
    }

    /// What the next look finds.
    fn written((text, changed): &(String, Option<Timestamp>)) -> ConfigMap {
        let mut map = ConfigMap {
            data: Some([(FILE.to_owned(), text.clone())].into()),
            ..ConfigMap::default()
        };
        let notes = changed.map(|it| [(CHANGED.to_owned(), it.to_string())].into());
        map.metadata.annotations = notes;
        map
    }

    #[test]
    fn former_issuers_stay_for_a_day_as_long_as_they_are_good() {
        let at = |hours: i64| Timestamp::from_second(1_700_000_000 + 3600 * hours).expect("a time");
        let holds = |told: &(String, Option<Timestamp>), expected: &[&String]| {
            let found: Vec<_> = good_after(&told.0, 0);
            assert_eq!(found, expected.iter().map(|it| it.trim()).collect::<Vec<_>>());
        };
        let [one, two, three, four] = [2030, 2030, 2030, 2030].map(issuer);
        let told = overlap(&one, None, at(0));
        assert_eq!(told, (one.clone(), None));
        assert_eq!(overlap(&one, Some(&written(&told)), at(1)), (one.clone(), None));
        let told = overlap(&two, Some(&written(&told)), at(2));
        holds(&told, &[&two, &one]);
        // A later leader reads it again.
        let told = overlap(&two, Some(&written(&told)), at(25));
        holds(&told, &[&two, &one]);
        assert_eq!(told.1, Some(at(2)), "since when it is so stays");
        assert_eq!(overlap(&two, Some(&written(&told)), at(26)), (two.clone(), None));
        // Another change in that day, and one more; a standby's file may be older than the leader's.
        let told = overlap(&three, Some(&written(&told)), at(25));
        holds(&told, &[&three, &two, &one]);
        let told = overlap(&four, Some(&written(&told)), at(25));
        holds(&told, &[&four, &three, &two]);
        let back = overlap(&three, Some(&written(&told)), at(25));
        holds(&back, &[&three, &four, &two]);
        // The clock of the leader before went ahead by two days.
        let told = overlap(&two, Some(&written(&(one.clone(), None))), at(50));
        let told = overlap(&two, Some(&written(&told)), at(2));
        assert_eq!(told.1, Some(at(2)), "a day from now on, not three");
        // What is over, and what is none, goes.
        let over = written(&(issuer(2020) + "nonsense", None));
        assert_eq!(overlap(&one, Some(&over), at(0)), (one.clone(), None));
    }
}
