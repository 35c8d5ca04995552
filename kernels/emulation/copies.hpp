#pragma once
// The part of the emulated driver that copies rows between the device and pinned memory of the host, and says whose an
// address is. Included by driver.cpp.
//
// Such a copy reads and writes when its stream comes to it, so rows that are looked at too early are poison.

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
