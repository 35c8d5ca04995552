// What the two computing warpgroups of the forward kernel do; formulas, layouts and launch are in forward.cuh.
//
// In: stages that the loading thread fills. Out: O and LSE, or parts of them. One warpgroup holds 64 rows of the query
// tile: thread t holds rows 16·warp + lane/4 and that + 8, and in them columns 8j + 2·(lane % 4) and the next, for
// every j.
//
// Invariant: both warpgroups take the same steps, so turns alternate without end; between a product's begin and
// its wait there is no branch on data.
#pragma once
#include "softmax.cuh"

namespace cadre {

// S = Q·Kᵀ for the warpgroup's 64 rows.
template <int D>
DEVICE void multiply_scores(float (&s)[Forward<D>::kScores], uint64_t q, uint64_t k) {
    using F = Forward<D>;
    ptx::wgmma_begin();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
        ptx::wgmma<0, 0>(s, q + along_row<F::kRows>(i), k + along_row<F::kKeys>(i), i != 0);
    ptx::wgmma_commit();
}

// O += P·V.
template <int D>
DEVICE void multiply_values(float (&o)[Forward<D>::kOut], const uint32_t (&p)[Forward<D>::kScores / 2], uint64_t v) {
    ptx::wgmma_begin();
#pragma unroll
    for (int i = 0; i < Forward<D>::kKeys / 16; ++i) ptx::wgmma<1>(o, &p[4 * i], v + down_rows(i), 1);
    ptx::wgmma_commit();
}

template <int D, class Cap>
DEVICE void forward_compute(const ForwardParameters& p, typename Forward<D>::Shared& shared, int group) {
    using F = Forward<D>;
    const ForwardAddresses<D> at(shared);
    const int row_in_tile = group * 64 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    const uint64_t q = ptx::descriptor(at.q + group * 64 * 128, 16);
    const uint64_t k = ptx::descriptor(at.k, 16), v = ptx::descriptor(at.v, F::kKeys * 128);
    constexpr uint64_t kStep = F::kKeyBytes >> 4;
    // Whose turn comes behind this one's.
    const int next = F::kGroups == 2 ? group ^ 1 : group == F::kGroups - 1 ? 0 : group + 1;
    Ring<1> queries;
    Ring<F::kStages> keys;
    if (F::kTurns && group == 0) ptx::named_arrive(kTurn, 2 * kGroup);
#pragma unroll 1
    for (;; queries.next()) {
        ptx::barrier_wait(at.q_full, queries.full());
        const int claimed = ptx::warp_uniform(shared.tile);
        if (claimed < 0) return;
        // By reference: what the end needs is read again there, registers are short until then.
        const ForwardTile& tile = p.tiles[claimed];
        const Task& task = p.tasks[tile.task];
        const int kv_begin = task.kv_offset, kv_end = kv_begin + task.kv_rows;
        const Tiles range = forward_keys<D>(p, task, tile);
        Softmax softmax;
        softmax.begin(task, tile.q_tile * F::kRows + row_in_tile);
        float o[F::kOut];
#pragma unroll
        for (int i = 0; i < F::kOut; ++i) o[i] = 0.f;

        // Rows of V that the task does not hold must not meet P, not even its zeros.
        auto clear = [&](int n) {
            if (n * F::kKeys >= kv_begin && (n + 1) * F::kKeys <= kv_end) return;
            ptx::barrier_wait(barrier_of(at.v_full, keys.stage()), keys.full());
            clear_outside<F::kKeys, D>(at.v + keys.stage() * F::kKeyBytes, n * F::kKeys, kv_begin, kv_end);
            ptx::fence_async_shared();
            ptx::named_sync(kCleared<D> + group, kGroup);
        };

        int n = range.end - 1;
        if (n >= range.begin) {
            float s[F::kScores];
            uint32_t prob[F::kScores / 2];
            ptx::barrier_wait(barrier_of(at.k_full, keys.stage()), keys.full());
            multiply_scores<D>(s, q, k + keys.stage() * kStep);
            ptx::wgmma_wait<0>();
            release(barrier_of(at.k_empty, keys.stage()));
            if constexpr (Cap::capped) cap_scores(s, p.inner_scale);
            softmax.step<Masked, F::kByProducts>(s, p.scale_log2, n * F::kKeys);
            round_scores(s, prob);
            clear(n);
            // Scores of key tile n together with P·V of the one before.
            auto step = [&](auto mask) {
                const Ring<F::kStages> before = keys;
                keys.next();
                ptx::barrier_wait(barrier_of(at.k_full, keys.stage()), keys.full());
                if constexpr (F::kTurns) ptx::named_sync(kTurn + group, 2 * kGroup);
                multiply_scores<D>(s, q, k + keys.stage() * kStep);
                ptx::barrier_wait(barrier_of(at.v_full, before.stage()), before.full());
                multiply_values<D>(o, prob, v + before.stage() * kStep);
                if constexpr (F::kTurns) ptx::named_arrive(kTurn + next, 2 * kGroup);
                ptx::wgmma_wait<1>();
                release(barrier_of(at.k_empty, keys.stage()));
                if constexpr (Cap::capped) cap_scores(s, p.inner_scale);
                softmax.step<decltype(mask), F::kByProducts>(s, p.scale_log2, n * F::kKeys);
                // Complete long ago, but the compiler may not move the wait below above it: all of the softmax runs
                // under P·V instead of a part. (A barrier that this tile still holds: one that is released could block
                // here.)
                ptx::barrier_wait(at.q_full, queries.full() ^ (F::kIsTall ? nothing(softmax.sum) : 0));
                ptx::wgmma_wait<0>();
                release(barrier_of(at.v_empty, before.stage()));
                round_scores(s, prob);
#pragma unroll
                for (int i = 0; i < F::kOut; ++i) o[i] *= softmax.rescale[i >> 1 & 1];
            };
            --n;
#pragma unroll 1
            for (int masked_end = range.full_end;; masked_end = range.begin) {
#pragma unroll 1
                for (; n >= masked_end; --n) {
                    step(Masked{});
                    clear(n);
                }
                if (n < range.begin) break;
#pragma unroll 1
                for (; n >= range.full_begin; --n) step(Unmasked{});
            }
            release(at.q_empty);
            ptx::barrier_wait(barrier_of(at.v_full, keys.stage()), keys.full());
            multiply_values<D>(o, prob, v + keys.stage() * kStep);
            ptx::wgmma_wait<0>();
            release(barrier_of(at.v_empty, keys.stage()));
            keys.next();
        } else {
            release(at.q_empty);
        }
        forward_write<D, F::kRows>(p, task, tile, softmax, o, row_in_tile, D);
    }
}

}  // namespace cadre
