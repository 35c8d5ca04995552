//! What the name of an object may be, for the API server and for runs without one.
//!
//! In and out: nothing is refused here; [`crate::validate`] and the API server do.

#[cfg(feature = "schema")]
use kube::core::Rule;

/// Longest name of an object: leaves room for the suffixes of pods and their attempts within 63.
pub const NAME_LENGTH: usize = 52;

/// Names leave room for the suffixes of pods and are labels of DNS, since hosts are named by them.
#[cfg(feature = "schema")]
pub(crate) fn name_rule() -> Rule {
    Rule::new(format!(
        "self.metadata.name.size() <= {NAME_LENGTH} && \
         self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')"
    ))
    .message(format!(
        "metadata.name is longer than {NAME_LENGTH} characters or holds a dot; use a–z, 0–9 and -, \
         with a letter or digit at both ends"
    ).as_str())
}
