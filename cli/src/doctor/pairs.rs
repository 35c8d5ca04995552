//! Which path the rows of each pair of processes take.
//!
//! In: what workers are told, and what the machine has. Out: a line for each kind of pair. It is what `docs/exchange.md` says;
//! nothing is tried here.

use cadre_crds::Encryption;
use serde::Serialize;

use super::Asked;
use super::machine::{GPU, RDMA, SHARED};
use crate::choices::ExchangeChoice;

/// A kind of pairs of processes, and the path that rows take between them.
#[derive(Debug, Serialize)]
pub(super) struct Pair {
    pub(super) between: &'static str,
    pub(super) path: String,
}

/// See the module.
pub(super) fn pairs(asked: &Asked, has: impl Fn(&str) -> bool) -> Vec<Pair> {
    let exchange = of_both(asked.exchange);
    let alone = match asked.encryption {
        Some(Encryption::Tcp | Encryption::Required) => "tcp, encrypted",
        Some(Encryption::Off) | None => "tcp",
    };
    let cluster = match asked.encryption {
        Some(Encryption::Off) => "tcp",
        Some(Encryption::Tcp | Encryption::Required) | None => "tcp, encrypted",
    };
    // Where all has to be encrypted, no row crosses a network in the clear.
    let may_be_clear = asked.encryption != Some(Encryption::Required);
    let near = match exchange {
        ExchangeChoice::Auto | ExchangeChoice::Shm if has(SHARED) => "shared memory",
        ExchangeChoice::Auto | ExchangeChoice::Tcp => alone,
        ExchangeChoice::Node if has(GPU) => "copies of the GPU",
        ExchangeChoice::Ucx if has(RDMA) && may_be_clear => "UCX",
        ExchangeChoice::Shm | ExchangeChoice::Ucx | ExchangeChoice::Node => {
            "none: the job is refused here"
        }
    };
    let far = match exchange {
        ExchangeChoice::Auto | ExchangeChoice::Ucx if has(RDMA) && may_be_clear => "UCX",
        ExchangeChoice::Auto | ExchangeChoice::Tcp => cluster,
        ExchangeChoice::Ucx if may_be_clear => "none: the job is refused here",
        ExchangeChoice::Ucx => "none: refused where encryption is Required",
        ExchangeChoice::Shm | ExchangeChoice::Node => "none: refused in a pod",
    };
    let pair = |between, path: &str| Pair { between, path: path.to_owned() };
    vec![
        pair("processes of this machine (cadre run)", near),
        pair("pods, on one machine or on two", far),
        pair("gradients between trainers of this machine", alone),
        pair("gradients between pods", cluster),
    ]
}

/// A worker that says `auto` takes the path that the other one names.
fn of_both([trainers, servers]: [ExchangeChoice; 2]) -> ExchangeChoice {
    if trainers == ExchangeChoice::Auto { servers } else { trainers }
}
