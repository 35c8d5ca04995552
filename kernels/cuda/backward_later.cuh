// Backward for head dim 128, a form for comparison: dQ and dK of a step are multiplied in the next one, so that all its
// exponentials run under products.
//
// In, out, and who computes which keys and columns: as in backward_keys.cuh. A step multiplies in this order:
//
//   Sᵀ(i) = K·Q(i)ᵀ    dQ(i−1) = dS(i−1)·K    dK += dSᵀ(i−1)·Q(i−1)    dPᵀ(i) = V·dO(i)ᵀ    dV += Pᵀ(i)·dO(i)
//
// The other warpgroup's dS is waited for under Sᵀ, dQ is handed over under dK, P(i) is computed under dK and dPᵀ,
// dSᵀ(i) stored under dV; only dS(i) has nothing beside it. dK takes dSᵀ from shared memory (128 clocks of it a step
// more), and dPᵀ the registers that dQ has left: 192 hold dK, dV, S, and dQ or dPᵀ. Q, LSE and Δ stay a step longer:
// three stages.
//
// The first step of a key tile finds dSᵀ of zeros in the place of a step before: its products are two fifths of a step
// for nothing, and its piece of dQ is dropped (`backward_drop_dq`). A copy of the step without them does not fit in the
// registers.
//
// Invariant: two buffers of dSᵀ need one barrier a step: whoever passes the barrier of step i+1 knows that the other
// has waited for its products of step i, which read dS(i−1). The last dS of a key tile is multiplied behind its last
// step; its buffer is cleared for the next tile when all warps have released K and V.
#pragma once
#include "backward_step.cuh"

namespace cadre {

// A warpgroup: its keys of a buffer of dSᵀ become zeros.
template <int D>
DEVICE void clear_gradients(uint32_t ds, int group) {
    const uint32_t to = ds + group * 64 * 128 + (threadIdx.x & (kGroup - 1)) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::store_shared(to + i * kGroup * 16, 0.f, 0.f, 0.f, 0.f);
    ptx::fence_async_shared();
}

template <int D, class Cap>
DEVICE void backward_later(const BackwardParameters& p, typename Backward<D>::Shared& shared, int group) {
    using B = Backward<D>;
    static_assert(D == 128, "a warpgroup's columns of dQ are a panel");
    const BackwardAddresses<D> at(shared);
    const int warp = threadIdx.x / 32 & 3, lane = threadIdx.x & 31;
    constexpr uint64_t kStep = B::kQueryBytes >> 4, kBuffer = B::kScoreBytes >> 4;
    const uint64_t k = ptx::descriptor(at.k + group * 64 * 128, 16), v = ptx::descriptor(at.v + group * 64 * 128, 16);
    const uint64_t q = ptx::descriptor(at.q, 16), dout = ptx::descriptor(at.dout, 16);
    // The same tiles with their rows as K of the product.
    const uint64_t q_down = ptx::descriptor(at.q, B::kRows * 128), dout_down = ptx::descriptor(at.dout, B::kRows * 128);
    // dS of all keys, query rows along M; dSᵀ of this warpgroup's keys; this warpgroup's columns of K.
    const uint64_t ds_down = ptx::descriptor(at.ds, 16), ds_own = ptx::descriptor(at.ds + group * 64 * 128, 16);
    const uint64_t k_down = ptx::descriptor(at.k + group * B::kKeys * 128, B::kKeys * 128);
    Ring<1> tiles;
    Ring<B::kStages> stages;
    Ring<B::kOutStages> outs;  // of dSᵀ, too: counts the steps
#pragma unroll 1
    for (;; tiles.next()) {
        ptx::barrier_wait(at.kv_full, tiles.full());
        const int claimed = ptx::warp_uniform(shared.tile);
        if (claimed < 0) return;
        const int key_tile = p.tiles[claimed].key_tile;
        clear_keys<D>(at, p.bundles[p.tiles[claimed].bundle], key_tile);
        const int key = key_tile * B::kKeys + group * 64 + warp * 16 + lane / 4;
        float dk[D / 2], dv[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.f;

        // dQ and dK of a step that is over: two groups of products.
        auto multiply_before = [&](float (&dq)[D / 4], uint32_t stage, uint32_t buffer) INLINE {
            ptx::named_sync(kExchange, kConsumers * kGroup);
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < B::kKeys / 16; ++i) {
                ptx::wgmma<1, 1>(dq, ds_down + buffer * kBuffer + down_rows(i), k_down + down_rows(i), i != 0);
            }
            ptx::wgmma_commit();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ptx::wgmma<0, 1>(dk, ds_own + buffer * kBuffer + along_row<B::kKeys>(i),
                                 q_down + stage * kStep + down_rows(i), 1);
            }
            ptx::wgmma_commit();
        };
        // What the first step finds in the place of a step before: dSᵀ of zeros, its own Q, and a barrier of nobody.
        clear_gradients<D>(at.ds + (outs.stage() ^ 1) * B::kScoreBytes, group);
        uint32_t before = stages.stage(), emptied = at.nobody;
        auto step = [&](auto mask) INLINE {
            const uint32_t stage = stages.stage(), out = outs.stage();
            const BackwardStep& step = shared.step[stage];
            float s[32];
            uint32_t prob[16], ds[16];  // with softcap ds holds slopes first
            if constexpr (decltype(mask)::value) {
                ptx::barrier_wait(barrier_of(at.dout_full, out), outs.full());
                clear_queries<D>(at.q + stage * B::kQueryBytes, at.dout + out * B::kQueryBytes, step);
            }
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                ptx::wgmma<0, 0>(s, k + along_row<B::kKeys>(i), q + stage * kStep + along_row<B::kRows>(i), i != 0);
            }
            ptx::wgmma_commit();
            float dq[D / 4];
            multiply_before(dq, before, out ^ 1);
            ptx::wgmma_wait<2>();
            if constexpr (!Cap::capped)
                to_probabilities<decltype(mask)>(s, shared.lse[stage], p.scale_log2, step, 0, key);
            // Complete already; it keeps the compiler from waiting for dQ before P is done, as in the forward kernel.
            ptx::barrier_wait(barrier_of(at.q_full, stage), stages.full());
            ptx::wgmma_wait<1>();
            hand_over_dq(dq, at.dq + group * B::kPieceNumbers * 4, group);
            ptx::barrier_wait(barrier_of(at.dout_full, out), outs.full());
            float (&dp)[32] = dq;
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                ptx::wgmma<0, 0>(dp, v + along_row<B::kKeys>(i), dout + out * kStep + along_row<B::kRows>(i), i != 0);
            }
            ptx::wgmma_commit();
            if constexpr (Cap::capped) {
                to_capped_probabilities<decltype(mask)>(s, prob, ds, shared.lse[stage], p, step, 0, key);
                ptx::barrier_wait(barrier_of(at.q_full, stage), stages.full());
            }
            ptx::wgmma_wait<1>();
            release(emptied);
            ptx::wgmma_wait<0>();
            if constexpr (Cap::capped) {
                to_capped_gradients(dp, ds, shared.delta[stage]);
            } else {
                round_scores(s, prob);
                to_score_gradients(dp, s, shared.delta[stage]);
            }
            round_scores(dp, ds);
            ptx::wgmma_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::wgmma<1>(dv, &prob[4 * i], dout_down + out * kStep + down_rows(i), 1);
            ptx::wgmma_commit();
            store_fragment(at.ds + out * B::kScoreBytes, ds, group * 64 + warp * 16, 0);
            ptx::fence_async_shared();
            ptx::wgmma_wait<0>();
            release(barrier_of(at.dout_empty, out));
            before = stage, emptied = barrier_of(at.q_empty, stage);
            stages.next(), outs.next();
        };
        auto next_kind = [&] {
            ptx::barrier_wait(barrier_of(at.q_full, stages.stage()), stages.full());
            return ptx::warp_uniform(shared.step[stages.stage()].kind);
        };
#pragma unroll 1
        for (int kind; (kind = next_kind()) != BackwardStep::kEnd;) {
            if (kind == BackwardStep::kMasked) {
                step(Masked{});
            } else {
                step(Unmasked{});
            }
        }
        if (emptied != at.nobody) {
            float dq[D / 4];
            multiply_before(dq, before, outs.stage() ^ 1);
            ptx::wgmma_wait<1>();
            hand_over_dq(dq, at.dq + group * B::kPieceNumbers * 4, group);
            ptx::wgmma_wait<0>();
            release(emptied);
        }
        release(barrier_of(at.q_empty, stages.stage()));
        stages.next();
        const BackwardTile tile = p.tiles[ptx::warp_uniform(shared.tile)];
        release(at.kv_empty);
        write_gradients<D>(p, tile, key, dk, dv);
    }
}

}  // namespace cadre
