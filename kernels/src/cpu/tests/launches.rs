//! What a launch holds beside a task or bundle, and the type of its rows, do not show.

use half::bf16;

use super::{Case, SCALE, whole};
use crate::cpu::backward;
use crate::cpu::engine::Engine;
use crate::{
    Backward, BackwardRows, Forward, Heads, Mask, Rows, RowsMut, Threads, key_tiles, wire,
};

#[test]
fn other_tasks_of_a_launch_do_not_show() {
    let heads = Heads { query: 2, kv: 1, dim: 16 };
    let cases: Vec<Case> =
        [300, 5, 129].map(|rows| Case::new(heads, Mask::Causal, rows, rows.into())).into();
    let mut together: Vec<(Vec<f32>, Vec<f32>)> =
        cases.iter().map(|it| (vec![0.0; it.q.len()], vec![0.0; it.q.len() / 16])).collect();
    let mut tasks: Vec<Forward<'_>> =
        cases.iter().zip(&mut together).map(|(case, (out, lse))| task(case, out, lse)).collect();
    crate::forward(&mut tasks, Threads::new(2)).unwrap();
    for (case, (out, lse)) in cases.iter().zip(&together) {
        let (alone, alone_lse, _) = case.compute(&whole());
        assert_eq!((out, lse), (&alone, &alone_lse));
    }
}

#[test]
fn other_bundles_of_a_launch_do_not_show() {
    let heads = Heads { query: 2, kv: 2, dim: 16 };
    let cases: Vec<Case> =
        [300, 5, 700, 129].map(|rows| Case::new(heads, Mask::Causal, rows, rows.into())).into();
    let alone: Vec<_> = cases.iter().map(|case| case.compute(&whole())).collect();
    for space in [0, 1 << 16, backward::SPACE] {
        let deltas: Vec<_> =
            cases.iter().zip(&alone).map(|(it, (out, ..))| it.delta(out)).collect();
        let empty = || cases.iter().map(|it| vec![f32::NAN; it.q.len()]).collect::<Vec<_>>();
        let (mut dq, mut dk, mut dv) = (empty(), empty(), empty());
        let gradients = dq.iter_mut().zip(&mut dk).zip(&mut dv);
        let mut bundles: Vec<Backward<'_>> = Vec::new();
        for (index, ((dq, dk), dv)) in gradients.enumerate() {
            let case = &cases[index];
            let rows = [&case.q, &case.k, &case.v, &case.dout].map(|it| Rows::F32(it));
            bundles.push(bundle(case, rows, (&alone[index].1, &deltas[index]), [dq, dk, dv]));
        }
        backward::run(Engine::best(), &mut bundles, Threads::new(2), space);
        for (index, (.., expected)) in alone.iter().enumerate() {
            assert_eq!(
                [&dq[index], &dk[index], &dv[index]],
                expected.each_ref(),
                "{index} {space}"
            );
        }
    }
}

#[test]
fn bf16_rows_give_what_their_widened_numbers_give() {
    let mut case = Case::new(Heads { query: 2, kv: 1, dim: 40 }, Mask::Causal, 200, 7);
    let mut narrow = [&mut case.q, &mut case.k, &mut case.v, &mut case.dout].map(|wide| {
        let mut narrow = vec![bf16::ZERO; wide.len()];
        wire::to_bf16(&mut narrow, wide);
        wire::to_f32(wide, &narrow);
        narrow
    });
    let (expected, expected_lse, gradients) = case.compute(&whole());
    let delta = case.delta(&expected);
    let mut rounded = vec![bf16::ZERO; expected.len()];
    wire::to_bf16(&mut rounded, &expected);
    let (mut unused, mut lse) = (vec![0.0; case.q.len()], vec![0.0; 400]);
    let mut out = rounded.clone();
    let mut narrowed = task(&case, &mut unused, &mut lse);
    let rows = narrow.each_mut().map(|it| Rows::Bf16(it));
    (narrowed.q, narrowed.k, narrowed.v) = (rows[0], rows[1], rows[2]);
    narrowed.out = RowsMut::Bf16(&mut out);
    crate::forward(&mut [narrowed], Threads::ONE).unwrap();
    assert_eq!((out, &lse), (rounded, &expected_lse));

    let mut actual = gradients.each_ref().map(|it| vec![f32::NAN; it.len()]);
    let bundle = bundle(&case, rows, (&lse, &delta), actual.each_mut());
    crate::backward(&mut [bundle], Threads::ONE).unwrap();
    assert_eq!(actual, gradients);
}

/// All of a case as one bundle; rows are Q, K, V and dO, sums LSE and Δ, gradients dQ, dK and dV.
fn bundle<'a>(
    case: &Case,
    [q, k, v, dout]: [Rows<'a>; 4],
    (lse, delta): (&'a [f32], &'a [f32]),
    [dq, dk, dv]: [&'a mut Vec<f32>; 3],
) -> Backward<'a> {
    Backward {
        heads: case.heads,
        mask: case.mask,
        scale: SCALE,
        softcap: None,
        document_rows: case.rows,
        keys: 0..case.rows,
        k,
        v,
        parts: vec![BackwardRows { rows: 0..case.rows, q, dout, lse, delta, dq }],
        dk,
        dv,
        key_tiles: 0..key_tiles(&(0..case.rows)),
    }
}

/// All of a case as one task.
pub(super) fn task<'a>(case: &'a Case, out: &'a mut [f32], lse: &'a mut [f32]) -> Forward<'a> {
    Forward {
        heads: case.heads,
        mask: case.mask,
        scale: SCALE,
        softcap: None,
        document_rows: case.rows,
        rows: 0..case.rows,
        keys: 0..case.rows,
        q: Rows::F32(&case.q),
        k: Rows::F32(&case.k),
        v: Rows::F32(&case.v),
        out: RowsMut::F32(out),
        lse,
    }
}
