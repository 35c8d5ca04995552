// The two families of kernels, as the checks launch them: tiles, threads, shared memory, and the call itself.
//
// In: a batch, parameters, a grid and a seed of stalls. Out: the launch's effects. The Hopper
// kernels have a head dim each, a portable one takes all multiples of 8 up to its D.
#pragma once
#include "forward.cu"
#include "portable/forward.cu"
#include "reference.hpp"
#ifndef CADRE_ONLY_FORWARD
#include "backward.cu"
#include "portable/backward.cu"
#endif

namespace families {

inline int kernel_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

struct Hopper {
    template <int D>
    using Forward = cadre::Forward<D>;

    template <int D, class Cap>
    static void forward(const cadre::ForwardParameters& p, const shapes::Batch& batch, int grid, uint64_t seed) {
        using F = Forward<D>;
        const ptx::TensorMap q{batch.q.data(), D, batch.heads, batch.q_rows, F::kRows};
        const ptx::TensorMap k{batch.k.data(), D, batch.kv_heads, batch.kv_rows, F::kKeys};
        const ptx::TensorMap v{batch.v.data(), D, batch.kv_heads, batch.kv_rows, F::kKeys};
        machine::herd = 128;
        machine::launch(grid, F::kThreads, sizeof(typename F::Shared), seed,
                        [&] { cadre::forward<D, Cap>(p, q, k, v); });
    }
#ifndef CADRE_ONLY_FORWARD
    template <int D>
    using Backward = cadre::Backward<D>;

    template <int D, class Cap>
    static void backward(const cadre::BackwardParameters& p, const shapes::Batch& batch, int grid, uint64_t seed) {
        using B = Backward<D>;
        const ptx::TensorMap q{batch.q.data(), D, batch.heads, batch.q_rows, B::kRows};
        const ptx::TensorMap dout{batch.dout.data(), D, batch.heads, batch.q_rows, B::kRows};
        const ptx::TensorMap k{batch.k.data(), D, batch.kv_heads, batch.kv_rows, B::kKeys};
        const ptx::TensorMap v{batch.v.data(), D, batch.kv_heads, batch.kv_rows, B::kKeys};
        machine::herd = 128;
        machine::launch(grid, cadre::kThreads, sizeof(typename B::Shared), seed,
                        [&] { cadre::backward<D, Cap>(p, q, dout, k, v); });
    }
#endif
};

struct Portable {
    template <int D>
    using Forward = cadre::portable::Forward<D>;

    static cadre::portable::Tensor tensor(const std::vector<uint16_t>& rows, int heads, int dim) {
        return {rows.data(), heads, dim};
    }
    template <int D, class Cap>
    static void forward(const cadre::ForwardParameters& p, const shapes::Batch& batch, int grid, uint64_t seed) {
        using F = Forward<D>;
        const auto q = tensor(batch.q, batch.heads, batch.dim), k = tensor(batch.k, batch.kv_heads, batch.dim),
                   v = tensor(batch.v, batch.kv_heads, batch.dim);
        machine::herd = 32;
        machine::launch(grid, F::kThreads, sizeof(typename F::Shared), seed,
                        [&] { cadre::portable::forward<D, Cap>(p, q, k, v); });
    }
#ifndef CADRE_ONLY_FORWARD
    template <int D>
    using Backward = cadre::portable::Backward<D>;

    template <int D, class Cap>
    static void backward(const cadre::BackwardParameters& p, const shapes::Batch& batch, int grid, uint64_t seed) {
        using B = Backward<D>;
        const auto q = tensor(batch.q, batch.heads, batch.dim), dout = tensor(batch.dout, batch.heads, batch.dim),
                   k = tensor(batch.k, batch.kv_heads, batch.dim), v = tensor(batch.v, batch.kv_heads, batch.dim);
        machine::herd = 32;
        machine::launch(grid, B::kThreads, sizeof(typename B::Shared), seed,
                        [&] { cadre::portable::backward<D, Cap>(p, q, dout, k, v); });
    }
#endif
};

}  // namespace families
