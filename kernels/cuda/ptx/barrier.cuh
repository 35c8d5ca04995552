// Order between threads: mbarriers, named barriers, turns in global memory, registers of a warpgroup, votes of a warp.
//
// Shared memory is named by its 32-bit address in the shared window (`shared_address`); an mbarrier is 8 bytes there.
// Included by ptx.cuh only. A phase starts at 0; waiting for the parity of the phase before the first returns at once.
#pragma once

namespace ptx {

DEVICE uint8_t* dynamic_shared() {
    extern __shared__ __align__(1024) uint8_t raw[];
    return raw;
}
DEVICE uint32_t shared_address(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

// mbarrier: `count` arrivals and all announced bytes complete a phase.
DEVICE void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// Makes initialised barriers visible to the async proxy; then all threads meet.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and announces bytes that copies will bring.
DEVICE void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
#ifdef CADRE_WATCH
#include "watch.cuh"
#else
// Returns once the phase of this parity is complete. The hint, 10 ms, only bounds one sleep.
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
        "@done bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(barrier),
        "r"(parity), "r"(10000000)
        : "memory");
}

// Named barriers: `threads` counts those that arrive and those that wait.
DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
#endif
DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// Registers move between warpgroups; all warps of the warpgroup call it.
template <int Registers>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// One lane of a converged warp.
DEVICE bool elect() {
    uint32_t mine;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(mine));
    return mine;
}
// Tells the compiler that a value is the same in all lanes, so that what follows from it lands in uniform registers.
DEVICE int warp_uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }
template <class T>
DEVICE T exchange(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffff, value, lane_mask);
}

// Order between thread blocks, in global memory.
DEVICE uint32_t claim(uint32_t* counter) { return atomicAdd(counter, 1u); }
#ifndef CADRE_WATCH
DEVICE void wait_turn(const uint32_t* turn, uint32_t mine) {
    uint32_t now;
#ifdef CADRE_POLL_SLEEPS
    // A form to compare: polls are relaxed and rare, one fence orders.
    for (;;) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        if (now == mine) break;
        asm volatile("nanosleep.u32 40;");
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#else
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != mine);
#endif
    // What follows is written by the async proxy.
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
#endif
DEVICE void pass_turn(uint32_t* turn) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
}

}  // namespace ptx
