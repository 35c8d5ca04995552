// The shapes that kernels are checked on, listed or drawn by a seed, with random rows.
//
// A shape is documents held in part, cut into tasks that belong to bundles. `Batch` lays it out as a launch wants it:
// between the rows of documents lie rows of NaN that nobody may read as numbers.
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
    float scale = 0;    // 0: D^-½
    uint64_t data = 1;  // seed of the rows' numbers
    bool drawn = false;
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
        // Drawn once: all that counts is one row of two keys, whose LSE is near 0.
        {"rows without keys, and one of two", 1, 3, {{62, 294, 87, 0, {{4, 40}}}, {0, 2, kFree, 0, {{1, 2}}}}},
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

// A shape that nobody chose: documents held and cut anyhow, rows before, among and behind the keys, under any mask.
inline Shape drawn(uint64_t seed) {
    Random random{(seed + 1) * 0x9E3779B97F4A7C15u};
    auto below = [&](int n) { return (int)(random.uniform() * n); };
    // Few heads: documents are what differs.
    constexpr int kHeads[][2] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 8}, {2, 1}, {2, 2}};
    const int* heads = kHeads[below(7)];
    Shape shape{"random " + std::to_string(seed), heads[0], heads[1], {}};
    shape.segment = below(3) ? 1 << 16 : 128, shape.data = seed + 1, shape.drawn = true;
    for (int documents = 1 + below(2); documents > 0; --documents) {
        const int end = 1 + below(below(2) ? 300 : 40), begin = below(2) ? 0 : below(end + 1);
        const int masks[][2] = {{kFree, 0}, {kFree, kFree}, {below(200), 0}, {below(200), below(60)}};
        const int* mask = masks[below(4)];
        Document document{begin, end, mask[0], mask[1], {}};
        int bundle = 0;
        for (int row = below(end); row < end + 30 && document.tasks.size() < 3; row += below(2) ? 0 : below(90)) {
            const int rows = below(3) ? 1 + below(60) : 1;
            bundle += !document.tasks.empty() && !below(3);
            document.tasks.push_back({row, row + rows, bundle});
            row += rows;
        }
        shape.documents.push_back(document);
    }
    return shape;
}

struct Batch {
    int dim, heads, kv_heads, group, q_rows = 0, kv_rows = 0, dkv_rows = 0, segment;
    float scale, softcap;  // 0: none
    bool drawn;
    std::vector<cadre::Task> tasks;
    std::vector<cadre::Bundle> bundles;
    std::vector<uint16_t> q, k, v, dout;
    std::vector<char> q_held;

    Batch(const Shape& shape, int dim, float softcap)
        : dim(dim),
          heads(shape.kv_heads * shape.group),
          kv_heads(shape.kv_heads),
          group(shape.group),
          segment(shape.segment),
          softcap(softcap),
          drawn(shape.drawn) {
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
        Random random{shape.data * 7919 + 1};
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

}  // namespace shapes
