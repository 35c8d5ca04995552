//! A small API server in memory, for the tests of this crate.
//!
//! In: requests of a real client. Out: lists, watches, creates, patches and deletes as the real one answers them, with uids,
//! versions, conflicts, preconditions, and in `managedFields` who has a pool's number. It knows no schemas, runs no controllers.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::Response;
use futures_util::stream;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::fields::{self, Way};
use super::wire::{
    born, is_other, made, merge, other, parameter, patched, refuse, refuse_with, reply, selected,
    shown,
};

/// Resource, namespace and name.
pub(crate) type Address = (String, String, String);

/// A request that is refused: what it does (`create`, `get`, `patch`, `apply`, `delete`, or `status` for a write of that), to
/// which resource, with what in it (a JSON pointer), with which code and words.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    pub(crate) verb: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) with: &'static str,
    pub(crate) code: u16,
    pub(crate) words: String,
}

/// The server; clones are the same one.
#[derive(Clone)]
pub(crate) struct Server {
    inner: Arc<Mutex<Inner>>,
    version: watch::Sender<u64>,
}

#[derive(Default)]
struct Inner {
    objects: BTreeMap<Address, Value>,
    /// Every change: version, resource, type of event, object.
    log: Vec<(u64, String, &'static str, Value)>,
    /// What is not made any more, by resource: after how many objects, the code, the words.
    limits: BTreeMap<String, (usize, u16, String)>,
    /// How many of the next calls are never answered, by resource.
    swallowed: BTreeMap<String, usize>,
    /// What is refused besides, and how often it was.
    refused: Option<(Refused, usize)>,
}

impl Server {
    pub(crate) fn new() -> Self {
        Self { inner: Arc::default(), version: watch::Sender::new(1) }
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(Router::new().fallback(answer).with_state(self.clone()), "n")
    }

    /// Waits until something holds. It is a failure of the test if it never does.
    pub(crate) async fn until<T>(
        &self,
        what: &str,
        holds: impl Fn(&Objects<'_>) -> Option<T>,
    ) -> T {
        let mut changes = self.version.subscribe();
        let found = async {
            loop {
                {
                    let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(found) = holds(&Objects(&inner.objects, inner.times())) {
                        return found;
                    }
                }
                changes.changed().await.expect("the server lives");
            }
        };
        let limit = std::time::Duration::from_mins(1);
        if let Ok(found) = tokio::time::timeout(limit, found).await {
            return found;
        }
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        panic!("never: {what}; there is {:#?}", inner.objects)
    }

    /// Writes an object past all checks, as other controllers do; null deletes.
    pub(crate) fn put(&self, resource: &str, name: &str, change: &Value) {
        let address = (resource.to_owned(), "n".to_owned(), name.to_owned());
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let mut object = inner.objects.get(&address).cloned().unwrap_or_else(|| born("n", name));
        merge(&mut object, change);
        self.store(&mut inner, address, object);
    }

    /// Writes the number of servers of pool `p` as somebody else does, or a manifest without one. Out: whether it is taken.
    pub(crate) fn write(&self, manager: &str, way: Way, number: Option<u64>) -> bool {
        let address = ("attentionpools".to_owned(), "n".to_owned(), "p".to_owned());
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let mut object = inner.objects.get(&address).cloned().expect("it is there");
        let is_taken = fields::write(&mut object, manager, way, number);
        self.store(&mut inner, address, object);
        is_taken
    }

    /// Makes no more than so many objects of a resource, as a quota or an admission plugin does. `NAME` in the words is
    /// the name of what is refused.
    pub(crate) fn limit(&self, resource: &str, most: usize, code: u16, words: &str) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.limits.insert(resource.to_owned(), (most, code, words.to_owned()));
    }

    /// Refuses requests from now on.
    pub(crate) fn refuse(&self, refused: Refused) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.refused = Some((refused, 0));
    }

    /// The answer to a request that is refused.
    fn refusal(&self, verb: &str, resource: &str, body: &Value) -> Option<Response> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (refused, times) = inner.refused.as_mut()?;
        let is_it = (refused.verb, refused.resource) == (verb, resource);
        if !is_it || body.pointer(refused.with).is_none() {
            return None;
        }
        *times += 1;
        Some(refuse_with(refused.code, &refused.words))
    }

    /// Never answers so many of the next calls for a resource of a group in a namespace. Every other one is done.
    pub(crate) fn swallow(&self, resource: &str, calls: usize) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.swallowed.insert(resource.to_owned(), calls);
    }

    /// Waits until they have all come.
    pub(crate) async fn has_swallowed(&self, resource: &str) {
        let mut changes = self.version.subscribe();
        while self.swallows(resource) > 0 {
            changes.changed().await.expect("the server lives");
        }
    }

    fn swallows(&self, resource: &str) -> usize {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.swallowed.get(resource).copied().unwrap_or_default()
    }

    /// Makes all again.
    pub(crate) fn lift_limits(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).limits.clear();
    }

    /// All that became of a resource's objects, in order, with versions that count all changes of the server.
    pub(crate) fn history(&self, resource: &str) -> Vec<(u64, Value)> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let of = inner.log.iter().filter(|it| it.1 == resource);
        of.map(|(version, _, _, object)| (*version, object.clone())).collect()
    }

    /// Takes an object away past all checks.
    pub(crate) fn remove_object(&self, resource: &str, name: &str) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        self.remove(&mut inner, &(resource.to_owned(), "n".to_owned(), name.to_owned()));
    }

    fn store(&self, inner: &mut Inner, address: Address, mut object: Value) -> Value {
        let version = *self.version.borrow() + 1;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = format!("uid-{version}").into();
        }
        let known = inner.objects.insert(address.clone(), object.clone()).is_some();
        let event = if known { "MODIFIED" } else { "ADDED" };
        inner.log.push((version, address.0, event, object.clone()));
        self.version.send_replace(version);
        object
    }

    fn remove(&self, inner: &mut Inner, address: &Address) {
        let version = *self.version.borrow() + 1;
        if let Some(mut object) = inner.objects.remove(address) {
            object["metadata"]["resourceVersion"] = version.to_string().into();
            inner.log.push((version, address.0.clone(), "DELETED", object));
            self.version.send_replace(version);
        }
    }
}

impl Inner {
    fn times(&self) -> usize {
        self.refused.as_ref().map_or(0, |it| it.1)
    }
}

/// What is there, and how often something was refused.
pub(crate) struct Objects<'a>(&'a BTreeMap<Address, Value>, usize);

impl Objects<'_> {
    /// How often [`Server::refuse`] was obeyed.
    pub(crate) fn refusals(&self) -> usize {
        self.1
    }

    /// Objects of one resource, by name.
    pub(crate) fn of(&self, resource: &str) -> Vec<&Value> {
        self.0.iter().filter(|(it, _)| it.0 == resource).map(|(_, object)| object).collect()
    }

    pub(crate) fn get(&self, resource: &str, name: &str) -> Option<&Value> {
        self.of(resource).into_iter().find(|it| it["metadata"]["name"] == name)
    }
}

async fn answer(State(server): State<Server>, request: Request) -> Response {
    let resource = request.uri().path().split('/').nth(6).unwrap_or_default().to_owned();
    match server.swallows(&resource) {
        0 => answered(server, request).await,
        left => {
            server.swallow(&resource, left - 1);
            if left % 2 == 1 {
                answered(server, request).await;
            }
            std::future::pending().await
        }
    }
}

async fn answered(server: Server, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path: Vec<&str> = parts.uri.path().split('/').filter(|it| !it.is_empty()).collect();
    let rest = if path.first() == Some(&"api") { &path[2..] } else { &path[3..] };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] => (*namespace, rest),
        rest => ("", rest),
    };
    let query = parts.uri.query().unwrap_or_default();
    let resource = rest.first().copied().unwrap_or_default();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let applies = parts
        .headers
        .get("content-type")
        .is_some_and(|it| it.as_bytes().starts_with(b"application/apply-patch"));
    let verb = match parts.method {
        Method::POST => "create",
        Method::PATCH if rest.get(2) == Some(&"status") => "status",
        Method::PATCH if applies => "apply",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ if rest.len() > 1 => "get",
        _ => "list",
    };
    if let Some(refusal) = server.refusal(verb, resource, &body) {
        return refusal;
    }
    if resource == "tokenreviews" {
        return server.review(&body);
    }
    let Some(name) = rest.get(1) else {
        return match parts.method {
            Method::POST => server.create(resource, (namespace, query), &body),
            _ if query.contains("watch=") => server.watch(resource, query),
            _ => server.list(resource, query),
        };
    };
    let address = (resource.to_owned(), namespace.to_owned(), (*name).to_owned());
    match parts.method {
        Method::PATCH if applies && server.get(&address).status() == StatusCode::NOT_FOUND => {
            server.create(resource, (namespace, query), &body)
        }
        Method::PATCH => server.patch(address, &body, (rest.get(2).copied(), applies, query)),
        Method::DELETE => server.delete(&address, &body),
        _ => server.get(&address),
    }
}

impl Server {
    fn get(&self, address: &Address) -> Response {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.objects.get(address).map_or_else(|| refuse(404), reply)
    }

    /// The token of pod `x` is `token of x`, as long as the pod is there.
    fn review(&self, body: &Value) -> Response {
        let pod = body["spec"]["token"].as_str().unwrap_or_default().strip_prefix("token of ");
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let objects = Objects(&inner.objects, 0);
        let pod = pod.and_then(|it| objects.get("pods", it));
        let status = match pod.map(|it| &it["metadata"]) {
            Some(meta) => json!({
                "authenticated": true,
                "audiences": body["spec"]["audiences"],
                "user": {"username": "system:serviceaccount:n:default", "extra": {
                    "authentication.kubernetes.io/pod-name": [meta["name"]],
                    "authentication.kubernetes.io/pod-uid": [meta["uid"]],
                }},
            }),
            None => json!({"authenticated": false, "error": "invalid bearer token"}),
        };
        reply(&json!({"metadata": {}, "spec": body["spec"], "status": status}))
    }

    fn create(&self, resource: &str, (namespace, query): (&str, &str), body: &Value) -> Response {
        let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let address = (resource.to_owned(), namespace.to_owned(), name.clone());
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.objects.contains_key(&address) {
            return refuse(409);
        }
        if resource == "services" && name.starts_with(|it: char| it.is_ascii_digit()) {
            return refuse_with(
                422,
                "a Service's name begins with a letter, before Kubernetes 1.36",
            );
        }
        let there = Objects(&inner.objects, 0).of(resource).len();
        if let Some((_, code, words)) = inner.limits.get(resource).filter(|it| there >= it.0) {
            return refuse_with(*code, &words.replace("NAME", &name));
        }
        let object = made(resource, (namespace, &name), body);
        if query.contains("dryRun=All") {
            return reply(&object);
        }
        reply(&self.store(&mut inner, address, object))
    }

    fn patch(
        &self,
        address: Address,
        body: &Value,
        (part, applies, query): (Option<&str>, bool, &str),
    ) -> Response {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut object) = inner.objects.get(&address).cloned() else { return refuse(404) };
        if let Some(refusal) = other(&object, &body["metadata"]) {
            return refusal;
        }
        if let Err(refusal) = patched(&mut object, body, (&address.0, part, applies, query)) {
            return *refusal;
        }
        reply(&self.store(&mut inner, address, object))
    }

    fn delete(&self, address: &Address, body: &Value) -> Response {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(object) = inner.objects.get(address) else { return refuse(404) };
        if is_other(object, &body["preconditions"]) {
            return refuse(409);
        }
        self.remove(&mut inner, address);
        reply(&json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 200}))
    }

    fn list(&self, resource: &str, query: &str) -> Response {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let objects = Objects(&inner.objects, 0);
        let items: Vec<_> =
            objects.of(resource).into_iter().filter(|it| selected(it, query)).cloned().collect();
        let version = self.version.borrow().to_string();
        reply(&json!({"metadata": {"resourceVersion": version}, "items": items}))
    }

    fn watch(&self, resource: &str, query: &str) -> Response {
        let from = parameter(query, "resourceVersion").and_then(|it| it.parse().ok()).unwrap_or(0);
        let (server, resource, query) = (self.clone(), resource.to_owned(), query.to_owned());
        let changes = self.version.subscribe();
        let events = stream::unfold((from, changes), move |(from, mut changes)| {
            let (server, resource, query) = (server.clone(), resource.clone(), query.clone());
            async move {
                loop {
                    let next = {
                        let inner = server.inner.lock().unwrap_or_else(PoisonError::into_inner);
                        let fits = |it: &&(u64, String, &str, Value)| {
                            it.0 > from && it.1 == resource && shown(it.2, &it.3, &query).is_some()
                        };
                        inner.log.iter().find(fits).cloned()
                    };
                    if let Some((version, _, event, object)) = next {
                        let event = shown(event, &object, &query);
                        let line = format!("{}\n", json!({"type": event, "object": object}));
                        return Some((Ok::<_, Infallible>(line), (version, changes)));
                    }
                    changes.changed().await.ok()?;
                }
            }
        });
        Response::new(Body::from_stream(events))
    }
}
