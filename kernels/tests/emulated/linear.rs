//! Linear layers on the GPU against those of the CPU.
//!
//! In: whatever libcuda and libcublasLt the process finds. Out: products and gradients of random rows, for every shape that
//! the kernels' tiles could get wrong: one row, one column, none that divides 4, more than a tile of each.

use std::ops::Range;

use cadre_kernels::device::Error;
use cadre_kernels::matmul::Accumulate;
use cadre_kernels::{Choice, Engine, Linear, LinearRows, Threads};

use super::cases::{Random, close, wide};

/// Rows, inner numbers, and outer numbers of two weights.
const SHAPES: [(usize, usize, [usize; 2]); 5] =
    [(1, 1, [1, 1]), (1, 64, [200, 3]), (130, 70, [33, 129]), (257, 64, [64, 16]), (31, 5, [2, 7])];

fn numbers(random: &mut Random, count: usize) -> Vec<f32> {
    wide(&random.numbers(count))
}

/// Everything that a step gives for one shape: y of both weights, y added, dx of one and of both, gradients.
fn step(linear: &mut Linear, shape: (usize, usize, [usize; 2]), again: bool) -> [Vec<f32>; 6] {
    let (rows, inner, outer) = shape;
    let random = &mut Random(inner as u64);
    // Something before and between the weights, so that they are not where the parameters begin.
    let first = 3..3 + outer[0] * inner;
    let second = first.end + 5..first.end + 5 + outer[1] * inner;
    let parameters = numbers(random, second.end);
    let x = numbers(random, rows * inner);
    let dys = outer.map(|outer| numbers(random, rows * outer));
    let mut gradients = numbers(random, second.end);
    let mut ys = outer.map(|outer| vec![f32::NAN; rows * outer]);
    let mut added = numbers(random, rows * outer[0]);
    let (mut one, mut both) = (vec![f32::NAN; rows * inner], vec![f32::NAN; rows * inner]);
    linear.begin(&parameters).expect("a step");
    let of = |numbers| LinearRows::new(numbers, rows);
    for _ in 0..if again { 2 } else { 1 } {
        let [a, b] = &mut ys;
        let mut outputs: [(&Range<usize>, &mut [f32]); 2] = [(&first, a), (&second, b)];
        linear.apply(&parameters, of(&x), &mut outputs, Accumulate::Replace).expect("a product");
    }
    let mut outputs: [(&Range<usize>, &mut [f32]); 1] = [(&first, &mut added)];
    linear.apply(&parameters, of(&x), &mut outputs, Accumulate::Add).expect("a product");
    linear.rows_gradient(&parameters, of(&dys[0]), &first, &mut one).expect("a product");
    linear.weight_gradient(&mut gradients, &dys[1], of(&x), &second).expect("a product");
    let inputs = [(&first, &dys[0][..]), (&second, &dys[1][..])];
    let all = (&parameters[..], &mut gradients[..]);
    linear.gradients(all, of(&x), &inputs, &mut both).expect("a product");
    linear.end(&mut gradients).expect("the end of a step");
    let [a, b] = ys;
    [a, b, added, one, both, gradients]
}

fn ranges((_, inner, outer): (usize, usize, [usize; 2])) -> [Range<usize>; 2] {
    let first = 3..3 + outer[0] * inner;
    [first.clone(), first.end + 5..first.end + 5 + outer[1] * inner]
}

fn engine() -> Engine {
    Engine::choose(Choice::Gpu, Threads::ONE).expect("the driver has a GPU")
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn products() {
    let engine = engine();
    for shape in SHAPES {
        let mut gpu = Linear::choose(Choice::Gpu, &engine, Threads::ONE, &ranges(shape))
            .expect("cuBLASLt is there");
        assert!(gpu.description().starts_with("GPU"), "{}", gpu.description());
        let right = step(&mut Linear::cpu(Threads::ONE), shape, false);
        let there = step(&mut gpu, shape, true);
        for (what, (there, right)) in ["y", "y of the second", "y added", "dx", "dx of both", "dw"]
            .iter()
            .zip(there.iter().zip(&right))
        {
            let right: Vec<f64> = right.iter().map(|&it| f64::from(it)).collect();
            close(&format!("{what} of {shape:?}"), there, &right, 1e-6);
        }
        // The second step of the same layers has forgotten the first one's gradients, and has its bits.
        let bits =
            |it: &[Vec<f32>; 6]| it.iter().flatten().map(|it| it.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&step(&mut gpu, shape, false)), bits(&there), "{shape:?}");
    }
}

#[test]
#[ignore = "breaks the emulated cuBLASLt"]
fn without_algorithm() {
    let range = 0..64;
    let mut gpu =
        Linear::choose(Choice::Gpu, &engine(), Threads::ONE, std::slice::from_ref(&range))
            .expect("cuBLASLt is there");
    gpu.begin(&[1.0; 64]).expect("a step");
    let (x, mut y) = ([1.0; 16], [0.0; 16]);
    let mut outputs: [(&Range<usize>, &mut [f32]); 1] = [(&range, &mut y)];
    let error = gpu
        .apply(&[1.0; 64], LinearRows::new(&x, 2), &mut outputs, Accumulate::Replace)
        .expect_err("no algorithm");
    assert_eq!(
        error.to_string(),
        "cublasLtMatmulAlgoGetHeuristic failed, a product of 2 × 8 × 8: CUBLAS_STATUS_NOT_SUPPORTED (15); run with \
         --engine cpu, and report the shapes"
    );
}

#[test]
#[ignore = "needs a driver without cuBLASLt"]
fn without_library() {
    let error = Linear::choose(Choice::Gpu, &engine(), Threads::ONE, &[]).expect_err("no library");
    assert_eq!(error, Error::NoBlas);
    assert!(error.to_string().contains("LD_LIBRARY_PATH"), "{error}");
    let cpu = Linear::choose(Choice::Auto, &engine(), Threads::ONE, &[]).expect("the CPU");
    assert!(
        cpu.description().starts_with("CPU: this machine has no cuBLASLt"),
        "{}",
        cpu.description()
    );
}
