//! Which engine is chosen, with a GPU and without one.
//!
//! In: whatever libcuda the process finds, or none. Out: what computes, and what it says of itself.

use cadre_kernels::device::{Error, Gpu};
use cadre_kernels::{Choice, Engine, Heads, Threads, WhichGpu, numerics_id, numerics_of_cpu};

const FIT: Heads = Heads { query: 2, kv: 1, dim: 64 };

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn with_gpu() {
    for choice in [Choice::Auto, Choice::Gpu] {
        let engine = Engine::choose(choice, Threads::ONE).expect("the driver has a GPU");
        assert!(engine.description().starts_with("GPU"), "{}", engine.description());
        assert!(engine.is_on_gpu(FIT, true));
        assert_ne!(engine.numerics_id(), numerics_id(), "the kernels' bits are named");
        assert_eq!(engine.numerics_id_of(true), engine.numerics_id());
        // Rows of f32 go to no GPU.
        assert_eq!(engine.numerics_id_of(false), numerics_id());
        assert_eq!(numerics_of_cpu(&engine.numerics_id()), numerics_id());
    }
}

#[test]
#[ignore = "needs three GPUs; the other tests run it over the emulated driver"]
fn of_three() {
    let choose = |which, choice| Engine::choose_on(which, choice, Threads::ONE);
    for choice in [Choice::Auto, Choice::Gpu] {
        let ordinal = |which| choose(which, choice).expect("a GPU").gpu().map(Gpu::ordinal);
        for turn in 0..7 {
            assert_eq!(ordinal(WhichGpu::Turn(turn)), Some(turn % 3));
        }
        assert_eq!(ordinal(WhichGpu::Number(2)), Some(2));
        assert_eq!(ordinal(WhichGpu::default()), Some(0));
        // A GPU that is named has no substitute, not even the CPU.
        let refused = choose(WhichGpu::Number(3), choice).expect_err("there are three");
        assert_eq!(refused, Error::NoDevice { ordinal: 3, count: 3 });
        let said = refused.to_string();
        assert!(said.contains("no GPU 3") && said.contains("name another one"), "{said}");
    }
    let said = choose(WhichGpu::Turn(4), Choice::Gpu).expect("a GPU").description();
    assert!(said.starts_with("GPU 1, emulated"), "{said}");
    assert!(choose(WhichGpu::Turn(1), Choice::Cpu).expect("the CPU").gpu().is_none());
    let refused = choose(WhichGpu::Number(1), Choice::Cpu).expect_err("it contradicts itself");
    assert!(refused.to_string().contains("leave out --gpu"), "{refused}");
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
