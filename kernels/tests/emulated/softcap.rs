//! Softcap on the GPU: tasks and bundles with one, with another and with none in one call, against f64.
//!
//! In: whatever libcuda the process finds. Out: O, LSE, dQ, dK and dV, close to the reference; tanh on the GPU is right to
//! 2⁻¹¹, and so are scores. A softcap that bounds nothing is refused.

use cadre_kernels::device::{Error, ForwardPlan, Gpu, Refusal, Shape, Stream};
use cadre_kernels::reference;

use super::cases::{Case, HEADS, cases, close, wide};
use super::{backward_of, forward_of, host};

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn softcap() {
    let mut host = host();
    for heads in HEADS {
        let softcaps = [Some(2.0), None, Some(2.0), Some(0.5), Some(1e4)];
        let with = |(it, softcap)| Case { softcap, ..it };
        let cases: Vec<Case> = cases(heads).into_iter().zip(softcaps).map(with).collect();
        let outputs = forward_of(&mut host, &cases, 30).expect("good tasks");
        let gradients = backward_of(&mut host, &cases).expect("good bundles");
        for ((case, output), gradients) in cases.iter().zip(&outputs).zip(&gradients) {
            let right = case.with_document(reference::forward);
            close("O", &wide(&output.out), &right.out, 4e-3);
            close("LSE", &output.lse, &right.lse, if case.softcap.is_some() { 5e-4 } else { 1e-5 });
            let right = case.with_document(|it| reference::backward(it, &wide(&case.dout)));
            close("dQ", &gradients.dq, &right.dq, 5e-3);
            close("dK", &gradients.dk, &right.dk, 5e-3);
            close("dV", &gradients.dv, &right.dv, 5e-3);
        }
    }
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn refusals() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let stream = Stream::new(&gpu).expect("a stream");
    for softcap in [0.0, -2.0, f32::NAN, f32::INFINITY] {
        let shape = Shape { softcap: Some(softcap), ..Shape::new(HEADS[0], 0.1) };
        let refused = ForwardPlan::new(&stream, shape, &[]).unwrap_err();
        let softcap = softcap.to_string();
        assert_eq!(refused, Error::Refused(Refusal::Softcap { softcap }));
    }
}
