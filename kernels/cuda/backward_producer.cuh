// What warpgroup 0 of the backward kernel does: tiles in by TMA, LSE and Δ in by hand, dQ out by bulk addition.
//
// In: the tables and tensors of backward.cuh. Out: full stages and what their steps are; sums of dQ in global memory.
// All three warps walk the same steps (`backward_walk`); the computing warpgroups follow what `backward_fetch` says.
//
// Invariant: a row of LSE that no task holds, or that is −∞, comes as +∞, so that its P is exactly 0; its Δ comes as 0.
#pragma once
#include "backward.cuh"

namespace cadre {

template <int D>
DEVICE void backward_load(const BackwardParameters& p, typename Backward<D>::Shared& shared,
                          const ptx::TensorMap& q_map, const ptx::TensorMap& dout_map, const ptx::TensorMap& k_map,
                          const ptx::TensorMap& v_map) {
    using B = Backward<D>;
    const BackwardAddresses<D> at(shared);
    ptx::prefetch(q_map), ptx::prefetch(dout_map), ptx::prefetch(k_map), ptx::prefetch(v_map);
    Ring<1> tiles;
    Ring<B::kStages> queries;
    Ring<B::kOutStages> outs;
#pragma unroll 1
    for (;; tiles.next()) {
        const uint32_t claimed = ptx::claim(p.next);
        const bool some = claimed < (uint32_t)p.tile_count;
        ptx::barrier_wait(at.kv_empty, tiles.empty());
        shared.tile = some ? (int)claimed : -1;
        if (!some) {
            ptx::barrier_arrive(at.kv_full);
            return;
        }
        const BackwardTile tile = p.tiles[claimed];
        const Bundle bundle = p.bundles[tile.bundle];
        const int kv_row = bundle.kv_row + tile.key_tile * B::kKeys - bundle.kv_offset;
        ptx::barrier_arrive_expect(at.kv_full, 2 * B::kKeyBytes);
        load_tile<B::kKeys, D>(at.k, k_map, at.kv_full, tile.kv_head, kv_row);
        load_tile<B::kKeys, D>(at.v, v_map, at.kv_full, tile.kv_head, kv_row);
        auto first_row = [](const Task& task, const Tiles&, int m) {
            return task.q_row + m * B::kRows - task.q_offset;
        };
        backward_walk<D>(p, tile, first_row, [&](int row, int head) {
            const uint32_t q_full = barrier_of(at.q_full, queries.stage());
            const uint32_t dout_full = barrier_of(at.dout_full, outs.stage());
            ptx::barrier_wait(barrier_of(at.q_empty, queries.stage()), queries.empty());
            ptx::barrier_arrive_expect(q_full, B::kQueryBytes);
            load_tile<B::kRows, D>(at.q + queries.stage() * B::kQueryBytes, q_map, q_full, head, row);
            ptx::barrier_wait(barrier_of(at.dout_empty, outs.stage()), outs.empty());
            ptx::barrier_arrive_expect(dout_full, B::kQueryBytes);
            load_tile<B::kRows, D>(at.dout + outs.stage() * B::kQueryBytes, dout_map, dout_full, head, row);
            queries.next(), outs.next();
        });
        ptx::barrier_wait(barrier_of(at.q_empty, queries.stage()), queries.empty());
        ptx::barrier_arrive(barrier_of(at.q_full, queries.stage()));
        queries.next();
    }
}

// One warp: waits for the next tile as the computing warps do and returns its number, −1 after the last.
template <int D>
DEVICE int backward_next_tile(const BackwardAddresses<D>& at, typename Backward<D>::Shared& shared, Ring<1>& tiles) {
    ptx::barrier_wait(at.kv_full, tiles.full());
    const int claimed = ptx::warp_uniform(shared.tile);
    release(at.kv_empty);
    tiles.next();
    return claimed;
}

// What a lane of `backward_fetch` knows of a tile of rows.
struct FetchedRows {
    int row[2];  // of LSE and Δ, below 0 where the task holds none
    int word;    // the lane's word of BackwardStep
};

template <int D>
DEVICE FetchedRows backward_rows(const Task& task, const Tiles& range, int m, int lane) {
    const bool full = m >= range.full_begin && m < range.full_end;
    FetchedRows rows;
    const int first = m * Backward<D>::kRows + lane - task.q_offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + half * 32;
        rows.row[half] = row >= 0 && row < task.q_rows ? task.q_row + row : -1;
    }
    rows.word = full ? BackwardStep::kFull : BackwardStep::kMasked;
    if (lane == 1) rows.word = m * Backward<D>::kRows;
    if (lane == 2) rows.word = task.q_offset;
    if (lane == 3) rows.word = task.q_offset + task.q_rows - 1;
    if (lane == 4) rows.word = task.kv_offset;
    if (lane == 5) rows.word = task.kv_offset + task.kv_rows - 1;
    if (lane == 6) rows.word = task.left;
    if (lane == 7) rows.word = task.right;
    return rows;
}

template <int D>
DEVICE void backward_fetch(const BackwardParameters& p, typename Backward<D>::Shared& shared) {
    using B = Backward<D>;
    constexpr int kStepWords = sizeof(BackwardStep) / sizeof(int);
    const BackwardAddresses<D> at(shared);
    const int lane = threadIdx.x & 31;
    Ring<1> tiles;
    Ring<B::kStages> queries;
#pragma unroll 1
    for (;;) {
        const int claimed = backward_next_tile<D>(at, shared, tiles);
        if (claimed < 0) return;
        auto rows = [&](const Task& task, const Tiles& range, int m) { return backward_rows<D>(task, range, m, lane); };
        backward_walk<D>(p, p.tiles[claimed], rows, [&](const FetchedRows& rows, int head) {
            float lse[2], delta[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                lse[half] = -ptx::infinity(), delta[half] = 0.f;
                if (rows.row[half] >= 0) {
                    const uint64_t index = (uint64_t)(uint32_t)rows.row[half] * (uint32_t)p.heads + (uint32_t)head;
                    lse[half] = p.lse[index], delta[half] = p.delta[index];
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (lse[half] == -ptx::infinity()) lse[half] = ptx::infinity(), delta[half] = 0.f;
                lse[half] *= 1.44269504089f;
            }
            const uint32_t stage = queries.stage();
            ptx::barrier_wait(barrier_of(at.q_empty, stage), queries.empty());
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shared.lse[stage][half * 32 + lane] = lse[half], shared.delta[stage][half * 32 + lane] = delta[half];
            }
            if (lane < kStepWords) reinterpret_cast<int*>(&shared.step[stage])[lane] = rows.word;
            release(barrier_of(at.q_full, stage));
            queries.next();
        });
        ptx::barrier_wait(barrier_of(at.q_empty, queries.stage()), queries.empty());
        if (lane == 0) shared.step[queries.stage()].kind = BackwardStep::kEnd;
        release(barrier_of(at.q_full, queries.stage()));
        queries.next();
    }
}

// The first piece of a key tile is of no step, and zero.
DEVICE void backward_drop_dq(int group) {
    ptx::named_sync(kDqFull + group, kDqThreads);
    ptx::named_arrive(kDqEmpty + group, kDqThreads);
}

// One warp for each computing warpgroup: adds the warpgroup's half of dQ. On sm_90 waiting until the copy engine has
// read and waiting until it has added are one instruction, so a turn is passed as soon as the staging is free.
template <int D>
DEVICE void backward_add_dq(const BackwardParameters& p, typename Backward<D>::Shared& shared, int group) {
    using B = Backward<D>;
    constexpr int kBytes = B::kPieceNumbers * 4;
    const BackwardAddresses<D> at(shared);
    const uint32_t staging = at.dq + group * kBytes;
    const bool elected = ptx::elect();
    Ring<1> tiles;
    ptx::named_arrive(kDqEmpty + group, kDqThreads);
#pragma unroll 1
    for (;;) {
        const int claimed = backward_next_tile<D>(at, shared, tiles);
        if (claimed < 0) break;
        const BackwardTile tile = p.tiles[claimed];
        const int first_tile = p.bundles[tile.bundle].first_key_tile;
        // Number of the dQ tile under head 0, and the turn that is this key tile's.
        struct Rows {
            size_t tile;
            uint32_t turn;
        };
        auto rows = [&](const Task& task, const Tiles&, int m) {
            const int first = key_tiles<B::kRows, B::kKeys>(task, m, 0, kUnbounded).begin;
            return Rows{dq_index(p, task, m, 0), (uint32_t)(tile.key_tile - most(first, first_tile))};
        };
        [[maybe_unused]] bool begun = false;
        backward_walk<D>(p, tile, rows, [&](const Rows& rows, int head) {
            if constexpr (B::kLater) {
                if (!begun) backward_drop_dq(group), begun = true;
            }
            const size_t index = (rows.tile + head) * kConsumers + group;
            float* to = p.dq + index * (B::kRows * D / kConsumers);
            const bool ordered = elected && p.turns;
            if (ordered) ptx::wait_turn(p.turns + index, rows.turn);
            ptx::sync_warp();
#pragma unroll 1
            for (int piece = 0; piece < B::kPieces; ++piece) {
                ptx::named_sync(kDqFull + group, kDqThreads);
                if (elected) {
                    ptx::add_bulk(to + piece * B::kPieceNumbers, staging, kBytes);
                    ptx::bulk_commit();
                    ptx::bulk_wait_read();
                }
                ptx::sync_warp();
                ptx::named_arrive(kDqEmpty + group, kDqThreads);
            }
            if (ordered) {
                ptx::bulk_wait();
                ptx::pass_turn(p.turns + index);
            }
            ptx::sync_warp();
        });
    }
    if (elected) ptx::bulk_wait();
}

}  // namespace cadre
