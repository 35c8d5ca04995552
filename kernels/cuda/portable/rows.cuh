// Rows of bf16 in shared memory, for products of a warp: how they lie, come, and are found.
//
// In: a tensor [rows, heads, dim] in global memory, rows 16-byte aligned. Out: a tile of rows of D numbers, 16 bytes of
// nothing behind each, so that eight rows of one column lie in different banks. What the caller does not hold, rows and
// columns from dim on, comes as zeros and is never read: it may be NaN.
#pragma once
#include "../ptx/ptx.cuh"

namespace cadre::portable {

// What a kernel gets of a tensor; dim is a multiple of 8, at most the kernel's D.
struct Tensor {
    const uint16_t* data;
    int heads, dim;
};

template <int D>
constexpr int kPitch = 2 * D + 16;  // bytes from row to row

// All threads of a block: Rows rows from position `first` on, of those that are held, [begin, end); `row` of the tensor
// holds the first of these. The caller commits and waits.
template <int Rows, int D, int Threads>
DEVICE void fetch_rows(uint32_t to, const Tensor& from, int head, int first, int begin, int end, int row) {
    constexpr int kParts = D / 8, kAtOnce = Threads / kParts;
    static_assert(Threads % kParts == 0 && Rows % kAtOnce == 0, "threads divide a tile evenly");
    const int part = threadIdx.x % kParts;
    const bool column = part * 8 < from.dim;
#pragma unroll 8
    for (int i = threadIdx.x / kParts; i < Rows; i += kAtOnce) {
        const bool held = column && first + i >= begin && first + i < end;
        const size_t number = ((size_t)(uint32_t)(row + first + i - begin) * from.heads + head) * from.dim + part * 8;
        ptx::copy_async(to + i * kPitch<D> + part * 16, from.data + (held ? number : 0), held);
    }
}

// Where a lane's row of a load of four matrices lies, from the first of 16 rows and 16 columns.
// As they lie: A with its rows, or transposed B with its K, along the rows of the tile.
DEVICE uint32_t by_rows(int pitch) {
    const int lane = threadIdx.x & 31;
    return (lane & 15) * pitch + (lane >> 4) * 16;
}
// The second and third matrix exchanged: B with its columns, or transposed A with its K, along the rows of the tile.
DEVICE uint32_t by_columns(int pitch) {
    const int lane = threadIdx.x & 31;
    return ((lane >> 4) * 8 + (lane & 7)) * pitch + (lane >> 3 & 1) * 16;
}

// Thread 0 claims the next unit of a list for its block; all have left the unit before when this returns.
DEVICE int claim_for_block(uint32_t* next, int* claimed) {
    ptx::sync_threads();
    if (threadIdx.x == 0) *claimed = (int)ptx::claim(next);
    ptx::sync_threads();
    return ptx::warp_uniform(*claimed);
}

}  // namespace cadre::portable
