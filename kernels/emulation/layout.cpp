// Prints size and places of the fields of every table that the host fills, for kernels/src/device/tables.rs to compare.
//
// In: nothing. Out: a line a table, fields in the order of the Rust struct.
#include <cstddef>

#include "backward.cuh"
#include "forward.cuh"
#include "portable/rows.cuh"
#include "rows.cuh"

#define SIZE(T) printf("%s %zu", #T, sizeof(cadre::T))
#define AT(T, field) printf(" %zu", offsetof(cadre::T, field))
#define FIELDS1(T, a) AT(T, a)
#define FIELDS2(T, a, ...) AT(T, a), FIELDS1(T, __VA_ARGS__)
#define FIELDS3(T, a, ...) AT(T, a), FIELDS2(T, __VA_ARGS__)
#define FIELDS4(T, a, ...) AT(T, a), FIELDS3(T, __VA_ARGS__)
#define FIELDS5(T, a, ...) AT(T, a), FIELDS4(T, __VA_ARGS__)
#define FIELDS6(T, a, ...) AT(T, a), FIELDS5(T, __VA_ARGS__)
#define FIELDS7(T, a, ...) AT(T, a), FIELDS6(T, __VA_ARGS__)
#define FIELDS8(T, a, ...) AT(T, a), FIELDS7(T, __VA_ARGS__)
#define FIELDS9(T, a, ...) AT(T, a), FIELDS8(T, __VA_ARGS__)
#define FIELDS10(T, a, ...) AT(T, a), FIELDS9(T, __VA_ARGS__)
#define FIELDS11(T, a, ...) AT(T, a), FIELDS10(T, __VA_ARGS__)
#define FIELDS12(T, a, ...) AT(T, a), FIELDS11(T, __VA_ARGS__)
#define FIELDS13(T, a, ...) AT(T, a), FIELDS12(T, __VA_ARGS__)
#define FIELDS14(T, a, ...) AT(T, a), FIELDS13(T, __VA_ARGS__)
#define FIELDS15(T, a, ...) AT(T, a), FIELDS14(T, __VA_ARGS__)
#define FIELDS16(T, a, ...) AT(T, a), FIELDS15(T, __VA_ARGS__)
#define FIELDS17(T, a, ...) AT(T, a), FIELDS16(T, __VA_ARGS__)
#define LINE(N, T, ...) SIZE(T), FIELDS##N(T, __VA_ARGS__), printf("\n")

// Units of both words lie alike.
namespace cadre {
using CopyUnit = RowCopy<uint4>;
using portable::Tensor;
static_assert(sizeof(CopyUnit) == sizeof(RowCopy<uint32_t>) && sizeof(Copy16Parameters) == sizeof(Copy4Parameters),
              "the host makes one list for either word");
}  // namespace cadre

int main() {
    LINE(4, Launch, threads, shared_bytes, rows, keys);
    LINE(10, Task, q_row, q_rows, q_offset, kv_row, kv_rows, kv_offset, left, right, bundle, dq_tile);
    LINE(7, Bundle, kv_row, kv_rows, kv_offset, first_task, tasks, dkv_row, first_key_tile);
    LINE(5, ForwardTile, task, q_tile, head, segment, slot);
    LINE(5, MergeTile, task, q_tile, head, first_slot, slots);
    LINE(3, BackwardTile, bundle, key_tile, kv_head);
    LINE(2, QueryTile, task, q_tile);
    LINE(3, Tensor, data, heads, dim);
    LINE(13, ForwardParameters, tasks, tiles, tile_count, next, heads, group, segment_rows, scale_log2, o, lse, part_o,
         part_lse, inner_scale);
    LINE(9, MergeParameters, tasks, tiles, tile_count, heads, dim, part_o, part_lse, o, lse);
    LINE(17, BackwardParameters, tasks, bundles, tiles, tile_count, next, turns, heads, group, kv_heads, scale,
         scale_log2, inner_scale, lse, delta, dq, dk, dv);
    LINE(8, SinkParameters, tasks, tiles, tile_count, heads, dim, sinks, o, lse);
    LINE(9, FinishParameters, tasks, tiles, tile_count, heads, dim, scale, sums, dq, dq_bf16);
    LINE(6, CopyUnit, from, to, rows, words, from_stride, to_stride);
    LINE(2, Copy16Parameters, copies, copy_count);
}
