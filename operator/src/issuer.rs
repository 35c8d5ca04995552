//! Which namespaces have the certificate of the control service's issuer.
//!
//! In: what [`crate::control::issuer`] has written, for which object. Out: whether it is to be written again. An object with
//! another uid may stand in another namespace of the same name. Nothing is read or written here.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time after which the `ConfigMap` is written again, even if it seems to be there.
const AGAIN: Duration = Duration::from_mins(10);

/// A namespace and an object there.
pub(crate) type Place = (String, String);

/// The issuer's certificate, and when it was written to which namespace.
#[derive(Debug)]
pub(crate) struct Issuer {
    /// Folder of the certificates; none: there is no control service.
    pub(crate) folder: Option<PathBuf>,
    /// Time after which the `ConfigMap` is written again, even if it seems to be there.
    pub(crate) again: Duration,
    /// By namespace and uid of the object that it was written for.
    written: Mutex<BTreeMap<Place, (Instant, String)>>,
}

impl Default for Issuer {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Issuer {
    /// Of this folder; nothing is written yet.
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, again: AGAIN, written: Mutex::default() }
    }

    /// How long the place does without another write, if it has this certificate.
    pub(crate) fn lasts(&self, place: &Place, certificate: &str) -> Option<Duration> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, _) = written.get(place).filter(|it| it.1 == certificate)?;
        Some(self.again.saturating_sub(at.elapsed())).filter(|it| !it.is_zero())
    }

    /// The place has this certificate from now on. Out: for how long.
    pub(crate) fn wrote(&self, place: Place, certificate: String) -> Duration {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|_, (at, _)| at.elapsed() < self.again);
        written.insert(place, (Instant::now(), certificate));
        self.again
    }
}
