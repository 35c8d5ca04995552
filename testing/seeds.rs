//! First seeds of tests that draw their cases: half of them known, half made from the commit's tree.
//!
//! In: `CADRE_SEED`, which names the first seed and leaves the others out, and `CADRE_TREE_SEED`, the id of
//! the commit's tree, which `scripts/test` sets. Out: numbers, printed, so that a failure can be repeated.
//! So every commit tries cases that nobody has tuned for, and the same commit always the same.
//!
//! Not a crate: a test takes it with `#[path]`, as `exchange/protocol/tests/simulation` does.

/// First seeds of the test `name` and the shares of its cases, which sum to `cases`: half from `known` on,
/// half from a number made of the tree and the name. Prints them.
pub(crate) fn first_seeds(name: &str, known: u64, cases: u64) -> Vec<(u64, u64)> {
    let asked = std::env::var("CADRE_SEED").ok().and_then(|it| it.parse().ok());
    if let Some(seed) = asked {
        println!("{name}: from seed {seed}, as CADRE_SEED says");
        return vec![(seed, cases)];
    }
    let tree = std::env::var("CADRE_TREE_SEED").ok().filter(|it| !it.is_empty());
    let from = tree.as_deref().unwrap_or("no tree");
    let fresh = made_from(from, name);
    println!("{name}: from seeds {known} and {fresh}, made of CADRE_TREE_SEED ({from})");
    vec![(known, cases - cases / 2), (fresh, cases / 2)]
}

/// FNV-1a of both, without the bits that make a number long.
fn made_from(tree: &str, name: &str) -> u64 {
    let bytes = tree.bytes().chain([0]).chain(name.bytes());
    let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.fold(0xcbf2_9ce4_8422_2325, hash) >> 16
}
