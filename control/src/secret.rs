//! The secret of a job: 32 bytes that prove to peers of the data plane that a worker belongs to it.
//!
//! In: the system's randomness. Out: the bytes, made once per job by its controller or, in pods, by trainer 0.
//! Who gets them is not decided here.

/// 32 bytes that nobody can guess.
///
/// # Errors
///
/// The system has no source of randomness.
pub fn job_secret() -> std::io::Result<[u8; 32]> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret)?;
    Ok(secret)
}
