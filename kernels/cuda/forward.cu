// The forward kernel: who does what, and its entry points, two a head dim. Everything about it is in forward.cuh.
#include "forward_consumer.cuh"
#include "forward_producer.cuh"

namespace cadre {

template <int D, class Cap>
DEVICE void forward(const ForwardParameters& p, const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                    const ptx::TensorMap& v_map) {
    using F = Forward<D>;
    typename F::Shared& shared = *reinterpret_cast<typename F::Shared*>(ptx::dynamic_shared());
    const ForwardAddresses<D> at(shared);
    const int group = ptx::warp_uniform(threadIdx.x / kGroup);
    if (threadIdx.x == 0) {
        ptx::barrier_init(at.q_full, 1), ptx::barrier_init(at.q_empty, F::kReleases);
        for (int stage = 0; stage < F::kStages; ++stage) {
            ptx::barrier_init(barrier_of(at.k_full, stage), 1), ptx::barrier_init(barrier_of(at.v_full, stage), 1);
            ptx::barrier_init(barrier_of(at.k_empty, stage), F::kReleases);
            ptx::barrier_init(barrier_of(at.v_empty, stage), F::kReleases);
        }
        ptx::barrier_init_done();
    }
    ptx::sync_threads();
    if (group == 0) {
        ptx::give_registers<F::kProducerRegisters>();
        if (threadIdx.x < 32 && ptx::elect()) forward_load<D>(p, shared, q_map, k_map, v_map);
    } else {
        ptx::take_registers<F::kConsumerRegisters>();
        forward_compute<D, Cap>(p, shared, group - 1);
    }
}

}  // namespace cadre

#ifndef CADRE_EMULATION  // there the template is called itself
#define CADRE_FORWARD(NAME, D, CAP)                                                                         \
    CONSTANT cadre::Launch NAME##_launch = {cadre::Forward<D>::kThreads, sizeof(cadre::Forward<D>::Shared), \
                                            cadre::Forward<D>::kRows, cadre::Forward<D>::kKeys};            \
    KERNEL(cadre::Forward<D>::kThreads)                                                                     \
    NAME(const __grid_constant__ cadre::ForwardParameters p, const __grid_constant__ ptx::TensorMap q,      \
         const __grid_constant__ ptx::TensorMap k, const __grid_constant__ ptx::TensorMap v) {              \
        cadre::forward<D, cadre::CAP>(p, q, k, v);                                                          \
    }

CADRE_FORWARD(cadre_forward_64, 64, Plain)
CADRE_FORWARD(cadre_forward_128, 128, Plain)
CADRE_FORWARD(cadre_forward_256, 256, Plain)
CADRE_FORWARD(cadre_forward_64_softcap, 64, Softcap)
CADRE_FORWARD(cadre_forward_128_softcap, 128, Softcap)
CADRE_FORWARD(cadre_forward_256_softcap, 256, Softcap)
#endif
