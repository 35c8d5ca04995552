//! Bugs that people write in such kernels, each as a replacement in one file of `cuda/`.
//!
//! In: nothing. Out: the list. Every text stands exactly once in its file, so a change of the kernel that removes it makes
//! the test say so. Shapes are chosen to be fast, not to be the only ones that would notice.

/// A planted bug.
pub(crate) struct Mutant {
    /// What is wrong, in a few words.
    pub(crate) name: &'static str,
    /// The check that must fail: a word of `emulation/main.cpp`.
    pub(crate) part: &'static str,
    /// Head dim to run.
    pub(crate) dim: &'static str,
    /// File of `cuda/`.
    pub(crate) file: &'static str,
    /// What stands there.
    pub(crate) right: &'static str,
    /// What is planted.
    pub(crate) wrong: &'static str,
    /// Shapes to run.
    pub(crate) shapes: &'static [&'static str],
}

const CAUSAL: &[&str] = &["ragged documents, causal"];
const TASKS: &[&str] = &["segments", "many tasks of one document"];
/// Long enough for every stage to be used again.
const LONG: &[&str] = &["many key tiles"];

const fn forward(
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
    shapes: &'static [&'static str],
) -> Mutant {
    Mutant { name, part: "forward", dim: "64", file, right, wrong, shapes }
}

const fn backward(
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
    shapes: &'static [&'static str],
) -> Mutant {
    Mutant { name, part: "backward", dim: "64", file, right, wrong, shapes }
}

/// All of them.
pub(crate) const MUTANTS: &[Mutant] = &[
    forward(
        "a row sees one key too many",
        "forward_consumer.cuh",
        "at > last[r]",
        "at > last[r] + 1",
        CAUSAL,
    ),
    Mutant {
        name: "the tile on the diagonal is taken as full",
        part: "forward",
        dim: "256",
        file: "table.cuh",
        right: "task.kv_offset), least(q_first + task.right, kv_last)",
        wrong: "task.kv_offset), least(q_last + task.right, kv_last)",
        shapes: CAUSAL,
    },
    forward(
        "V is used before it is there",
        "forward_consumer.cuh",
        "ptx::barrier_wait(barrier_of(at.v_full, before.stage()), before.full());",
        "",
        LONG,
    ),
    Mutant {
        name: "V is given back while it is multiplied",
        part: "forward",
        dim: "128",
        file: "forward_consumer.cuh",
        right: "                ptx::wgmma_wait<0>();
                release(barrier_of(at.v_empty, before.stage()));",
        wrong: "                release(barrier_of(at.v_empty, before.stage()));
                ptx::wgmma_wait<0>();",
        shapes: LONG,
    },
    forward(
        "P is overwritten while it is multiplied",
        "forward_consumer.cuh",
        "                ptx::wgmma_wait<0>();
                release(barrier_of(at.v_empty, before.stage()));
                round_scores(s, prob);",
        "                round_scores(s, prob);
                ptx::wgmma_wait<0>();
                release(barrier_of(at.v_empty, before.stage()));",
        LONG,
    ),
    forward(
        "O is not rescaled",
        "forward_consumer.cuh",
        "o[i] *= softmax.rescale[i >> 1 & 1];",
        "o[i] *= 1.f;",
        LONG,
    ),
    forward(
        "O is rescaled by the other row",
        "forward_consumer.cuh",
        "softmax.rescale[i >> 1 & 1]",
        "softmax.rescale[i & 1]",
        LONG,
    ),
    forward(
        "rows of V that belong to others stay",
        "forward_consumer.cuh",
        "clear_outside<F::kKeys, D>(at.v + keys.stage() * F::kKeyBytes, n * F::kKeys, kv_begin, kv_end);",
        "",
        CAUSAL,
    ),
    forward(
        "cleared rows are not published",
        "forward_consumer.cuh",
        "ptx::fence_async_shared();",
        "",
        CAUSAL,
    ),
    forward(
        "a row without keys divides by zero",
        "forward_consumer.cuh",
        "none ? 0.f : 1.f / sum[r]",
        "1.f / sum[r]",
        &["rows before the first key"],
    ),
    forward(
        "query heads read the wrong KV head",
        "forward_producer.cuh",
        "tile.head / p.group",
        "tile.head % p.group / 2",
        CAUSAL,
    ),
    forward(
        "Q is given back before the last scores",
        "forward_consumer.cuh",
        "            auto step = [&](auto mask) {",
        "            release(at.q_empty);
            auto step = [&](auto mask) {",
        LONG,
    ),
    forward(
        "segments are added without weights",
        "rows.cuh",
        "total[0] += weight * part.x",
        "total[0] += part.x",
        TASKS,
    ),
    backward(
        "LSE of rows beside the task is taken for its own",
        "backward_producer.cuh",
        "row >= 0 && row < task.q_rows ?",
        "row >= -1 && row <= task.q_rows ?",
        CAUSAL,
    ),
    backward(
        "a key sees one row too early",
        "backward_step.cuh",
        "it - step.right : kUnbounded",
        "it - step.right - 1 : kUnbounded",
        CAUSAL,
    ),
    backward(
        "rows of Q that belong to others stay",
        "backward_step.cuh",
        "clear_outside<kRows, D>(q, step.row, step.q_first, step.q_last + 1);",
        "",
        CAUSAL,
    ),
    backward(
        "rows of K that belong to others stay",
        "backward_step.cuh",
        "clear_outside<kKeys, D>(at.k, first, bundle.kv_offset, end);",
        "",
        CAUSAL,
    ),
    backward(
        "dS is not published to the products",
        "backward_keys.cuh",
        "ptx::fence_async_shared();",
        "",
        CAUSAL,
    ),
    backward(
        "dQ is not published to the bulk addition",
        "backward_step.cuh",
        "ptx::fence_async_shared();
    ptx::named_arrive(kDqFull",
        "ptx::named_arrive(kDqFull",
        CAUSAL,
    ),
    backward(
        "dS of the other warpgroup is not waited for",
        "backward_keys.cuh",
        "ptx::named_sync(kExchange, kConsumers * kGroup);",
        "",
        LONG,
    ),
    backward(
        "Q is given back while it is multiplied",
        "backward_keys.cuh",
        "            ptx::wgmma_wait<0>();
            release(barrier_of(at.q_empty, stage));",
        "            release(barrier_of(at.q_empty, stage));
            ptx::wgmma_wait<0>();",
        LONG,
    ),
    backward(
        "the next addition does not wait for its turn",
        "backward_producer.cuh",
        "if (ordered) ptx::wait_turn(p.turns + index, rows.turn);",
        "",
        LONG,
    ),
    backward(
        "the turn is passed before the addition is done",
        "backward_producer.cuh",
        "                ptx::bulk_wait();
                ptx::pass_turn",
        "                ptx::pass_turn",
        LONG,
    ),
    backward(
        "turns of a second launch count from the first key",
        "backward_producer.cuh",
        "most(first, first_tile)",
        "most(first, first_tile * 0)",
        TASKS,
    ),
    backward(
        "only the first task of a bundle is done",
        "backward.cuh",
        "bundle.first_task + bundle.tasks; i-- >",
        "bundle.first_task + 1; i-- >",
        TASKS,
    ),
    backward(
        "two bundles of a document share dK",
        "backward_keys.cuh",
        "(bundle.dkv_row + key_in_bundle)",
        "(p.bundles[0].dkv_row + key_in_bundle)",
        &["two bundles of one document"],
    ),
    backward(
        "dQ goes out before it is computed",
        "backward_keys.cuh",
        "            ptx::wgmma_wait<1>();
            hand_over_dq",
        "            hand_over_dq",
        CAUSAL,
    ),
    Mutant {
        name: "wide heads do not wait for P of the other warpgroup",
        part: "backward",
        dim: "256",
        file: "backward_columns.cuh",
        right: "ptx::named_sync(kExchange, kConsumers * kGroup);",
        wrong: "",
        shapes: LONG,
    },
    Mutant {
        part: "forward-softcap",
        ..forward(
            "scores of the first key tile go without the cap",
            "forward_consumer.cuh",
            "            if constexpr (Cap::capped) cap_scores(s, p.inner_scale);
            softmax.step<Masked>",
            "            softmax.step<Masked>",
            LONG,
        )
    },
    Mutant {
        part: "backward-softcap",
        ..backward(
            "dS goes without the slope of the cap",
            "backward_step.cuh",
            "high * fmaxf(1.f - s[i + 1] * s[i + 1], 0.f)",
            "high",
            CAUSAL,
        )
    },
    Mutant {
        part: "backward-softcap",
        ..backward(
            "a masked score has a slope without end",
            "backward_step.cuh",
            "low * fmaxf(1.f - s[i] * s[i], 0.f)",
            "low * (1.f - s[i] * s[i])",
            CAUSAL,
        )
    },
];
