// What the two computing warpgroups of the forward kernel do; formulas, layouts and launch are in forward.cuh.
//
// In: stages that the loading thread fills. Out: O and LSE, or parts of them. One warpgroup holds 64 rows of the query
// tile: thread t holds rows 16·warp + lane/4 and that + 8, and in them columns 8j + 2·(lane % 4) and the next, for
// every j.
//
// Invariant: both warpgroups take the same steps, so turns alternate without end; between a product's begin and
// its wait there is no branch on data.
#pragma once
#include "forward.cuh"
#include "fragment.cuh"

namespace cadre {

// The online softmax of a thread's two rows.
struct Softmax {
    float largest[2], sum[2], rescale[2];
    int first[2], last[2];  // kept keys of each row, as positions

    DEVICE void begin(const Task& task, int position) {
        const int kv_last = task.kv_offset + task.kv_rows - 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = -ptx::infinity(), sum[r] = 0.f;
            first[r] = most(position + 8 * r - task.left, task.kv_offset);
            last[r] = least(position + 8 * r + task.right, kv_last);
        }
    }

    // Scores of keys [key, key + Keys) become probabilities, relative to the largest score so far; `rescale` is what
    // earlier sums and rows of O are to be multiplied with. A row that has kept nothing yet stays at −∞ and 0.
    template <class Mask, int Scores>
    DEVICE void step(float (&s)[Scores], float scale_log2, int key) {
        if constexpr (Mask::value) {
            const int column = key + (threadIdx.x & 3) * 2;
#pragma unroll
            for (int i = 0; i < Scores; ++i) {
                const int at = column + (i / 4) * 8 + (i & 1), r = i >> 1 & 1;
                if (at < first[r] || at > last[r]) s[i] = -ptx::infinity();
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = largest[r];
#pragma unroll
            for (int i = 2 * r; i < Scores; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            top = fmaxf(top, ptx::exchange(top, 1));
            top = fmaxf(top, ptx::exchange(top, 2));
            const float base = Mask::value && top == -ptx::infinity() ? 0.f : top * scale_log2;
            rescale[r] = ptx::exp2(largest[r] * scale_log2 - base);
            largest[r] = top;
            float added = 0.f;
#pragma unroll
            for (int i = 2 * r; i < Scores; i += 4) {
                s[i] = ptx::exp2(s[i] * scale_log2 - base);
                s[i + 1] = ptx::exp2(s[i + 1] * scale_log2 - base);
                added += s[i] + s[i + 1];
            }
            sum[r] = sum[r] * rescale[r] + added;
        }
    }

    // The four lanes of a row add up; `sum` becomes the row's LSE, and what comes back its factor of O.
    DEVICE float finish(int r, float scale_log2) {
        sum[r] += ptx::exchange(sum[r], 1);
        sum[r] += ptx::exchange(sum[r], 2);
        const bool none = sum[r] == 0.f;
        const float factor = none ? 0.f : 1.f / sum[r];
        sum[r] = none ? -ptx::infinity() : 0.69314718056f * (largest[r] * scale_log2 + ptx::log2(sum[r]));
        return factor;
    }
};

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

// Writes one row of a thread: bf16, two lanes swapping a word so that four lanes fill 32 bytes at a time.
template <int D>
DEVICE void write_row(uint16_t* row, const float (&o)[Forward<D>::kOut], int r, float factor, bool held) {
    const int lane = threadIdx.x & 3, odd = lane & 1;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        const uint32_t here = ptx::pack_bf16(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor);
        const uint32_t next = ptx::pack_bf16(o[4 * j + 4 + 2 * r] * factor, o[4 * j + 5 + 2 * r] * factor);
        const uint32_t other = ptx::exchange(odd ? here : next, 1);
        const uint2 both = odd ? make_uint2(other, next) : make_uint2(here, other);
        if (held) *reinterpret_cast<uint2*>(row + (j + odd) * 8 + (lane >> 1) * 4) = both;
    }
}

template <int D>
DEVICE void forward_write(const ForwardParameters& p, const Task& task, const ForwardTile& tile, Softmax& softmax,
                          const float (&o)[Forward<D>::kOut], int row_in_tile) {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float factor = softmax.finish(r, p.scale_log2);
        const int in_tile = row_in_tile + 8 * r, in_task = tile.q_tile * Forward<D>::kRows + in_tile - task.q_offset;
        const bool held = in_task >= 0 && in_task < task.q_rows;
        if (tile.slot < 0) {
            const size_t row = (size_t)(task.q_row + (held ? in_task : 0)) * p.heads + tile.head;
            write_row<D>(p.o + row * D, o, r, factor, held);
            if (held && lane == 0) p.lse[row] = softmax.sum[r];
        } else {
            const size_t row = (size_t)tile.slot * Forward<D>::kRows + in_tile;
            float2* to = reinterpret_cast<float2*>(p.part_o + row * D) + lane;
#pragma unroll
            for (int j = 0; j < D / 8; ++j) {
                to[4 * j] = make_float2(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor);
            }
            if (lane == 0) p.part_lse[row] = softmax.sum[r];
        }
    }
}

template <int D, class Cap>
DEVICE void forward_compute(const ForwardParameters& p, typename Forward<D>::Shared& shared, int group) {
    using F = Forward<D>;
    const ForwardAddresses<D> at(shared);
    const int row_in_tile = group * 64 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    const uint64_t q = ptx::descriptor(at.q + group * 64 * 128, 16);
    const uint64_t k = ptx::descriptor(at.k, 16), v = ptx::descriptor(at.v, F::kKeys * 128);
    constexpr uint64_t kStep = F::kKeyBytes >> 4;
    Ring<1> queries;
    Ring<F::kStages> keys;
    if (F::kTurns && group == 0) ptx::named_arrive(kTurn, kConsumers * kGroup);
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
            ptx::named_sync(kCleared + group, kGroup);
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
            softmax.step<Masked>(s, p.scale_log2, n * F::kKeys);
            round_scores(s, prob);
            clear(n);
            // Scores of key tile n together with P·V of the one before.
            auto step = [&](auto mask) {
                const Ring<F::kStages> before = keys;
                keys.next();
                ptx::barrier_wait(barrier_of(at.k_full, keys.stage()), keys.full());
                if constexpr (F::kTurns) ptx::named_sync(kTurn + group, kConsumers * kGroup);
                multiply_scores<D>(s, q, k + keys.stage() * kStep);
                ptx::barrier_wait(barrier_of(at.v_full, before.stage()), before.full());
                multiply_values<D>(o, prob, v + before.stage() * kStep);
                if constexpr (F::kTurns) ptx::named_arrive(kTurn + (group ^ 1), kConsumers * kGroup);
                ptx::wgmma_wait<1>();
                release(barrier_of(at.k_empty, keys.stage()));
                if constexpr (Cap::capped) cap_scores(s, p.inner_scale);
                softmax.step<decltype(mask)>(s, p.scale_log2, n * F::kKeys);
                // Complete long ago, but the compiler may not move the wait below above it: all of the softmax runs
                // under P·V instead of a part. (A barrier that this tile still holds: one that is released could block
                // here.)
                ptx::barrier_wait(at.q_full, queries.full());
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
        forward_write<D>(p, task, tile, softmax, o, row_in_tile);
    }
}

}  // namespace cadre
