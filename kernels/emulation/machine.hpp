// A small machine that runs one kernel launch on the CPU: blocks of threads as fibers, shared memory, time by seed.
//
// In: a grid, a number of threads, bytes of shared memory, a seed and the kernel. Out: the kernel's effects. All blocks
// live at once on one OS thread; a fiber runs until it waits for something. The seed decides which warpgroups stall in
// a round, when asynchronous work is done (late, early or at random), and in which order blocks get on. Seed 0 stalls
// nobody and does asynchronous work as late as it may.
//
// What it sees: wrong numbers, deadlocks, reads before a wait, writes over operands still in use, stores to shared
// memory that no fence has made visible to the async proxy, wgmma operands that differ inside a warpgroup, too many
// arrivals. What it does not see: speed, bank conflicts, races between generic accesses inside a round, memory order
// between blocks.
//
// Invariant: it ends. When no fiber can go on and nothing is pending, it says where everybody waits and aborts.
#pragma once
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace machine {

[[noreturn]] inline void fail(const std::string& what) {
    fprintf(stderr, "emulation: %s\n", what.c_str());
    exit(3);
}

// One 64 KiB-stacked thread of control. On x86-64 a switch is a few instructions; elsewhere ucontext, which asks the
// kernel for the signal mask each time.
constexpr size_t kStack = 64 << 10;
#if defined(__x86_64__)
struct Context {
    void* stack = nullptr;
};
extern "C" void machine_switch(void** from, void* to);
asm(R"(
.text
.weak machine_switch
.type machine_switch, @function
machine_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
inline void swap(Context& from, Context& to) { machine_switch(&from.stack, to.stack); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    // Six registers, the entry, and a slot that keeps the stack aligned as a call would.
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + kStack) & ~uintptr_t(15));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack = top;
}
#else
struct Context {
    ucontext_t it;
};
inline void swap(Context& from, Context& to) { swapcontext(&from.it, &to.it); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context.it);
    context.it.uc_stack.ss_sp = stack, context.it.uc_stack.ss_size = kStack, context.it.uc_link = nullptr;
    makecontext(&context.it, entry, 0);
}
#endif

struct Barrier {
    int count = 0, pending = 0;
    int64_t bytes = 0;
    unsigned phase = 0;
    void complete() {
        if (pending < 0) fail("an mbarrier got more arrivals than it counts");
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
    }
};

// Threads of a warp or warpgroup that meet; the last one acts for all.
struct Meeting {
    int here = 0;
    unsigned times = 0;
};

struct Product;  // of wgmma, emulated.hpp

struct Warpgroup {
    std::deque<Product*> products;      // issued, not done; front is the oldest
    std::deque<size_t> groups;          // number of products up to the end of each committed group
    size_t done = 0, issued[128] = {};  // products done; issued by each thread
    size_t commits[128] = {}, retired = 0;
    Meeting meeting;
};

struct Pending {  // an asynchronous copy
    std::function<void()> act;
    int rounds;  // until it may land
};

// What a lane gives to an operation of its warp.
struct Operand {
    float* d;
    const uint32_t *a, *b;
    uint32_t *to, from;
};

struct Block {
    int index = 0;
    std::vector<uint8_t> store, async_store;
    uint8_t *generic = nullptr, *async = nullptr;  // shared memory as threads and as the async proxy see it
    std::map<uint32_t, Barrier> barriers;
    struct Named {
        int here = 0;
        unsigned times = 0;
    } named[16];
    std::vector<Meeting> warps;
    std::vector<Warpgroup> warpgroups;
    std::vector<std::array<uint64_t, 32>> exchanged;
    std::vector<std::array<Operand, 32>> operands;
    std::deque<Pending> copies;
};

// What a thread waits for, as the words of kernels/cuda/ptx/watch.cuh.
struct WaitsAt {
    uint32_t kind = 0, what = 0, parity = 0, seen = 0;
};

// 16 bytes on their way into shared memory, for a thread that has to wait for them.
struct ThreadCopy {
    uint32_t to;
    const void* from;
    bool held;
};

struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    Block* block = nullptr;
    int thread = 0;
    bool done = false;
    const char* waiting = "";
    WaitsAt at;
    int stall = 0;                                        // rounds
    std::vector<std::pair<uint32_t, uint32_t>> unfenced;  // stores: address, bytes
    std::vector<std::function<void()>> reads, writes;     // bulk additions: not read yet, not added yet
    std::vector<ThreadCopy> fetched, committed;           // copies of a thread
    std::vector<std::pair<float*, float>> adds;           // additions of a thread: not done yet
};

inline std::vector<std::unique_ptr<Block>> blocks;
inline std::vector<Fiber> fibers;
inline Context scheduler;
inline Fiber* current;
inline std::function<void()> kernel;
inline uint64_t moves;  // grows whenever anything happens
inline uint64_t random_state;
inline bool stalls;     // by seed
inline bool eager;      // products and copies are done when committed, not when waited for
inline int herd = 128;  // threads that stall together: a warpgroup, or a warp

// Plays of what a GPU may do: the how-manieth arrival at an mbarrier from here that is lost, how often the first
// numbers of a product are off (0: never), and MN-major operands whose swizzle counts from where they begin, not by
// address.
inline int lost_arrival, wrong_every, products;
inline bool swizzle_from_operand;
// Asked when nothing can go on; true gives the launch up instead of ending the process.
inline std::function<bool()> on_deadlock;

inline uint32_t random_bits() {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state >> 20;
}

// Rounds that a copy takes: for ever with seed 0, else mostly few, sometimes very many.
inline int copy_rounds() {
    if (!stalls) return 1 << 30;
    return random_bits() % 8 ? random_bits() % 3 : random_bits() % 300;
}

inline void yield() { swap(current->context, scheduler); }

// A thread may be slow just after it has told others to go on.
inline void dawdle() {
    if (!stalls || random_bits() % 4) return;
    current->stall = 1 + random_bits() % 16;
    yield();
}

template <class Ready>
void wait_until(const char* what, Ready ready, WaitsAt at = {}) {
    while (!ready()) {
        current->waiting = what, current->at = at;
        yield();
    }
    current->at = {};
    ++moves;
}

// The last of `size` threads does `act`; all go on after it.
template <class Act>
void meet(const char* what, Meeting& meeting, int size, Act act) {
    const unsigned time = meeting.times;
    if (++meeting.here == size) {
        act();
        meeting.here = 0, ++meeting.times, ++moves;
    } else {
        wait_until(what, [&] { return meeting.times != time; });
    }
}

inline void enter() {
    kernel();
    if (!current->reads.empty()) fail("a thread ended before its bulk additions had read shared memory");
    for (auto& write : current->writes) write();
    if (!current->fetched.empty() || !current->committed.empty()) fail("a thread ended before its copies were there");
    for (auto& [to, number] : current->adds) *to += number;
    current->done = true;
    ++moves;
    for (;;) yield();
}

inline std::unique_ptr<Block> make_block(int index, int threads, size_t shared_bytes) {
    auto block = std::make_unique<Block>();
    block->index = index;
    auto aligned = [&](std::vector<uint8_t>& store) {
        store.assign(shared_bytes + 1024, 0xFF);  // NaN in every type
        return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(store.data()) + 1023) & ~uintptr_t(1023));
    };
    block->generic = aligned(block->store), block->async = aligned(block->async_store);
    block->warps.resize(threads / 32), block->exchanged.resize(threads / 32), block->operands.resize(threads / 32),
        block->warpgroups.resize(threads / 128);
    return block;
}

[[noreturn]] inline void report_deadlock() {
    std::map<std::string, int> places;
    for (auto& fiber : fibers) {
        if (!fiber.done)
            ++places["block " + std::to_string(fiber.block->index) + ", warpgroup " +
                     std::to_string(fiber.thread / 128) + ": " + fiber.waiting];
    }
    std::string all = "deadlock;";
    for (auto& [place, threads] : places) all += "\n  " + std::to_string(threads) + " threads of " + place;
    fail(all);
}

// Lands the block's copies that are due; `oldest`: one that is not, too. Whether any landed.
inline bool advance(Block& block, bool oldest) {
    bool landed = false;
    for (size_t left = block.copies.size(); left; --left) {
        Pending copy = std::move(block.copies.front());
        block.copies.pop_front();
        if (--copy.rounds < 0 || oldest) {
            copy.act();
            oldest = false, landed = true;
        } else {
            block.copies.push_back(std::move(copy));
        }
    }
    return landed;
}

void set_place(int block, int thread, int grid);

inline void launch(int grid, int threads, size_t shared_bytes, uint64_t seed, std::function<void()> body) {
    kernel = std::move(body);
    random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    stalls = seed != 0, eager = seed % 3 == 2;
    blocks.clear();
    fibers.clear();
    fibers.resize((size_t)grid * threads);
    for (int b = 0; b < grid; ++b) {
        blocks.push_back(make_block(b, threads, shared_bytes));
        for (int t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[(size_t)b * threads + t];
            fiber.block = blocks.back().get(), fiber.thread = t;
            fiber.stack.reset(new char[kStack]);
            prepare(fiber.context, fiber.stack.get(), enter);
        }
    }
    std::vector<int> resting(fibers.size() / herd + 1, 0);  // rounds, of each herd
    for (int quiet = 0;;) {
        const uint64_t before = moves;
        bool left = false;
        for (size_t i = 0; i < fibers.size(); i += herd) {
            bool stalled = seed && random_bits() % 4 == 0;
            // A warp may fall behind the others of its block by more than a product; too short to look like a deadlock.
            int& rests = resting[i / herd];
            if (seed && herd < 128 && !rests && random_bits() % 256 == 0) rests = random_bits() % 40;
            if (rests) --rests, stalled = true;
            for (size_t t = i; t < i + herd && t < fibers.size(); ++t) {
                if (fibers[t].done) continue;
                left = true;
                if (stalled || (fibers[t].stall && fibers[t].stall--)) continue;
                current = &fibers[t];
                set_place(current->block->index, current->thread, grid);
                swap(scheduler, current->context);
            }
        }
        if (!left) break;
        quiet = moves == before ? quiet + 1 : 0;
        // Nothing but copies can help: the oldest lands, alone, so that what waits for it goes on without the others.
        // With stalls a round may be idle by chance.
        const bool idle = quiet > (seed ? 40 : 0);
        for (auto& block : blocks) {
            if (advance(*block, idle)) quiet = 0;
        }
        if (quiet > (seed ? 200 : 3)) {
            if (on_deadlock && on_deadlock()) return;
            report_deadlock();
        }
    }
}

}  // namespace machine
