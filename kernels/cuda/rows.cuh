// Kernels that move rows and do little arithmetic: merge of key segments, the end of dQ, sinks, gather and pack.
//
// merge: O = Σ w_i·O_i and LSE of a query tile from the parts that `forward` wrote for its key segments, keys
// ascending,
//   w_i = exp(LSE_i − LSE); a part without keys weighs exactly 0, one part alone exactly 1. In: part_o f32 [slot, rows,
//   dim], part_lse f32 [slot, rows], rows being those of a forward tile. Out: O bf16 [q rows, heads, dim], LSE f32 [q
//   rows, heads]; a row without keys O =
//   0, LSE = −∞.
//
// finish_dq: dQ = scale · the sums that `backward` left, from the order of fragments into rows. In: dq f32, tiles of 64
// rows × dim,
//   [dq tile, heads, …]. Out: f32 or bf16 [q rows, heads, dim], rows of the listed tiles that their task holds; the
//   sums are zero again, ready for the next launch.
//
// sink: a number of each head that takes part in the sums as a key without a value,
//   LSE′ = ln(exp(LSE) + exp(s_head)), O′ = exp(LSE − LSE′)·O. In place: O bf16 [q rows, heads, dim], LSE f32 [q rows,
//   heads], of the listed tiles of 64 rows that their task holds. Sinks f32 [heads], −∞ for none; a row without keys
//   has O′ = 0, LSE′ = s. O is rounded to bf16 twice. Backward wants LSE′ and Δ of O′ and is then right as it is.
//
// copy_rows: pieces of rows from anywhere to anywhere: gathers what was pulled into the rows of a launch, and packs
// results for
//   who pulls them. In: a list of copies, in words of 16 or 4 bytes, addresses aligned to them; sources and targets do
//   not overlap.
//
// Launch: any grid of 256 threads; no shared memory. dim is a multiple of 8; tensors 16-byte aligned, LSE and sinks 4.
// Bound by memory. Numerics: f32, copies exact; what is written as bf16 is rounded to nearest. Tolerance against f64:
// that of the pass it belongs to (forward.cuh, backward.cuh). Share of memory's rate on a GPU: not measured.
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
    constexpr int kWarps = kRowThreads / 32;
    const int rows = tile_rows(p.dim), lane = threadIdx.x & 31;
    for (int unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < p.tile_count * rows; unit += gridDim.x * kWarps) {
        const MergeTile tile = p.tiles[unit / rows];
        const Task task = p.tasks[tile.task];
        const int in_tile = unit % rows, in_task = tile.q_tile * rows + in_tile - task.q_offset;
        if (in_task < 0 || in_task >= task.q_rows) continue;
        const size_t first = (size_t)tile.first_slot * rows + in_tile;
        float largest = -ptx::infinity(), sum = 0.f;
        for (int s = 0; s < tile.slots; ++s) largest = fmaxf(largest, p.part_lse[first + s * rows]);
        const float base = largest == -ptx::infinity() ? 0.f : largest;
        for (int s = 0; s < tile.slots; ++s) sum += ptx::exp2((p.part_lse[first + s * rows] - base) * 1.44269504089f);
        const float lse = sum == 0.f ? -ptx::infinity() : base + ptx::log2(sum) * 0.69314718056f;
        const size_t row = (size_t)(task.q_row + in_task) * p.heads + tile.head;
        if (lane == 0) p.lse[row] = lse;
        for (int column = lane * 4; column < p.dim; column += 128) {
            float total[4] = {0.f, 0.f, 0.f, 0.f};
            for (int s = 0; s < tile.slots; ++s) {
                const float weight = ptx::exp2((p.part_lse[first + s * rows] - base) * 1.44269504089f);
                const float4 part = *reinterpret_cast<const float4*>(p.part_o + (first + s * rows) * p.dim + column);
                total[0] += weight * part.x, total[1] += weight * part.y;
                total[2] += weight * part.z, total[3] += weight * part.w;
            }
            const float factor = sum == 0.f ? 0.f : 1.f / sum;
            *reinterpret_cast<uint2*>(p.o + row * p.dim + column) =
                make_uint2(ptx::pack_bf16(total[0] * factor, total[1] * factor),
                           ptx::pack_bf16(total[2] * factor, total[3] * factor));
        }
    }
}

// One unit of `finish_dq`, all heads: a tile of 64 rows of a task.
struct QueryTile {
    int task, q_tile;
};

struct FinishParameters {
    const Task* tasks;
    const QueryTile* tiles;
    int tile_count, heads, dim;
    float scale;
    float* sums;
    float* dq;          // this or
    uint16_t* dq_bf16;  // that is null
};

// A block takes a tile and head at a time, a thread four numbers of it: two rows, two columns.
DEVICE void finish_dq(const FinishParameters& p) {
    // A piece is 64 rows × 32 (dim 64) or 64 columns.
    const int columns = p.dim == 64 ? 32 : 64;
    for (int unit = blockIdx.x; unit < p.tile_count * p.heads; unit += gridDim.x) {
        const QueryTile tile = p.tiles[unit / p.heads];
        const Task task = p.tasks[tile.task];
        const int head = unit % p.heads;
        float4* sums = reinterpret_cast<float4*>(
            p.sums + ((size_t)(task.dq_tile + tile.q_tile - task.q_offset / 64) * p.heads + head) * 64 * p.dim);
        for (int i = threadIdx.x; i < 16 * p.dim; i += kRowThreads) {
            const float4 sum = sums[i];
            sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            const int thread = i % 128, block = i / 128, lane = thread & 31;
            const int column = block / (columns / 8) * columns + block % (columns / 8) * 8 + (lane & 3) * 2;
            const int first = tile.q_tile * 64 + thread / 32 * 16 + lane / 4 - task.q_offset;
            for (int r = 0; r < 2; ++r) {
                const int row = first + 8 * r;
                if (row < 0 || row >= task.q_rows) continue;
                const float a = (r ? sum.z : sum.x) * p.scale, b = (r ? sum.w : sum.y) * p.scale;
                const size_t at = ((size_t)(task.q_row + row) * p.heads + head) * p.dim + column;
                if (p.dq) *reinterpret_cast<float2*>(p.dq + at) = make_float2(a, b);
                if (p.dq_bf16) *reinterpret_cast<uint32_t*>(p.dq_bf16 + at) = ptx::pack_bf16(a, b);
            }
        }
    }
}

struct SinkParameters {
    const Task* tasks;
    const QueryTile* tiles;
    int tile_count, heads, dim;
    const float* sinks;
    uint16_t* o;
    float* lse;
};

// A warp takes a row of a head at a time.
DEVICE void sink(const SinkParameters& p) {
    constexpr int kRows = 64, kWarps = kRowThreads / 32;
    const int lane = threadIdx.x & 31, per_tile = kRows * p.heads;
    for (int unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < p.tile_count * per_tile;
         unit += gridDim.x * kWarps) {
        const QueryTile tile = p.tiles[unit / per_tile];
        const Task task = p.tasks[tile.task];
        const int head = unit % p.heads, in_tile = unit % per_tile / p.heads;
        const int in_task = tile.q_tile * kRows + in_tile - task.q_offset;
        if (in_task < 0 || in_task >= task.q_rows) continue;
        const size_t row = (size_t)(task.q_row + in_task) * p.heads + head;
        const float before = p.lse[row], other = p.sinks[head], largest = fmaxf(before, other);
        const bool nothing = largest == -ptx::infinity();
        const float base = nothing ? 0.f : largest;
        const float sum = ptx::exp2((before - base) * 1.44269504089f) + ptx::exp2((other - base) * 1.44269504089f);
        const float after = nothing ? -ptx::infinity() : base + ptx::log2(sum) * 0.69314718056f;
        const float factor = nothing ? 0.f : ptx::exp2((before - after) * 1.44269504089f);
        // All lanes have read the row's LSE before one writes it.
        ptx::sync_warp();
        if (lane == 0) p.lse[row] = after;
        for (int column = lane * 2; column < p.dim; column += 64) {
            uint32_t* pair = reinterpret_cast<uint32_t*>(p.o + row * p.dim + column);
            const float2 numbers = ptx::unpack_bf16(*pair);
            *pair = ptx::pack_bf16(numbers.x * factor, numbers.y * factor);
        }
    }
}

// `rows` rows of `words` words; strides in words. Long copies are cut by the host: a block does one at a time.
template <class Word>
struct RowCopy {
    const Word* from;
    Word* to;
    int rows, words, from_stride, to_stride;
};

template <class Word>
struct CopyParameters {
    const RowCopy<Word>* copies;
    int copy_count;
};
using Copy16Parameters = CopyParameters<uint4>;
using Copy4Parameters = CopyParameters<uint32_t>;

template <class Word>
DEVICE void copy_rows(const CopyParameters<Word>& p) {
    for (int unit = blockIdx.x; unit < p.copy_count; unit += gridDim.x) {
        const RowCopy<Word> copy = p.copies[unit];
        for (int i = threadIdx.x; i < copy.rows * copy.words; i += kRowThreads) {
            const int row = i / copy.words, word = i % copy.words;
            copy.to[(size_t)row * copy.to_stride + word] = copy.from[(size_t)row * copy.from_stride + word];
        }
    }
}
DEVICE void copy_rows_16(const Copy16Parameters& p) { copy_rows(p); }
DEVICE void copy_rows_4(const Copy4Parameters& p) { copy_rows(p); }

}  // namespace cadre
