#pragma once
// The part of the emulated driver that copies between the device and the host, and says whose an address is. Included
// by driver.cpp.
//
// A copy from or to pinned memory reads and writes when its stream comes to it, so rows that are looked at too early
// are poison. From other memory its caller waits.

namespace {

// As the driver's header lays it out.
struct Copy2D {
    size_t from_x, from_y;
    int from_kind;
    const void* from_host;
    uint64_t from_device;
    void* from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    int to_kind;
    void* to_host;
    uint64_t to_device;
    void* to_array;
    size_t to_pitch, width, height;
};

}  // namespace

CALL cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    if (!open_to(to, bytes, true)) return kInvalidValue;
    Stream& of = stream_of(stream);
    if (of.refuses()) return kCaptureUnsupported;
    auto* first = static_cast<const uint8_t*>(from);
    if (inside(pinned, reinterpret_cast<uint64_t>(from), bytes)) {
        of.put([=] { memcpy(reinterpret_cast<void*>(to), first, bytes); });
        return get_on(), kSuccess;
    }
    // Before it takes the bytes, the driver may wait for the stream, and with it the caller.
    if (!of.work.empty() && (plays("CADRE_EMULATED_PAGEABLE", "0") || setting_of_role("CADRE_EMULATED_PAGEABLE")))
        return kInvalidValue;
    flush(of);
    stream_of(stream).put([to, copy = std::vector<uint8_t>(first, first + bytes)] {
        memcpy(reinterpret_cast<void*>(to), copy.data(), copy.size());
    });
    return get_on(), kSuccess;
}
CALL cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    // Only to the pointer of a module, which is no allocation.
    if (to != reinterpret_cast<uint64_t>(&told_to) || bytes != sizeof told_to) return kInvalidValue;
    memcpy(&told_to, from, bytes);
    return kSuccess;
}
CALL cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return kSuccess;
}
CALL cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    const Copy2D it = *copy;
    constexpr int kHost = 1, kDevice = 2;
    const bool down = it.from_kind == kDevice && it.to_kind == kHost,
               up = it.from_kind == kHost && it.to_kind == kDevice;
    if ((!down && !up) || it.width == 0 || it.height == 0 || it.from_pitch < it.width || it.to_pitch < it.width) {
        return kInvalidValue;
    }
    const size_t from_bytes = (it.height - 1) * it.from_pitch + it.width,
                 to_bytes = (it.height - 1) * it.to_pitch + it.width;
    if (down ? !open_to(it.from_device, from_bytes, false) : !open_to(it.to_device, to_bytes, true))
        return kInvalidValue;
    // Only memory that is pinned is copied while the host goes on.
    const auto host = reinterpret_cast<uint64_t>(down ? it.to_host : it.from_host);
    if (!inside(pinned, host, down ? to_bytes : from_bytes)) return kInvalidValue;
    auto* from = down ? reinterpret_cast<const uint8_t*>(it.from_device) : static_cast<const uint8_t*>(it.from_host);
    auto* to = down ? static_cast<uint8_t*>(it.to_host) : reinterpret_cast<uint8_t*>(it.to_device);
    // Until it has run, what is read of the target is poison.
    if (down) {
        for (size_t row = 0; row < it.height; ++row) poison(to + row * it.to_pitch, it.width);
    }
    stream_of(stream).put([=] {
        for (size_t row = 0; row < it.height; ++row)
            memcpy(to + row * it.to_pitch, from + row * it.from_pitch, it.width);
    });
    return get_on(), kSuccess;
}
CALL cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    if (!held(address, 1)) return kInvalidValue;
    const auto found = --allocations.upper_bound(address);
    const bool elsewhere = (long)found->second == setting("CADRE_EMULATED_ELSEWHERE", -1);
    // Kind of memory: that of a device. Number of the device.
    if (attribute != 2 && attribute != 9) return kInvalidValue;
    *static_cast<int*>(value) = attribute == 2 ? 2 : elsewhere;
    return kSuccess;
}
