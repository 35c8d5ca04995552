// A libcuda.so.1 whose GPU is the emulated one: for tests of the host's code, with the kernels' own source behind it.
//
// In: the calls of the CUDA driver that kernels/src/device makes. Out: what a Hopper GPU with 3 multiprocessors would
// give, or one of another compute capability, which takes files of kernels that are for it. Streams are lazy: work runs
// when somebody waits for it, so that a result read too early is poison. Fresh memory is NaN, and a write beside an
// allocation ends the process when it is freed. Copies from memory of the host that is not pinned wait for their stream
// and take the bytes then, as a driver may; from memory that is they take them when they run. A kernel that was not
// loaded waits for everything at its first launch, and cannot be recorded then. A thread that waits for an event that
// lets it spin is refused, and so is the time of an event without one.
//
// Environment: CADRE_EMULATED_MEMORY, bytes in all, or ROLE-INDEX:BYTES for one process of a job; CADRE_EMULATED_LOST,
// launches until the GPU is lost; CADRE_EMULATED_SEED of stalls. As ROLE:COUNT: CADRE_EMULATED_COPIES, copies inside
// the device until it is lost; CADRE_EMULATED_ORPHAN, the copy from another process during which that process is
// killed; CADRE_EMULATED_CUT, the wait of a stream for such copies at which this process loses all its links.
// CADRE_EMULATED_HANG, _FAULT, _WRONG: the kernel that never ends because an arrival is lost, that touches an illegal
// address, whose products are wrong (with head dim 64 backward as if the swizzle counted from where an operand begins;
// of cadre_finish_dq the scale of what it rounds). CADRE_EMULATED_DRIVER, _CAPABILITY, _GPUS: version of the driver
// (13000), compute capability (90, or as CADRE_EMULATED_MEMORY), number of GPUs (1). CADRE_EMULATED_OWN_GPU=1: each
// process sees a GPU with another UUID. CADRE_EMULATED_MODULES: modules that can be loaded, then memory is short.
// CADRE_EMULATED_GATES=0: streams wait for no word of the host. CADRE_EMULATED_PAGEABLE=0, or ROLE:1 for processes of a
// job: copies that would make their caller wait are refused. CADRE_EMULATED_PINNED: bytes that can be pinned.
// CADRE_EMULATED_ELSEWHERE: allocations of so many bytes are said to lie on GPU 1. CADRE_EMULATED_PROGRESS: a seed;
// streams without gates then get on by themselves too, as it happens, whenever work is put. Says nothing of speed, of a
// real driver's answers, or of memory that a real GPU would refuse.
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <random>
#include <thread>

#include "machine.hpp"

namespace {

enum Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidHandle = 400,
    kNoBinary = 209,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kCaptureUnsupported = 900,
    kCaptureInvalidated = 901,
    kCaptureIsolation = 905,
    kCapturedEvent = 907,
    kLaunchFailed = 719
};

using Work = std::function<void()>;
struct Graph {
    std::vector<Work> work;
    bool broken = false;
};
struct Stream {
    std::deque<Work> work;
    bool busy = false;           // a thread runs its work
    int foreign = 0;             // copies from other processes that are not over
    bool awaited = false;        // a stream waits for the last of them
    bool has_gates = false;      // its work may wait for the host
    Graph* recording = nullptr;  // where its work goes instead

    void put(Work it) {
        if (recording) return recording->work.push_back(std::move(it));
        work.push_back(std::move(it));
    }
    // What cannot be recorded ends a recording.
    bool refuses() { return recording && (recording->broken = true); }
};
// What a recorded event stands for; who waits for it may outlive the event.
struct Moment {
    Stream* stream = nullptr;
    bool done = false, recorded_in_graph = false;
    std::chrono::steady_clock::time_point time;
};
struct Event {
    std::shared_ptr<Moment> moment = std::make_shared<Moment>();
    unsigned flags = 0;  // 1: who waits sleeps; 2: it has no time
};

constexpr size_t kGuard = 256;
constexpr uint8_t kGuardByte = 0xC7;

std::recursive_mutex mutex;
std::mutex machine_mutex;  // one kernel runs at a time
std::vector<std::unique_ptr<Stream>> streams;
Stream default_stream;
std::map<uint64_t, size_t> allocations;  // address behind the guard, bytes
std::map<uint64_t, size_t> pinned;       // memory of the host that copies read late
size_t allocated;
long copies;
bool lost;
int lost_with = kLaunchFailed;
bool hung;                      // a kernel that never ends has begun
uint32_t* told_to;              // memory of the host that a kernel which waits too long writes to
thread_local Stream* captures;  // the stream that this thread records

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}
// Whether a play of this name is for `kernel`.
bool plays(const char* name, const char* kernel) {
    const char* text = getenv(name);
    return text && !strcmp(text, kernel);
}
// A number for all, or as ROLE-INDEX:NUMBER for one process of a job.
long setting_of_process(const char* name, long otherwise) {
    const char *text = getenv(name), *number = text ? strchr(text, ':') : nullptr;
    if (!number) return setting(name, otherwise);
    const char *role = getenv("CADRE_ROLE"), *index = getenv("CADRE_INDEX");
    const bool is_meant = role && index && std::string(text, number) == std::string(role) + "-" + index;
    return is_meant ? atol(number + 1) : otherwise;
}
size_t memory() { return (size_t)setting_of_process("CADRE_EMULATED_MEMORY", 4l << 30); }

Stream& stream_of(void* handle) { return handle ? *static_cast<Stream*>(handle) : default_stream; }
// Lets other threads call the driver until `over`: they may be what this one waits for.
void yield_until(const std::function<bool()>& over) {
    const auto begin = std::chrono::steady_clock::now();
    while (!over()) {
        mutex.unlock();
        std::this_thread::yield();
        mutex.lock();
        if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(30)) {
            machine::fail("a stream waited for 30 s: nobody opened its gate");
        }
    }
}
// Runs the first work of a stream that has some and that nobody else runs.
void step(Stream& stream) {
    auto work = std::move(stream.work.front());
    stream.work.pop_front();
    stream.busy = true, work(), stream.busy = false;
}
// As long as the process lives; others may call the driver.
void wait_for_ever() {
    mutex.unlock();
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}
void flush(Stream& stream) {
    if (hung) wait_for_ever();
    yield_until([&] { return !stream.busy; });
    while (!stream.work.empty()) {
        step(stream);
        if (hung) wait_for_ever();
    }
}
void reach(const Moment& it) {
    for (;;) {
        if (hung) wait_for_ever();
        yield_until([&] { return it.done || !it.stream || !it.stream->busy; });
        if (it.done || !it.stream || it.stream->work.empty()) return;
        step(*it.stream);
    }
}
void flush_all() {
    flush(default_stream);
    // More may be made meanwhile.
    for (size_t i = 0; i < streams.size(); ++i) flush(*streams[i]);
}

// CADRE_EMULATED_PROGRESS: streams get on out of step, as those of a GPU do that nobody waits for.
void get_on() {
    static const long seed = setting("CADRE_EMULATED_PROGRESS", -1);
    static std::mt19937_64 random((unsigned long)seed);
    static bool gates = false;
    for (const auto& it : streams) gates |= it->has_gates;
    // Who waits for a stream that waits for the host would hold up the host.
    if (seed < 0 || gates || hung || captures || streams.empty()) return;
    for (unsigned long steps = random() % 4; steps > 0; --steps) {
        Stream& it = *streams[random() % streams.size()];
        if (!it.busy && !it.work.empty()) step(it);
    }
}

// NaN as f32 and as bf16, and as a counter more than any list is long.
void poison(uint8_t* to, size_t bytes) {
    constexpr uint32_t kNan = 0x7FC07FC0;
    for (size_t i = 0; i < bytes; i += 4) memcpy(to + i, &kNan, std::min<size_t>(4, bytes - i));
}

long setting_of_role(const char* name);
bool open_to(uint64_t address, size_t bytes, bool to_write);
void waited(Stream& copies);
bool is_held_back(const Stream& copies);
extern long events, frees;

// `bytes` at `address` lie in one piece; a driver would not look, a test wants to know.
bool inside(const std::map<uint64_t, size_t>& pieces, uint64_t address, size_t bytes) {
    auto next = pieces.upper_bound(address);
    if (next == pieces.begin()) return false;
    --next;
    return address + bytes <= next->first + next->second;
}
bool held(uint64_t address, size_t bytes) { return inside(allocations, address, bytes); }

}  // namespace

using Lock = std::lock_guard<std::recursive_mutex>;
#define CALL extern "C" __attribute__((visibility("default"))) int

CALL cuInit(unsigned) {
    const Lock lock(mutex);
    return kSuccess;
}
CALL cuDriverGetVersion(int* version) {
    const Lock lock(mutex);
    *version = (int)setting("CADRE_EMULATED_DRIVER", 13000);
    return kSuccess;
}
CALL cuMemGetInfo_v2(size_t* free, size_t* total) {
    const Lock lock(mutex);
    *total = memory(), *free = *total - allocated;
    return kSuccess;
}
CALL cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    if (bytes == 0) return kInvalidValue;
    if (captures) return captures->refuses(), kCaptureUnsupported;
    if (allocated + bytes > memory()) return kOutOfMemory;
    auto* raw = static_cast<uint8_t*>(aligned_alloc(256, (bytes + 2 * kGuard + 255) / 256 * 256));
    memset(raw, kGuardByte, kGuard), poison(raw + kGuard, bytes), memset(raw + kGuard + bytes, kGuardByte, kGuard / 2);
    *address = reinterpret_cast<uint64_t>(raw + kGuard);
    allocations[*address] = bytes, allocated += bytes;
    return kSuccess;
}
CALL cuMemFree_v2(uint64_t address) {
    const Lock lock(mutex);
    ++frees;
    flush_all();
    auto found = allocations.find(address);
    if (found == allocations.end()) return kInvalidValue;
    auto* first = reinterpret_cast<uint8_t*>(address);
    for (size_t i = 0; i < kGuard / 2; ++i) {
        if (first[-1 - (long)i] != kGuardByte || first[found->second + i] != kGuardByte) {
            machine::fail("something was written beside an allocation of " + std::to_string(found->second) + " bytes");
        }
    }
    allocated -= found->second, allocations.erase(found);
    free(first - kGuard);
    return kSuccess;
}
CALL cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void* stream) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    if (!held(to, count * 4)) return kInvalidValue;
    stream_of(stream).put([=] { std::fill_n(reinterpret_cast<unsigned*>(to), count, value); });
    return kSuccess;
}
CALL cuStreamCreate(void** stream, unsigned) {
    const Lock lock(mutex);
    streams.push_back(std::make_unique<Stream>());
    *stream = streams.back().get();
    return kSuccess;
}
CALL cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
    // All streams of this one get on alike.
    return cuStreamCreate(stream, flags);
}
CALL cuStreamDestroy_v2(void* stream) {
    const Lock lock(mutex);
    flush(stream_of(stream));
    return kSuccess;
}
CALL cuStreamSynchronize(void* stream) {
    const Lock lock(mutex);
    if (stream_of(stream).refuses()) return kCaptureUnsupported;
    flush(stream_of(stream));
    return lost ? lost_with : kSuccess;
}
CALL cuStreamQuery(void* stream) {
    const Lock lock(mutex);
    Stream& it = stream_of(stream);
    if (lost) return lost_with;
    if (it.refuses()) return kCaptureUnsupported;
    if (hung || is_held_back(it)) return kNotReady;
    // As cuEventQuery.
    if (!it.busy && !it.work.empty()) step(it);
    if (lost) return lost_with;
    return hung || it.busy || !it.work.empty() ? kNotReady : kSuccess;
}
CALL cuEventCreate(void** event, unsigned flags) {
    const Lock lock(mutex);
    auto* made = new Event;
    made->flags = flags, *event = made, ++events;
    return kSuccess;
}
CALL cuEventDestroy_v2(void* event) {
    const Lock lock(mutex);
    // Nobody waits for what it stands for.
    delete static_cast<Event*>(event), --events;
    return kSuccess;
}
CALL cuEventRecord(void* event, void* stream) {
    const Lock lock(mutex);
    auto it = std::make_shared<Moment>();
    it->stream = &stream_of(stream), it->recorded_in_graph = it->stream->recording != nullptr;
    it->stream->put([it] { it->done = true, it->time = std::chrono::steady_clock::now(); });
    static_cast<Event*>(event)->moment = it;
    return get_on(), kSuccess;
}
CALL cuEventSynchronize(void* event) {
    const Lock lock(mutex);
    const auto it = static_cast<Event*>(event)->moment;
    if (it->recorded_in_graph) return kCapturedEvent;
    // A real driver would spin: nobody here wants a core to be busy with that.
    if (!(static_cast<Event*>(event)->flags & 1)) return kInvalidValue;
    reach(*it);
    return lost ? lost_with : kSuccess;
}
CALL cuEventQuery(void* event) {
    const Lock lock(mutex);
    // A real GPU gets on by itself; this one by as much as it is asked.
    const auto it = static_cast<Event*>(event)->moment;
    if (lost) return lost_with;
    if (it->recorded_in_graph) return kCapturedEvent;
    if (hung || (!it->done && is_held_back(*it->stream))) return kNotReady;
    if (!it->done && !it->stream->busy && !it->stream->work.empty()) step(*it->stream);
    if (lost) return lost_with;
    return it->done ? kSuccess : kNotReady;
}
CALL cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    const Lock lock(mutex);
    const auto a = static_cast<Event*>(start)->moment, b = static_cast<Event*>(end)->moment;
    if (!a->done || !b->done) return kInvalidValue;
    if ((static_cast<Event*>(start)->flags | static_cast<Event*>(end)->flags) & 2) return kInvalidHandle;
    *milliseconds = std::chrono::duration<float, std::milli>(b->time - a->time).count();
    return kSuccess;
}
CALL cuStreamWaitEvent(void* stream, void* event, unsigned) {
    const Lock lock(mutex);
    const auto it = static_cast<Event*>(event)->moment;
    Stream& of = stream_of(stream);
    // A recording waits for nothing outside of it, and nobody outside for what is in it.
    if (of.recording && !it->recorded_in_graph) return of.refuses(), kCaptureIsolation;
    if (!of.recording && it->recorded_in_graph) return kCapturedEvent;
    if (!it->stream || it->stream == &of) return kSuccess;
    if (!it->done) waited(*it->stream);
    of.put([it] { reach(*it); });
    return get_on(), kSuccess;
}
CALL cuLaunchHostFunc(void* stream, void (*work)(void*), void* data) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    stream_of(stream).put([=] { work(data); });
    return kSuccess;
}
CALL cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
    const Lock lock(mutex);
    if (!held(address, 1)) return kInvalidValue;
    auto found = --allocations.upper_bound(address);
    *base = found->first, *bytes = found->second;
    return kSuccess;
}
CALL cuGetErrorName(int code, const char** text) {
    const Lock lock(mutex);
    *text = code == kLaunchFailed     ? "CUDA_ERROR_LAUNCH_FAILED"
            : code == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : code == kOutOfMemory    ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == kNoBinary       ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
                                      : "CUDA_ERROR_INVALID_VALUE";
    return kSuccess;
}
CALL cuGetErrorString(int code, const char** text) {
    const Lock lock(mutex);
    *text = code == kLaunchFailed     ? "unspecified launch failure"
            : code == kIllegalAddress ? "an illegal memory access was encountered"
                                      : "an error of the emulated driver";
    return kSuccess;
}

#include "arenas.hpp"
#include "copies.hpp"
#include "devices.hpp"
#include "graphs.hpp"
#include "launches.hpp"
