// Core attention, backward: dQ, and dK, dV once per bundle, for a table of bundles, on sm_90a.
//
//   P = 2^(scale·log2e·Q·Kᵀ − log2e·LSE)    dP = dO·Vᵀ    dS = P∘(dP − Δ)
//   dV = Pᵀ·dO    dK = scale · dSᵀ·Q    dQ = scale · dS·K
//
// With softcap, kernels of their own: with t = tanh(scale·Q·Kᵀ/cap) P = 2^(cap·log2e·t − log2e·LSE), dS = P∘(1 −
// t²)∘(dP − Δ).
//
// In, bf16: Q, dO [q rows, heads, D], K, V [kv rows, kv heads, D], through tensor maps of boxes [64, 1, 64 or Keys]
// with the 128-byte swizzle; rows, and dK, dV and dQ sums, 16-byte aligned; D 64, 128 or 256; heads = group · kv heads;
// f32: LSE, Δ = rowsum(dO∘O) [q rows, heads]; tables of table.cuh; `next` = 0. A row with
// LSE = −∞ has no gradient. Out, f32: dK, dV [dkv rows, kv heads, D], each row of the launch's key tiles written once;
// dQ sums, added to, in tiles of 64 rows × D in the order of fragments ([dq tile, heads, D/64 or 4 pieces, …], read by
// `finish_dq` of rows.cuh), unscaled.
//
// Launch: any grid of 384 threads, one block an SM; blocks claim key tiles in list order from `next`. A block keeps the
// K and V of its key tile and goes over all tasks of the bundle, all their query tiles and all query heads of the KV
// head; so dK and dV stay in registers, leave once, and sum in one order. Warpgroup 0: warp 0 loads tiles by TMA, warps
// 1 and 3 add dQ of a computing warpgroup each to global memory by bulk addition, warp 2 fetches LSE and Δ and says
// what each step is. Warpgroups 1 and 2 compute: 64 keys each (backward_keys.cuh: D 64, 128), or half of the columns
// each (backward_columns.cuh: D 256, where 64 keys × 256 × 2 do not fit in registers). -DCADRE_LATER builds a form of
// D 128 for comparison (backward_later.cuh), of 210 KiB.
//
// dQ: with `turns` (zeroed, two a dQ tile and head, one for each computing warpgroup) key tiles are added in ascending
// order, so dQ has the same bits in any launch; a block only ever waits for tiles that are earlier in the list, which
// have been claimed. Launches that take some key tiles of a bundle run one after the other, tiles ascending, each with
// fresh turns. Without, the order is that of arrival.
//
// Shared memory: D 64 114 KiB, D 128 194 KiB, D 256 226 KiB. Numerics: f32 sums, P and dS rounded to bf16. Tolerance
// against f64: 4e-3 of the root mean square; with softcap 5e-3, as P∘(1 − t²) is rounded to bf16 before it meets dP,
// and the GPU's tanh is right to 2^-11. Not here: Δ, scaling of dQ (rows.cuh), tile lists (host). Share of peak on a
// GPU: not measured.
#pragma once
#include "operand.cuh"
#include "table.cuh"

namespace cadre {

struct BackwardParameters {
    const Task* tasks;
    const Bundle* bundles;
    const BackwardTile* tiles;
    int tile_count;
    uint32_t* next;   // 0 before the launch
    uint32_t* turns;  // [dq tile, heads, 2], 0 before the launch; null: dQ in order of arrival
    int heads, group, kv_heads;
    float scale, scale_log2;
    float inner_scale;  // with softcap: scale / cap, and scale_log2 = cap · log2 e
    const float* lse;
    const float* delta;
    float* dq;
    float* dk;
    float* dv;
};

// What the computing warpgroups know of a step: they keep no tables, their registers are full.
struct BackwardStep {
    enum Kind { kFull, kMasked, kEnd };  // kEnd: the key tile has no more steps; no tiles came with it
    int kind;
    int row;                                 // position of the tile's first query row
    int q_first, q_last, kv_first, kv_last;  // rows and keys that the task holds, as positions
    int left, right;
};

#ifdef CADRE_LATER
constexpr bool kWithLater = true;
#else
constexpr bool kWithLater = false;
#endif

template <int D>
struct Backward {
    static constexpr bool kByColumns = D == 256;            // else by keys
    static constexpr bool kLater = D == 128 && kWithLater;  // by keys, dQ and dK a step later: backward_later.cuh
    static constexpr int kRows = 64;
    static constexpr int kKeys = kByColumns ? 64 : 128;
    static constexpr int kStages = kLater ? 3 : 2;
    static constexpr int kOutStages = kByColumns ? 1 : 2;  // of dO
    static constexpr int kQueryBytes = kRows * D * 2, kKeyBytes = kKeys * D * 2;
    static constexpr int kScoreBytes = kKeys * kRows * 2;
    static constexpr int kPieces = kByColumns ? 2 : 1;  // of a warpgroup's half of dQ
    static constexpr int kPieceColumns = D / 2 / kPieces;
    static constexpr int kPieceNumbers = kRows * kPieceColumns;
    struct Shared {
        alignas(1024) uint8_t k[kKeyBytes];
        uint8_t v[kKeyBytes], q[kStages][kQueryBytes], dout[kOutStages][kQueryBytes];
        uint8_t ds[2][kScoreBytes];                   // dSᵀ, a row a key
        uint8_t p[2][kByColumns ? kScoreBytes : 16];  // Pᵀ, where both warpgroups need it
        float dq[kConsumers][kPieceNumbers];
        float lse[kStages][kRows], delta[kStages][kRows];  // log2 units; +∞ for rows without a part in this
        BackwardStep step[kStages];
        uint64_t kv_full, kv_empty, q_full[kStages], q_empty[kStages], dout_full[kOutStages], dout_empty[kOutStages];
        uint64_t nobody;  // arrived at, never waited for: kLater
        int tile;         // written before kv_full, −1 after the last
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "a block of sm_90 has 227 KiB of shared memory");
};

// Named barriers; 0 is that of all threads. kDqFull, kDqEmpty: one a warpgroup, with the warp that adds.
enum BackwardBarrier { kExchange = 1, kDqFull = 2, kDqEmpty = 4 };
constexpr int kDqThreads = kGroup + 32;

template <int D>
struct BackwardAddresses {
    uint32_t k, v, q, dout, ds, p, dq, kv_full, kv_empty, q_full, q_empty, dout_full, dout_empty, nobody;
    DEVICE explicit BackwardAddresses(typename Backward<D>::Shared& s)
        : k(ptx::shared_address(s.k)),
          v(ptx::shared_address(s.v)),
          q(ptx::shared_address(s.q)),
          dout(ptx::shared_address(s.dout)),
          ds(ptx::shared_address(s.ds)),
          p(ptx::shared_address(s.p)),
          dq(ptx::shared_address(s.dq)),
          kv_full(ptx::shared_address(&s.kv_full)),
          kv_empty(ptx::shared_address(&s.kv_empty)),
          q_full(ptx::shared_address(s.q_full)),
          q_empty(ptx::shared_address(s.q_empty)),
          dout_full(ptx::shared_address(s.dout_full)),
          dout_empty(ptx::shared_address(s.dout_empty)),
          nobody(ptx::shared_address(&s.nobody)) {}
};

// Calls step(state, head) for each step of a key tile, in the one order that all roles follow: rows from the last to
// the first, the heads of a tile of rows together; `state` is what rows(task, the task's query tiles, one of them)
// returned, so that tables are read once a tile of rows.
//
// With `turns` that order is what keeps key tiles of one document from waiting. Under a causal mask the first keys have
// the most steps and go first at every tile of rows; downwards all key tiles begin at the same rows, each a little
// behind the one before, and those with fewer steps end early. Upwards, or head by head, each of them would wait until
// the first has come to its diagonal.
template <int D, class Rows, class Step>
DEVICE void backward_walk(const BackwardParameters& p, const BackwardTile& tile, Rows rows, Step step) {
    const Bundle& bundle = p.bundles[tile.bundle];
    const int first_head = tile.kv_head * p.group;
#pragma unroll 1
    for (int i = bundle.first_task + bundle.tasks; i-- > bundle.first_task;) {
        const Task& task = p.tasks[i];
        const Tiles range = query_tiles<Backward<D>::kRows, Backward<D>::kKeys>(task, tile.key_tile);
#pragma unroll 1
        for (int m = range.end; m-- > range.begin;) {
            const auto state = rows(task, range, m);
#pragma unroll 1
            for (int head = first_head; head < first_head + p.group; ++head) step(state, head);
        }
    }
}

// Number of the dQ tile, over tiles and heads.
DEVICE size_t dq_index(const BackwardParameters& p, const Task& task, int q_tile, int head) {
    return (size_t)(task.dq_tile + q_tile - task.q_offset / 64) * p.heads + head;
}

}  // namespace cadre
