// What the warps of the portable backward kernel compute; launch and layouts are in backward.cuh.
//
// In: the tables and tensors of ../backward.cuh. Out: dK and dV of key tiles, sums of dQ. Three barriers a step: when Q
// and dO are there, when Pᵀ and dSᵀ are, and when all have read Q and dO, so that those of the next step may come.
//
// Invariant: all threads of a block take the same steps, so all meet at every barrier.
#pragma once
#include "backward.cuh"

namespace cadre::portable {

// D[16 × Columns] += A·B along Depth rows of two tiles: A has them as columns, transposed by the load if TA, B as rows.
template <int Depth, int Columns, bool TA>
DEVICE void multiply_down(float* d, uint32_t a, uint32_t a_step, uint32_t b, uint32_t b_step) {
#pragma unroll
    for (int i = 0; i < Depth / 16; ++i) {
        uint32_t words[4];
        if constexpr (TA) {
            ptx::load_transposed<1>(words, a + i * a_step, 0);
        } else {
            ptx::load_matrices<1>(words, a + i * a_step, 0);
        }
#pragma unroll
        for (int c = 0; c < Columns / 32; ++c) {
            uint32_t columns[8];
            ptx::load_transposed<2>(columns, b + i * b_step + c * 64, 32);
            ptx::multiply<2>(d + 16 * c, words, columns);
        }
    }
}

// D[16 × Rows] = A·Bᵀ along the rows of two tiles of D numbers.
template <int D, int Rows>
DEVICE void multiply_across(float (&d)[Rows / 2], uint32_t a, uint32_t b) {
#pragma unroll
    for (int i = 0; i < Rows / 2; ++i) d[i] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        uint32_t words[4], rows[Rows / 4];
        ptx::load_matrices<1>(words, a + i * 32, 0);
        ptx::load_matrices<Rows / 16>(rows, b + i * 32, 16 * kPitch<D>);
        ptx::multiply<Rows / 16>(d, words, rows);
    }
}

// A fragment of 16 keys into a tile whose rows are keys.
template <int N>
DEVICE void store_scores(uint32_t to, int pitch, const uint32_t (&words)[N]) {
    const int lane = threadIdx.x & 31;
    const uint32_t first = to + lane / 4 * pitch + (lane & 3) * 4;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
        ptx::store_word(first + j * 16, words[2 * j]), ptx::store_word(first + 8 * pitch + j * 16, words[2 * j + 1]);
    }
}

// One step of a warp up to Pᵀ and dSᵀ in shared memory.
template <int D, class Cap, class Mask>
DEVICE void score_step(const BackwardParameters& p, const typename Backward<D>::Shared& shared,
                       const BackwardStep& step, int key, uint32_t k, uint32_t v, uint32_t q, uint32_t dout,
                       uint32_t prob_to, uint32_t ds_to, int first_row) {
    using B = Backward<D>;
    constexpr int kScores = B::kScoreRows / 2;
    float s[kScores], dp[kScores];
    uint32_t prob[kScores / 2], ds[kScores / 2];  // with softcap ds holds slopes first
    multiply_across<D, B::kScoreRows>(s, k, q);
    if constexpr (Cap::capped) {
        to_capped_probabilities<Mask>(s, prob, ds, shared.lse + first_row, p, step, first_row, key);
    } else {
        to_probabilities<Mask>(s, shared.lse + first_row, p.scale_log2, step, first_row, key);
        round_scores(s, prob);
    }
    store_scores(prob_to, B::kScorePitch, prob);
    multiply_across<D, B::kScoreRows>(dp, v, dout);
    if constexpr (Cap::capped) {
        to_capped_gradients(dp, ds, shared.delta + first_row);
    } else {
        to_score_gradients(dp, s, shared.delta + first_row);
    }
    round_scores(dp, ds);
    store_scores(ds_to, B::kScorePitch, ds);
}

template <int D, class Cap>
DEVICE void backward(const BackwardParameters& p, const Tensor& q, const Tensor& dout, const Tensor& k,
                     const Tensor& v) {
    using B = Backward<D>;
    typename B::Shared& shared = *reinterpret_cast<typename B::Shared*>(ptx::dynamic_shared());
    const uint32_t at_k = ptx::shared_address(shared.k), at_v = ptx::shared_address(shared.v),
                   at_q = ptx::shared_address(shared.q), at_dout = ptx::shared_address(shared.dout),
                   at_p = ptx::shared_address(shared.p), at_ds = ptx::shared_address(shared.ds);
    const int warp = ptx::warp_uniform(threadIdx.x / 32), lane = threadIdx.x & 31;
    const int own_keys = warp % (B::kKeys / 16) * 16, part = warp / (B::kKeys / 16);
    const int own_rows = warp % (B::kRows / 16) * 16, query_part = warp / (B::kRows / 16);
    const uint32_t key_rows = own_keys * kPitch<D> + by_rows(kPitch<D>);
    const uint32_t query_rows = part * B::kScoreRows * kPitch<D> + by_columns(kPitch<D>);
    const uint32_t down_columns = part * B::kColumns * 2 + by_rows(kPitch<D>);
    const uint32_t own_scores = own_keys * B::kScorePitch, stored = own_scores + part * B::kScoreRows * 2;
#pragma unroll 1
    for (;;) {
        const int claimed = claim_for_block(p.next, &shared.tile);
        if ((uint32_t)claimed >= (uint32_t)p.tile_count) return;
        const BackwardTile tile = p.tiles[claimed];
        // By reference: registers are short.
        const Bundle& bundle = p.bundles[tile.bundle];
        const int kv_end = bundle.kv_offset + bundle.kv_rows, first_key = tile.key_tile * B::kKeys;
        const int key = first_key + own_keys + lane / 4;
        auto fetch_keys = [&](uint32_t to, const Tensor& from) {
            fetch_rows<B::kKeys, D, B::kThreads>(to, from, tile.kv_head, first_key, bundle.kv_offset, kv_end,
                                                 bundle.kv_row);
        };
        // Q, dO, LSE and Δ of a step; none after the last.
        auto fetch_queries = [&](const Walk<D>& at) {
            if (at.is_over()) return;
            fetch_rows<B::kRows, D, B::kThreads>(at_q, q, at.head, at.position(), at.q_begin, at.q_end, at.q_row);
            fetch_rows<B::kRows, D, B::kThreads>(at_dout, dout, at.head, at.position(), at.q_begin, at.q_end, at.q_row);
            ptx::copies_commit();
        };
        auto keep_sums = [&](const RowSums& sums) {
            if (threadIdx.x < B::kRows) shared.lse[threadIdx.x] = sums.lse, shared.delta[threadIdx.x] = sums.delta;
        };
        Walk<D> now(p, tile);
        fetch_keys(at_k, k), fetch_keys(at_v, v);
        ptx::copies_commit();
        fetch_queries(now);
        keep_sums(row_sums(p, now));
        float dk[B::kColumns / 2], dv[B::kColumns / 2];
#pragma unroll
        for (int i = 0; i < B::kColumns / 2; ++i) dk[i] = dv[i] = 0.f;
#pragma unroll 1
        while (!now.is_over()) {
            ptx::copies_wait();
            ptx::sync_threads();  // Q and dO are there, and all have read dSᵀ of the step before
            const BackwardStep step{0,          now.position(), now.q_begin, now.q_end - 1, bundle.kv_offset,
                                    kv_end - 1, now.left,       now.right};
            auto score = [&](auto mask) {
                score_step<D, Cap, decltype(mask)>(p, shared, step, key, at_k + key_rows, at_v + key_rows,
                                                   at_q + query_rows, at_dout + query_rows, at_p + stored,
                                                   at_ds + stored, part * B::kScoreRows);
            };
            if (now.is_full()) {
                score(Unmasked{});
            } else {
                score(Masked{});
            }
            ptx::sync_threads();  // Pᵀ and dSᵀ are there
            const uint32_t across_scores = own_scores + by_rows(B::kScorePitch);
            multiply_down<B::kRows, B::kColumns, false>(dv, at_p + across_scores, 32, at_dout + down_columns,
                                                        16 * kPitch<D>);
            multiply_down<B::kRows, B::kColumns, false>(dk, at_ds + across_scores, 32, at_q + down_columns,
                                                        16 * kPitch<D>);
            ptx::sync_threads();  // all have read Q, dO, LSE and Δ
            const Addition addition = addition_of<D>(p, now, tile.key_tile, bundle.first_key_tile, q.dim);
            now.next(p, tile.key_tile);
            fetch_queries(now);
            const RowSums sums = row_sums(p, now);
            float dq[B::kQueryColumns / 2];
#pragma unroll
            for (int i = 0; i < B::kQueryColumns / 2; ++i) dq[i] = 0.f;
            multiply_down<B::kKeys, B::kQueryColumns, true>(
                dq, at_ds + own_rows * 2 + by_columns(B::kScorePitch), 16 * B::kScorePitch,
                at_k + query_part * B::kQueryColumns * 2 + by_rows(kPitch<D>), 16 * kPitch<D>);
            keep_sums(sums);
            add_dq<D>(addition, dq, q.dim);
        }
        ptx::copies_wait();
        const size_t stride = (size_t)p.kv_heads * k.dim;
        const int key_in_bundle = key - bundle.kv_offset, column = part * B::kColumns;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool held = key_in_bundle + 8 * r >= 0 && key_in_bundle + 8 * r < bundle.kv_rows;
            const ptrdiff_t first =
                (ptrdiff_t)(bundle.dkv_row + key_in_bundle) * (ptrdiff_t)stride + tile.kv_head * k.dim + column;
            write_gradient(p.dk + first, stride, dk, p.scale, held, r, k.dim - column);
            write_gradient(p.dv + first, stride, dv, 1.f, held, r, k.dim - column);
        }
    }
}

}  // namespace cadre::portable
