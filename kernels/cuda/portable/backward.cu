// Entry points of the portable backward kernel, two a head dim. Everything about it is in backward.cuh.
#include "backward_compute.cuh"

#ifndef CADRE_EMULATION  // there the template is called itself
#define CADRE_BACKWARD(NAME, D, CAP)                                                                              \
    CONSTANT cadre::Launch NAME##_launch = {                                                                      \
        cadre::portable::Backward<D>::kThreads, sizeof(cadre::portable::Backward<D>::Shared),                     \
        cadre::portable::Backward<D>::kTileRows, cadre::portable::Backward<D>::kKeys};                            \
    KERNEL(cadre::portable::Backward<D>::kThreads)                                                                \
    NAME(const __grid_constant__ cadre::BackwardParameters p, const __grid_constant__ cadre::portable::Tensor q,  \
         const __grid_constant__ cadre::portable::Tensor dout, const __grid_constant__ cadre::portable::Tensor k, \
         const __grid_constant__ cadre::portable::Tensor v) {                                                     \
        cadre::portable::backward<D, cadre::CAP>(p, q, dout, k, v);                                               \
    }

CADRE_BACKWARD(cadre_portable_backward_64, 64, Plain)
CADRE_BACKWARD(cadre_portable_backward_128, 128, Plain)
CADRE_BACKWARD(cadre_portable_backward_256, 256, Plain)
CADRE_BACKWARD(cadre_portable_backward_64_softcap, 64, Softcap)
CADRE_BACKWARD(cadre_portable_backward_128_softcap, 128, Softcap)
CADRE_BACKWARD(cadre_portable_backward_256_softcap, 256, Softcap)
#endif
