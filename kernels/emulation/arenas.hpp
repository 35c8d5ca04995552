#pragma once
// The part of the emulated driver that shares memory between processes, and lets streams wait for words of the host.
// Included by driver.cpp.
//
// Memory that can be exported is a memfd, so that another process which gets the descriptor maps the same bytes. Access
// is as it was allowed: what may only be read faults when it is written. Copies between such memories are work of a
// stream.
#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

constexpr size_t kGranularity = 2 << 20;

// As the driver's header lays them out.
struct Property {
    int type, handles;
    int location_type, location;
    void* windows;
    uint8_t flags[8];
};
struct Access {
    int location_type, location;
    int flags;
};
struct Reserved {
    size_t bytes;
    bool mapped = false, readable = false, writable = false;
    int owner = 0;  // the process that made the memory
};
std::map<uint64_t, Reserved> reserved;
std::map<uint64_t, int> exportable;  // handle, descriptor
uint64_t last_handle;

bool wanted(const Property* it) {
    // Pinned memory of device 0 with a POSIX file descriptor.
    return it->type == 1 && it->handles == 1 && it->location_type == 1 && it->location == 0;
}
bool open_to(uint64_t address, size_t bytes, bool to_write) {
    auto next = reserved.upper_bound(address);
    if (next == reserved.begin()) return held(address, bytes);
    --next;
    const Reserved& it = next->second;
    if (address + bytes > next->first + it.bytes) return held(address, bytes);
    return to_write ? it.writable : it.readable;
}

// The process that made an exportable memory; its name says so.
constexpr const char* kName = "cadre-emulated-device-memory-";
int owner_of(int file) {
    char link[64], name[256] = {};
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, name, sizeof name - 1) < 0) return 0;
    const char* found = strstr(name, kName);
    return found ? atoi(found + strlen(kName)) : 0;
}
// The other process whose memory is at an address; 0 for none.
int stranger_at(uint64_t address) {
    auto next = reserved.upper_bound(address);
    if (next == reserved.begin()) return 0;
    --next;
    const bool inside = address < next->first + next->second.bytes;
    return inside && next->second.owner != getpid() ? next->second.owner : 0;
}
bool is_alive(int process) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE* file = fopen(path, "r");
    if (!file) return false;
    // A name in parentheses has no blank in our programs.
    const bool read = fscanf(file, "%*d %*s %c", &state) == 1;
    fclose(file);
    return read && state != 'Z' && state != 'X';
}

long strangers, waits;

// `ROLE:COUNT`, for processes of one role of a job; 0 in others.
long setting_of_role(const char* name) {
    const char *text = getenv(name), *role = getenv("CADRE_ROLE"), *count = text ? strchr(text, ':') : nullptr;
    return count && role && std::string(text, count) == role ? atol(count + 1) : 0;
}
// CADRE_EMULATED_ORPHAN: the owner of what that copy reads is dead before the copy is over.
void orphan(int owner, Stream& stream) {
    if (++strangers != setting_of_role("CADRE_EMULATED_ORPHAN")) return;
    fprintf(stderr, "emulated driver: process %d is killed while its rows are copied\n", owner);
    kill(owner, SIGKILL);
    stream.put([owner] { yield_until([owner] { return !is_alive(owner); }); });
}
// Ends every TCP link of this process, as a cable does that is pulled.
void cut_links() {
    DIR* folder = opendir("/proc/self/fd");
    while (const dirent* entry = folder ? readdir(folder) : nullptr) {
        sockaddr_in peer{};
        socklen_t bytes = sizeof peer;
        const int file = atoi(entry->d_name);
        if (getpeername(file, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 && peer.sin_family == AF_INET) {
            shutdown(file, SHUT_RDWR);
        }
    }
    if (folder) closedir(folder);
}

// CADRE_EMULATED_CUT: this wait of a stream for copies from another process ends all links. Until then nobody finds
// such copies over before a stream has waited for them, so that it always comes.
bool is_held_back(const Stream& copies) {
    return copies.foreign > 0 && !copies.awaited && waits < setting_of_role("CADRE_EMULATED_CUT");
}
void waited(Stream& copies) {
    if (copies.foreign == 0) return;
    copies.awaited = true;
    if (++waits != setting_of_role("CADRE_EMULATED_CUT")) return;
    fprintf(stderr, "emulated driver: all links are cut while a launch waits for copies\n");
    cut_links();
}

}  // namespace

CALL cuMemGetAllocationGranularity(size_t* bytes, const Property* property, int) {
    const Lock lock(mutex);
    *bytes = kGranularity;
    return wanted(property) ? kSuccess : kInvalidValue;
}
CALL cuMemCreate(uint64_t* handle, size_t bytes, const Property* property, uint64_t flags) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    if (!wanted(property) || bytes == 0 || bytes % kGranularity != 0 || flags != 0) return kInvalidValue;
    if (allocated + bytes > memory()) return kOutOfMemory;
    const int file = memfd_create((kName + std::to_string(getpid())).c_str(), MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) return kOutOfMemory;
    exportable[*handle = ++last_handle] = file;
    return kSuccess;
}
CALL cuMemRelease(uint64_t handle) {
    const Lock lock(mutex);
    auto found = exportable.find(handle);
    if (found == exportable.end()) return kInvalidValue;
    close(found->second), exportable.erase(found);
    return kSuccess;
}
CALL cuMemExportToShareableHandle(void* descriptor, uint64_t handle, int type, uint64_t flags) {
    const Lock lock(mutex);
    auto found = exportable.find(handle);
    if (found == exportable.end() || type != 1 || flags != 0) return kInvalidValue;
    const int file = dup(found->second);
    memcpy(descriptor, &file, sizeof file);
    return file < 0 ? kInvalidValue : kSuccess;
}
CALL cuMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int type) {
    const Lock lock(mutex);
    const int file = dup((int)reinterpret_cast<intptr_t>(descriptor));
    struct stat status;
    if (type != 1 || file < 0 || fstat(file, &status) != 0 || status.st_size == 0) return kInvalidValue;
    exportable[*handle = ++last_handle] = file;
    return kSuccess;
}
CALL cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, uint64_t) {
    const Lock lock(mutex);
    if (bytes == 0 || bytes % kGranularity != 0) return kInvalidValue;
    void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return kOutOfMemory;
    *address = reinterpret_cast<uint64_t>(place);
    reserved[*address] = {bytes};
    return kSuccess;
}
CALL cuMemAddressFree(uint64_t address, size_t bytes) {
    const Lock lock(mutex);
    auto found = reserved.find(address);
    if (found == reserved.end() || found->second.bytes != bytes || found->second.mapped) return kInvalidValue;
    munmap(reinterpret_cast<void*>(address), bytes), reserved.erase(found);
    return kSuccess;
}
CALL cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t) {
    const Lock lock(mutex);
    auto place = reserved.find(address);
    auto found = exportable.find(handle);
    struct stat status;
    if (place == reserved.end() || found == exportable.end() || place->second.bytes != bytes || offset != 0 ||
        place->second.mapped || fstat(found->second, &status) != 0 || (size_t)status.st_size != bytes) {
        return kInvalidValue;
    }
    // Not to be touched before access is set.
    void* mapped = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second, 0);
    place->second.mapped = mapped != MAP_FAILED, place->second.owner = owner_of(found->second);
    return place->second.mapped ? kSuccess : kInvalidValue;
}
CALL cuMemSetAccess(uint64_t address, size_t bytes, const Access* access, size_t count) {
    const Lock lock(mutex);
    auto place = reserved.find(address);
    // 1: to read; 3: to read and write.
    if (place == reserved.end() || !place->second.mapped || place->second.bytes != bytes || count != 1 ||
        access->location_type != 1 || access->location != 0 || (access->flags != 1 && access->flags != 3)) {
        return kInvalidValue;
    }
    place->second.readable = true, place->second.writable = access->flags == 3;
    const int allowed = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect(reinterpret_cast<void*>(address), bytes, allowed) == 0 ? kSuccess : kInvalidValue;
}
CALL cuMemUnmap(uint64_t address, size_t bytes) {
    const Lock lock(mutex);
    auto place = reserved.find(address);
    if (place == reserved.end() || !place->second.mapped || place->second.bytes != bytes) return kInvalidValue;
    flush_all();
    place->second = {bytes};
    mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return kSuccess;
}
CALL cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    if (!open_to(to, bytes, true) || !open_to(from, bytes, false)) return kInvalidValue;
    const long most = setting_of_role("CADRE_EMULATED_COPIES");
    if (++copies > most && most > 0) {
        // As a launch: accepted, the error shows later.
        lost = true;
        return kSuccess;
    }
    Stream& of = stream_of(stream);
    const int owner = stranger_at(from);
    if (owner) orphan(owner, of), ++of.foreign, of.awaited = false;
    of.put([=, &of] {
        memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        of.foreign -= owner != 0;
    });
    return kSuccess;
}
CALL cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    const Lock lock(mutex);
    // Portable, and mapped for the device.
    if (flags != 3) return kInvalidValue;
    size_t all = bytes;
    for (const auto& it : pinned) all += it.second;
    if (all > (size_t)setting("CADRE_EMULATED_PINNED", 1l << 40)) return kOutOfMemory;
    *address = calloc(1, bytes);
    pinned[reinterpret_cast<uint64_t>(*address)] = bytes;
    return kSuccess;
}
CALL cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned) {
    const Lock lock(mutex);
    *device = reinterpret_cast<uint64_t>(host);
    return kSuccess;
}
CALL cuMemFreeHost(void* address) {
    const Lock lock(mutex);
    // The driver would wait for nobody: copies that still use it touch what is no longer there.
    pinned.erase(reinterpret_cast<uint64_t>(address));
    free(address);
    return kSuccess;
}
CALL cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    // 0: until the word is the value or above, counted cyclically.
    if (flags != 0 || address % 4 != 0 || setting("CADRE_EMULATED_GATES", 1) == 0) return kInvalidValue;
    stream_of(stream).has_gates = true;
    stream_of(stream).put([=] {
        auto* word = reinterpret_cast<uint32_t*>(address);
        yield_until([=] { return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) >= 0; });
    });
    return kSuccess;
}
