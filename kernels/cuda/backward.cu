// The backward kernel: who does what, and its entry points, two a head dim. Everything about it is in backward.cuh.
#include "backward_columns.cuh"
#include "backward_keys.cuh"
#include "backward_later.cuh"
#include "backward_producer.cuh"

namespace cadre {

template <int D, class Cap>
DEVICE void backward(const BackwardParameters& p, const ptx::TensorMap& q_map, const ptx::TensorMap& dout_map,
                     const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
    using B = Backward<D>;
    typename B::Shared& shared = *reinterpret_cast<typename B::Shared*>(ptx::dynamic_shared());
    const BackwardAddresses<D> at(shared);
    const int group = ptx::warp_uniform(threadIdx.x / kGroup);
    if (threadIdx.x == 0) {
        // Those who load: the thread that claims does not wait for itself; the warps of dQ and of LSE read `tile` too.
        if constexpr (B::kLater) ptx::barrier_init(at.nobody, kReleases);
        ptx::barrier_init(at.kv_full, 1), ptx::barrier_init(at.kv_empty, kReleases + 3);
        for (int stage = 0; stage < B::kStages; ++stage) {
            ptx::barrier_init(barrier_of(at.q_full, stage), 2);  // the copy, and the step with LSE and Δ
            ptx::barrier_init(barrier_of(at.q_empty, stage), kReleases);
        }
        for (int stage = 0; stage < B::kOutStages; ++stage) {
            ptx::barrier_init(barrier_of(at.dout_full, stage), 1);
            ptx::barrier_init(barrier_of(at.dout_empty, stage), kReleases);
        }
        ptx::barrier_init_done();
    }
    ptx::sync_threads();
    if (group == 0) {
        ptx::give_registers<kProducerRegisters>();
        const int warp = ptx::warp_uniform(threadIdx.x / 32);
        if (warp == 0 && ptx::elect()) backward_load<D>(p, shared, q_map, dout_map, k_map, v_map);
        if (warp == 1 || warp == 3) backward_add_dq<D>(p, shared, warp / 2);
        if (warp == 2) backward_fetch<D>(p, shared);
    } else {
        ptx::take_registers<kConsumerRegisters>();
        if constexpr (B::kByColumns) {
            backward_by_columns<D, Cap>(p, shared, group - 1);
        } else if constexpr (B::kLater) {
            backward_later<D, Cap>(p, shared, group - 1);
        } else {
            backward_by_keys<D, Cap>(p, shared, group - 1);
        }
    }
}

}  // namespace cadre

#ifndef CADRE_EMULATION  // there the template is called itself
#define CADRE_BACKWARD(NAME, D, CAP)                                                                    \
    CONSTANT cadre::Launch NAME##_launch = {cadre::kThreads, sizeof(cadre::Backward<D>::Shared),        \
                                            cadre::Backward<D>::kRows, cadre::Backward<D>::kKeys};      \
    KERNEL(cadre::kThreads)                                                                             \
    NAME(const __grid_constant__ cadre::BackwardParameters p, const __grid_constant__ ptx::TensorMap q, \
         const __grid_constant__ ptx::TensorMap dout, const __grid_constant__ ptx::TensorMap k,         \
         const __grid_constant__ ptx::TensorMap v) {                                                    \
        cadre::backward<D, cadre::CAP>(p, q, dout, k, v);                                               \
    }

CADRE_BACKWARD(cadre_backward_64, 64, Plain)
CADRE_BACKWARD(cadre_backward_128, 128, Plain)
CADRE_BACKWARD(cadre_backward_256, 256, Plain)
CADRE_BACKWARD(cadre_backward_64_softcap, 64, Softcap)
CADRE_BACKWARD(cadre_backward_128_softcap, 128, Softcap)
CADRE_BACKWARD(cadre_backward_256_softcap, 256, Softcap)
#endif
