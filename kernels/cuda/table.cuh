// What the host tells a launch: tasks, bundles, tile lists; and which tiles of keys and of query rows a mask keeps.
//
// In: tables in global memory, made by the host, never checked here. Out: tile ranges that the roles of a kernel agree
// on. All positions are rows of the document; tiles are counted from the document's start, so tile t of size S covers
// positions [t·S, (t+1)·S) whatever the task holds of them. All sizes of arrays are in elements; i32 holds rows, never
// elements.
//
// Invariant: a tile is visited by its key side exactly when its query side visits it: `query_tiles(n)` contains m if
// and only if `key_tiles(m)` contains n. The order of dQ rests on it.
#pragma once
#include "ptx/ptx.cuh"

namespace cadre {

// What a host must know to launch a kernel, in its cubin under the kernel's name with `_launch` behind.
struct Launch {
    int threads, shared_bytes;  // of a block; shared memory is dynamic
    int rows, keys;             // of its tiles, 0 where it has none
};

#ifdef CADRE_BUILD
// Names the sources of this file in its cubin: a host refuses files of others.
CONSTANT unsigned long long cadre_build = CADRE_BUILD;
#endif

// -DCADRE_TALL builds a form of forward for head dim 64, with tiles of 192 rows.
#ifdef CADRE_TALL
constexpr bool kTall = true;
#else
constexpr bool kTall = false;
#endif
// Query rows of a forward tile.
constexpr int kForwardRows = 128;
DEVICE constexpr int tile_rows(int dim) { return kTall && dim <= 64 ? 192 : kForwardRows; }

// A side of the mask without end.
constexpr int kUnbounded = 1 << 30;

// Query rows of one document and KV-head group, and the keys held for them. Row q keeps key k if q − left ≤ k ≤ q +
// right: causal is {kUnbounded, 0}, full {kUnbounded, kUnbounded}, a window {left, 0}. Causal aligned to the end of the
// key range is q_offset = kv_offset + kv_rows − q_rows.
struct Task {
    int q_row, q_rows, q_offset;     // first row in Q, O, dO, LSE, Δ; how many; position of the first
    int kv_row, kv_rows, kv_offset;  // the same for K and V
    int left, right;
    int bundle;
    int dq_tile;  // backward: first tile of this task in the dQ sums
};

// Backward: consecutive tasks of the table, rows ascending, and the keys of all of them.
struct Bundle {
    int kv_row, kv_rows, kv_offset;
    int first_task, tasks;
    int dkv_row;         // row of the bundle's first key in dK, dV
    int first_key_tile;  // lowest key tile of this bundle that this launch does
};

// One unit of a forward launch: a tile of query rows under one head, over one segment of keys. `slot` < 0: O and LSE
// are final; else f32 parts go to that slot and `merge` makes the row.
struct ForwardTile {
    int task, q_tile, head, segment, slot;
};

// One unit of `merge`: the parts of `q_tile` are slots [first_slot, first_slot + slots), keys ascending.
struct MergeTile {
    int task, q_tile, head, first_slot, slots;
};

// One unit of a backward launch. With ordered dQ, the key tiles of a bundle and KV head come in ascending order.
struct BackwardTile {
    int bundle, key_tile, kv_head;
};

// Tiles [begin, end), of which [full_begin, full_end) keep every pair; the others need the mask.
struct Tiles {
    int begin, end, full_begin, full_end;
};

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }

template <int Size>
DEVICE Tiles tiles_between(int first, int last, int full_first, int full_last) {
    Tiles tiles;
    if (first > last) return {0, 0, 0, 0};
    tiles.begin = first / Size, tiles.end = last / Size + 1;
    tiles.full_begin = most(tiles.begin, least(tiles.end, (most(full_first, 0) + Size - 1) / Size));
    tiles.full_end = most(tiles.full_begin, least(tiles.end, (most(full_last, -1) + 1) / Size));
    return tiles;
}

// Key tiles that rows of `q_tile` keep, inside keys [segment_begin, segment_end), both multiples of Keys.
template <int Rows, int Keys>
DEVICE Tiles key_tiles(const Task& task, int q_tile, int segment_begin, int segment_end) {
    const int q_first = most(q_tile * Rows, task.q_offset);
    const int q_last = least((q_tile + 1) * Rows, task.q_offset + task.q_rows) - 1;
    const int kv_last = task.kv_offset + task.kv_rows - 1;
    if (q_first > q_last) return {0, 0, 0, 0};
    return tiles_between<Keys>(most(most(q_first - task.left, task.kv_offset), segment_begin),
                               least(least(q_last + task.right, kv_last), segment_end - 1),
                               most(q_last - task.left, task.kv_offset), least(q_first + task.right, kv_last));
}

// Tiles of the task's query rows that keep keys of `key_tile`.
template <int Rows, int Keys>
DEVICE Tiles query_tiles(const Task& task, int key_tile) {
    const int k_first = most(key_tile * Keys, task.kv_offset);
    const int k_last = least((key_tile + 1) * Keys, task.kv_offset + task.kv_rows) - 1;
    const int q_last = task.q_offset + task.q_rows - 1;
    if (k_first > k_last) return {0, 0, 0, 0};
    const Tiles tiles =
        tiles_between<Rows>(most(k_first - task.right, task.q_offset), least(k_last + task.left, q_last),
                            most(k_last - task.right, task.q_offset), least(k_first + task.left, q_last));
    // A key tile that the task holds in part has pairs to mask everywhere.
    if (k_last - k_first != Keys - 1) return {tiles.begin, tiles.end, tiles.begin, tiles.begin};
    return tiles;
}

}  // namespace cadre
