// Core attention, forward: O = softmax(scale · Q·Kᵀ, masked) · V and its LSE, for a table of tasks, on sm_90a.
//
//   S = Q_tile · K_tileᵀ    P = 2^(scale·log2e·S − m)    O = O·2^(m_old − m) + P · V_tile    LSE = ln2·(m + log2 Σ P)
//
// With softcap, kernels of their own: cap·tanh(scale·S/cap) in place of scale·S, before the mask.
//
// In, bf16: Q [q rows, heads, D], K, V [kv rows, kv heads, D], through tensor maps of boxes [64, 1, 128 or Keys] with
// the 128-byte swizzle; rows 16-byte aligned; D 64, 128 or 256; heads = group · kv heads; tables of table.cuh; `next` =
// 0. Out: O bf16 [q rows, heads, D], LSE f32 [q rows, heads], natural log; a row without keys has O = 0, LSE = −∞.
// Tiles with a slot write f32 parts [slot, 128, D] and [slot, 128] instead, for `merge` (rows.cuh).
//
// Launch: any grid of 384 threads, one block an SM; blocks claim tiles in list order (dearest first, so that the last
// ones are short) from `next`. Warpgroup 0 loads by TMA, 1 and 2 hold 64 rows each and take turns up to D 128: while
// one is in softmax the other multiplies, and P·V of a key tile runs under the softmax of the next. Shared memory: Q
// 256·D bytes, K and V 2·Keys·D bytes a stage each: 144 KiB (D 64, 4 stages of 128 keys), 160 KiB (D 128, 2 of 128),
// 192 KiB (D 256, 2 of 64).
//
// -DCADRE_TALL builds a form of D 64 for comparison: three computing warpgroups, 192 rows (153 KiB), and an eighth of
// the exponentials by multiply-adds (power.cuh). O keeps its tolerance; LSE is off by 7.5e-5 more at most.
//
// Keys go from the last tile of a segment to its first. A tile that no mask or edge cuts goes without compares; the
// bits are the same either way, so a row's bits depend on its document alone: a key that is masked adds exactly 0, rows
// of K or V that the task does not hold are never read as numbers (V's are cleared, the scores of K's replaced).
//
// Numerics: scores and sums f32, P rounded to bf16 for P·V. Against f64 O is right to 4e-3 of the root mean square, LSE
// to 1e-5 of it; with softcap LSE to 2^-11 of the mean size of its row's scores, as the GPU's tanh is. Not here: tile
// lists (host), parts of segments (`merge`). Share of peak on a GPU: not measured.
#pragma once
#include "operand.cuh"
#include "table.cuh"

namespace cadre {

struct ForwardParameters {
    const Task* tasks;
    const ForwardTile* tiles;
    int tile_count;
    uint32_t* next;    // 0 before the launch
    int heads, group;  // query heads; query heads per KV head
    int segment_rows;  // a multiple of 128
    float scale_log2;  // scale · log2 e, above 0
    uint16_t* o;
    float* lse;
    float* part_o;
    float* part_lse;
    float inner_scale;  // with softcap: scale / cap, and scale_log2 = cap · log2 e
};

template <int D>
struct Forward {
    static constexpr bool kIsTall = D == 64 && kTall;
    static constexpr int kRows = tile_rows(D);  // of a tile, and of a slot of parts
    static constexpr int kGroups = kRows / 64;  // warpgroups that compute
    static constexpr int kThreads = (kGroups + 1) * kGroup;
    static constexpr int kReleases = kGroups * 4;
    static constexpr int kConsumerRegisters = kIsTall ? 160 : cadre::kConsumerRegisters;
    static constexpr int kProducerRegisters = kIsTall ? 32 : cadre::kProducerRegisters;
    // One of so many blocks of 8 scores becomes powers by multiply-adds: with one of four, issuing would bind.
    static constexpr int kByProducts = kIsTall ? 8 : 0;
    static constexpr int kKeys = D == 256 ? 64 : 128;
    static constexpr int kStages = D == 64 ? 4 : 2;
    // Wide heads have few exponentials for their products; peers that measured it (FlashAttention 3) take no turns
    // either.
    static constexpr bool kTurns = D <= 128;
    static constexpr int kQueryBytes = kRows * D * 2;
    static constexpr int kKeyBytes = kKeys * D * 2;
    static constexpr int kScores = kKeys / 2;  // registers of S, and twice those of P
    static constexpr int kOut = D / 2;         // registers of O
    struct Shared {
        alignas(1024) uint8_t q[kQueryBytes];
        uint8_t k[kStages][kKeyBytes], v[kStages][kKeyBytes];
        uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
        int tile;  // written before q_full, −1 after the last
    };
    static_assert(sizeof(Shared) <= 227 * 1024, "a block of sm_90 has 227 KiB of shared memory");
    static_assert(kStages % 2 == 0, "Ring counts modulo a power of 2");
};

// Named barriers; 0 is that of all threads. One a warpgroup each, the cleared ones behind the turns.
constexpr int kTurn = 1;
template <int D>
constexpr int kCleared = kTurn + Forward<D>::kGroups;

template <int D>
struct ForwardAddresses {
    uint32_t q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
    DEVICE explicit ForwardAddresses(typename Forward<D>::Shared& s)
        : q(ptx::shared_address(s.q)),
          k(ptx::shared_address(s.k)),
          v(ptx::shared_address(s.v)),
          q_full(ptx::shared_address(&s.q_full)),
          q_empty(ptx::shared_address(&s.q_empty)),
          k_full(ptx::shared_address(s.k_full)),
          k_empty(ptx::shared_address(s.k_empty)),
          v_full(ptx::shared_address(s.v_full)),
          v_empty(ptx::shared_address(s.v_empty)) {}
};

template <int D>
DEVICE Tiles forward_keys(const ForwardParameters& p, const Task& task, const ForwardTile& tile) {
    const int begin = tile.segment * p.segment_rows;
    return key_tiles<Forward<D>::kRows, Forward<D>::kKeys>(task, tile.q_tile, begin, begin + p.segment_rows);
}

}  // namespace cadre
