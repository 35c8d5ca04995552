//! A new template: what is kept of the former one, and what a server is made from that is lost meanwhile.

use serde_json::{Value, json};

use super::server::{Objects, Server};
use super::{name, operator, pool, reason, running};

fn template(image: &str) -> Value {
    json!({"spec": {"template": {"spec": {"containers": [{"name": "server", "image": image}]}}}})
}

/// Images of all servers, in order.
fn images(all: &Objects<'_>) -> Vec<String> {
    let image = |it: &Value| it["spec"]["containers"][0]["image"].as_str().unwrap_or("").to_owned();
    let mut images: Vec<_> = all.of("pods").into_iter().map(image).collect();
    images.sort_unstable();
    images
}

/// What kubelets do, until all servers are of an image and the pool says that it has all that it asks for.
async fn until_all_are_of(server: &Server, image: &str, servers: usize) {
    loop {
        let next = server
            .until("a server that starts, or the end", |all| {
                let starts = |it: &&Value| it["status"].is_null();
                if let Some(pod) = all.of("pods").into_iter().find(starts) {
                    return Some(Some(name(pod)));
                }
                let whole = reason(all.get("attentionpools", "p")?, "Ready") == "Ready";
                (whole && images(all) == vec![image.to_owned(); servers]).then_some(None)
            })
            .await;
        let Some(pod) = next else { return };
        server.put("pods", &pod, &running());
    }
}

#[tokio::test]
async fn a_server_that_is_lost_in_a_rollout_comes_back_with_the_template_that_it_had() {
    let server = Server::new();
    let _context = operator(&server).await;
    let mut three = pool(3);
    three["spec"]["template"] = template("a")["spec"]["template"].clone();
    server.put("attentionpools", "p", &three);
    until_all_are_of(&server, "a", 3).await;
    let revisions = |status: &Value| {
        let name = |field: &str| status[field].as_str().unwrap_or_default().to_owned();
        (name("currentRevision"), name("updateRevision"), status["updatedReplicas"].as_u64())
    };
    let first = server
        .until("the only revision", |all| {
            let (current, update, updated) = revisions(&all.get("attentionpools", "p")?["status"]);
            let [kept] = all.of("controllerrevisions")[..] else { return None };
            assert_eq!(kept["metadata"]["ownerReferences"][0]["name"], "p");
            (current == name(kept) && current == update && updated == Some(3)).then_some(current)
        })
        .await;

    server.put("attentionpools", "p", &template("b"));
    // The server of the new template never becomes ready.
    let lost = server
        .until("one server of the new template", |all| {
            let one = images(all) == ["a", "a", "b"];
            let a = |it: &&Value| it["spec"]["containers"][0]["image"] == "a";
            all.of("pods").into_iter().find(a).filter(|_| one).map(name)
        })
        .await;
    server.remove_object("pods", &lost);
    let successor = server
        .until("a successor", |all| {
            let starts =
                |it: &&Value| it["status"].is_null() && it["spec"]["containers"][0]["image"] == "a";
            let found = all.of("pods").into_iter().find(starts).map(name);
            found.filter(|_| images(all) == ["a", "a", "b"])
        })
        .await;
    server
        .until("both revisions", |all| {
            let (current, update, updated) = revisions(&all.get("attentionpools", "p")?["status"]);
            let kept: Vec<_> = all.of("controllerrevisions").into_iter().map(name).collect();
            let told = current == first && update != first && updated == Some(1);
            (told && kept.len() == 2 && kept.contains(&update)).then_some(())
        })
        .await;
    server.put("pods", &successor, &running());
    until_all_are_of(&server, "b", 3).await;
    server
        .until("the new revision alone", |all| {
            let (current, update, updated) = revisions(&all.get("attentionpools", "p")?["status"]);
            let kept: Vec<_> = all.of("controllerrevisions").into_iter().map(name).collect();
            (kept == [update.clone()] && current == update && updated == Some(3)).then_some(())
        })
        .await;
}
