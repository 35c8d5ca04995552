// The online softmax of the forward pass and its rows on their way out, whichever products made the scores.
//
// In: fragments of S and O: a thread holds rows r and r + 8, and in them columns 8j + 2·(lane % 4) and the next, for
// every j (ptx/wgmma.cuh, ptx/warp.cuh). Out: probabilities; O and LSE, or parts of them.
#pragma once
#include "forward.cuh"
#include "fragment.cuh"
#include "power.cuh"

namespace cadre {

DEVICE float power(float x, bool by_products) { return by_products ? power_by_products(x) : ptx::exp2(x); }

// The online softmax of a thread's two rows.
struct Softmax {
    float largest[2], sum[2], rescale[2];
    int first[2], last[2];  // kept keys of each row, as positions

    DEVICE void begin(const Task& task, int position) {
        const int kv_last = task.kv_offset + task.kv_rows - 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = -ptx::infinity(), sum[r] = 0.f;
            first[r] = most(position + 8 * r - task.left, task.kv_offset);
            last[r] = least(position + 8 * r + task.right, kv_last);
        }
    }

    // Scores of keys [key, key + Keys) become probabilities, relative to the largest score so far; `rescale` is what
    // earlier sums and rows of O are to be multiplied with. A row that has kept nothing yet stays at −∞ and 0. Of
    // `Every` blocks of 8 columns one is computed by multiply-adds; 0: none.
    template <class Mask, int Every = 0, int Scores>
    DEVICE void step(float (&s)[Scores], float scale_log2, int key) {
        if constexpr (Mask::value) {
            const int column = key + (threadIdx.x & 3) * 2;
#pragma unroll
            for (int i = 0; i < Scores; ++i) {
                const int at = column + (i / 4) * 8 + (i & 1), r = i >> 1 & 1;
                if (at < first[r] || at > last[r]) s[i] = -ptx::infinity();
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = largest[r];
#pragma unroll
            for (int i = 2 * r; i < Scores; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            top = fmaxf(top, ptx::exchange(top, 1));
            top = fmaxf(top, ptx::exchange(top, 2));
            const float base = Mask::value && top == -ptx::infinity() ? 0.f : top * scale_log2;
            rescale[r] = ptx::exp2(largest[r] * scale_log2 - base);
            largest[r] = top;
            float added = 0.f;
#pragma unroll
            for (int i = 2 * r; i < Scores; i += 4) {
                const bool by_products = Every != 0 && i / 4 % most(Every, 1) == Every - 1;
                s[i] = power(s[i] * scale_log2 - base, by_products);
                s[i + 1] = power(s[i + 1] * scale_log2 - base, by_products);
                added += s[i] + s[i + 1];
            }
            sum[r] = sum[r] * rescale[r] + added;
        }
    }

    // The four lanes of a row add up; `sum` becomes the row's LSE, and what comes back its factor of O.
    DEVICE float finish(int r, float scale_log2) {
        sum[r] += ptx::exchange(sum[r], 1);
        sum[r] += ptx::exchange(sum[r], 2);
        const bool none = sum[r] == 0.f;
        const float factor = none ? 0.f : 1.f / sum[r];
        sum[r] = none ? -ptx::infinity() : 0.69314718056f * (largest[r] * scale_log2 + ptx::log2(sum[r]));
        return factor;
    }
};

// Writes one row of a thread: bf16, two lanes swapping a word so that four lanes fill 32 bytes at a time.
template <int D>
DEVICE void write_row(uint16_t* row, const float (&o)[D / 2], int r, float factor, bool held, int dim) {
    const int lane = threadIdx.x & 3, odd = lane & 1;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        const uint32_t here = ptx::pack_bf16(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor);
        const uint32_t next = ptx::pack_bf16(o[4 * j + 4 + 2 * r] * factor, o[4 * j + 5 + 2 * r] * factor);
        const uint32_t other = ptx::exchange(odd ? here : next, 1);
        const uint2 both = odd ? make_uint2(other, next) : make_uint2(here, other);
        const bool mine = held && (j + odd) * 8 < dim;
        if (mine) *reinterpret_cast<uint2*>(row + (j + odd) * 8 + (lane >> 1) * 4) = both;
    }
}

// One row of a thread, of `dim` numbers, of which a fragment holds D: with D above dim the last are nobody's.
template <int D, int TileRows, int R>
DEVICE void forward_write_row(const ForwardParameters& p, const Task& task, const ForwardTile& tile, Softmax& softmax,
                              const float (&o)[D / 2], int in_tile, int dim) {
    const int lane = threadIdx.x & 3;
    const float factor = softmax.finish(R, p.scale_log2);
    const int in_task = tile.q_tile * TileRows + in_tile - task.q_offset;
    const bool held = in_task >= 0 && in_task < task.q_rows;
    if (tile.slot < 0) {
        const size_t row = (size_t)(task.q_row + (held ? in_task : 0)) * p.heads + tile.head;
        write_row<D>(p.o + row * dim, o, R, factor, held, dim);
        if (held && lane == 0) p.lse[row] = softmax.sum[R];
    } else {
        const size_t row = (size_t)tile.slot * TileRows + in_tile;
        float2* to = reinterpret_cast<float2*>(p.part_o + row * dim) + lane;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
            if (8 * j < dim) to[4 * j] = make_float2(o[4 * j + 2 * R] * factor, o[4 * j + 2 * R + 1] * factor);
        }
        if (lane == 0) p.part_lse[row] = softmax.sum[R];
    }
}

template <int D, int TileRows = kForwardRows>
DEVICE void forward_write(const ForwardParameters& p, const Task& task, const ForwardTile& tile, Softmax& softmax,
                          const float (&o)[D / 2], int row_in_tile, int dim) {
    // Not in a loop: one that the compiler leaves would index registers, which then lie in memory.
    forward_write_row<D, TileRows, 0>(p, task, tile, softmax, o, row_in_tile, dim);
    forward_write_row<D, TileRows, 1>(p, task, tile, softmax, o, row_in_tile + 8, dim);
}

}  // namespace cadre
