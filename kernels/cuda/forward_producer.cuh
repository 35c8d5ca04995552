// What the loading thread of the forward kernel does; formulas, layouts and launch are in forward.cuh.
//
// In: the tile list. Out: full stages of Q, K and V, in the order in which the computing warpgroups use them.
// Everything it knows of a tile the others derive from the same tables; only the tile's number passes through shared
// memory.
#pragma once
#include "forward.cuh"

namespace cadre {

// One thread: claims tiles and loads what they need, as far ahead as there is room.
template <int D>
DEVICE void forward_load(const ForwardParameters& p, typename Forward<D>::Shared& shared, const ptx::TensorMap& q_map,
                         const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
    using F = Forward<D>;
    const ForwardAddresses<D> at(shared);
    ptx::prefetch(q_map), ptx::prefetch(k_map), ptx::prefetch(v_map);
    Ring<1> queries;
    Ring<F::kStages> keys;
#pragma unroll 1
    for (;; queries.next()) {
        const uint32_t claimed = ptx::claim(p.next);
        const bool some = claimed < (uint32_t)p.tile_count;
        ptx::barrier_wait(at.q_empty, queries.empty());
        shared.tile = some ? (int)claimed : -1;
        if (!some) {
            ptx::barrier_arrive(at.q_full);
            return;
        }
        const ForwardTile tile = p.tiles[claimed];
        const Task task = p.tasks[tile.task];
        const Tiles range = forward_keys<D>(p, task, tile);
        const int kv_head = tile.head / p.group;
        ptx::barrier_arrive_expect(at.q_full, F::kQueryBytes);
        load_tile<F::kRows, D>(at.q, q_map, at.q_full, tile.head, task.q_row + tile.q_tile * F::kRows - task.q_offset);
#pragma unroll 1
        for (int n = range.end - 1; n >= range.begin; --n, keys.next()) {
            const uint32_t stage = keys.stage();
            const int row = task.kv_row + n * F::kKeys - task.kv_offset;
            const uint32_t k_full = barrier_of(at.k_full, stage), v_full = barrier_of(at.v_full, stage);
            ptx::barrier_wait(barrier_of(at.k_empty, stage), keys.empty());
            ptx::barrier_arrive_expect(k_full, F::kKeyBytes);
            load_tile<F::kKeys, D>(at.k + stage * F::kKeyBytes, k_map, k_full, kv_head, row);
            ptx::barrier_wait(barrier_of(at.v_empty, stage), keys.empty());
            ptx::barrier_arrive_expect(v_full, F::kKeyBytes);
            load_tile<F::kKeys, D>(at.v + stage * F::kKeyBytes, v_map, v_full, kv_head, row);
        }
    }
}

}  // namespace cadre
