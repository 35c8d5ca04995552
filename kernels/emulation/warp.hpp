// The primitives of kernels/cuda/ptx/warp.cuh on the CPU: copies of a thread, products of a warp, additions.
//
// Included by emulated.hpp. At its worst: a copy lands when its thread waits for it, or, by seed, at once; an addition
// reaches global memory at the fence behind it. The last lane of a warp to come does an operation for all.
#pragma once

namespace machine {

inline void land(const ThreadCopy& it) {
    if (it.held) {
        memcpy(block().generic + it.to, it.from, 16);
    } else {
        memset(block().generic + it.to, 0, 16);
    }
}

// Gives `operand` to the warp; `act` gets those of all lanes.
template <class Act>
void meet_warp(const char* what, const Operand& operand, Act act) {
    const int warp = current->thread / 32;
    auto& all = block().operands[warp];
    all[current->thread % 32] = operand;
    meet(what, block().warps[warp], 32, [&] { act(all); });
}

// Word i of a lane: the pair of matrix i that is its own.
template <bool Transposed>
void load_matrices_of(const std::array<Operand, 32>& all, int count, uint32_t stride) {
    const uint8_t* memory = block().generic;
    for (int i = 0; i < count; ++i) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            uint16_t numbers[8][8];
            for (int row = 0; row < 8; ++row) {
                const uint32_t from = all[matrix * 8 + row].from + i * stride;
                if (from % 16) fail("a row of a matrix is not aligned to 16 bytes");
                memcpy(numbers[row], memory + from, 16);
            }
            for (int lane = 0; lane < 32; ++lane) {
                const int row = lane / 4, column = lane % 4 * 2;
                const uint16_t low = Transposed ? numbers[column][row] : numbers[row][column];
                const uint16_t high = Transposed ? numbers[column + 1][row] : numbers[row][column + 1];
                all[lane].to[4 * i + matrix] = low | (uint32_t)high << 16;
            }
        }
    }
}

// D += A·B for `N` blocks of 8 columns.
template <int N>
__attribute__((optimize("O3"))) void multiply_warp(const std::array<Operand, 32>& all) {
    static float a[16][16], b[16][8 * N], sums[8 * N];
    for (int lane = 0; lane < 32; ++lane) {
        for (int word = 0; word < 4; ++word) {
            const int row = lane / 4 + word % 2 * 8, k = lane % 4 * 2 + word / 2 * 8;
            a[row][k] = widen(all[lane].a[word]), a[row][k + 1] = widen(all[lane].a[word] >> 16);
        }
        for (int word = 0; word < 2 * N; ++word) {
            const int k = lane % 4 * 2 + word % 2 * 8, column = word / 2 * 8 + lane / 4;
            b[k][column] = widen(all[lane].b[word]), b[k + 1][column] = widen(all[lane].b[word] >> 16);
        }
    }
    for (int row = 0; row < 16; ++row) {
        const int first = row % 8 * 4, high = row / 8 * 2;
        for (int c = 0; c < 8 * N; ++c) sums[c] = all[first + c % 8 / 2].d[c / 8 * 4 + high + c % 2];
        for (int k = 0; k < 16; ++k) {
            const float factor = a[row][k];
            for (int c = 0; c < 8 * N; ++c) sums[c] += factor * b[k][c];
        }
        for (int c = 0; c < 8 * N; ++c) all[first + c % 8 / 2].d[c / 8 * 4 + high + c % 2] = sums[c];
    }
    if (wrong_every && ++products % wrong_every == 0) {
        for (const Operand& it : all) it.d[0] += 100.f;
    }
}

}  // namespace machine

namespace ptx {

inline void copy_async(uint32_t to, const void* from, bool held) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("a copy is not aligned to 16 bytes");
    if (eager) return land({to, from, held});
    current->fetched.push_back({to, from, held});
}
inline void copies_commit() {
    current->committed.insert(current->committed.end(), current->fetched.begin(), current->fetched.end());
    current->fetched.clear();
}
inline void copies_wait() {
    for (const ThreadCopy& it : current->committed) land(it);
    current->committed.clear();
    ++moves;
    dawdle();
}
inline void store_word(uint32_t to, uint32_t word) { memcpy(block().generic + to, &word, 4); }
template <int N>
void load_matrices(uint32_t* to, uint32_t from, uint32_t stride) {
    meet_warp("its warp at a load", {nullptr, nullptr, nullptr, to, from},
              [&](auto& all) { load_matrices_of<false>(all, N, stride); });
}
template <int N>
void load_transposed(uint32_t* to, uint32_t from, uint32_t stride) {
    meet_warp("its warp at a load", {nullptr, nullptr, nullptr, to, from},
              [&](auto& all) { load_matrices_of<true>(all, N, stride); });
}
template <int N>
void multiply(float* d, const uint32_t* a, const uint32_t* b) {
    meet_warp("its warp at a product", {d, a, b, nullptr, 0}, [](auto& all) { multiply_warp<2 * N>(all); });
}
inline void add_numbers(float* to, float a, float b, float c, float d) {
    const float numbers[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) current->adds.push_back({to + i, numbers[i]});
}
inline void adds_done() {
    for (auto& [to, number] : current->adds) *to += number;
    current->adds.clear();
}
inline void await_turn(const uint32_t* turn, uint32_t mine) {
    wait_until("its turn at dQ", [&] { return *turn == mine; }, {3, mine, 0, *turn});
}
inline void end_turn(uint32_t* turn) {
    if (lost_arrival && --lost_arrival == 0) return;
    ++*turn, ++moves;
}

}  // namespace ptx
