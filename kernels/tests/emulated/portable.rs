//! The portable kernels: which GPU runs them, their id, and head dims that those for Hopper do not take.
//!
//! In: whatever libcuda the process finds, whose GPU runs the portable kernels; `CADRE_TEST_KERNELS`, what an engine says of them.
//! Out: results against f64, bits over cuts; ids that name compute capability; refusals with a remedy.

use cadre_kernels::device::{Family, Gpu, Stream};
use cadre_kernels::{Choice, Engine, Heads, Threads, numerics_of_cpu, reference};

use super::cases::{cases, close, wide};
use super::{backward_of, bits, forward_of, host};

/// What the test that runs this one says.
fn wanted() -> String {
    std::env::var("CADRE_TEST_KERNELS").expect("the outer test sets it")
}

#[test]
#[ignore = "needs a GPU that runs the portable kernels; the other tests run it over the emulated one"]
fn engine() {
    let engine = Engine::choose(Choice::Gpu, Threads::ONE).expect("the driver has a GPU");
    let gpu = engine.gpu().expect("it was demanded");
    let (major, minor) = gpu.capability();
    assert_eq!(gpu.family(), Family::Portable);
    let said = engine.description();
    assert!(said.contains(&wanted()), "{said}");
    let id = engine.numerics_id();
    assert!(id.contains(&format!("gpu sm_{major}{minor} portable ")), "{id}");
    assert_eq!(numerics_of_cpu(&id), cadre_kernels::numerics_id());
    for dim in [8, 64, 80, 96, 112, 128, 256] {
        let heads = Heads { query: 2, kv: 1, dim };
        assert!(engine.is_on_gpu(heads, true), "{dim}");
        // A calibration of these kernels is none of others on the same GPU.
        let of = engine.processor(heads, true);
        assert!(of.starts_with("gpu-") && of.ends_with("-portable"), "{of}");
    }
    assert!(!engine.is_on_gpu(Heads { query: 2, kv: 1, dim: 264 }, true));
    Stream::new(gpu).expect("a stream");
}

#[test]
#[ignore = "needs a GPU that does not run what is asked for"]
fn refused_for_any_engine() {
    let said = match Engine::choose(Choice::Auto, Threads::ONE) {
        Err(error) => error.to_string(),
        Ok(engine) => panic!("it computes by {}", engine.description()),
    };
    assert!(said.contains(&wanted()), "{said}");
}

#[test]
#[ignore = "needs a GPU that does not run what is asked for"]
fn refused() {
    let said = match Gpu::open(0) {
        Err(error) => error.to_string(),
        Ok(gpu) => panic!("it runs the {}", gpu.kernels()),
    };
    assert!(said.contains(&wanted()), "{said}");
}

#[test]
#[ignore = "needs a GPU that runs the portable kernels; the other tests run it over the emulated one"]
fn other_head_dims() {
    let mut host = host();
    assert_eq!(host.stream().gpu().family(), Family::Portable);
    for dim in [24, 80] {
        let cases = cases(Heads { query: 2, kv: 1, dim });
        let outputs = forward_of(&mut host, &cases, 0).expect("good tasks");
        let cut = forward_of(&mut host, &cases, 37).expect("good tasks");
        let gradients = backward_of(&mut host, &cases).expect("good bundles");
        for (index, case) in cases.iter().enumerate() {
            let right = case.with_document(reference::forward);
            close("O", &wide(&outputs[index].out), &right.out, 4e-3);
            close("LSE", &outputs[index].lse, &right.lse, 1e-5);
            assert_eq!(bits(&cut[index].out), bits(&outputs[index].out), "dim {dim}, case {index}");
            let right = case.with_document(|it| reference::backward(it, &wide(&case.dout)));
            close("dQ", &gradients[index].dq, &right.dq, 4e-3);
            close("dK", &gradients[index].dk, &right.dk, 4e-3);
            close("dV", &gradients[index].dv, &right.dv, 4e-3);
        }
    }
}
