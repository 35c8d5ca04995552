//! Which namespaces have the certificate of the control service's issuer.
//!
//! In: what [`crate::control::issuer`] has written. Out: whether it is to be written again. Nothing is read or written here.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time after which the `ConfigMap` is written again, even if it seems to be there.
const AGAIN: Duration = Duration::from_mins(10);

/// The issuer's certificate, and when it was written to which namespace.
#[derive(Debug, Default)]
pub(crate) struct Issuer {
    /// Folder of the certificates; none: there is no control service.
    pub(crate) folder: Option<PathBuf>,
    written: Mutex<BTreeMap<String, (Instant, String)>>,
}

impl Issuer {
    /// Of this folder; nothing is written yet.
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, written: Mutex::default() }
    }

    /// Whether the namespace has this certificate.
    pub(crate) fn is_written(&self, namespace: &str, certificate: &str) -> bool {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.get(namespace).is_some_and(|(at, it)| at.elapsed() < AGAIN && it == certificate)
    }

    /// The namespace has this certificate from now on.
    pub(crate) fn wrote(&self, namespace: String, certificate: String) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.insert(namespace, (Instant::now(), certificate));
    }
}
