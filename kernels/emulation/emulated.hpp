// The primitives of kernels/cuda/ptx on the CPU, with the same names and meaning; machine.hpp runs them.
//
// Included instead of the PTX headers when CADRE_EMULATION is defined. What the device leaves open is taken at its
// worst: copies land late, products are done at the wait that covers them (or at once, by seed), bulk additions read
// shared memory at the wait for reading and reach global memory at the wait for the end. wgmma and bulk copies see only
// stores that a fence has published. Names in `ptx` are documented there; those of warp.cuh are in warp.hpp.
#pragma once
#include <algorithm>
#include <cmath>

#include "machine.hpp"

#define DEVICE inline
#define ELEMENTWISE(threads) inline void
#define CONSTANT inline const
#define __grid_constant__

struct Place {
    int x = 0;
};
inline Place threadIdx, blockIdx, gridDim;
inline Place blockDim;
struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace machine {

inline void set_place(int block, int thread, int grid) { blockIdx.x = block, threadIdx.x = thread, gridDim.x = grid; }

inline float widen(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline uint16_t narrow(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// The 128-byte swizzle.
inline uint32_t place_of(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }
// That of an operand which begins at `base` and whose M or N runs along the rows of the panel.
inline uint32_t place_in(uint32_t base, uint32_t address) {
    return swizzle_from_operand ? base + place_of(address - base) : place_of(address);
}

inline Block& block() { return *current->block; }
inline Warpgroup& warpgroup() { return block().warpgroups[current->thread / 128]; }

struct Product {
    int columns, keep, ta, tb;
    uint64_t a, b;
    bool registers;
    float* d[128];
    const uint32_t* words[128];
};

// 16 numbers deep slab of an operand, as [rows][16].
inline void read_operand(const Block& block, uint64_t descriptor, int rows, int major, float* to) {
    if (descriptor >> 62 != 1) fail("an operand's descriptor does not say 128-byte swizzle");
    const uint32_t base = (descriptor & 0x3FFF) << 4, panel = (descriptor >> 16 & 0x3FFF) << 4;
    const uint32_t group = (descriptor >> 32 & 0x3FFF) << 4;
    uint16_t part[8];
    if (major == 0) {
        for (int row = 0; row < rows; ++row) {
            for (int half = 0; half < 2; ++half) {
                memcpy(part, block.async + place_of(base + row / 8 * group + row % 8 * 128 + half * 16), 16);
                for (int i = 0; i < 8; ++i) to[row * 16 + half * 8 + i] = widen(part[i]);
            }
        }
    } else {
        for (int k = 0; k < 16; ++k) {
            for (int row = 0; row < rows; row += 8) {
                const uint32_t at = base + row / 64 * panel + k / 8 * group + k % 8 * 128 + row % 64 * 2;
                memcpy(part, block.async + place_in(base, at), 16);
                for (int i = 0; i < 8; ++i) to[(row + i) * 16 + k] = widen(part[i]);
            }
        }
    }
}

// The only loop that is worth optimising; the program is compiled fast, not to be fast.
template <int N>
__attribute__((optimize("O3"))) void multiply_columns(const Block& block, const Product& it) {
    static float a[64 * 16], b[N * 16], across[16][N];
    float sums[N];
    read_operand(block, it.b, N, it.tb, b);
    for (int c = 0; c < N; ++c) {
        for (int k = 0; k < 16; ++k) across[k][c] = b[c * 16 + k];
    }
    if (!it.registers) read_operand(block, it.a, 64, it.ta, a);
    for (int row = 0; row < 64; ++row) {
        const int first = row / 16 * 32 + row % 8 * 4, high = row >> 3 & 1;
        if (it.registers) {
            for (int k = 0; k < 16; ++k) {
                a[row * 16 + k] = widen(it.words[first + k % 8 / 2][high + k / 8 * 2] >> (k & 1) * 16);
            }
        }
        for (int c = 0; c < N; ++c) {
            sums[c] = it.keep ? it.d[first + c % 8 / 2][c / 8 * 4 + high * 2 + (c & 1)] : 0.f;
        }
        for (int k = 0; k < 16; ++k) {
            const float factor = a[row * 16 + k];
            for (int c = 0; c < N; ++c) sums[c] += factor * across[k][c];
        }
        for (int c = 0; c < N; ++c) it.d[first + c % 8 / 2][c / 8 * 4 + high * 2 + (c & 1)] = sums[c];
    }
    if (wrong_every && ++products % wrong_every == 0) {
        for (float* d : it.d) d[0] += 100.f;
    }
}

inline void multiply(const Block& block, const Product& it) {
    switch (it.columns) {
        case 32:
            return multiply_columns<32>(block, it);
        case 64:
            return multiply_columns<64>(block, it);
        case 128:
            return multiply_columns<128>(block, it);
        case 256:
            return multiply_columns<256>(block, it);
        default:
            fail("no wgmma has " + std::to_string(it.columns) + " columns");
    }
}

// Does the oldest group.
inline void retire(Block& block, Warpgroup& group) {
    for (; group.done < group.groups.front(); ++group.done) {
        multiply(block, *group.products.front());
        delete group.products.front();
        group.products.pop_front();
    }
    group.groups.pop_front();
    ++group.retired;
}

inline void issue(Product part, float* d, const uint32_t* words) {
    Warpgroup& group = warpgroup();
    const int thread = current->thread % 128;
    const size_t index = group.issued[thread]++;
    if (index < group.done) fail("a wgmma is issued after it was done");
    if (index - group.done == group.products.size()) group.products.push_back(new Product(part));
    Product& it = *group.products[index - group.done];
    if (it.a != part.a || it.b != part.b || it.columns != part.columns || it.keep != part.keep) {
        fail("operands of a wgmma differ inside a warpgroup");
    }
    it.d[thread] = d, it.words[thread] = words;
}

inline void published_store(uint32_t to, const void* from, uint32_t bytes) {
    memcpy(block().generic + to, from, bytes);
    current->unfenced.push_back({to, bytes});
}

}  // namespace machine

namespace ptx {

using namespace machine;

// A [rows, heads, dim] tensor of bf16 and the box that is copied from it.
struct TensorMap {
    const uint16_t* data;
    int dim, heads, rows, box_rows;
};

inline uint8_t* dynamic_shared() { return block().generic; }
inline uint32_t shared_address(const void* pointer) {
    return (uint32_t)(static_cast<const uint8_t*>(pointer) - block().generic);
}

inline Barrier& barrier_at(uint32_t barrier) {
    auto found = block().barriers.find(barrier);
    if (found == block().barriers.end()) fail("an mbarrier is used before it is initialised");
    return found->second;
}
inline void barrier_init(uint32_t barrier, uint32_t count) {
    block().barriers[barrier] = {(int)count, (int)count, 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) {
    if (lost_arrival && --lost_arrival == 0) return;
    --barrier_at(barrier).pending;
    barrier_at(barrier).complete();
    ++moves;
    dawdle();
}
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    Barrier& it = barrier_at(barrier);
    wait_until("an mbarrier", [&] { return it.phase != (parity & 1); }, {1, barrier, parity, 0});
}
inline void named_arrive(int id, int threads) {
    auto& it = block().named[id];
    if (++it.here == threads) it.here = 0, ++it.times;
    ++moves;
}
inline void named_sync(int id, int threads) {
    auto& it = block().named[id];
    const unsigned time = it.times;
    named_arrive(id, threads);
    wait_until("a named barrier", [&] { return it.times != time; }, {2, (uint32_t)id, (uint32_t)threads, 0});
}
inline void sync_threads() { named_sync(0, (int)block().warps.size() * 32); }
inline void sync_warp() {
    meet("its warp", block().warps[current->thread / 32], 32, [] {});
}
template <int Registers>
void take_registers() {}
template <int Registers>
void give_registers() {}
inline bool elect() { return current->thread % 32 == 0; }
inline int warp_uniform(int value) { return value; }
template <class T>
T exchange(T value, int lane_mask) {
    static_assert(sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
    auto& all = block().exchanged[current->thread / 32];
    memcpy(&all[current->thread % 32], &value, sizeof(T));
    sync_warp();
    memcpy(&value, &all[current->thread % 32 ^ lane_mask], sizeof(T));
    sync_warp();
    return value;
}
inline uint32_t claim(uint32_t* counter) {
    ++moves;
    return (*counter)++;
}
inline void wait_turn(const uint32_t* turn, uint32_t mine) {
    wait_until("its turn at dQ", [&] { return *turn == mine; }, {3, mine, 0, *turn});
}
inline void pass_turn(uint32_t* turn) { ++*turn, ++moves; }

inline uint32_t swizzled(uint32_t panel, int row, int sixteenth) {
    return panel + row * 128 + ((sixteenth ^ (row & 7)) << 4);
}
inline void prefetch(const TensorMap&) {}
inline void load_box(uint32_t to, const TensorMap& map, uint32_t barrier, int dim, int head, int row) {
    Block* where = &block();
    if (to % 1024) fail("a box lands where the swizzle does not begin");
    where->copies.push_back(
        {[=] {
             for (int r = 0; r < map.box_rows; ++r) {
                 uint16_t numbers[64] = {};
                 if (row + r >= 0 && row + r < map.rows) {
                     memcpy(numbers, map.data + ((size_t)(row + r) * map.heads + head) * map.dim + dim, sizeof numbers);
                 }
                 for (int part = 0; part < 8; ++part) {
                     const uint32_t at = place_of(to + r * 128 + part * 16);
                     memcpy(where->generic + at, numbers + part * 8, 16);
                     memcpy(where->async + at, numbers + part * 8, 16);
                 }
             }
             Barrier& it = where->barriers.at(barrier);
             it.bytes -= map.box_rows * 128;
             it.complete();
         },
         copy_rounds()});
    ++moves;
}

inline void add_bulk(float* to, uint32_t from, uint32_t bytes) {
    Fiber* fiber = current;
    fiber->reads.push_back([=] {
        std::vector<float> numbers(bytes / 4);
        memcpy(numbers.data(), fiber->block->async + from, bytes);
        fiber->writes.push_back([to, numbers] {
            for (size_t i = 0; i < numbers.size(); ++i) to[i] += numbers[i];
        });
    });
}
inline void bulk_commit() {}
inline void bulk_wait_read() {
    for (auto& read : current->reads) read();
    current->reads.clear();
}
inline void bulk_wait() {
    bulk_wait_read();
    for (auto& write : current->writes) write();
    current->writes.clear();
}
inline void store_shared(uint32_t to, float a, float b, float c, float d) {
    const float all[4] = {a, b, c, d};
    published_store(to, all, 16);
}
inline void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int lane = current->thread % 32;
    auto& all = block().exchanged[current->thread / 32];
    all[lane] = to;
    sync_warp();
    const uint32_t words[4] = {a, b, c, d};
    for (int matrix = 0; matrix < 4; ++matrix) {
        published_store((uint32_t)all[8 * matrix + lane / 4] + lane % 4 * 4, &words[matrix], 4);
    }
    sync_warp();
}
inline void fence_async_shared() {
    for (auto& [at, bytes] : current->unfenced) memcpy(block().async + at, block().generic + at, bytes);
    current->unfenced.clear();
}

inline uint32_t pack_bf16(float low, float high) { return narrow(low) | (uint32_t)narrow(high) << 16; }
inline float2 unpack_bf16(uint32_t both) {
    const uint32_t words[2] = {both << 16, both & 0xFFFF0000u};
    float2 numbers;
    memcpy(&numbers, words, sizeof numbers);
    return numbers;
}
inline float exp2(float x) { return ::exp2f(x); }
inline float log2(float x) { return ::log2f(x); }
// As far off as the device's may be: 2^-11 of it, up or down by the number's bits.
inline float tanh(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const float y = ::tanhf(x) * (1.f + (bits * 2654435761u >> 31 ? 0x1p-11f : -0x1p-11f));
    return y > 1.f ? 1.f : y < -1.f ? -1.f : y;
}
inline float infinity() { return INFINITY; }
inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float larger(float x, float y) { return x != x || y != y ? NAN : std::max(x, y); }

inline uint64_t descriptor(uint32_t address, uint32_t panel_stride, uint32_t group_stride = 1024) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | ((uint64_t)(panel_stride >> 4) << 16) |
           ((uint64_t)(group_stride >> 4) << 32) | (1ull << 62);
}
inline void wgmma_begin() {}
inline void wgmma_commit() {
    Warpgroup& group = warpgroup();
    const int thread = current->thread % 128;
    const size_t index = group.commits[thread]++ - group.retired;
    if (index == group.groups.size()) group.groups.push_back(group.issued[thread]);
    if (group.groups[index] != group.issued[thread]) fail("groups of wgmma differ inside a warpgroup");
    if (!eager) return;
    meet("its warpgroup at a commit", group.meeting, 128, [&] {
        while (!group.groups.empty()) retire(block(), group);
    });
}
template <int Open>
void wgmma_wait() {
    Warpgroup& group = warpgroup();
    meet("its warpgroup at a wgmma wait", group.meeting, 128, [&] {
        while (group.groups.size() > Open) retire(block(), group);
    });
}
template <int TA, int TB, int N>
void wgmma(float (&d)[N], uint64_t a, uint64_t b, int keep) {
    issue({N * 2, keep, TA, TB, a, b, false, {}, {}}, d, nullptr);
}
template <int TB, int N>
void wgmma(float (&d)[N], const uint32_t* a, uint64_t b, int keep) {
    issue({N * 2, keep, 0, TB, 0, b, true, {}, {}}, d, a);
}

}  // namespace ptx

#include "warp.hpp"
