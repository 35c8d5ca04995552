//! The chart adds pools and jobs to Kubernetes' own roles: who may edit a namespace makes, scales and deletes them there and
//! writes no status, who may view it looks at them, and nobody does anything elsewhere.

use anyhow::{Result, bail, ensure};
use cadre_e2e::{Cluster, helm, until};

use crate::objects::{job, pool};

const HERE: &str = "of-a-team";
const ELSEWHERE: &str = "of-another-team";
const ROLES: &str = "templates/roles.yaml";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.definitions()?;
    cluster.namespace(HERE).await?;
    cluster.namespace(ELSEWHERE).await?;
    let roles = helm::template(cluster, &["--show-only", ROLES])?;
    cluster.kubectl_with(&["apply", "--validate=strict"], &roles)?;
    for role in ["admin", "edit", "view"] {
        let (of, user) = (format!("--clusterrole={role}"), format!("--user={role}"));
        cluster.kubectl(&["create", "rolebinding", role, &of, &user, "--namespace", HERE])?;
    }
    // A controller of Kubernetes adds them some time after.
    for (user, verb) in [("admin", "create"), ("edit", "create"), ("view", "get")] {
        until(&format!("the role {user}"), async || {
            let user = format!("--as={user}");
            let may = ["auth", "can-i", verb, "trainingjobs.cadre.dev", "-n", HERE, &user];
            Ok(cluster.kubectl(&may).is_ok().then_some(()))
        })
        .await?;
    }

    for user in ["--as=admin", "--as=edit"] {
        let here = |words: &str| {
            let words: Vec<_> = words.split(' ').collect();
            cluster.kubectl(&[&words[..], &["--namespace", HERE, user]].concat())
        };
        let make = ["apply", "--server-side", user, "--namespace"];
        for object in [pool(2), job("")] {
            cluster.kubectl_with(&[&make[..], &[HERE]].concat(), &object)?;
            refused(cluster.kubectl_with(&[&make[..], &[ELSEWHERE]].concat(), &object))?;
        }
        here("scale attnpool/p --replicas=3")?;
        let replicas = here("get attnpool p -o jsonpath={.spec.replicas}")?;
        ensure!(replicas == "3", "{replicas} replicas");
        let status = "patch attnpool p --subresource=status --type=merge -p";
        refused(here(&format!("{status} {{\"status\":{{\"ready\":9}}}}")))?;
        here("delete attnpool/p cadjob/j --timeout=30s")?;
    }
    cluster.kubectl(&["get", "cadre", "--namespace", HERE, "--as=view"])?;
    refused(cluster.kubectl_with(&["create", "--namespace", HERE, "--as=view"], &pool(1)))?;
    refused(cluster.kubectl(&["get", "cadre", "--namespace", ELSEWHERE, "--as=view"]))?;
    refused(cluster.kubectl(&["get", "cadre", "--namespace", HERE, "--as=somebody"]))?;
    cluster.kubectl_with(&["delete"], &roles).map(drop)
}

fn refused(done: Result<String>) -> Result<()> {
    match done {
        Ok(said) => bail!("the API server does it: {said}"),
        Err(error) => {
            let said = format!("{error:#}");
            ensure!(said.contains("Forbidden") || said.contains("forbidden"), "{said}");
            Ok(())
        }
    }
}
