//! What the exchange is measured beside: the same bytes by other means.
//!
//! In: bytes a unit. Out: MiB/s, or microseconds of a round trip.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cadre_exchange::Buffer;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};

use crate::{ARENA_BYTES, MESSAGE_BYTES, ROUND_TRIPS, SHARED, TOTAL_BYTES, mib_per_second, rows};

/// UCX's own benchmark of reads, in MiB/s; none where it is not installed.
pub(crate) fn perftest(unit_bytes: usize, transports: &str) -> Option<f64> {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).ok()?.port();
    let port = port.to_string();
    let start = |words: &[&str]| {
        let mut command = Command::new("ucx_perftest");
        command.args(["-p", &port]).args(words).env("UCX_TLS", transports);
        command.env("UCX_MM_ERROR_HANDLING", "y").stderr(Stdio::null());
        command
    };
    let mut server = start(&[]).stdout(Stdio::null()).spawn().ok()?;
    let (unit, units) = (unit_bytes.to_string(), (TOTAL_BYTES / unit_bytes).to_string());
    let gets = ["127.0.0.1", "-t", "ucp_get", "-s", &unit, "-n", &units, "-e", "-f"];
    // The server listens a moment after it was started.
    let said = (0..50).find_map(|_| {
        let done = start(&gets).output().ok().filter(|it| it.status.success());
        if done.is_none() {
            thread::sleep(Duration::from_millis(20));
        }
        done
    });
    let _ = server.kill();
    let _ = server.wait();
    // Iterations, three latencies, average and overall rate.
    let text = String::from_utf8(said?.stdout).ok()?;
    text.lines().rev().find_map(|it| it.split_whitespace().nth(5)?.parse().ok())
}

/// The same by copies alone, from an arena to memory of our own.
pub(crate) fn pump(unit_bytes: usize) -> f64 {
    let rows = rows(SHARED.1);
    let mut landing = Buffer::from(vec![0.0; ARENA_BYTES / 4]);
    let begin = Instant::now();
    for _ in 0..TOTAL_BYTES / ARENA_BYTES {
        let units = rows.bytes().chunks(unit_bytes);
        for (to, from) in landing.bytes_mut().chunks_mut(unit_bytes).zip(units) {
            to.copy_from_slice(from);
        }
        black_box(&mut landing);
    }
    mib_per_second(begin)
}

/// The same over raw sockets.
pub(crate) fn raw_stream(unit_bytes: usize) -> f64 {
    let (writer, reader) = raw_pair();
    stream(writer, reader, unit_bytes)
}

/// The same over rustls on raw sockets.
pub(crate) fn tls_stream(unit_bytes: usize) -> f64 {
    let (writer, reader) = raw_pair();
    let name = "localhost".to_owned();
    let made = rcgen::generate_simple_self_signed([name.clone()]).expect("a certificate");
    let crypto = Arc::new(CryptoProvider {
        cipher_suites: vec![TLS13_AES_128_GCM_SHA256],
        ..rustls::crypto::ring::default_provider()
    });
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("our own");
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()).into();
    let server = ServerConfig::builder_with_provider(Arc::clone(&crypto))
        .with_safe_default_protocol_versions()
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .expect("they fit");
    let client = ClientConfig::builder_with_provider(crypto)
        .with_safe_default_protocol_versions()
        .expect("TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(name).expect("a name");
    let client = ClientConnection::new(Arc::new(client), name).expect("they fit");
    let server = ServerConnection::new(Arc::new(server)).expect("they fit");
    stream(StreamOwned::new(client, writer), StreamOwned::new(server, reader), unit_bytes)
}

/// A blocking writer and a blocking reader move the total; MiB/s as the reader sees it.
fn stream(
    mut writer: impl Write + Send + 'static,
    mut reader: impl Read,
    unit_bytes: usize,
) -> f64 {
    let source = vec![1_u8; ARENA_BYTES];
    let mut target = vec![1_u8; ARENA_BYTES];
    let writing = thread::spawn(move || {
        for _ in 0..TOTAL_BYTES / ARENA_BYTES {
            for unit in source.chunks(unit_bytes) {
                writer.write_all(unit).expect("the reader reads");
            }
        }
        writer.flush().expect("the reader reads");
        // It stays open while the reader reads: closed before it took what the other end sent, such as a ticket of TLS, it would
        // reset the link.
        writer
    });
    let begin = Instant::now();
    for _ in 0..TOTAL_BYTES / ARENA_BYTES {
        for unit in target.chunks_mut(unit_bytes) {
            reader.read_exact(unit).expect("the writer writes");
        }
    }
    let rate = mib_per_second(begin);
    drop(writing.join().expect("the writer has written all"));
    rate
}

/// Microseconds of a blocking ping-pong.
pub(crate) fn raw_ping_pong() -> f64 {
    let (mut one, mut two) = raw_pair();
    let echo = thread::spawn(move || {
        let mut bytes = [0; MESSAGE_BYTES];
        for _ in 0..ROUND_TRIPS {
            two.read_exact(&mut bytes).expect("it is rung");
            two.write_all(&bytes).expect("it is heard");
        }
    });
    let mut bytes = [0; MESSAGE_BYTES];
    let begin = Instant::now();
    for _ in 0..ROUND_TRIPS {
        one.write_all(&bytes).expect("it is heard");
        one.read_exact(&mut bytes).expect("it is echoed");
    }
    let time = begin.elapsed();
    echo.join().expect("it echoes");
    time.as_secs_f64() * 1e6 / f64::from(ROUND_TRIPS)
}

fn raw_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
    let one = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (two, _) = listener.accept().expect("just connected");
    for stream in [&one, &two] {
        stream.set_nodelay(true).expect("a socket of ours");
    }
    (one, two)
}
