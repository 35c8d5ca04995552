// Entry points of the portable forward kernel, two a head dim. Everything about it is in forward.cuh.
#include "forward.cuh"

#ifndef CADRE_EMULATION  // there the template is called itself
#define CADRE_FORWARD(NAME, D, CAP)                                                                                  \
    CONSTANT cadre::Launch NAME##_launch = {cadre::portable::Forward<D>::kThreads,                                   \
                                            sizeof(cadre::portable::Forward<D>::Shared),                             \
                                            cadre::portable::Forward<D>::kRows, cadre::portable::Forward<D>::kKeys}; \
    KERNEL(cadre::portable::Forward<D>::kThreads)                                                                    \
    NAME(const __grid_constant__ cadre::ForwardParameters p, const __grid_constant__ cadre::portable::Tensor q,      \
         const __grid_constant__ cadre::portable::Tensor k, const __grid_constant__ cadre::portable::Tensor v) {     \
        cadre::portable::forward<D, cadre::CAP>(p, q, k, v);                                                         \
    }

CADRE_FORWARD(cadre_portable_forward_64, 64, Plain)
CADRE_FORWARD(cadre_portable_forward_128, 128, Plain)
CADRE_FORWARD(cadre_portable_forward_256, 256, Plain)
CADRE_FORWARD(cadre_portable_forward_64_softcap, 64, Softcap)
CADRE_FORWARD(cadre_portable_forward_128_softcap, 128, Softcap)
CADRE_FORWARD(cadre_portable_forward_256_softcap, 256, Softcap)
#endif
