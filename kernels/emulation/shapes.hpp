// The shapes that kernels are checked on, with random rows, and attention in f64 from its definition.
//
// A shape is documents held in part, cut into tasks that belong to bundles. `Batch` lays it out as a launch wants it:
// between the rows of documents lie rows of NaN that nobody may read as numbers. Out of `reference`: O, LSE, Δ and the
// gradients of every row of the batch; dK and dV a bundle.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "table.cuh"

namespace shapes {

constexpr int kFree = cadre::kUnbounded;

struct Rows {  // query rows [begin, end) of a document, a task
    int begin, end, bundle = 0;
};
struct Document {
    int keys_begin, keys_end;  // held
    int left, right;
    std::vector<Rows> tasks;  // bundles numbered from 0, consecutive
};
struct Shape {
    std::string name;
    int kv_heads, group;
    std::vector<Document> documents;
    int segment = 1 << 16;
    float scale = 0;  // 0: D^-½
};

inline std::vector<Shape> all() {
    return {
        {"one row", 1, 1, {{0, 1, kFree, 0, {{0, 1}}}}},
        {"one row late in its document", 1, 4, {{0, 300, kFree, 0, {{299, 300}}}}},
        {"whole tiles, causal", 1, 1, {{0, 256, kFree, 0, {{0, 256}}}}},
        {"whole tiles, full", 1, 1, {{0, 256, kFree, kFree, {{0, 128}}}}},
        {"ragged documents, causal",
         2,
         4,
         {{0, 37, kFree, 0, {{0, 37}}}, {0, 150, kFree, 0, {{0, 150}}}, {0, 200, kFree, 0, {{131, 200}}}}},
        {"ragged, full", 1, 8, {{0, 77, kFree, kFree, {{0, 20}}}, {0, 129, kFree, kFree, {{3, 40}}}}},
        {"empty key range beside a full one", 1, 2, {{0, 0, kFree, 0, {{0, 70}}}, {0, 64, kFree, kFree, {{0, 9}}}}},
        {"rows before the first key", 1, 1, {{100, 180, kFree, 0, {{60, 180}}}}},
        {"window", 1, 2, {{0, 400, 70, 0, {{0, 400}}}}},
        {"window of the row itself", 1, 1, {{0, 150, 0, 0, {{0, 150}}}}},
        {"window over keys held in part", 2, 1, {{90, 333, 150, 0, {{240, 333}}}}},
        {"look ahead a little", 1, 1, {{0, 260, 40, 20, {{0, 260}}}}},
        {"many tasks of one document",
         1,
         4,
         {{0, 300, kFree, 0, {{0, 40}, {40, 64}, {64, 130}, {200, 201}, {210, 300}}}}},
        {"two bundles of one document", 2, 2, {{0, 260, kFree, 0, {{0, 60, 0}, {60, 128, 1}, {190, 260, 1}}}}},
        {"segments", 1, 2, {{0, 500, kFree, 0, {{300, 500}}}, {0, 300, kFree, kFree, {{0, 10}}}}, 128},
        {"segments under a window", 1, 1, {{0, 500, 100, 0, {{100, 290}}}}, 128},
        {"many key tiles", 1, 1, {{0, 640, kFree, 0, {{350, 640}}}}},
        {"large scores", 1, 1, {{0, 200, kFree, 0, {{0, 200}}}}, 1 << 16, 4.f},
    };
}

struct Random {
    uint64_t state;
    double uniform() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return ((state >> 11) + 0.5) / 9007199254740992.0;
    }
    float normal() { return (float)(std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform())); }
};

struct Batch {
    int dim, heads, kv_heads, group, q_rows = 0, kv_rows = 0, dkv_rows = 0, segment;
    float scale, softcap;  // 0: none
    std::vector<cadre::Task> tasks;
    std::vector<cadre::Bundle> bundles;
    std::vector<uint16_t> q, k, v, dout;
    std::vector<char> q_held;

    Batch(const Shape& shape, int dim, uint64_t seed, float softcap)
        : dim(dim),
          heads(shape.kv_heads * shape.group),
          kv_heads(shape.kv_heads),
          group(shape.group),
          segment(shape.segment),
          softcap(softcap) {
        scale = (shape.scale ? shape.scale : 1.f) / std::sqrt((float)dim);
        q_rows = 3, kv_rows = 5;  // NaN before the first row
        int dq_tile = 0;
        std::vector<char> kv_held(kv_rows, 0);
        q_held.assign(q_rows, 0);
        for (const Document& document : shape.documents) {
            const int keys = document.keys_end - document.keys_begin;
            int last = -1;
            for (const Rows& rows : document.tasks) {
                if (rows.bundle != last) {
                    last = rows.bundle;
                    bundles.push_back({kv_rows, keys, document.keys_begin, (int)tasks.size(), 0, dkv_rows + 1,
                                       document.keys_begin / (dim == 256 ? 64 : 128)});
                    dkv_rows += keys + 2;
                }
                const int count = rows.end - rows.begin;
                tasks.push_back({q_rows, count, rows.begin, kv_rows, keys, document.keys_begin, document.left,
                                 document.right, (int)bundles.size() - 1, dq_tile});
                ++bundles.back().tasks;
                dq_tile += (rows.end + 63) / 64 - rows.begin / 64;
                q_held.insert(q_held.end(), count, 1), q_held.push_back(0);
                q_rows += count + 1;
            }
            kv_held.insert(kv_held.end(), keys, 1), kv_held.insert(kv_held.end(), 3, 0);
            kv_rows += keys + 3;
        }
        Random random{seed * 7919 + 1};
        auto fill = [&](const std::vector<char>& held, int row_heads) {
            std::vector<uint16_t> rows(held.size() * row_heads * dim, 0x7fff);
            for (size_t i = 0; i < rows.size(); ++i) {
                if (held[i / (row_heads * dim)]) rows[i] = machine::narrow(random.normal());
            }
            return rows;
        };
        q = fill(q_held, heads), k = fill(kv_held, kv_heads), v = fill(kv_held, kv_heads), dout = fill(q_held, heads);
    }
    float scale_log2() const { return (softcap ? softcap : scale) * 1.44269504f; }
    float inner_scale() const { return softcap ? scale / softcap : 0.f; }
    int dq_tiles() const {
        const cadre::Task& last = tasks.back();
        return last.dq_tile + (last.q_offset + last.q_rows + 63) / 64 - last.q_offset / 64;
    }
};

struct Reference {
    std::vector<double> o, lse, delta, dq, dk, dv;  // dk, dv: [dkv rows, kv heads, dim]
};

inline Reference reference(const Batch& it) {
    const int D = it.dim;
    Reference out;
    out.o.assign((size_t)it.q_rows * it.heads * D, 0), out.dq = out.o;
    out.lse.assign((size_t)it.q_rows * it.heads, -INFINITY), out.delta.assign(out.lse.size(), 0);
    out.dk.assign((size_t)it.dkv_rows * it.kv_heads * D, 0), out.dv = out.dk;
    auto wide = [](const std::vector<uint16_t>& rows) {
        std::vector<double> numbers(rows.size());
        for (size_t i = 0; i < rows.size(); ++i) numbers[i] = machine::widen(rows[i]);
        return numbers;
    };
    const auto q = wide(it.q), k = wide(it.k), v = wide(it.v), dout = wide(it.dout);
    auto dot = [D](const double* a, const double* b) {
        double sum = 0;
        for (int i = 0; i < D; ++i) sum += a[i] * b[i];
        return sum;
    };
    for (const cadre::Task& task : it.tasks) {
        const cadre::Bundle& bundle = it.bundles[task.bundle];
        for (int row = 0; row < task.q_rows; ++row) {
            const int position = task.q_offset + row;
            const int first = std::max(position - task.left, task.kv_offset) - task.kv_offset;
            const int end = std::min(position + task.right + 1, task.kv_offset + task.kv_rows) - task.kv_offset;
            for (int head = 0; head < it.heads && first < end; ++head) {
                const size_t at = (size_t)(task.q_row + row) * it.heads + head;
                const double *mine = &q[at * D], *grad = &dout[at * D];
                double *o = &out.o[at * D], *dq = &out.dq[at * D], largest = -INFINITY, sum = 0;
                auto held = [&](int base, int key) {
                    return ((size_t)(base + key) * it.kv_heads + head / it.group) * D;
                };
                std::vector<double> p(end - first), slope(p.size(), 1);
                for (int key = first; key < end; ++key) {
                    double& score = p[key - first] = dot(mine, &k[held(task.kv_row, key)]) * it.scale;
                    if (it.softcap) {
                        const double capped = std::tanh(score / it.softcap);
                        score = it.softcap * capped, slope[key - first] = 1 - capped * capped;
                    }
                    largest = std::max(largest, score);
                }
                for (double& x : p) sum += x = std::exp(x - largest);
                for (int key = first; key < end; ++key) {
                    p[key - first] /= sum;
                    for (int i = 0; i < D; ++i) o[i] += p[key - first] * v[held(task.kv_row, key) + i];
                }
                out.lse[at] = largest + std::log(sum), out.delta[at] = dot(o, grad);
                for (int key = first; key < end; ++key) {
                    const double x = p[key - first];
                    const double dp = dot(grad, &v[held(task.kv_row, key)]) - out.delta[at];
                    const double ds = x * dp * slope[key - first] * it.scale;
                    double *dk = &out.dk[held(bundle.dkv_row, key)], *dv = &out.dv[held(bundle.dkv_row, key)];
                    for (int i = 0; i < D; ++i) {
                        dq[i] += ds * k[held(task.kv_row, key) + i], dk[i] += ds * mine[i], dv[i] += x * grad[i];
                    }
                }
            }
        }
    }
    return out;
}

}  // namespace shapes
