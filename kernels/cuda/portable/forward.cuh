// Core attention, forward, on any GPU from sm_80 on: formulas, tables, results and bounds are those of ../forward.cuh.
//
// In, bf16: Q, K, V as there, through addresses instead of tensor maps; head dims are any multiple of 8 up to the
// kernel's D (64, 128 or 256), with zeros in shared memory behind them. Out: as there; also parts for `merge`.
//
// Launch: any grid; blocks claim tiles in list order. A warp holds 16 rows, or twice 16 so that what it loads of K and
// V serves twice, multiplies by mma.sync and keeps S, P and O in registers. One buffer of K and one of V: V of a tile
// comes while its scores are computed, K of the next while P meets V. Shared memory: 128 rows of Q and twice kKeys
// rows, of 2·D + 16 bytes: 36 KiB (D 64, 64 keys), 51 KiB (D 128, 32), 99 KiB (D 256, 32), so that GPUs whose blocks
// have 99 KiB run all.
//
// Order of keys, masks and what is exactly 0 are as in ../forward.cuh, so a row's bits depend on its document alone;
// they are not those of the Hopper kernels, whose tiles and products are others. Share of peak on a GPU: not measured.
#pragma once
#include "../softmax.cuh"
#include "rows.cuh"

namespace cadre::portable {

template <int D>
struct Forward {
    static constexpr int kRows = kForwardRows;
    static constexpr int kKeys = D == 64 ? 64 : 32;
    static constexpr int kWarps = D == 256 ? 8 : 4;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kFragments = kRows / 16 / kWarps;  // 16 rows each
    static_assert(kFragments == 1 || kFragments == 2, "the end of a tile writes one or two");
    struct Shared {
        alignas(16) uint8_t q[kRows * kPitch<D>];
        uint8_t k[kKeys * kPitch<D>];
        uint8_t v[kKeys * kPitch<D> - 16];  // nobody reads what is behind the last row
        int tile;
    };
    static_assert(sizeof(Shared) <= 99 * 1024, "a block of sm_86, sm_89 and sm_120 has 99 KiB of shared memory");
};

template <int D, class Cap>
DEVICE void forward(const ForwardParameters& p, const Tensor& q, const Tensor& k, const Tensor& v) {
    using F = Forward<D>;
    constexpr int kFragments = F::kFragments, kScores = F::kKeys / 2;
    typename F::Shared& shared = *reinterpret_cast<typename F::Shared*>(ptx::dynamic_shared());
    const uint32_t at_q = ptx::shared_address(shared.q), at_k = ptx::shared_address(shared.k),
                   at_v = ptx::shared_address(shared.v);
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const uint32_t own_q = at_q + warp * 16 * kPitch<D> + by_rows(kPitch<D>), across_k = at_k + by_columns(kPitch<D>),
                   down_v = at_v + by_rows(kPitch<D>);
    constexpr uint32_t kNextFragment = F::kWarps * 16 * kPitch<D>;
#pragma unroll 1
    for (;;) {
        const int claimed = claim_for_block(p.next, &shared.tile);
        if ((uint32_t)claimed >= (uint32_t)p.tile_count) return;
        // By reference: what the end needs is read again there, registers are short until then.
        const ForwardTile& tile = p.tiles[claimed];
        const Task& task = p.tasks[tile.task];
        const int kv_begin = task.kv_offset, kv_end = kv_begin + task.kv_rows, kv_row = task.kv_row;
        const int kv_head = tile.head / p.group, segment = tile.segment * p.segment_rows;
        const Tiles range = key_tiles<F::kRows, F::kKeys>(task, tile.q_tile, segment, segment + p.segment_rows);
        Softmax softmax[kFragments];
        float o[kFragments][D / 2];
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
            softmax[m].begin(task, tile.q_tile * F::kRows + (m * F::kWarps + warp) * 16 + lane / 4);
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[m][i] = 0.f;
        }
        auto fetch = [&](uint32_t to, const Tensor& from, int n) {
            fetch_rows<F::kKeys, D, F::kThreads>(to, from, kv_head, n * F::kKeys, kv_begin, kv_end, kv_row);
            ptx::copies_commit();
        };
        int n = range.end - 1;
        if (n >= range.begin) {
            fetch_rows<F::kRows, D, F::kThreads>(at_q, q, tile.head, tile.q_tile * F::kRows, task.q_offset,
                                                 task.q_offset + task.q_rows, task.q_row);
            fetch(at_k, k, n);
        }
        auto step = [&](auto mask) INLINE {
            ptx::copies_wait();
            ptx::sync_threads();  // K is there, and all have read V of the tile before
            fetch(at_v, v, n);
            float s[kFragments][kScores];
#pragma unroll
            for (int m = 0; m < kFragments; ++m) {
#pragma unroll
                for (int i = 0; i < kScores; ++i) s[m][i] = 0.f;
            }
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                uint32_t keys[F::kKeys / 4];
                ptx::load_matrices<F::kKeys / 16>(keys, across_k + i * 32, 16 * kPitch<D>);
#pragma unroll
                for (int m = 0; m < kFragments; ++m) {
                    uint32_t rows[4];
                    ptx::load_matrices<1>(rows, own_q + m * kNextFragment + i * 32, 0);
                    ptx::multiply<F::kKeys / 16>(s[m], rows, keys);
                }
            }
#pragma unroll
            for (int m = 0; m < kFragments; ++m) {
                if constexpr (Cap::capped) cap_scores(s[m], p.inner_scale);
                softmax[m].template step<decltype(mask)>(s[m], p.scale_log2, n * F::kKeys);
#pragma unroll
                for (int i = 0; i < D / 2; ++i) o[m][i] *= softmax[m].rescale[i >> 1 & 1];
            }
            ptx::copies_wait();
            ptx::sync_threads();  // V is there, and all have read K
            if (n > range.begin) fetch(at_k, k, n - 1);
            uint32_t prob[kFragments][kScores / 2];
#pragma unroll
            for (int m = 0; m < kFragments; ++m) round_scores(s[m], prob[m]);
#pragma unroll
            for (int i = 0; i < F::kKeys / 16; ++i) {
#pragma unroll
                for (int c = 0; c < D / 64; ++c) {  // 64 columns at a time: registers
                    uint32_t values[16];
                    ptx::load_transposed<4>(values, down_v + i * 16 * kPitch<D> + c * 128, 32);
#pragma unroll
                    for (int m = 0; m < kFragments; ++m) ptx::multiply<4>(&o[m][32 * c], &prob[m][4 * i], values);
                }
            }
        };
#pragma unroll 1
        for (int masked_end = range.full_end;; masked_end = range.begin) {
#pragma unroll 1
            for (; n >= masked_end; --n) step(Masked{});
            if (n < range.begin) break;
#pragma unroll 1
            for (; n >= range.full_begin; --n) step(Unmasked{});
        }
        const int row = warp * 16 + lane / 4;
        forward_write<D>(p, task, tile, softmax[0], o[0], row, q.dim);
        if constexpr (kFragments == 2) {
            forward_write<D>(p, task, tile, softmax[1], o[1], F::kWarps * 16 + row, q.dim);
        }
    }
}

}  // namespace cadre::portable
