// Attention in f64 from its definition, and how far the kernels' roundings can bring each number from it.
//
// In: a batch. Out: O, LSE, Δ and the gradients of every row of the batch, dK and dV a bundle; beside each number a
// bound. Bounds are derived, nothing in them is fitted, and a sum of errors is taken as if none cancelled, so a right
// kernel keeps them whatever the shape and the numbers:
//
//   a score s                                δ = kTanh·|s| under a softcap, + (D + 16)·kF32·Σ|q·k|·scale
//   P and its sum, forward                   δ + kExp of themselves (kPower in a form with powers by multiply-adds),
//   the
//                                            sum n·kF32 besides
//   LSE = log Σ e^s                          Σ P·δ: a softmax of errors, whatever the LSE's own size
//   O = Σ P·V / Σ P                          Σ P·(δ + kBf16)·|V|, + the sum's own error of |O|, + kBf16·|O|
//   P, backward, from LSE                    δ + kExp of itself
//   dV                                       Σ P·(δ + kBf16)·|dO|
//   dS = P∘(dP − Δ), with softcap ∘(1 − t²)  those of its factors, + kBf16 of itself for each rounding
//   dQ, dK                                   Σ δdS·|K|, Σ δdS·|Q|
#pragma once
#include <cmath>
#include <vector>

#include "shapes.hpp"

namespace shapes {

// Half a unit of the last of 8 bits; PTX's bounds of tanh.approx, and of ex2.approx and lg2.approx with the
// rounding of their arguments; an addition of f32; a sum of gradients in f32, of up to 1024 numbers.
constexpr double kBf16 = 0x1p-8, kTanh = 0x1p-11, kExp = 0x1p-20, kF32 = 0x1p-24, kSum = 1024 * kF32;

struct Bounded {
    std::vector<double> right, off;

    void assign(size_t count, double number) { right.assign(count, number), off.assign(count, 0); }
    void add(size_t at, double number, double error) { right[at] += number, off[at] += error; }
};

struct Reference {
    Bounded o, lse, dq, dk, dv;  // dk, dv: [dkv rows, kv heads, dim]
    std::vector<double> delta;
};

// The largest error of power.cuh's polynomial, and three roundings of f32.
constexpr double kPower = 7.5e-5 + 3 * kF32;

inline Reference reference(const Batch& it) {
    const int D = it.dim;
    const double exp_off = cadre::tile_rows(D) == cadre::kForwardRows ? kExp : kPower;
    const double tanh_off = it.softcap ? kTanh : 0;
    Reference out;
    const size_t numbers = (size_t)it.q_rows * it.heads, keys = (size_t)it.dkv_rows * it.kv_heads;
    out.o.assign(numbers * D, 0), out.dq.assign(numbers * D, 0), out.dk.assign(keys * D, 0), out.dv.assign(keys * D, 0);
    out.lse.assign(numbers, -INFINITY), out.delta.assign(numbers, 0);
    auto wide = [](const std::vector<uint16_t>& rows) {
        std::vector<double> numbers(rows.size());
        for (size_t i = 0; i < rows.size(); ++i) numbers[i] = machine::widen(rows[i]);
        return numbers;
    };
    const auto q = wide(it.q), k = wide(it.k), v = wide(it.v), dout = wide(it.dout);
    // The product of two rows, and that of their sizes.
    auto dot = [D](const double* a, const double* b, double* sizes) {
        double sum = 0;
        *sizes = 0;
        for (int i = 0; i < D; ++i) sum += a[i] * b[i], *sizes += std::abs(a[i] * b[i]);
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
                auto held = [&](int base, int key) {
                    return ((size_t)(base + key) * it.kv_heads + head / it.group) * D;
                };
                const int count = end - first;
                std::vector<double> p(count), off(count), slope(count, 1), slope_off(count, 0);
                double largest = -INFINITY, sizes, most = 0, sum = 0;
                for (int i = 0; i < count; ++i) {
                    double& score = p[i] = dot(mine, &k[held(task.kv_row, first + i)], &sizes) * it.scale;
                    most = std::max(most, sizes * it.scale);
                    if (it.softcap) {
                        const double capped = std::tanh(score / it.softcap);
                        score = it.softcap * capped, slope[i] = 1 - capped * capped;
                        slope_off[i] = 2 * tanh_off * capped * capped + kExp;
                    }
                    largest = std::max(largest, score), off[i] = tanh_off * std::abs(score);
                }
                for (double& x : p) sum += x = std::exp(x - largest);
                const double lse = largest + std::log(sum);
                double sum_off = count * kF32;
                for (int i = 0; i < count; ++i) {
                    p[i] /= sum, off[i] += (D + 16) * kF32 * (most + std::abs(lse)) + exp_off;
                    sum_off += p[i] * off[i];
                }
                out.lse.right[at] = lse, out.lse.off[at] = sum_off;
                for (int i = 0; i < count; ++i) {
                    const double* value = &v[held(task.kv_row, first + i)];
                    const double error = p[i] * (off[i] + kBf16 + count * kF32);
                    for (int d = 0; d < D; ++d) out.o.add(at * D + d, p[i] * value[d], error * std::abs(value[d]));
                }
                for (size_t d = at * D; d < (at + 1) * D; ++d) {
                    out.o.off[d] += (sum_off + kBf16) * std::abs(out.o.right[d]);
                }
                out.delta[at] = dot(&out.o.right[at * D], grad, &sizes);
                for (int i = 0; i < count; ++i) {
                    const size_t key = held(task.kv_row, first + i), sum_at = held(bundle.dkv_row, first + i);
                    const double dp = dot(grad, &v[key], &sizes) - out.delta[at];
                    const double dp_off = kF32 * ((D + 2) * sizes + std::abs(out.delta[at]));
                    const double ds = p[i] * dp * slope[i] * it.scale, roundings = it.softcap ? 2 * kBf16 : kBf16;
                    const double ds_off = std::abs(ds) * (off[i] + roundings + kSum) +
                                          p[i] * it.scale * (slope[i] * dp_off + std::abs(dp) * slope_off[i]);
                    const double p_off = p[i] * (off[i] + kBf16 + kSum);
                    for (int d = 0; d < D; ++d) {
                        out.dq.add(at * D + d, ds * k[key + d], ds_off * std::abs(k[key + d]));
                        out.dk.add(sum_at + d, ds * mine[d], ds_off * std::abs(mine[d]));
                        out.dv.add(sum_at + d, p[i] * grad[d], p_off * std::abs(grad[d]));
                    }
                }
            }
        }
    }
    return out;
}

}  // namespace shapes
