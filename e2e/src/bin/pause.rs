//! Does nothing until it is asked to end: what holds a pod's network, and what stands in for a program
//! whose work does not matter to a test.

use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        ended = tokio::signal::ctrl_c() => ended,
    }
}
