// 2^x by multiply-adds, for a part of the exponentials where their unit is what a kernel waits for.
//
// In: x. Out: 2^x; 0 below −126.5, where f32 has few bits left, −∞ included; NaN of NaN. x is divided into its nearest
// whole number, which becomes an exponent, and a rest f of at most a half (Cody and Waite; exact, as the base is 2).
// 2^f is a polynomial of degree 3, whose relative error is nowhere above 7.5e-5: coefficients by Remez's exchange on
// [−½, ½], rounded to f32. It is for numbers that are rounded to bf16 next, whose half unit is 3.9e-3.
//
// FlashAttention 4 does so on Blackwell, where products have become faster and exponentials have not.
#pragma once
#include "ptx/ptx.cuh"

namespace cadre {

DEVICE float power_by_products(float x) {
    // 1.5·2^23: what is added to it is rounded to a whole number; and the bias of exponents.
    constexpr float kShift = 12582912.f + 127.f;
    const float bounded = ptx::larger(x, -127.f);
    const float shifted = bounded + kShift;
    const float f = bounded - (shifted - kShift);
    const float power = ((0x1.c3f7b2p-5f * f + 0x1.f0de4ep-3f) * f + 0x1.62f31ap-1f) * f + 0x1.fff692p-1f;
    // The exponent is in the low bits of `shifted`; the others are shifted out.
    return power * ptx::as_float(ptx::as_bits(shifted) << 23);
}

}  // namespace cadre
