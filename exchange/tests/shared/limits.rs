//! What a process may have and what it keeps: limits of files, peers that come and go, a machine that is silent.
//!
//! In: children. Out: by which path rows go then, what is left, and what is said.

use std::process::{Command, Stdio};
use std::time::Duration;

use cadre_exchange::{Buffer, Clock, Limits, PeerId, Pool, Provider as _, Sharing, TcpConfig};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::children::{Told, say};
use crate::common::{KEY, Node, config, connect, until};
use crate::pair::{OWNER, READER};

#[test]
#[ignore = "the child of other tests"]
fn a_child_whose_files_must_be_short() {
    let most = Some(1 << 20);
    setrlimit(Resource::Fsize, Rlimit { current: most, maximum: most }).expect("lower");
    let refused = Pool::shared(16 << 20).expect_err("an arena is a file");
    say(&refused.to_string());
    let mut node = Node::on(config(READER), Clock::system(), Sharing::Auto);
    let mut owner = Node::on(config(OWNER), Clock::system(), Sharing::Off);
    connect(&mut node, &mut owner);
    say(&format!("{:?}", node.tcp.path(OWNER)));
}

#[test]
fn a_limit_of_files_ends_no_process_and_its_rows_go_by_tcp() {
    let mut child = Told::start("limits::a_child_whose_files_must_be_short");
    assert_eq!(
        child.hear(),
        "files may have 1048576 bytes, and 16777216 are needed: raise the limit (ulimit -f)"
    );
    assert_eq!(child.hear(), "Tcp");
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_whose_addresses_are_few() {
    let most = Some(40 << 30);
    setrlimit(Resource::As, Rlimit { current: most, maximum: most }).expect("lower");
    let [mut owner, mut reader] =
        [OWNER, READER].map(|it| Node::on(config(it), Clock::system(), Sharing::Auto));
    // Each has arenas, as long as those of workers.
    let pools = [0, 1].map(|_| Pool::shared(32 << 30).expect("an arena"));
    for (node, pool) in [&mut owner, &mut reader].into_iter().zip(&pools) {
        node.tcp.publish(KEY, std::sync::Arc::new(pool.take(100_000)));
    }
    connect(&mut reader, &mut owner);
    connect(&mut owner, &mut reader);
    let both = [(READER, OWNER), (OWNER, READER)];
    let landings = [&mut reader, &mut owner].map(|it| it.tcp.land(Buffer::zeroed(100_000)));
    let whole = [(0, 0, 100_000)];
    // The first ones may find the arenas on their way.
    for _ in 0..1_000 {
        let pulls = [
            reader.pull(both[0].1, KEY, &whole, landings[0]),
            owner.pull(both[1].1, KEY, &whole, landings[1]),
        ];
        until(&mut [&mut reader, &mut owner], |it| {
            it[0].result(pulls[0]).is_some() && it[1].result(pulls[1]).is_some()
        });
        if [&reader, &owner].iter().all(|it| it.tcp.traffic().shared_bytes > 0) {
            return say("both by shared memory");
        }
    }
    say("not by shared memory");
}

#[test]
fn who_has_few_addresses_has_short_arenas_which_its_peers_can_map() {
    let mut child = Told::start("limits::a_child_whose_addresses_are_few");
    assert_eq!(child.hear(), "both by shared memory");
}

/// Descriptors, mappings of shared memory, and threads of this process.
fn held() -> [usize; 3] {
    let entries = |path| std::fs::read_dir(path).expect("it is ours").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("it is ours");
    let maps = maps.lines().filter(|it| it.contains("cadre-rows")).count();
    [entries("/proc/self/fd"), maps, entries("/proc/self/task")]
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_whom_many_peers_visit() {
    let peers = std::env::var("CADRE_PEERS").ok().and_then(|it| it.parse().ok()).unwrap_or(100);
    let mut still = Node::on(config(OWNER), Clock::system(), Sharing::Auto);
    let region = still.publish(KEY, 100_000, 1);
    let mut before = None;
    for index in 0..peers {
        let id = PeerId::server(index, 0);
        let mut peer = Node::on(config(id), Clock::system(), Sharing::Auto);
        let theirs = peer.publish(KEY, 100_000, 2);
        still.tcp.connect(id, &peer.tcp.address());
        peer.tcp.connect(OWNER, &still.tcp.address());
        // Each takes rows of the other from its memory.
        let landings = [&mut still, &mut peer].map(|it| it.tcp.land(Buffer::zeroed(100_000)));
        let whole = [(0, 0, 100_000)];
        let shared = |it: &Node| it.tcp.traffic().shared_bytes;
        let before_it = shared(&still);
        // The first ones may find the arenas on their way.
        while shared(&still) == before_it || shared(&peer) == 0 {
            let pulls = [
                still.pull(id, KEY, &whole, landings[0]),
                peer.pull(OWNER, KEY, &whole, landings[1]),
            ];
            until(&mut [&mut still, &mut peer], |it| {
                it[0].result(pulls[0]).is_some() && it[1].result(pulls[1]).is_some()
            });
        }
        let taken = still.tcp.take(landings[0]).expect("it ended");
        assert!(taken == *theirs && peer.tcp.take(landings[1]).expect("it ended") == *region);
        drop(peer);
        until(&mut [&mut still], |it| it[0].closed(id).is_some());
        still.events.clear();
        if index == 2 {
            before = Some(held());
        }
    }
    // Threads end a little after their door.
    let before = before.expect("more than 3 peers");
    until(&mut [&mut still], |_| held().iter().zip(before).all(|it| *it.0 <= it.1));
    say(&format!("{peers} peers, nothing is left"));
}

#[test]
fn peers_that_come_and_go_leave_no_descriptor_mapping_or_thread() {
    let mut child = Told::start("limits::a_child_whom_many_peers_visit");
    assert!(child.hear().ends_with("nothing is left"));
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_whose_network_is_cut() {
    let network = |state| Command::new("ip").args(["link", "set", "lo", state]).status();
    assert!(network("up").is_ok_and(|it| it.success()), "a namespace of its own");
    let config = |me| {
        let config = config(me);
        let limits = Limits { silence: Duration::from_secs(1), ..config.limits };
        TcpConfig { limits, ..config }
    };
    let mut owner = Node::on(config(OWNER), Clock::system(), Sharing::Off);
    let mut reader = Node::on(config(READER), Clock::system(), Sharing::Off);
    connect(&mut reader, &mut owner);
    assert!(network("down").is_ok_and(|it| it.success()), "a namespace of its own");
    // Neither has anything to say, and both learn it.
    until(&mut [&mut owner, &mut reader], |it| {
        it[0].closed(READER).is_some() && it[1].closed(OWNER).is_some()
    });
    say("closed");
}

#[test]
fn a_link_whose_machine_is_silent_is_closed_though_nobody_says_anything() {
    let apart = ["unshare", "--map-root-user", "--net"];
    let has = |words: &[&str]| {
        let done = Command::new(words[0]).args(&words[1..]).stdout(Stdio::null()).status();
        done.is_ok_and(|it| it.success())
    };
    if !has(&[&apart[..], &["ip", "link"]].concat()) {
        return println!("skipped: no network namespace can be made here");
    }
    let mut child = Told::start_by(&apart, "limits::a_child_whose_network_is_cut");
    assert_eq!(child.hear(), "closed");
}
