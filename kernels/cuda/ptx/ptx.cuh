// The closed set of primitives that the kernels are written in: everything that is not plain C++ goes through here.
//
// In: nothing. Out: namespace `ptx`. On the device the headers below, one PTX instruction a function; under
// CADRE_EMULATION the same names on the CPU (kernels/emulation/emulated.hpp), so that the kernels' own source runs in
// `make test`. A primitive that exists on one side only does not compile on the other: that is the point.
#pragma once
// Of a lambda that is large: otherwise what it captures may land in memory.
#define INLINE __attribute__((always_inline))
#ifdef CADRE_EMULATION
#include "emulated.hpp"
#else
#include <cuda.h>

#include <cstdint>
#define DEVICE __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define ELEMENTWISE(threads) extern "C" __global__ void __launch_bounds__(threads)
#define CONSTANT extern "C" __device__ const
#include "barrier.cuh"
#include "copy.cuh"
#include "warp.cuh"
#include "wgmma.cuh"
#endif
