// What both passes do with the fragment of a product that a thread holds (layout: ptx/wgmma.cuh).
//
// In: registers. Out: registers. `Masked` and `Unmasked` choose at compile time whether a step compares positions: the
// branch on it is taken between products, never inside them. `Plain` and `Softcap` choose the kernel: without softcap
// nothing of it is compiled.
#pragma once
#include "ptx/ptx.cuh"

namespace cadre {

struct Masked {
    static constexpr bool value = true;
};
struct Unmasked {
    static constexpr bool value = false;
};

// What becomes of scores before the mask: nothing, or cap · tanh(s / cap).
struct Plain {
    static constexpr bool capped = false;
};
struct Softcap {
    static constexpr bool capped = true;
};

// Products become tanh(scale / cap · s); what follows takes them times cap · log2 e. A score of a key that nobody holds
// may be NaN and stays so until the mask.
template <int Scores>
DEVICE void cap_scores(float (&s)[Scores], float inner_scale) {
#pragma unroll
    for (int i = 0; i < Scores; ++i) s[i] = ptx::tanh(s[i] * inner_scale);
}

// 0; the compiler does not know so before all numbers are there. (None is a NaN of all ones.) What waits for it waits
// for them.
template <int N>
DEVICE uint32_t nothing(const float (&numbers)[N]) {
    uint32_t ones = 0xFFFFFFFFu;
#pragma unroll
    for (int i = 0; i < N; ++i) ones &= ptx::as_bits(numbers[i]);
    return ones == 0xFFFFFFFFu;
}

// Pairs of bf16 as the register operand of the next product wants them.
template <int Scores>
DEVICE void round_scores(const float (&s)[Scores], uint32_t (&p)[Scores / 2]) {
#pragma unroll
    for (int i = 0; i < Scores / 2; ++i) p[i] = ptx::pack_bf16(s[2 * i], s[2 * i + 1]);
}

}  // namespace cadre
