// Backward for head dim 256: each warpgroup computes half of the columns of dK, dV and dQ, for all 64 keys of a tile.
//
// In: stages of Q, dO, LSE, Δ and the resident K, V. Out: 128 columns of dK and dV, and of dQ in two pieces of 64. Of
// Sᵀ and dPᵀ a warpgroup computes 64 keys × 32 query rows; Pᵀ and dSᵀ then go through shared memory, where they are A
// operands of dV += Pᵀ·dO and dK += dSᵀ·Q as they lie, and dSᵀ that of dQ = dS·K with its rows as K of the product.
//
// Invariant: as in backward_keys.cuh, two buffers of Pᵀ and dSᵀ and one barrier a step. Registers: dK, dV 128, Sᵀ, dPᵀ
// 32, dQ 32.
#pragma once
#include "backward_step.cuh"

namespace cadre {

template <int D, class Cap>
DEVICE void backward_by_columns(const BackwardParameters& p, typename Backward<D>::Shared& shared, int group) {
    using B = Backward<D>;
    static_assert(B::kKeys == 64 && B::kPieceColumns == 64, "half of the columns are two panels");
    const BackwardAddresses<D> at(shared);
    const int warp = threadIdx.x / 32 & 3, lane = threadIdx.x & 31;
    constexpr uint64_t kStep = B::kQueryBytes >> 4, kScoreStep = B::kScoreBytes >> 4;
    constexpr uint32_t kHalf = D / 128;  // panels of a warpgroup's columns
    const uint64_t k = ptx::descriptor(at.k, 16), v = ptx::descriptor(at.v, 16);
    const uint64_t q = ptx::descriptor(at.q + group * 32 * 128, 16),
                   dout = ptx::descriptor(at.dout + group * 32 * 128, 16);
    const uint64_t q_down = ptx::descriptor(at.q + group * kHalf * B::kRows * 128, B::kRows * 128);
    const uint64_t dout_down = ptx::descriptor(at.dout + group * kHalf * B::kRows * 128, B::kRows * 128);
    const uint64_t k_down = ptx::descriptor(at.k + group * kHalf * B::kKeys * 128, B::kKeys * 128);
    const uint64_t prob_across = ptx::descriptor(at.p, 16), ds_across = ptx::descriptor(at.ds, 16);
    Ring<1> tiles;
    Ring<B::kStages> stages;
    Ring<B::kOutStages> outs;
#pragma unroll 1
    for (;; tiles.next()) {
        ptx::barrier_wait(at.kv_full, tiles.full());
        const int claimed = ptx::warp_uniform(shared.tile);
        if (claimed < 0) return;
        const BackwardTile tile = p.tiles[claimed];
        clear_keys<D>(at, p.bundles[tile.bundle], tile.key_tile);
        const int key = tile.key_tile * B::kKeys + warp * 16 + lane / 4;
        float dk[D / 4], dv[D / 4];
#pragma unroll
        for (int i = 0; i < D / 4; ++i) dk[i] = dv[i] = 0.f;

        backward_steps<D>(at, shared, stages, [&](auto mask) {
            const uint32_t stage = stages.stage();
            const BackwardStep& step = shared.step[stage];
            const uint32_t out = outs.stage(), out_full = outs.full();
            outs.next();
            float s[16], dp[16];
            uint32_t words[8];
            [[maybe_unused]] uint32_t slopes[8];  // with softcap
            if constexpr (decltype(mask)::value) {
                ptx::barrier_wait(barrier_of(at.dout_full, out), out_full);
                clear_queries<D>(at.q + stage * B::kQueryBytes, at.dout + out * B::kQueryBytes, step);
            }
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                ptx::wgmma<0, 0>(s, k + along_row<B::kKeys>(i), q + stage * kStep + along_row<B::kRows>(i), i != 0);
            }
            ptx::wgmma_commit();
            ptx::barrier_wait(barrier_of(at.dout_full, out), out_full);
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                ptx::wgmma<0, 0>(dp, v + along_row<B::kKeys>(i), dout + out * kStep + along_row<B::kRows>(i), i != 0);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            if constexpr (Cap::capped) {
                to_capped_probabilities<decltype(mask)>(s, words, slopes, shared.lse[stage] + group * 32, p, step,
                                                        group * 32, key);
            } else {
                to_probabilities<decltype(mask)>(s, shared.lse[stage] + group * 32, p.scale_log2, step, group * 32,
                                                 key);
                round_scores(s, words);
            }
            store_fragment(at.p + stage * B::kScoreBytes, words, warp * 16, group * 4);
            ptx::wgmma_wait<0>();
            if constexpr (Cap::capped) {
                to_capped_gradients(dp, slopes, shared.delta[stage] + group * 32);
            } else {
                to_score_gradients(dp, s, shared.delta[stage] + group * 32);
            }
            round_scores(dp, words);
            store_fragment(at.ds + stage * B::kScoreBytes, words, warp * 16, group * 4);
            ptx::fence_async_shared();
            ptx::named_sync(kExchange, kConsumers * kGroup);
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ptx::wgmma<0, 1>(dv, prob_across + stage * kScoreStep + along_row<B::kKeys>(i),
                                 dout_down + out * kStep + down_rows(i), 1);
            }
            ptx::wgmma_commit();
            float dq[32];
            auto multiply_dq = [&](int piece) {
                ptx::wgmma_begin();
#pragma unroll
                for (int i = 0; i < B::kKeys / 16; ++i) {
                    ptx::wgmma<1, 1>(dq, ds_across + stage * kScoreStep + down_rows(i),
                                     k_down + piece * (B::kKeys * 128 >> 4) + down_rows(i), i != 0);
                }
                ptx::wgmma_commit();
            };
            multiply_dq(0);
            ptx::wgmma_wait<1>();
            release(barrier_of(at.dout_empty, out));
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ptx::wgmma<0, 1>(dk, ds_across + stage * kScoreStep + along_row<B::kKeys>(i),
                                 q_down + stage * kStep + down_rows(i), 1);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            hand_over_dq(dq, at.dq + group * B::kPieceNumbers * 4, group);
            multiply_dq(1);
            ptx::wgmma_wait<1>();
            release(barrier_of(at.q_empty, stage));
            ptx::wgmma_wait<0>();
            hand_over_dq(dq, at.dq + group * B::kPieceNumbers * 4, group);
        });
        release(at.kv_empty);
        const Bundle bundle = p.bundles[tile.bundle];
        const size_t stride = (size_t)p.kv_heads * D;
        const int key_in_bundle = key - bundle.kv_offset;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool held = key_in_bundle + 8 * r >= 0 && key_in_bundle + 8 * r < bundle.kv_rows;
            const ptrdiff_t first =
                (ptrdiff_t)(bundle.dkv_row + key_in_bundle) * (ptrdiff_t)stride + tile.kv_head * D + group * (D / 2);
            write_gradient(p.dk + first, stride, dk, p.scale, held, r);
            write_gradient(p.dv + first, stride, dv, 1.f, held, r);
        }
    }
}

}  // namespace cadre
