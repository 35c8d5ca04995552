// The waits of a build that tells where everybody waits, instead of waiting for ever (-DCADRE_WATCH).
//
// In: `cadre_watch` of the module, an address of pinned memory of the host that the host sets before a launch; null
// waits for ever. Out, there: whoever has waited for half a second writes its place, after a second that it was too
// long, and then the kernel traps.
//
//   words 0 to 3: 1 once a wait was too long; block and thread that waited; blocks of the grid
//   4 words a warp from word 4, kWatchedWarps a block: kind (0: waits for nothing here), what, parity or turn, seen
//
// kind 1: an mbarrier, `what` its distance from the start of shared memory; 2: a named barrier, `what` its number,
// parity the threads that it counts; 3: a turn at dQ, `what` the turn, `seen` the one that it is. Few registers: those
// of the kernels are all taken. Nothing is measured with it. Included by barrier.cuh only, in namespace ptx.
#pragma once

constexpr uint32_t kWatchedBlocks = 160, kWatchedWarps = 12;
constexpr uint32_t kPlaced = 500000000, kPatience = 1000000000;  // nanoseconds, of a clock of 4.3 s

extern "C" {
__device__ uint32_t* cadre_watch;
}

DEVICE uint32_t nanoseconds() {
    uint32_t now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
    return now;
}
DEVICE void write_words(uint32_t* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
DEVICE void watch_place(uint32_t kind, uint32_t what, uint32_t parity, uint32_t seen) {
    if (!cadre_watch || blockIdx.x >= kWatchedBlocks) return;
    write_words(cadre_watch + 4 * (1 + blockIdx.x * kWatchedWarps + threadIdx.x / 32), kind, what, parity, seen);
}
// Called again and again by who waits since `since`.
DEVICE void watch_late(uint32_t since, uint32_t kind, uint32_t what, uint32_t parity, uint32_t seen) {
    const uint32_t waited = nanoseconds() - since;
    if (waited < kPlaced || !cadre_watch) return;
    watch_place(kind, what, parity, seen);
    if (waited < kPatience) return;
    write_words(cadre_watch, 1, blockIdx.x, threadIdx.x, gridDim.x);
    __threadfence_system();
    // The others may write theirs.
    if (waited > kPatience + kPlaced) asm volatile("trap;");
}

DEVICE bool barrier_try(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity), "r"(10000000)
                 : "memory");
    return done;
}
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    if (barrier_try(barrier, parity)) return;
    const uint32_t since = nanoseconds();
    while (!barrier_try(barrier, parity)) {
        watch_late(since, 1, barrier - shared_address(dynamic_shared()), parity, 0);
    }
}

DEVICE void named_sync(int id, int threads) {
    watch_place(2, id, threads, 0);
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
    watch_place(0, 0, 0, 0);
}

DEVICE void wait_turn(const uint32_t* turn, uint32_t mine) {
    const uint32_t since = nanoseconds();
    for (;;) {
        uint32_t now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        if (now == mine) break;
        watch_late(since, 3, mine, 0, now);
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
