// Kernels that move rows and do little arithmetic: merge of key segments.
//
// merge: O = Σ w_i·O_i and LSE of a query tile from the parts that `forward` wrote for its key segments, keys ascending,
//   w_i = exp(LSE_i − LSE); a part without keys weighs exactly 0, one part alone exactly 1. In: part_o f32 [slot, 128, dim],
//   part_lse f32 [slot, 128]. Out: O bf16 [q rows, heads, dim], LSE f32 [q rows, heads]; a row without keys O = 0, LSE = −∞.
//
// Launch: any grid of 256 threads; no shared memory. dim is a multiple of 8. Bound by memory.
#pragma once
#include "table.cuh"

namespace cadre {

constexpr int kRowThreads = 256;

struct MergeParameters {
    const Task* tasks;
    const MergeTile* tiles;
    int tile_count, heads, dim;
    const float* part_o;
    const float* part_lse;
    uint16_t* o;
    float* lse;
};

// A warp takes a row at a time.
DEVICE void merge(const MergeParameters& p) {
    constexpr int kRows = 128, kWarps = kRowThreads / 32;
    const int lane = threadIdx.x & 31;
    for (int unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < p.tile_count * kRows; unit += gridDim.x * kWarps) {
        const MergeTile tile = p.tiles[unit / kRows];
        const Task task = p.tasks[tile.task];
        const int in_tile = unit % kRows, in_task = tile.q_tile * kRows + in_tile - task.q_offset;
        if (in_task < 0 || in_task >= task.q_rows) continue;
        const size_t first = (size_t)tile.first_slot * kRows + in_tile;
        float largest = -ptx::infinity(), sum = 0.f;
        for (int s = 0; s < tile.slots; ++s) largest = fmaxf(largest, p.part_lse[first + s * kRows]);
        const float base = largest == -ptx::infinity() ? 0.f : largest;
        for (int s = 0; s < tile.slots; ++s) sum += ptx::exp2((p.part_lse[first + s * kRows] - base) * 1.44269504089f);
        const float lse = sum == 0.f ? -ptx::infinity() : base + ptx::log2(sum) * 0.69314718056f;
        const size_t row = (size_t)(task.q_row + in_task) * p.heads + tile.head;
        if (lane == 0) p.lse[row] = lse;
        for (int column = lane * 4; column < p.dim; column += 128) {
            float total[4] = {0.f, 0.f, 0.f, 0.f};
            for (int s = 0; s < tile.slots; ++s) {
                const float weight = ptx::exp2((p.part_lse[first + s * kRows] - base) * 1.44269504089f);
                const float4 part = *reinterpret_cast<const float4*>(p.part_o + (first + s * kRows) * p.dim + column);
                total[0] += weight * part.x, total[1] += weight * part.y;
                total[2] += weight * part.z, total[3] += weight * part.w;
            }
            const float factor = sum == 0.f ? 0.f : 1.f / sum;
            *reinterpret_cast<uint2*>(p.o + row * p.dim + column) =
                make_uint2(ptx::pack_bf16(total[0] * factor, total[1] * factor), ptx::pack_bf16(total[2] * factor, total[3] * factor));
        }
    }
}

}  // namespace cadre
