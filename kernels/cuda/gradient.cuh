// P and dS of the backward pass from a fragment of Sᵀ, and dK and dV at the end, whichever products made them.
//
// Fragments are transposed: a thread holds keys `key` and `key` + 8 and, for every j, query rows 8j + 2·(lane % 4) and
// the next.
#pragma once
#include "backward.cuh"
#include "fragment.cuh"

namespace cadre {

// Query rows that keep a thread's two keys, as positions; asked for by masked steps only.
struct KeptRows {
    int first[2], last[2];

    DEVICE KeptRows(const BackwardStep& step, int key) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int it = key + 8 * r;
            const bool held = it >= step.kv_first && it <= step.kv_last;
            first[r] = held ? it - step.right : kUnbounded, last[r] = held ? it + step.left : -1;
        }
    }
};

// Scores become P. `lse`: that of the fragment's first query row, which is row `first` of the tile; `key`: the thread's
// first.
template <class Mask, int N>
DEVICE void to_probabilities(float (&s)[N], const float* lse, float scale_log2, const BackwardStep& step, int first,
                             int key) {
    const int column = (threadIdx.x & 3) * 2;
    const KeptRows kept(step, key);
    const int row = step.row + first;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float2 it = *reinterpret_cast<const float2*>(lse + 8 * j + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float p = ptx::exp2(s[4 * j + i] * scale_log2 - (i & 1 ? it.y : it.x));
            if constexpr (Mask::value) {
                const int q = row + column + 8 * j + (i & 1);
                if (q < kept.first[i >> 1] || q > kept.last[i >> 1]) p = 0.f;
            }
            s[4 * j + i] = p;
        }
    }
}

// The same with softcap, in two steps as registers are short: first caps and mask of all scores, then P, and P∘(1 −
// tanh²), the factor of dS, both rounded. Of a masked score, −∞, the slope counts as 0, because 0·∞ would be NaN.
template <class Mask, int N>
DEVICE void to_capped_probabilities(float (&s)[N], uint32_t (&prob)[N / 2], uint32_t (&slopes)[N / 2], const float* lse,
                                    const BackwardParameters& p, const BackwardStep& step, int first, int key) {
    const int column = (threadIdx.x & 3) * 2;
    cap_scores(s, p.inner_scale);
    if constexpr (Mask::value) {
        const KeptRows kept(step, key);
        const int row = step.row + first + column;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int q = row + i / 4 * 8 + (i & 1), r = i >> 1 & 1;
            if (q < kept.first[r] || q > kept.last[r]) s[i] = -ptx::infinity();
        }
    }
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float2 it = *reinterpret_cast<const float2*>(lse + 8 * j + column);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i += 2) {
            const float low = ptx::exp2(s[i] * p.scale_log2 - it.x), high = ptx::exp2(s[i + 1] * p.scale_log2 - it.y);
            prob[i / 2] = ptx::pack_bf16(low, high);
            slopes[i / 2] =
                ptx::pack_bf16(low * fmaxf(1.f - s[i] * s[i], 0.f), high * fmaxf(1.f - s[i + 1] * s[i + 1], 0.f));
        }
    }
}

// dP becomes dS.
template <int N>
DEVICE void to_score_gradients(float (&dp)[N], const float (&p)[N], const float* delta) {
    const int column = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float2 it = *reinterpret_cast<const float2*>(delta + 8 * j + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) dp[4 * j + i] = p[4 * j + i] * (dp[4 * j + i] - (i & 1 ? it.y : it.x));
    }
}

// The same with softcap.
template <int N>
DEVICE void to_capped_gradients(float (&dp)[N], const uint32_t (&slopes)[N / 2], const float* delta) {
    const int column = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float2 it = *reinterpret_cast<const float2*>(delta + 8 * j + column);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i += 2) {
            const float2 factors = ptx::unpack_bf16(slopes[i / 2]);
            dp[i] = factors.x * (dp[i] - it.x), dp[i + 1] = factors.y * (dp[i + 1] - it.y);
        }
    }
}

// A thread's rows of dK or dV; `to` is where its first key's first column of the fragment lies, `stride` a key. Columns
// from `columns` on are nobody's.
template <int N>
DEVICE void write_gradient(float* to, size_t stride, const float (&sum)[N], float factor, bool held, int r,
                           int columns = 1 << 20) {
    if (!held) return;
    float2* row = reinterpret_cast<float2*>(to + r * 8 * stride) + (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        if (8 * j < columns) row[4 * j] = make_float2(sum[4 * j + 2 * r] * factor, sum[4 * j + 2 * r + 1] * factor);
    }
}

}  // namespace cadre
