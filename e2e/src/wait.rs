//! Waiting for a condition, never for a time.
//!
//! In: a look that answers when the condition holds. Out: its answer, or an error that names what was
//! waited for and what the last look found. `CADRE_E2E_SECONDS=1` says what took a second or more. Looks at programs ask them
//! over HTTP.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Longest wait. Far above what is normal on a busy machine, so it never decides about a slow one.
const LONGEST: Duration = Duration::from_mins(2);
/// Pause between two polls.
const PAUSE: Duration = Duration::from_millis(50);

/// Polls until there is an answer. An error is remembered, and polling goes on: an API server that
/// starts refuses connections.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let began = Instant::now();
    let mut last = None;
    while began.elapsed() < LONGEST {
        match look().await {
            Ok(Some(found)) => {
                took(what, began);
                return Ok(found);
            }
            Ok(None) => last = None,
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(PAUSE).await;
    }
    let last = last.map(|it| format!("; the last look said: {it:#}")).unwrap_or_default();
    bail!("waited {} s for {what}{last}", LONGEST.as_secs())
}

/// Says how long something took, where that is asked for.
pub(crate) fn took(what: &str, began: Instant) {
    let seconds = began.elapsed().as_secs_f64();
    if seconds >= 1.0 && std::env::var_os("CADRE_E2E_SECONDS").is_some() {
        let thread = std::thread::current();
        let (who, what) = (thread.name().unwrap_or_default(), what.chars().take(150));
        println!("    {seconds:>6.1} s  {who:.20}: {}", what.collect::<String>());
    }
}

/// One request of HTTP. Out: the body of an answer 200.
pub(crate) fn get(port: u16, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).context("metrics and health")?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").context("a request")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("an answer")?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer of HTTP")?;
    if head.split(' ').nth(1) != Some("200") {
        bail!("{path}: {}", head.lines().next().unwrap_or_default());
    }
    Ok(body.to_owned())
}
