// What both passes do with the fragment of a product that a thread holds (layout: ptx/wgmma.cuh).
//
// In: registers. Out: registers. `Masked` and `Unmasked` choose at compile time whether a step compares positions: the
// branch on it is taken between products, never inside them.
#pragma once
#include "ptx/ptx.cuh"

namespace cadre {

struct Masked {
    static constexpr bool value = true;
};
struct Unmasked {
    static constexpr bool value = false;
};

// Pairs of bf16 as the register operand of the next product wants them.
template <int Scores>
DEVICE void round_scores(const float (&s)[Scores], uint32_t (&p)[Scores / 2]) {
#pragma unroll
    for (int i = 0; i < Scores / 2; ++i) p[i] = ptx::pack_bf16(s[2 * i], s[2 * i + 1]);
}

}  // namespace cadre
