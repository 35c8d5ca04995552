//! Opens the ways that a process has beside its links, or says why one is missing.
//!
//! In: the owner's choice, the encryption, the devices of the machine. Out: ways, or the reason that reports give for rows that
//! come by TCP. It warns of network cards that are left unused.
//!
//! Invariant: a way that the owner demands is opened, or its absence is an error.

use super::Sharing;
use super::remote::Remote;
use super::sharing::Shared;
use crate::provider::Error;
use crate::tcp::{Encryption, Limits, Tcp};
use crate::ucx::{Transports, rdma_devices};
use crate::ucx_error::UcxError;

/// UCX, or why there is none.
pub(super) fn remote(
    tcp: &mut Tcp,
    sharing: Sharing,
    encryption: Encryption,
    limits: Limits,
) -> Result<Result<Remote, String>, UcxError> {
    match sharing {
        Sharing::Ucx(_) if encryption == Encryption::Required => Err(UcxError::InTheClear),
        Sharing::Ucx(over) => Remote::open(tcp, over, true, limits).map(Ok),
        Sharing::Auto => Ok(by_itself(&rdma_devices(), encryption, |over| {
            Remote::open(tcp, over, false, limits)
        })),
        Sharing::Off => Ok(Err("--exchange is tcp".to_owned())),
        Sharing::Required => Ok(Err("--exchange is shm".to_owned())),
    }
}

/// Shared memory, if there is any.
pub(super) fn shared(tcp: &Tcp, sharing: Sharing) -> Result<Option<Shared>, Error> {
    match sharing {
        Sharing::Off | Sharing::Ucx(_) => Ok(None),
        Sharing::Auto | Sharing::Required => match Shared::open(tcp, sharing) {
            Ok(it) => Ok(Some(it)),
            Err(source) if sharing == Sharing::Required => Err(Error::Shared { source }),
            Err(error) => {
                tracing::warn!(%error, "this machine gives no shared memory: rows of its own processes come by tcp");
                Ok(None)
            }
        },
    }
}

/// Decides about UCX where the owner left the choice to the process, on a machine with these devices.
fn by_itself<T>(
    devices: &[String],
    encryption: Encryption,
    open: impl FnOnce(Transports) -> Result<T, UcxError>,
) -> Result<T, String> {
    if devices.is_empty() {
        return Err("this machine has no device for RDMA".to_owned());
    }
    // RDMA does not encrypt, whatever the links do.
    let refused = match encryption {
        Encryption::Required => Err(UcxError::InTheClear),
        Encryption::Off | Encryption::Tcp => Ok(()),
    };
    refused.and_then(|()| open(Transports::Rdma)).map_err(|error| {
        let devices = devices.join(", ");
        tracing::warn!("rows between machines come by tcp, and not by RDMA ({devices}): {error}");
        error.to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_used_unless_all_is_to_be_encrypted_and_the_reason_is_kept() {
        let cards = ["mlx5_0".to_owned()];
        for encryption in [Encryption::Off, Encryption::Tcp, Encryption::Required] {
            let none = by_itself(&[], encryption, |_| -> Result<(), _> { panic!("no card") });
            assert_eq!(none.unwrap_err(), "this machine has no device for RDMA");
            let absent = UcxError::NoDevice { asked: "rc" };
            let why = by_itself::<()>(&cards, encryption, |_| Err(absent.clone())).unwrap_err();
            let opened = by_itself(&cards, encryption, Ok);
            if encryption == Encryption::Required {
                assert_eq!(why, UcxError::InTheClear.to_string());
                assert_eq!(opened, Err(why));
            } else {
                assert_eq!(why, absent.to_string());
                assert_eq!(opened, Ok(Transports::Rdma), "{encryption:?}");
            }
        }
    }
}
