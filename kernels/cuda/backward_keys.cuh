// Backward for head dims 64 and 128: each warpgroup computes 64 of the 128 keys of a tile.
//
// In: stages of Q, dO, LSE, Δ and the resident K, V. Out: dK, dV of its keys, its half of the columns of dQ. Sᵀ = K·Qᵀ
// and dPᵀ = V·dOᵀ are computed transposed, so that Pᵀ and dSᵀ are register operands of dV += Pᵀ·dO and dK += dSᵀ·Q; dSᵀ
// also goes through shared memory, once, because dQ = dS·K sums over both warpgroups' keys.
//
// Invariant: the two buffers of dSᵀ need one barrier a step: whoever passes the barrier of step i+1 knows that the
// other has waited for its products of step i. The end of a key tile takes a stage without a step, so the next tile may
// begin with the same buffer: it begins after all warps have released K and V.
//
// With head dim 64 a warpgroup's columns of K begin 64 bytes inside a swizzled panel, which no published layout covers.
// -DCADRE_WHOLE_PANELS builds a form for comparison: both warpgroups multiply all columns and hand over their half.
#pragma once
#include "backward_step.cuh"

namespace cadre {

#ifdef CADRE_WHOLE_PANELS
constexpr bool kWholePanels = true;
#else
constexpr bool kWholePanels = false;
#endif
template <int D>
constexpr bool kBothHalves = D == 64 && kWholePanels;
// Of a thread's fragment of dQ, which holds more than its warpgroup's half with kBothHalves.
template <int D>
constexpr int kDqNumbers = kBothHalves<D> ? D / 2 : D / 4;

template <int D, class Cap>
DEVICE void backward_by_keys(const BackwardParameters& p, typename Backward<D>::Shared& shared, int group) {
    using B = Backward<D>;
    const BackwardAddresses<D> at(shared);
    const int warp = threadIdx.x / 32 & 3, lane = threadIdx.x & 31;
    constexpr uint64_t kStep = B::kQueryBytes >> 4;
    const uint64_t k = ptx::descriptor(at.k + group * 64 * 128, 16), v = ptx::descriptor(at.v + group * 64 * 128, 16);
    const uint64_t q = ptx::descriptor(at.q, 16), dout = ptx::descriptor(at.dout, 16);
    // The same tiles with their rows as K of the product.
    const uint64_t q_down = ptx::descriptor(at.q, B::kRows * 128), dout_down = ptx::descriptor(at.dout, B::kRows * 128);
    // dS, query rows along M, and this warpgroup's columns of K.
    const uint64_t ds_down = ptx::descriptor(at.ds, 16);
    constexpr int kColumnBytes = D > 64 ? B::kKeys * 128 : kBothHalves<D> ? 0 : 64;
    const uint64_t k_down = ptx::descriptor(at.k + group * kColumnBytes, B::kKeys * 128);
    Ring<1> tiles;
    Ring<B::kStages> stages;
    Ring<B::kOutStages> outs;  // falls behind by one at the end of each key tile
#pragma unroll 1
    for (;; tiles.next()) {
        ptx::barrier_wait(at.kv_full, tiles.full());
        const int claimed = ptx::warp_uniform(shared.tile);
        if (claimed < 0) return;
        const BackwardTile tile = p.tiles[claimed];
        clear_keys<D>(at, p.bundles[tile.bundle], tile.key_tile);
        const int key = tile.key_tile * B::kKeys + group * 64 + warp * 16 + lane / 4;
        float dk[D / 2], dv[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.f;

        backward_steps<D>(at, shared, stages, [&](auto mask) {
            const uint32_t stage = stages.stage(), out = outs.stage(), out_full = outs.full();
            outs.next();
            const BackwardStep& step = shared.step[stage];
            float s[32], dp[32];
            uint32_t prob[16], ds[16];  // with softcap ds holds slopes first
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
                to_capped_probabilities<decltype(mask)>(s, prob, ds, shared.lse[stage], p, step, 0, key);
            } else {
                to_probabilities<decltype(mask)>(s, shared.lse[stage], p.scale_log2, step, 0, key);
                round_scores(s, prob);
            }
            // Complete already; it keeps the compiler from waiting for dP before all of P is done.
            ptx::barrier_wait(barrier_of(at.dout_full, out), out_full ^ nothing(s));
            ptx::wgmma_wait<0>();
            if constexpr (Cap::capped) {
                to_capped_gradients(dp, ds, shared.delta[stage]);
            } else {
                to_score_gradients(dp, s, shared.delta[stage]);
            }
            round_scores(dp, ds);
            store_fragment(at.ds + stage * B::kScoreBytes, ds, group * 64 + warp * 16, 0);
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::wgmma<1>(dv, &prob[4 * i], dout_down + out * kStep + down_rows(i), 1);
            ptx::wgmma_commit();
            ptx::fence_async_shared();
            ptx::named_sync(kExchange, kConsumers * kGroup);
            float dq[kDqNumbers<D>];
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < B::kKeys / 16; ++i) {
                ptx::wgmma<1, 1>(dq, ds_down + stage * (B::kScoreBytes >> 4) + down_rows(i), k_down + down_rows(i),
                                 i != 0);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            release(barrier_of(at.dout_empty, out));
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::wgmma<1>(dk, &ds[4 * i], q_down + stage * kStep + down_rows(i), 1);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            if constexpr (kBothHalves<D>) {
                float half[D / 4];
#pragma unroll
                for (int i = 0; i < D / 4; ++i) half[i] = group ? dq[D / 4 + i] : dq[i];
                hand_over_dq(half, at.dq + group * B::kPieceNumbers * 4, group);
            } else {
                hand_over_dq(dq, at.dq + group * B::kPieceNumbers * 4, group);
            }
            ptx::wgmma_wait<0>();
            release(barrier_of(at.q_empty, stage));
        });
        release(at.kv_empty);
        write_gradients<D>(p, tile, key, dk, dv);
    }
}

}  // namespace cadre
