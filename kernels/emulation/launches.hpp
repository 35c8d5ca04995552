#pragma once
// The part of the emulated driver that loads and launches: kernels' own source in the place of a cubin's. Included by
// driver.cpp.
//
// A launch is refused where threads, shared memory or arguments are not those that the kernel's head comment says.
#include "backward.cu"
#include "forward.cu"
#include "portable/backward.cu"
#include "portable/forward.cu"
#include "rows.hpp"

namespace {

// What a launch has behind its parameters: tensor maps, or the tensors of portable kernels.
struct Arguments {
    std::vector<ptx::TensorMap> maps;
    std::vector<cadre::portable::Tensor> tensors;
};
struct Kernel {
    const char* name;
    cadre::Launch launch;
    size_t parameter_bytes;
    int maps, tensors;
    std::function<void(const void*, const Arguments&)> body;
    bool loaded = false;
};

long launches, modules;

template <int D, class Cap>
Kernel forward_kernel(const char* name) {
    using F = cadre::Forward<D>;
    return {name,
            {F::kThreads, (int)sizeof(typename F::Shared), F::kRows, F::kKeys},
            sizeof(cadre::ForwardParameters),
            3,
            0,
            [](const void* p, const Arguments& it) {
                cadre::forward<D, Cap>(*static_cast<const cadre::ForwardParameters*>(p), it.maps[0], it.maps[1],
                                       it.maps[2]);
            }};
}
template <int D, class Cap>
Kernel backward_kernel(const char* name) {
    using B = cadre::Backward<D>;
    return {name,
            {cadre::kThreads, (int)sizeof(typename B::Shared), B::kRows, B::kKeys},
            sizeof(cadre::BackwardParameters),
            4,
            0,
            [](const void* p, const Arguments& it) {
                cadre::backward<D, Cap>(*static_cast<const cadre::BackwardParameters*>(p), it.maps[0], it.maps[1],
                                        it.maps[2], it.maps[3]);
            }};
}
template <int D, class Cap>
Kernel portable_forward(const char* name) {
    using F = cadre::portable::Forward<D>;
    return {name,
            {F::kThreads, (int)sizeof(typename F::Shared), F::kRows, F::kKeys},
            sizeof(cadre::ForwardParameters),
            0,
            3,
            [](const void* p, const Arguments& it) {
                cadre::portable::forward<D, Cap>(*static_cast<const cadre::ForwardParameters*>(p), it.tensors[0],
                                                 it.tensors[1], it.tensors[2]);
            }};
}
template <int D, class Cap>
Kernel portable_backward(const char* name) {
    using B = cadre::portable::Backward<D>;
    return {name,
            {B::kThreads, (int)sizeof(typename B::Shared), B::kTileRows, B::kKeys},
            sizeof(cadre::BackwardParameters),
            0,
            4,
            [](const void* p, const Arguments& it) {
                cadre::portable::backward<D, Cap>(*static_cast<const cadre::BackwardParameters*>(p), it.tensors[0],
                                                  it.tensors[1], it.tensors[2], it.tensors[3]);
            }};
}
template <class Parameters, class Body>
Kernel rows_kernel(const char* name, Body body) {
    return {name, {cadre::kRowThreads, 0, 0, 0}, sizeof(Parameters), 0, 0, [body](const void* p, const Arguments&) {
                body(*static_cast<const Parameters*>(p));
            }};
}

std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all{
        forward_kernel<64, cadre::Plain>("cadre_forward_64"),
        forward_kernel<128, cadre::Plain>("cadre_forward_128"),
        forward_kernel<256, cadre::Plain>("cadre_forward_256"),
        forward_kernel<64, cadre::Softcap>("cadre_forward_64_softcap"),
        forward_kernel<128, cadre::Softcap>("cadre_forward_128_softcap"),
        forward_kernel<256, cadre::Softcap>("cadre_forward_256_softcap"),
        backward_kernel<64, cadre::Plain>("cadre_backward_64"),
        backward_kernel<128, cadre::Plain>("cadre_backward_128"),
        backward_kernel<256, cadre::Plain>("cadre_backward_256"),
        backward_kernel<64, cadre::Softcap>("cadre_backward_64_softcap"),
        backward_kernel<128, cadre::Softcap>("cadre_backward_128_softcap"),
        backward_kernel<256, cadre::Softcap>("cadre_backward_256_softcap"),
        portable_forward<64, cadre::Plain>("cadre_portable_forward_64"),
        portable_forward<128, cadre::Plain>("cadre_portable_forward_128"),
        portable_forward<256, cadre::Plain>("cadre_portable_forward_256"),
        portable_forward<64, cadre::Softcap>("cadre_portable_forward_64_softcap"),
        portable_forward<128, cadre::Softcap>("cadre_portable_forward_128_softcap"),
        portable_forward<256, cadre::Softcap>("cadre_portable_forward_256_softcap"),
        portable_backward<64, cadre::Plain>("cadre_portable_backward_64"),
        portable_backward<128, cadre::Plain>("cadre_portable_backward_128"),
        portable_backward<256, cadre::Plain>("cadre_portable_backward_256"),
        portable_backward<64, cadre::Softcap>("cadre_portable_backward_64_softcap"),
        portable_backward<128, cadre::Softcap>("cadre_portable_backward_128_softcap"),
        portable_backward<256, cadre::Softcap>("cadre_portable_backward_256_softcap"),
        rows_kernel<cadre::MergeParameters>("cadre_merge", [](auto& p) { cadre_merge(p); }),
        rows_kernel<cadre::FinishParameters>("cadre_finish_dq", [](auto& p) { cadre_finish_dq(p); }),
        rows_kernel<cadre::SinkParameters>("cadre_sink", [](auto& p) { cadre_sink(p); }),
        rows_kernel<cadre::Copy16Parameters>("cadre_copy_rows_16", [](auto& p) { cadre_copy_rows_16(p); }),
        rows_kernel<cadre::Copy4Parameters>("cadre_copy_rows_4", [](auto& p) { cadre_copy_rows_4(p); }),
    };
    return all;
}

// As kernels/cuda/ptx/watch.cuh: the place of every warp, and the launch ends with an error.
void tell_places() {
    constexpr int kBlocks = 160, kWarps = 12;
    uint32_t words[4 + 4 * kBlocks * kWarps] = {};
    words[0] = 1, words[3] = (uint32_t)machine::blocks.size();
    bool found = false;
    for (const machine::Fiber& fiber : machine::fibers) {
        if (fiber.done || fiber.at.kind == 0) continue;
        if (fiber.at.kind != 2 && !found) words[1] = fiber.block->index, words[2] = fiber.thread, found = true;
        uint32_t* to = words + 4 + 4 * (fiber.block->index * kWarps + fiber.thread / 32);
        if (to[0] == 0) to[0] = fiber.at.kind, to[1] = fiber.at.what, to[2] = fiber.at.parity, to[3] = fiber.at.seen;
    }
    memcpy(told_to, words, sizeof words);
    lost = true;
}

// What a GPU may do wrong with a kernel, by the environment.
void run_launch(const Kernel& it, unsigned grid, uint64_t seed, const std::function<void()>& body) {
    const bool hangs = plays("CADRE_EMULATED_HANG", it.name), wrong = plays("CADRE_EMULATED_WRONG", it.name);
    if (plays("CADRE_EMULATED_FAULT", it.name)) {
        // As the driver does where it is told to.
        const char* dump = getenv("CUDA_ENABLE_COREDUMP_ON_EXCEPTION") ? getenv("CUDA_COREDUMP_FILE") : nullptr;
        if (FILE* file = dump ? fopen(dump, "w") : nullptr) fclose(file);
        return (void)(lost = true, lost_with = kIllegalAddress);
    }
    const bool panels = wrong && !strncmp(it.name, "cadre_backward_64", 17);
    machine::lost_arrival = hangs ? 9 : 0;
    machine::wrong_every = wrong && !panels ? 7 : 0;
    machine::swizzle_from_operand = panels;
    machine::on_deadlock = [hangs] {
        if (hangs) told_to ? tell_places() : (void)(hung = true);
        return hangs;
    };
    // Warps of a portable kernel get on alone.
    machine::herd = it.tensors ? 32 : 128;
    machine::launch((int)std::min(grid, 3u), it.launch.threads, it.launch.shared_bytes, seed, body);
}

// Whether this GPU runs what a file holds: PTX in a fatbin, for 8.0 and later; machine code of 9.0, which is sm_90a and
// for that alone; other machine code of its generation that is not newer.
bool runs(const void* image) {
    const auto* bytes = static_cast<const uint8_t*>(image);
    const int capability = emulated_capability();
    if (!memcmp(bytes, "\x50\xED\x55\xBA", 4)) return capability >= 80;
    // An ELF file of CUDA 13 has the compute capability there.
    const int of = bytes[49];
    return of == 90 ? of == capability : of / 10 == capability / 10 && of <= capability;
}

}  // namespace

// A module tells where warps wait if its file has WATCH where an ELF header has nothing.
CALL cuModuleGetGlobal_v2(uint64_t* address, size_t* bytes, void* module, const char* name) {
    const Lock lock(mutex);
    if (strcmp(name, "cadre_watch") || memcmp(static_cast<const char*>(module) + 9, "WATCH", 5)) return kNotFound;
    *address = reinterpret_cast<uint64_t>(&told_to), *bytes = sizeof told_to;
    return kSuccess;
}
CALL cuModuleLoadData(void** module, const void* image) {
    const Lock lock(mutex);
    *module = const_cast<void*>(image);
    if (++modules > setting("CADRE_EMULATED_MODULES", 1l << 60)) return kOutOfMemory;
    const bool is_known = !memcmp(image,
                                  "\x7f"
                                  "ELF",
                                  4) ||
                          !memcmp(image, "\x50\xED\x55\xBA", 4);
    return !is_known ? kInvalidValue : runs(image) ? kSuccess : kNoBinary;
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
CALL cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared) {
    const Lock lock(mutex);
    const Kernel& it = *static_cast<Kernel*>(function);
    if (threads != it.launch.threads || (int)shared != it.launch.shared_bytes) return kInvalidValue;
    constexpr int kShared = 100 << 10, kOwn = 1 << 10;  // of a processor, and what each block takes besides
    *blocks = std::max(1, kShared / (it.launch.shared_bytes + kOwn));
    return kSuccess;
}
CALL cuFuncLoad(void* function) {
    const Lock lock(mutex);
    if (captures) return captures->refuses(), kCaptureUnsupported;
    static_cast<Kernel*>(function)->loaded = true;
    return kSuccess;
}
CALL cuLaunchKernel(void* function, unsigned grid, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                    unsigned shared, void* stream, void** arguments, void** extra) {
    const auto then = [] {
        const Lock lock(mutex);
        return std::exchange(before_launch, nullptr);
    }();
    if (then) then();
    const Lock lock(mutex);
    if (lost) return lost_with;
    Kernel* it = static_cast<Kernel*>(function);
    if (!it->loaded) {
        if (captures) return captures->refuses(), kCaptureUnsupported;
        flush_all(), it->loaded = true;
    }
    if (grid == 0 || y != 1 || z != 1 || extra || (int)threads != it->launch.threads ||
        (int)shared != it->launch.shared_bytes) {
        return kInvalidValue;
    }
    const auto* first = static_cast<const uint8_t*>(arguments[0]);
    std::vector<uint8_t> parameters(first, first + it->parameter_bytes);
    if (plays("CADRE_EMULATED_WRONG", it->name) && !strcmp(it->name, "cadre_finish_dq")) {
        // It has no products: what it rounds is not scaled.
        auto* finish = reinterpret_cast<cadre::FinishParameters*>(parameters.data());
        if (finish->dq_bf16) finish->scale = 1;
    }
    Arguments others;
    for (int i = 0; i < it->maps; ++i) others.maps.push_back(*static_cast<const ptx::TensorMap*>(arguments[1 + i]));
    for (int i = 0; i < it->tensors; ++i) {
        others.tensors.push_back(*static_cast<const cadre::portable::Tensor*>(arguments[1 + i]));
    }
    if (++launches > setting("CADRE_EMULATED_LOST", 1l << 60)) {
        // As a real one: the launch is accepted, the error shows later.
        lost = true;
        return kSuccess;
    }
    const uint64_t seed = (uint64_t)setting("CADRE_EMULATED_SEED", 0) * launches;
    stream_of(stream).put([=] {
        // Other threads go on meanwhile.
        mutex.unlock();
        machine_mutex.lock();
        run_launch(*it, grid, seed, [&] { it->body(parameters.data(), others); });
        machine_mutex.unlock();
        mutex.lock();
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
