// Core attention, backward, on any GPU from sm_80 on: formulas, tables, results and bounds are those of
// ../backward.cuh.
//
// In, bf16: Q, dO, K, V as there, through addresses instead of tensor maps; head dims are any multiple of 8 up to the
// kernel's D (64, 128 or 256), with zeros in shared memory behind them. Out: as there; sums of dQ in the same order.
//
// Launch: any grid; blocks claim key tiles in list order. A block keeps K and V of its key tile and goes over all tasks
// of the bundle, all their query tiles and all query heads of the KV head, in the order of ../backward.cuh. kShare
// warps share 16 keys: of Sᵀ and dPᵀ each computes a part of the rows, of dK and dV a part of the columns. Pᵀ and dSᵀ
// go through shared memory, where dSᵀ is also A of dQ = dS·K. Q and dO of the next step come while dQ is computed. With
// D 256 a step is half of a query tile.
//
// dQ leaves by additions to global memory; with `turns` in the order of key tiles, of which one turn a half of the
// query tile is used (two with D 256). A block only ever waits for key tiles that are earlier in the list, so all end.
//
// Shared memory: D 64 91 KiB (128 keys), D 128 87 KiB (64), D 256 72 KiB (32): GPUs whose blocks have 99 KiB run all.
// Share of peak on a GPU: not measured.
#pragma once
#include "../gradient.cuh"
#include "rows.cuh"

namespace cadre::portable {

template <int D>
struct Backward {
    static constexpr int kTileRows = 64;               // of a tile of dQ
    static constexpr int kRows = D == 256 ? 32 : 64;   // of a step
    static constexpr int kHalves = kTileRows / kRows;  // steps of a tile
    static constexpr int kKeys = D == 64 ? 128 : D == 128 ? 64 : 32;
    static constexpr int kWarps = D == 256 ? 4 : 8;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kShare = kWarps / (kKeys / 16);       // warps that share 16 keys
    static constexpr int kScoreRows = kRows / kShare;          // a warp's, of Sᵀ and dPᵀ
    static constexpr int kColumns = D / kShare;                // a warp's, of dK and dV
    static constexpr int kQueryShare = kWarps / (kRows / 16);  // warps that share 16 rows of dQ
    static constexpr int kQueryColumns = D / kQueryShare;      // a warp's, of dQ
    static constexpr int kScorePitch = 2 * kRows + 16;         // bytes from key to key
    struct Shared {
        alignas(16) uint8_t k[kKeys * kPitch<D>];
        uint8_t v[kKeys * kPitch<D>], q[kRows * kPitch<D>], dout[kRows * kPitch<D>];
        uint8_t p[kKeys * kScorePitch], ds[kKeys * kScorePitch];  // Pᵀ and dSᵀ, a row a key
        float lse[kRows], delta[kRows];                           // log2 units; +∞ for rows without a part in this
        int tile;
    };
    static_assert(sizeof(Shared) <= 99 * 1024, "a block of sm_86, sm_89 and sm_120 has 99 KiB of shared memory");
    static_assert(kScoreRows % 16 == 0 && kColumns % 32 == 0 && kQueryColumns % 32 == 0, "whole loads of matrices");
};

// The steps of a key tile, one after the other: rows from the last to the first, the heads of a tile of rows together.
template <int D>
struct Walk {
    int task, head, half, m, first_task, first_head, last_head;
    Tiles range;
    int q_row, q_begin, q_end, left, right, dq_tile;  // of the task

    DEVICE Walk(const BackwardParameters& p, const BackwardTile& tile) {
        const Bundle& bundle = p.bundles[tile.bundle];
        first_task = bundle.first_task, task = first_task + bundle.tasks;
        first_head = tile.kv_head * p.group, last_head = first_head + p.group - 1;
        range = {0, 0, 0, 0};
        head = last_head, half = 0, m = 0;
        next(p, tile.key_tile);
    }
    DEVICE bool is_over() const { return task < first_task; }
    DEVICE void next(const BackwardParameters& p, int key_tile) {
        if (half-- > 0) return;
        half = Backward<D>::kHalves - 1;
        if (head++ < last_head) return;
        head = first_head;
        if (--m >= range.begin) return;
        while (--task >= first_task) {
            const Task& it = p.tasks[task];
            range = query_tiles<Backward<D>::kTileRows, Backward<D>::kKeys>(it, key_tile);
            q_row = it.q_row, q_begin = it.q_offset, q_end = q_begin + it.q_rows;
            left = it.left, right = it.right, dq_tile = it.dq_tile;
            m = range.end - 1;
            if (m >= range.begin) return;
        }
    }
    DEVICE int position() const { return m * Backward<D>::kTileRows + half * Backward<D>::kRows; }
    DEVICE bool is_full() const { return m >= range.full_begin && m < range.full_end; }
};

// LSE and Δ of a thread's row of a step.
struct RowSums {
    float lse, delta;
};
template <int D>
DEVICE RowSums row_sums(const BackwardParameters& p, const Walk<D>& at) {
    const int position = at.position() + (int)threadIdx.x;
    RowSums sums{ptx::infinity(), 0.f};
    if ((int)threadIdx.x >= Backward<D>::kRows || at.is_over() || position < at.q_begin || position >= at.q_end) {
        return sums;
    }
    const size_t row = (size_t)(uint32_t)(at.q_row + position - at.q_begin) * p.heads + at.head;
    const float lse = p.lse[row];
    if (lse != -ptx::infinity()) sums = {lse * 1.44269504089f, p.delta[row]};
    return sums;
}

// Where dQ of a step goes, and when.
struct Addition {
    float* sums;     // of the tile
    uint32_t* turn;  // null: at once
    uint32_t mine;
    int half;
};
template <int D>
DEVICE Addition addition_of(const BackwardParameters& p, const Walk<D>& at, int key_tile, int first_tile, int dim) {
    using B = Backward<D>;
    const size_t tile = (size_t)(at.dq_tile + at.m - at.q_begin / B::kTileRows) * p.heads + at.head;
    Addition it{p.dq + tile * (B::kTileRows * dim), nullptr, 0, at.half};
    if (p.turns) {
        const int first = key_tiles<B::kTileRows, B::kKeys>(p.tasks[at.task], at.m, 0, kUnbounded).begin;
        it.turn = p.turns + 2 * tile + at.half, it.mine = (uint32_t)(key_tile - most(first, first_tile));
    }
    return it;
}

// Adds a warp's part of dQ to the sums: in its turn, if there are turns. All threads of the block.
template <int D>
DEVICE void add_dq(const Addition& it, const float* dq, int dim) {
    using B = Backward<D>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    if (it.turn) {
        if (threadIdx.x == 0) ptx::await_turn(it.turn, it.mine);
        ptx::sync_threads();
    }
    const int rows = it.half * B::kRows / 16 + warp % (B::kRows / 16);
    const int first = warp / (B::kRows / 16) * B::kQueryColumns;
    float* to = it.sums + ((first / 8) * 128 + rows * 32 + lane) * 4;
#pragma unroll
    for (int j = 0; j < B::kQueryColumns / 8; ++j) {
        if (first + 8 * j < dim) ptx::add_numbers(to + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
    if (it.turn) {
        ptx::adds_done();
        ptx::sync_threads();
        if (threadIdx.x == 0) ptx::end_turn(it.turn);
    }
}

}  // namespace cadre::portable
