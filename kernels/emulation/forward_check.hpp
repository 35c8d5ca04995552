// Runs the forward kernel and the merge of segments on a batch, as a host would launch them, and compares.
//
// `forward` is the host's part in small: the tile list, dearest first, slots for rows whose keys lie in several
// segments.
#pragma once
#include <algorithm>

#include "families.hpp"
#include "rows.hpp"
#include "verdict.hpp"

namespace forward_check {

struct Output {
    std::vector<uint16_t> o;
    std::vector<float> lse;
};

template <class Family, int D, class Cap>
Output forward(const shapes::Batch& batch, int grid, uint64_t seed) {
    using F = typename Family::template Forward<D>;
    const int dim = batch.dim;
    struct Costed {
        cadre::ForwardTile tile;
        int cost;
    };
    std::vector<Costed> tiles;
    std::vector<cadre::MergeTile> merges;
    int slots = 0;
    for (int index = 0; index < (int)batch.tasks.size(); ++index) {
        const cadre::Task& task = batch.tasks[index];
        for (int q = task.q_offset / F::kRows; q * F::kRows < task.q_offset + task.q_rows; ++q) {
            std::vector<std::pair<int, int>> segments;  // number, tiles
            for (int s = 0; s * batch.segment < task.kv_offset + task.kv_rows; ++s) {
                const auto range =
                    cadre::key_tiles<F::kRows, F::kKeys>(task, q, s * batch.segment, (s + 1) * batch.segment);
                if (range.begin < range.end) segments.push_back({s, range.end - range.begin});
            }
            if (segments.empty()) segments.push_back({0, 0});
            for (int head = 0; head < batch.heads; ++head) {
                const bool parts = segments.size() > 1;
                if (parts) merges.push_back({index, q, head, slots, (int)segments.size()});
                for (auto [s, cost] : segments) tiles.push_back({{index, q, head, s, parts ? slots++ : -1}, cost});
            }
        }
    }
    std::stable_sort(tiles.begin(), tiles.end(), [](const Costed& a, const Costed& b) { return a.cost > b.cost; });
    std::vector<cadre::ForwardTile> list;
    for (const Costed& it : tiles) list.push_back(it.tile);

    Output out{std::vector<uint16_t>((size_t)batch.q_rows * batch.heads * dim, 0x7fff),
               std::vector<float>((size_t)batch.q_rows * batch.heads, NAN)};
    std::vector<float> part_o((size_t)slots * F::kRows * dim, NAN), part_lse((size_t)slots * F::kRows, NAN);
    uint32_t next = 0;
    const cadre::ForwardParameters p{batch.tasks.data(), list.data(),    (int)list.size(), &next,
                                     batch.heads,        batch.group,    batch.segment,    batch.scale_log2(),
                                     out.o.data(),       out.lse.data(), part_o.data(),    part_lse.data(),
                                     batch.inner_scale()};
    Family::template forward<D, Cap>(p, batch, grid, seed);
    if (!merges.empty()) {
        const cadre::MergeParameters m{batch.tasks.data(), merges.data(),   (int)merges.size(), batch.heads,   dim,
                                       part_o.data(),      part_lse.data(), out.o.data(),       out.lse.data()};
        machine::launch(2, cadre::kRowThreads, 0, seed, [&] { cadre_merge(m); });
    }
    return out;
}

template <class Family, int D, class Cap>
void check(const shapes::Batch& batch, const shapes::Reference& expected, uint64_t seed, bool cuts) {
    const Output out = forward<Family, D, Cap>(batch, 2, seed);
    const int dim = batch.dim;
    std::vector<size_t> sums, numbers;  // of rows that somebody holds
    for (size_t i = 0; i < out.o.size(); ++i) {
        if (!batch.q_held[i / dim / batch.heads]) continue;
        numbers.push_back(i);
        if (i % dim == 0) sums.push_back(i / dim);
    }
    auto number = [&](size_t i) { return machine::widen(out.o[i]); };
    verdict::within("LSE", sums, [&](size_t i) { return out.lse[i]; }, expected.lse);
    verdict::within("O", numbers, number, expected.o);
    if (!batch.drawn) verdict::close("O", numbers, number, expected.o.right, 4e-3);
    verdict::untouched<uint16_t>("O", out.o, (size_t)batch.heads * dim, batch.q_held, 0x7fff);
    verdict::untouched<float>("LSE", out.lse, batch.heads, batch.q_held, NAN);
    if (!cuts) return;
    // Other cuts of the same rows, one task a piece, other order of work: the same bits.
    shapes::Batch other = batch;
    other.tasks.clear();
    for (const cadre::Task& task : batch.tasks) {
        for (int begin = 0, size = 7; begin < task.q_rows; begin += size, size = 90) {
            cadre::Task piece = task;
            piece.q_row += begin, piece.q_offset += begin, piece.q_rows = std::min(size, task.q_rows - begin);
            other.tasks.push_back(piece);
        }
    }
    const Output again = forward<Family, D, Cap>(other, 3, seed + 1);
    verdict::same_bits("O of other cuts", out.o, again.o);
    verdict::same_bits("LSE of other cuts", out.lse, again.lse);
}

}  // namespace forward_check
