// A libcuda.so.1 whose GPU is the emulated one: for tests of the host's code, with the kernels' own source behind it.
//
// In: the calls of the CUDA driver that kernels/src/device makes. Out: what a Hopper GPU with 3 multiprocessors would
// give. Streams are lazy: work runs when somebody waits for it, so that a result read too early is poison. Fresh memory
// is NaN, and a write beside an allocation ends the process when it is freed. Copies from the host take the bytes at
// once, as the driver does with memory that is not pinned.
//
// Environment: CADRE_EMULATED_MEMORY, bytes in all; CADRE_EMULATED_LOST, launches until the GPU is lost;
// CADRE_EMULATED_SEED of stalls. Says nothing of speed, of a real driver's answers, or of memory that a real GPU would
// refuse.
#include <chrono>
#include <mutex>
#include <thread>

#include "backward.cu"
#include "forward.cu"
#include "rows.hpp"

namespace {

enum Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotFound = 500,
    kNotReady = 600,
    kLaunchFailed = 719
};

struct Stream {
    std::deque<std::function<void()>> work;
    bool busy = false;  // a thread runs its work
};
struct Event {
    Stream* stream = nullptr;
    bool done = false;
    std::chrono::steady_clock::time_point time;
};
struct Kernel {
    const char* name;
    cadre::Launch launch;
    size_t parameter_bytes;
    int maps;
    std::function<void(const void*, const ptx::TensorMap*)> body;
};

constexpr size_t kGuard = 256;
constexpr uint8_t kGuardByte = 0xC7;

std::recursive_mutex mutex;
std::vector<std::unique_ptr<Stream>> streams;
Stream default_stream;
std::map<uint64_t, size_t> allocations;  // address behind the guard, bytes
size_t allocated;
long launches;
bool lost;

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}
size_t memory() { return (size_t)setting("CADRE_EMULATED_MEMORY", 4l << 30); }

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
void flush(Stream& stream) {
    yield_until([&] { return !stream.busy; });
    while (!stream.work.empty()) step(stream);
}
void flush_all() {
    flush(default_stream);
    for (auto& stream : streams) flush(*stream);
}

template <int D>
Kernel forward_kernel(const char* name) {
    using F = cadre::Forward<D>;
    return {name,
            {cadre::kThreads, (int)sizeof(typename F::Shared), F::kRows, F::kKeys},
            sizeof(cadre::ForwardParameters),
            3,
            [](const void* p, const ptx::TensorMap* maps) {
                cadre::forward<D>(*static_cast<const cadre::ForwardParameters*>(p), maps[0], maps[1], maps[2]);
            }};
}
template <int D>
Kernel backward_kernel(const char* name) {
    using B = cadre::Backward<D>;
    return {name,
            {cadre::kThreads, (int)sizeof(typename B::Shared), B::kRows, B::kKeys},
            sizeof(cadre::BackwardParameters),
            4,
            [](const void* p, const ptx::TensorMap* maps) {
                cadre::backward<D>(*static_cast<const cadre::BackwardParameters*>(p), maps[0], maps[1], maps[2],
                                   maps[3]);
            }};
}
template <class Parameters, class Body>
Kernel rows_kernel(const char* name, Body body) {
    return {name, {cadre::kRowThreads, 0, 0, 0}, sizeof(Parameters), 0, [body](const void* p, const ptx::TensorMap*) {
                body(*static_cast<const Parameters*>(p));
            }};
}

std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all{
        forward_kernel<64>("cadre_forward_64"),
        forward_kernel<128>("cadre_forward_128"),
        forward_kernel<256>("cadre_forward_256"),
        backward_kernel<64>("cadre_backward_64"),
        backward_kernel<128>("cadre_backward_128"),
        backward_kernel<256>("cadre_backward_256"),
        rows_kernel<cadre::MergeParameters>("cadre_merge", [](auto& p) { cadre_merge(p); }),
        rows_kernel<cadre::FinishParameters>("cadre_finish_dq", [](auto& p) { cadre_finish_dq(p); }),
        rows_kernel<cadre::SinkParameters>("cadre_sink", [](auto& p) { cadre_sink(p); }),
    };
    return all;
}

// NaN as f32 and as bf16, and as a counter more than any list is long.
void poison(uint8_t* to, size_t bytes) {
    constexpr uint32_t kNan = 0x7FC07FC0;
    for (size_t i = 0; i < bytes; i += 4) memcpy(to + i, &kNan, std::min<size_t>(4, bytes - i));
}

bool open_to(uint64_t address, size_t bytes, bool to_write);

// `bytes` at `address` lie in one allocation; a driver would not look, a test wants to know.
bool held(uint64_t address, size_t bytes) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return false;
    --next;
    return address + bytes <= next->first + next->second;
}

}  // namespace

using Lock = std::lock_guard<std::recursive_mutex>;
#define CALL extern "C" __attribute__((visibility("default"))) int

CALL cuInit(unsigned) {
    const Lock lock(mutex);
    return kSuccess;
}
CALL cuDriverGetVersion(int* version) {
    const Lock lock(mutex);
    *version = 13000;
    return kSuccess;
}
CALL cuDeviceGetCount(int* count) {
    const Lock lock(mutex);
    *count = 1;
    return kSuccess;
}
CALL cuDeviceGet(int* device, int index) {
    const Lock lock(mutex);
    *device = index;
    return index == 0 ? kSuccess : kInvalidValue;
}
CALL cuDeviceGetName(char* name, int bytes, int) {
    const Lock lock(mutex);
    snprintf(name, bytes, "emulated");
    return kSuccess;
}
CALL cuDeviceGetAttribute(int* value, int attribute, int) {
    const Lock lock(mutex);
    // Compute capability 9.0, 3 multiprocessors.
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 3 : -1;
    return *value < 0 ? kInvalidValue : kSuccess;
}
CALL cuDevicePrimaryCtxRetain(void** context, int) {
    const Lock lock(mutex);
    *context = &default_stream;
    return kSuccess;
}
CALL cuDevicePrimaryCtxRelease_v2(int) {
    const Lock lock(mutex);
    return kSuccess;
}
CALL cuCtxSetCurrent(void*) {
    const Lock lock(mutex);
    return kSuccess;
}
CALL cuMemGetInfo_v2(size_t* free, size_t* total) {
    const Lock lock(mutex);
    *total = memory(), *free = *total - allocated;
    return kSuccess;
}
CALL cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    const Lock lock(mutex);
    if (lost) return kLaunchFailed;
    if (bytes == 0) return kInvalidValue;
    if (allocated + bytes > memory()) return kOutOfMemory;
    auto* raw = static_cast<uint8_t*>(aligned_alloc(256, (bytes + 2 * kGuard + 255) / 256 * 256));
    memset(raw, kGuardByte, kGuard), poison(raw + kGuard, bytes), memset(raw + kGuard + bytes, kGuardByte, kGuard / 2);
    *address = reinterpret_cast<uint64_t>(raw + kGuard);
    allocations[*address] = bytes, allocated += bytes;
    return kSuccess;
}
CALL cuMemFree_v2(uint64_t address) {
    const Lock lock(mutex);
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
CALL cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    const Lock lock(mutex);
    if (lost) return kLaunchFailed;
    if (!open_to(to, bytes, true)) return kInvalidValue;
    auto* first = static_cast<const uint8_t*>(from);
    stream_of(stream).work.push_back([to, copy = std::vector<uint8_t>(first, first + bytes)] {
        memcpy(reinterpret_cast<void*>(to), copy.data(), copy.size());
    });
    return kSuccess;
}
CALL cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    const Lock lock(mutex);
    if (lost) return kLaunchFailed;
    memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return kSuccess;
}
CALL cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void* stream) {
    const Lock lock(mutex);
    if (lost) return kLaunchFailed;
    if (!held(to, count * 4)) return kInvalidValue;
    stream_of(stream).work.push_back([=] { std::fill_n(reinterpret_cast<unsigned*>(to), count, value); });
    return kSuccess;
}
CALL cuStreamCreate(void** stream, unsigned) {
    const Lock lock(mutex);
    streams.push_back(std::make_unique<Stream>());
    *stream = streams.back().get();
    return kSuccess;
}
CALL cuStreamDestroy_v2(void* stream) {
    const Lock lock(mutex);
    flush(stream_of(stream));
    return kSuccess;
}
CALL cuStreamSynchronize(void* stream) {
    const Lock lock(mutex);
    flush(stream_of(stream));
    return lost ? kLaunchFailed : kSuccess;
}
CALL cuEventCreate(void** event, unsigned) {
    const Lock lock(mutex);
    *event = new Event;
    return kSuccess;
}
CALL cuEventDestroy_v2(void* event) {
    const Lock lock(mutex);
    auto* it = static_cast<Event*>(event);
    if (it->stream) flush(*it->stream);
    delete it;
    return kSuccess;
}
CALL cuEventRecord(void* event, void* stream) {
    const Lock lock(mutex);
    auto* it = static_cast<Event*>(event);
    it->stream = &stream_of(stream), it->done = false;
    it->stream->work.push_back([it] { it->done = true, it->time = std::chrono::steady_clock::now(); });
    return kSuccess;
}
CALL cuEventSynchronize(void* event) {
    const Lock lock(mutex);
    flush(*static_cast<Event*>(event)->stream);
    return lost ? kLaunchFailed : kSuccess;
}
CALL cuEventQuery(void* event) {
    const Lock lock(mutex);
    // A real GPU gets on by itself; this one by as much as it is asked.
    auto* it = static_cast<Event*>(event);
    if (lost) return kLaunchFailed;
    if (!it->done && !it->stream->busy && !it->stream->work.empty()) step(*it->stream);
    return it->done ? kSuccess : kNotReady;
}
CALL cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    const Lock lock(mutex);
    auto *a = static_cast<Event*>(start), *b = static_cast<Event*>(end);
    if (!a->done || !b->done) return kInvalidValue;
    *milliseconds = std::chrono::duration<float, std::milli>(b->time - a->time).count();
    return kSuccess;
}
CALL cuStreamWaitEvent(void* stream, void* event, unsigned) {
    const Lock lock(mutex);
    auto* it = static_cast<Event*>(event);
    // The event may be destroyed before this runs.
    stream_of(stream).work.push_back([of = it->stream] { flush(*of); });
    return kSuccess;
}
CALL cuLaunchHostFunc(void* stream, void (*work)(void*), void* data) {
    const Lock lock(mutex);
    if (lost) return kLaunchFailed;
    stream_of(stream).work.push_back([=] { work(data); });
    return kSuccess;
}
CALL cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
    const Lock lock(mutex);
    if (!held(address, 1)) return kInvalidValue;
    auto found = --allocations.upper_bound(address);
    *base = found->first, *bytes = found->second;
    return kSuccess;
}
CALL cuModuleLoadData(void** module, const void* image) {
    const Lock lock(mutex);
    *module = const_cast<void*>(image);
    return memcmp(image,
                  "\x7f"
                  "ELF",
                  4)
               ? kInvalidValue
               : kSuccess;
}
CALL cuModuleUnload(void*) {
    const Lock lock(mutex);
    return kSuccess;
}
CALL cuModuleGetFunction(void** function, void*, const char* name) {
    const Lock lock(mutex);
    for (Kernel& it : kernels()) {
        if (!strcmp(it.name, name)) return *function = &it, kSuccess;
    }
    return kNotFound;
}
CALL cuFuncSetAttribute(void* function, int attribute, int value) {
    const Lock lock(mutex);
    // 8: the most dynamic shared memory.
    const Kernel& it = *static_cast<Kernel*>(function);
    return attribute == 8 && value == it.launch.shared_bytes ? kSuccess : kInvalidValue;
}
CALL cuLaunchKernel(void* function, unsigned grid, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                    unsigned shared, void* stream, void** arguments, void** extra) {
    const Lock lock(mutex);
    if (lost) return kLaunchFailed;
    const Kernel* it = static_cast<Kernel*>(function);
    if (grid == 0 || y != 1 || z != 1 || extra || (int)threads != it->launch.threads ||
        (int)shared != it->launch.shared_bytes) {
        return kInvalidValue;
    }
    const auto* first = static_cast<const uint8_t*>(arguments[0]);
    std::vector<uint8_t> parameters(first, first + it->parameter_bytes);
    std::vector<ptx::TensorMap> maps;
    for (int i = 0; i < it->maps; ++i) maps.push_back(*static_cast<const ptx::TensorMap*>(arguments[1 + i]));
    if (++launches > setting("CADRE_EMULATED_LOST", 1l << 60)) {
        // As a real one: the launch is accepted, the error shows later.
        lost = true;
        return kSuccess;
    }
    const uint64_t seed = (uint64_t)setting("CADRE_EMULATED_SEED", 0) * launches;
    stream_of(stream).work.push_back([=] {
        machine::launch((int)std::min(grid, 3u), it->launch.threads, it->launch.shared_bytes, seed,
                        [&] { it->body(parameters.data(), maps.data()); });
    });
    return kSuccess;
}
CALL cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                            const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                            int swizzle, int, int fill) {
    const Lock lock(mutex);
    // bf16; 128-byte swizzle; zeros outside.
    const bool right = type == 9 && rank == 3 && interleave == 0 && swizzle == 3 && fill == 0 && box[0] == 64 &&
                       box[1] == 1 && box[2] <= 256 && steps[0] == 1 && steps[1] == 1 && steps[2] == 1 &&
                       reinterpret_cast<uint64_t>(address) % 16 == 0 && strides[0] == dims[0] * 2 &&
                       strides[1] == dims[0] * dims[1] * 2 && reinterpret_cast<uint64_t>(map) % 64 == 0;
    if (!right) return kInvalidValue;
    new (map)
        ptx::TensorMap{static_cast<const uint16_t*>(address), (int)dims[0], (int)dims[1], (int)dims[2], (int)box[2]};
    return kSuccess;
}
CALL cuGetErrorName(int code, const char** text) {
    const Lock lock(mutex);
    *text = code == kLaunchFailed  ? "CUDA_ERROR_LAUNCH_FAILED"
            : code == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
                                   : "CUDA_ERROR_INVALID_VALUE";
    return kSuccess;
}
CALL cuGetErrorString(int code, const char** text) {
    const Lock lock(mutex);
    *text = code == kLaunchFailed ? "unspecified launch failure" : "an error of the emulated driver";
    return kSuccess;
}

#include "arenas.hpp"
