// Tiles of rows as operands of matrix products: loading them, clearing rows that nobody holds, walking along them.
//
// A tile of R rows × D numbers lies in shared memory as D/64 panels of R × 128 bytes, aligned to 1024.
// `barrier_of`, `Ring`: a ring of stages whose full and empty mbarriers change parity with every round.
#pragma once
#include "ptx/ptx.cuh"

namespace cadre {

constexpr int kGroup = 128;    // threads of a warpgroup
constexpr int kConsumers = 2;  // warpgroups that compute
constexpr int kThreads = (kConsumers + 1) * kGroup;
constexpr int kReleases = kConsumers * 4;  // arrivals that empty a stage: one a consumer warp
// 2·232 + 40 registers are the 504 that three warpgroups may have.
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;

// Position in a ring of Stages: the how-manieth use it is. (2^32 uses end a ring whose Stages are no power of 2; a
// launch would take hours for them.)
template <int Stages>
struct Ring {
    uint32_t uses = 0;
    DEVICE uint32_t stage() const { return uses % Stages; }
    // Parity of the phase that ends when the stage is full, for this use.
    DEVICE uint32_t full() const { return uses / Stages & 1; }
    // Parity of the phase that ended when the use before emptied it; the first use finds it empty.
    DEVICE uint32_t empty() const { return full() ^ 1; }
    DEVICE void next() { ++uses; }
};

DEVICE uint32_t barrier_of(uint32_t first, uint32_t stage) { return first + 8 * stage; }

// A consumer warp has read a stage.
DEVICE void release(uint32_t barrier) {
    ptx::sync_warp();
    if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(barrier);
}

// One thread: rows [row, row + Rows) of a head, all panels.
template <int Rows, int D>
DEVICE void load_tile(uint32_t to, const ptx::TensorMap& map, uint32_t barrier, int head, int row) {
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel) {
        ptx::load_box(to + panel * Rows * 128, map, barrier, panel * 64, head, row);
    }
}

// A warpgroup: zeroes the rows of a tile that starts at position `first` and lie outside [begin, end). What stood there
// belongs to others, NaN included. The caller fences and synchronises.
template <int Rows, int D>
DEVICE void clear_outside(uint32_t tile, int first, int begin, int end) {
    const int row = threadIdx.x & (kGroup - 1);
    if (row >= Rows || (first + row >= begin && first + row < end)) return;
#pragma unroll 1
    for (int panel = 0; panel < D / 64; ++panel) {
#pragma unroll 1
        for (int part = 0; part < 8; ++part) {
            ptx::store_shared(tile + (panel * Rows + row) * 128 + part * 16, 0.f, 0.f, 0.f, 0.f);
        }
    }
}

// Step k (16 numbers) along the rows of a K-major tile of `Rows` rows, for a descriptor.
template <int Rows>
DEVICE constexpr uint64_t along_row(int k) {
    return (k & 3) * 2 + (k >> 2) * (Rows * 128 >> 4);
}
// Step k (16 rows) down an MN-major tile.
DEVICE constexpr uint64_t down_rows(int k) { return k * (16 * 128 >> 4); }

}  // namespace cadre
