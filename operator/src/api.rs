//! How the API server is reached, and how long a silent connection is believed.
//!
//! In: where it is, and who asks. Out: a client none of whose calls waits for ever. A connection whose other end has died
//! without a word (its machine lost power, a firewall forgot it) brings nothing any more, and nobody says so: a call waits
//! for its answer, a watch for news, and a status for both.
//!
//! Invariant: a watch that lives ends by itself, in time to be silent for no longer than a connection may be.

use std::time::Duration;

use kube::{Client, Config};

/// How long a watch is asked to last. The client adds 5 s, and then takes it for dead.
pub(crate) const WATCH_SECONDS: u32 = 30;
/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest silence of a connection on which something is waited for. Webhooks of a call may take 30 s.
const SILENCE: Duration = Duration::from_secs(45);

/// A client with connections of its own.
pub(crate) fn client(config: Config) -> kube::Result<Client> {
    believing(config, SILENCE)
}

fn believing(mut config: Config, silence: Duration) -> kube::Result<Client> {
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(silence);
    // A connection may have rested before the call.
    config.reset_reader_on_write = true;
    Client::try_from(config)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::StreamExt as _;
    use k8s_openapi::api::core::v1::Pod;
    use kube::Api;
    use kube::runtime::{WatchStreamExt as _, watcher};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::watch;

    use super::*;

    /// An API server on a machine that dies as soon as a watch has begun, or any other call but the list.
    async fn dying(mut stream: TcpStream, watches: watch::Sender<usize>) -> std::io::Result<()> {
        let list =
            r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}"#;
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await?);
            }
            let head = String::from_utf8_lossy(&head);
            let line = head.lines().next().unwrap_or_default();
            if line.contains("watch=") {
                stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await?;
                watches.send_modify(|it| *it += 1);
                return std::future::pending().await;
            } else if line.contains("/pods?") {
                let length = list.len();
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{list}");
                stream.write_all(answer.as_bytes()).await?;
            } else {
                return std::future::pending().await;
            }
        }
    }

    #[tokio::test]
    async fn neither_a_call_nor_a_watch_waits_for_a_server_that_died_without_a_word() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (watches, mut begun) = watch::channel(0);
        let connections = Arc::new(AtomicUsize::new(0));
        let accepted = connections.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                accepted.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(dying(stream, watches.clone()));
            }
        });
        let config = Config::new(format!("http://{address}").parse().expect("an address"));
        let client = believing(config, Duration::from_millis(300)).expect("a client");
        let pods = Api::<Pod>::namespaced(client, "n");
        let error = pods.get("p").await.expect_err("nobody answers");
        assert!(matches!(error, kube::Error::Service(_) | kube::Error::HyperError(_)), "{error:?}");

        let config = watcher::Config::default().timeout(WATCH_SECONDS);
        let mut events = std::pin::pin!(watcher(pods, config).default_backoff());
        let again = async { begun.wait_for(|it| *it == 2).await.map(drop) };
        tokio::select! {
            again = again => again.expect("the server lives"),
            () = async { while events.next().await.is_some() {} } => panic!("a watch never ends"),
        }
        let connections = connections.load(Ordering::Relaxed);
        assert!(connections >= 3, "one that is dead is not used again: {connections}");
    }

    #[test]
    fn a_watch_ends_before_its_silence_is_taken_for_a_death() {
        let margin = Duration::from_secs(5);
        assert!(Duration::from_secs(WATCH_SECONDS.into()) + margin < SILENCE);
    }
}
