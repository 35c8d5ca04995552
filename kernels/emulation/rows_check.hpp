// Runs the kernels that move rows on random lists. `merge` and `finish_dq` are checked where they are used, with their
// kernels.
//
// `copies`: random pieces of a tensor with gaps between them arrive where the list says, and nothing else is written.
#pragma once
#include <numeric>

#include "rows.hpp"
#include "shapes.hpp"
#include "verdict.hpp"

namespace rows_check {

template <class Word, class Launch>
void copies(uint64_t seed, Launch launch) {
    verdict::where = "copy_rows of " + std::to_string(sizeof(Word)) + " bytes, seed " + std::to_string(seed);
    shapes::Random random{seed * 77 + 5};
    auto below = [&](int n) { return (int)(random.uniform() * n); };
    const int rows = 100, from_stride = 24, to_stride = 17;
    std::vector<Word> from(rows * from_stride), to(rows * to_stride), expected;
    std::vector<uint32_t> numbers(from.size() * sizeof(Word) / 4);
    std::iota(numbers.begin(), numbers.end(), 1);
    memcpy(static_cast<void*>(from.data()), numbers.data(), from.size() * sizeof(Word));
    memset(static_cast<void*>(to.data()), 0xAB, to.size() * sizeof(Word));
    expected = to;
    std::vector<cadre::RowCopy<Word>> list;
    for (int row = 0; row < rows;) {
        const int count = std::min(1 + below(9), rows - row), words = 1 + below(to_stride),
                  source = below(rows - count + 1);
        const int column = below(from_stride - words + 1), target = below(to_stride - words + 1);
        if (below(4)) {
            list.push_back({&from[source * from_stride + column], &to[row * to_stride + target], count, words,
                            from_stride, to_stride});
            for (int i = 0; i < count; ++i) {
                std::copy_n(&from[(source + i) * from_stride + column], words,
                            &expected[(row + i) * to_stride + target]);
            }
        }
        row += count;
    }
    machine::launch(3, cadre::kRowThreads, 0, seed,
                    [&] { launch(cadre::CopyParameters<Word>{list.data(), (int)list.size()}); });
    verdict::same_bits("the target", to, expected);
}

inline int check(int seeds) {
    for (int seed = 0; seed < seeds; ++seed) {
        copies<uint4>(seed, [](auto p) { cadre_copy_rows_16(p); });
        copies<uint32_t>(seed, [](auto p) { cadre_copy_rows_4(p); });
    }
    return 2 * seeds;
}

}  // namespace rows_check
