// Entry points of the forward kernel, one a head dim; everything about them is in forward.cuh.
#include "forward.cuh"

#define CADRE_FORWARD(D)                                                                                              \
    KERNEL(cadre::kThreads)                                                                                           \
    cadre_forward_##D(const __grid_constant__ cadre::ForwardParameters p, const __grid_constant__ ptx::TensorMap q,    \
                      const __grid_constant__ ptx::TensorMap k, const __grid_constant__ ptx::TensorMap v) {            \
        cadre::forward<D>(p, q, k, v);                                                                                \
    }

CADRE_FORWARD(64)
CADRE_FORWARD(128)
CADRE_FORWARD(256)
