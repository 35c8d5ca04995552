//! What else a machine can do: linear layers, the loopback, a call of the kernels.

use std::io::{Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use cadre_kernels::Threads;
use cadre_kernels::matmul::{Accumulate, Matrix, matmul};

/// Bytes that are sent through the loopback.
const LOOPBACK_BYTES: usize = 64 << 20;
const PINGS_A_RUN: u32 = 200;
const MEASURED_RUNS: usize = 5;

/// Operations a nanosecond of a product of 1024 by 1024 by 1024.
pub(super) fn linear(threads: Threads) -> u64 {
    const PRODUCT_SIDE: usize = 1_024;
    let (a, b) = (vec![1.0; PRODUCT_SIDE * PRODUCT_SIDE], vec![0.5; PRODUCT_SIDE * PRODUCT_SIDE]);
    let mut out = vec![0.0; PRODUCT_SIDE * PRODUCT_SIDE];
    let seconds = fastest(|| {
        let (a, b) = (
            Matrix::new(&a, PRODUCT_SIDE, PRODUCT_SIDE),
            Matrix::new(&b, PRODUCT_SIDE, PRODUCT_SIDE),
        );
        matmul(&mut out, a, b, Accumulate::Replace, threads);
        std::hint::black_box(&out);
    });
    ((2 * PRODUCT_SIDE * PRODUCT_SIDE * PRODUCT_SIDE) as f64 / seconds / 1e9).ceil() as u64
}

/// Nanoseconds of a call without work.
pub(super) fn call(threads: Threads) -> u64 {
    const CALLS_A_RUN: usize = 1_000;
    let seconds = fastest(|| {
        for _ in 0..CALLS_A_RUN {
            threads.run(threads.0.get(), |unit| {
                std::hint::black_box(unit);
            });
        }
    });
    (seconds * 1e9 / CALLS_A_RUN as f64) as u64
}

/// Bytes a microsecond from one thread to another, and nanoseconds one way of a message.
pub(super) fn loopback() -> Result<(u32, u64)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            let mut byte = [0];
            for _ in 0..PINGS_A_RUN {
                stream.read_exact(&mut byte)?;
                stream.write_all(&byte)?;
            }
            let mut buffer = vec![0; 1 << 20];
            for _ in 0..MEASURED_RUNS * LOOPBACK_BYTES / buffer.len() {
                stream.read_exact(&mut buffer)?;
            }
            stream.write_all(&byte)
        });
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let mut byte = [0];
        let start = Instant::now();
        for _ in 0..PINGS_A_RUN {
            stream.write_all(&byte)?;
            stream.read_exact(&mut byte)?;
        }
        let latency = start.elapsed().as_nanos() as u64 / u64::from(2 * PINGS_A_RUN);
        let buffer = vec![0; 1 << 20];
        let start = Instant::now();
        for _ in 0..MEASURED_RUNS * LOOPBACK_BYTES / buffer.len() {
            stream.write_all(&buffer)?;
        }
        stream.read_exact(&mut byte)?;
        let rate = (MEASURED_RUNS * LOOPBACK_BYTES) as f64 / start.elapsed().as_secs_f64() / 1e6;
        echo.join().expect("the echo does not panic")?;
        Ok(((rate as u32).max(1), latency))
    })
}

/// The fastest of several runs in seconds, after one that does not count.
fn fastest(mut run: impl FnMut()) -> f64 {
    run();
    let mut timed = || {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    (0..MEASURED_RUNS).map(|_| timed()).fold(f64::INFINITY, f64::min)
}
