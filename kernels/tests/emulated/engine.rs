//! Which engine is chosen, with a GPU and without one.
//!
//! In: whatever libcuda the process finds, or none. Out: what computes, and what it says of itself.

use cadre_kernels::{Choice, Engine, Heads, Threads, numerics_id};

const FIT: Heads = Heads { query: 2, kv: 1, dim: 64 };

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn with_gpu() {
    for choice in [Choice::Auto, Choice::Gpu] {
        let engine = Engine::choose(choice, Threads::ONE).expect("the driver has a GPU");
        assert!(engine.description().starts_with("GPU"), "{}", engine.description());
        assert!(engine.is_on_gpu(FIT, true));
        assert_ne!(engine.numerics_id(), numerics_id(), "the kernels' bits are named");
    }
}

#[test]
#[ignore = "needs a machine whose GPU is hidden"]
fn without_gpu() {
    let why = match Engine::choose(Choice::Gpu, Threads::ONE) {
        Err(why) => why.to_string(),
        Ok(engine) => panic!("there is no GPU to take, but this is one: {}", engine.description()),
    };
    let engine = Engine::choose(Choice::Auto, Threads::ONE).expect("the CPU is always there");
    let said = engine.description();
    assert!(said.starts_with("CPU") && said.contains(&why), "{said} says why: {why}");
    assert!(!engine.is_on_gpu(FIT, true));
    assert_eq!(engine.numerics_id(), numerics_id());
}
