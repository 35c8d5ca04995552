// Runs the backward kernel on a batch, as a host would launch it, and compares with f64; and its bits with each other.
//
// `backward` is the host's part in small: key tiles ascending in each bundle (so that ordered dQ never waits for a
// later one), one launch or two with the key tiles divided between them. LSE and Δ are the reference's, rounded to f32.
#pragma once
#include <algorithm>

#include "families.hpp"
#include "rows.hpp"
#include "verdict.hpp"

namespace backward_check {

// NaN, of which f32 makes NAN's own bits.
constexpr uint16_t kPoison = 0x7FC0;

struct How {
    bool ordered = false;
    int launches = 1;
    int grid = 2;
    uint64_t seed = 0;
};

struct Gradients {
    std::vector<float> dq, dk, dv;
    std::vector<uint16_t> dq_bf16;  // of the same sums
};

template <class Family, int D, class Cap>
Gradients backward(const shapes::Batch& batch, const shapes::Reference& forward, How how) {
    using B = typename Family::template Backward<D>;
    constexpr int kTileRows = 64;
    const int dim = batch.dim;
    Gradients out;
    out.dq.assign((size_t)batch.q_rows * batch.heads * dim, NAN);
    out.dq_bf16.assign(out.dq.size(), kPoison);
    out.dk.assign((size_t)batch.dkv_rows * batch.kv_heads * dim, NAN), out.dv = out.dk;
    std::vector<float> lse(forward.lse.right.begin(), forward.lse.right.end()),
        delta(forward.delta.begin(), forward.delta.end());
    for (size_t i = 0; i < lse.size(); ++i) {
        if (!batch.q_held[i / batch.heads]) lse[i] = delta[i] = NAN;
    }
    const size_t dq_tiles = (size_t)batch.dq_tiles() * batch.heads;
    std::vector<float> sums(dq_tiles * kTileRows * dim, 0.f);
    for (int launch = 0; launch < how.launches; ++launch) {
        std::vector<cadre::BackwardTile> list;
        std::vector<cadre::Bundle> bundles = batch.bundles;
        for (int index = 0; index < (int)bundles.size(); ++index) {
            cadre::Bundle& bundle = bundles[index];
            if (bundle.kv_rows == 0) continue;
            const int first = bundle.kv_offset / B::kKeys;
            const int tiles = (bundle.kv_offset + bundle.kv_rows + B::kKeys - 1) / B::kKeys - first;
            const int begin = first + tiles * launch / how.launches, end = first + tiles * (launch + 1) / how.launches;
            bundle.first_key_tile = begin;
            for (int n = begin; n < end; ++n) {
                for (int head = 0; head < batch.kv_heads; ++head) list.push_back({index, n, head});
            }
        }
        std::stable_sort(list.begin(), list.end(), [](auto& a, auto& b) { return a.key_tile < b.key_tile; });
        std::vector<uint32_t> turns(2 * dq_tiles, 0);
        uint32_t next = 0;
        const cadre::BackwardParameters p{batch.tasks.data(),
                                          bundles.data(),
                                          list.data(),
                                          (int)list.size(),
                                          &next,
                                          how.ordered ? turns.data() : nullptr,
                                          batch.heads,
                                          batch.group,
                                          batch.kv_heads,
                                          batch.scale,
                                          batch.scale_log2(),
                                          batch.inner_scale(),
                                          lse.data(),
                                          delta.data(),
                                          sums.data(),
                                          out.dk.data(),
                                          out.dv.data()};
        Family::template backward<D, Cap>(p, batch, how.grid, how.seed);
    }
    std::vector<cadre::QueryTile> tiles;
    for (int index = 0; index < (int)batch.tasks.size(); ++index) {
        const cadre::Task& task = batch.tasks[index];
        for (int m = task.q_offset / 64; m * 64 < task.q_offset + task.q_rows; ++m) tiles.push_back({index, m});
    }
    const std::vector<float> left = sums;
    for (bool narrow : {false, true}) {
        sums = left;
        const cadre::FinishParameters f{batch.tasks.data(),
                                        tiles.data(),
                                        (int)tiles.size(),
                                        batch.heads,
                                        dim,
                                        batch.scale,
                                        sums.data(),
                                        narrow ? nullptr : out.dq.data(),
                                        narrow ? out.dq_bf16.data() : nullptr};
        machine::launch(2, cadre::kRowThreads, 0, how.seed, [&] { cadre_finish_dq(f); });
        for (float sum : sums) {
            if (sum != 0) return verdict::refuse("sums of dQ are not zero after finish_dq"), out;
        }
    }
    return out;
}

template <class Family, int D, class Cap>
void check(const shapes::Batch& batch, const shapes::Reference& expected, uint64_t seed) {
    const int dim = batch.dim;
    const bool ordered = seed % 2 == 1;
    const Gradients out = backward<Family, D, Cap>(batch, expected, {ordered, 1, 2, seed});
    std::vector<char> keys_held(batch.dkv_rows, 0);
    for (const cadre::Bundle& bundle : batch.bundles) {
        std::fill_n(keys_held.begin() + bundle.dkv_row, bundle.kv_rows, 1);
    }
    const double tolerance = Cap::capped ? 5e-3 : 4e-3;
    auto compare = [&](const char* what, const std::vector<float>& rows, const shapes::Bounded& right, size_t width,
                       const std::vector<char>& held, double most) {
        std::vector<size_t> places;
        double size = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (held[i / width]) places.push_back(i), size += right.right[i] * right.right[i];
        }
        auto number = [&](size_t i) { return rows[i]; };
        verdict::within(what, places, number, right);
        // A gradient that is 0 by cancellation has no size to be compared with.
        const bool has_size = size > 1e-12 * places.size();
        if (!batch.drawn && has_size) verdict::close(what, places, number, right.right, most);
        verdict::untouched<float>(what, rows, width, held, NAN);
    };
    compare("dQ", out.dq, expected.dq, (size_t)batch.heads * dim, batch.q_held, tolerance);
    compare("dK", out.dk, expected.dk, (size_t)batch.kv_heads * dim, keys_held, tolerance);
    compare("dV", out.dv, expected.dv, (size_t)batch.kv_heads * dim, keys_held, tolerance);
    // One rounding more, of 2^-8 of each number at most.
    shapes::Bounded rounded = expected.dq;
    for (size_t i = 0; i < rounded.off.size(); ++i) {
        rounded.off[i] += (std::abs(rounded.right[i]) + rounded.off[i]) / 256;
    }
    std::vector<float> wide;
    for (uint16_t number : out.dq_bf16) wide.push_back(ptx::unpack_bf16(number).x);
    compare("dQ in bf16", wide, rounded, (size_t)batch.heads * dim, batch.q_held, tolerance + 1e-3);
    if (!ordered) return;
    // Key tiles divided over launches, other stalls, more blocks: the same bits.
    const Gradients again = backward<Family, D, Cap>(batch, expected, {true, 2, 3, seed + 1});
    verdict::same_bits("dQ of two launches", out.dq, again.dq);
    verdict::same_bits("dK of two launches", out.dk, again.dk);
    verdict::same_bits("dV of two launches", out.dv, again.dv);
    // Rows cut elsewhere, each piece a task of its own bundle: the same bits of dQ.
    shapes::Batch other = batch;
    other.tasks.clear();
    int dq_tile = 0;
    for (cadre::Bundle& bundle : other.bundles) {
        const int first = bundle.first_task, end = first + bundle.tasks;
        bundle.first_task = (int)other.tasks.size();
        for (int i = first; i < end; ++i) {
            for (int begin = 0, size = 7; begin < batch.tasks[i].q_rows; begin += size, size = 90) {
                cadre::Task piece = batch.tasks[i];
                piece.q_row += begin, piece.q_offset += begin, piece.q_rows = std::min(size, piece.q_rows - begin);
                piece.dq_tile = dq_tile;
                dq_tile += (piece.q_offset + piece.q_rows + 63) / 64 - piece.q_offset / 64;
                other.tasks.push_back(piece);
            }
        }
        bundle.tasks = (int)other.tasks.size() - bundle.first_task;
    }
    verdict::same_bits("dQ of other cuts", out.dq, backward<Family, D, Cap>(other, expected, {true, 1, 3, seed}).dq);
}

}  // namespace backward_check
