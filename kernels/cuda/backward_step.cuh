// What both ways of computing the backward pass share: steps as they come, dSᵀ and dQ on their way to who needs them.
//
// Included by the two backward_*.cuh that compute.
#pragma once
#include "gradient.cuh"

namespace cadre {

// A fragment of bf16 into a panel whose rows are keys: rows from `key_row`, 8 query rows a sixteenth from `sixteenth`.
template <int N>
DEVICE void store_fragment(uint32_t panel, const uint32_t (&words)[N], int key_row, int sixteenth) {
    const int lane = threadIdx.x & 31, row = key_row + (lane & 15);
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        ptx::store_matrices(ptx::swizzled(panel, row, sixteenth + 2 * j + (lane >> 4)), words[4 * j], words[4 * j + 1],
                            words[4 * j + 2], words[4 * j + 3]);
    }
}

// A piece of dQ to the warp that adds it up.
template <int N>
DEVICE void hand_over_dq(const float (&dq)[N], uint32_t staging, int group) {
    ptx::named_sync(kDqEmpty + group, kDqThreads);
    const uint32_t to = staging + (threadIdx.x & (kGroup - 1)) * 16;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        ptx::store_shared(to + j * kGroup * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
    ptx::fence_async_shared();
    ptx::named_arrive(kDqFull + group, kDqThreads);
}

// Runs the steps of a key tile as they come; those that a mask or an edge cuts with Masked.
template <int D, class Step>
DEVICE void backward_steps(const BackwardAddresses<D>& at, typename Backward<D>::Shared& shared,
                           Ring<Backward<D>::kStages>& stages, Step step) {
#pragma unroll 1
    for (;; stages.next()) {
        ptx::barrier_wait(barrier_of(at.q_full, stages.stage()), stages.full());
        const int kind = ptx::warp_uniform(shared.step[stages.stage()].kind);
        if (kind == BackwardStep::kEnd) break;
        if (kind == BackwardStep::kMasked) {
            step(Masked{});
        } else {
            step(Unmasked{});
        }
    }
    release(barrier_of(at.q_empty, stages.stage()));
    stages.next();
}

// A thread's keys, the first at position `key`, of dK and dV.
template <int D>
DEVICE void write_gradients(const BackwardParameters& p, const BackwardTile& tile, int key, const float (&dk)[D / 2],
                            const float (&dv)[D / 2]) {
    const Bundle bundle = p.bundles[tile.bundle];
    const size_t stride = (size_t)p.kv_heads * D;
    const int key_in_bundle = key - bundle.kv_offset;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool held = key_in_bundle + 8 * r >= 0 && key_in_bundle + 8 * r < bundle.kv_rows;
        const ptrdiff_t first = (ptrdiff_t)(bundle.dkv_row + key_in_bundle) * (ptrdiff_t)stride + tile.kv_head * D;
        write_gradient(p.dk + first, stride, dk, p.scale, held, r);
        write_gradient(p.dv + first, stride, dv, 1.f, held, r);
    }
}

// Both warpgroups: rows of the loaded K and V that the bundle does not hold become zeros.
template <int D>
DEVICE void clear_keys(const BackwardAddresses<D>& at, const Bundle& bundle, int key_tile) {
    constexpr int kKeys = Backward<D>::kKeys;
    const int first = key_tile * kKeys, end = bundle.kv_offset + bundle.kv_rows;
    if (first >= bundle.kv_offset && first + kKeys <= end) return;
    clear_outside<kKeys, D>(at.k, first, bundle.kv_offset, end);
    clear_outside<kKeys, D>(at.v, first, bundle.kv_offset, end);
    ptx::fence_async_shared();
    ptx::named_sync(kExchange, kConsumers * kGroup);
}

// Both warpgroups: the same for the rows of Q and dO that the task does not hold.
template <int D>
DEVICE void clear_queries(uint32_t q, uint32_t dout, const BackwardStep& step) {
    constexpr int kRows = Backward<D>::kRows;
    if (step.row >= step.q_first && step.row + kRows - 1 <= step.q_last) return;
    clear_outside<kRows, D>(q, step.row, step.q_first, step.q_last + 1);
    clear_outside<kRows, D>(dout, step.row, step.q_first, step.q_last + 1);
    ptx::fence_async_shared();
    ptx::named_sync(kExchange, kConsumers * kGroup);
}

}  // namespace cadre
