//! The process that publishes: it does what the reader rings.
//!
//! In: `hello ADDRESS`, `change`, `withdraw`, `die`. Out: `ok` after each, on a link back to the reader.

use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{Event, Node, NodeConfig, Provider as _};
use cadre_kernels::device::{Arena, ArenaMemory, Gpu, Stream};
use cadre_worker::gpu_memory::GpuMemory;

use super::{BYTES, KEY, OWNER, READER, links, pattern, sockets};

fn fill(memory: &mut ArenaMemory, stream: &Stream, version: u8) {
    let bytes: Vec<u8> = (0..BYTES).map(|at| pattern(at, version)).collect();
    memory.write(stream, &bytes).expect("a copy");
    stream.wait().expect("rows are there before they are published");
}

#[test]
#[ignore = "is one of two processes that the other test starts"]
fn publishes() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let stream = Stream::new(&gpu).expect("a stream");
    let arena = Arena::new(&gpu, 1 << 20).expect("memory");
    // The rows do not begin where the arena does.
    let _before = arena.take(1000).expect("room");
    let mut memory = arena.take(BYTES).expect("room");
    let mut version = 1;
    fill(&mut memory, &stream, version);
    let config = NodeConfig { tcp: links(OWNER), sockets: sockets() };
    let device = GpuMemory::new(&gpu).expect("a stream");
    let mut node = Node::open(config, device).expect("loopback and a folder are there");
    node.publish(KEY, Arc::new(memory));
    let written = sockets().join("address.new");
    std::fs::write(&written, node.address()).expect("the test's own folder");
    std::fs::rename(&written, sockets().join("address")).expect("the test's own folder");
    let mut events = Vec::new();
    loop {
        node.poll(Duration::from_secs(1), &mut events);
        for event in events.drain(..) {
            let Event::Message { bytes, .. } = event else { continue };
            let message = String::from_utf8(bytes).expect("the reader says words");
            match message.split_once(' ') {
                Some(("hello", address)) => node.connect(READER, address),
                _ if message == "die" => std::process::abort(),
                _ => {
                    let memory = node.withdraw(KEY).expect("it was published");
                    let mut memory = Arc::into_inner(memory).expect("nobody else holds it");
                    version += 1;
                    // Over the rows that a reader may be copying.
                    fill(&mut memory, &stream, version);
                    if message == "change" {
                        node.publish(KEY, Arc::new(memory));
                    }
                }
            }
            node.ring(READER, b"ok").expect("the link back");
        }
    }
}
