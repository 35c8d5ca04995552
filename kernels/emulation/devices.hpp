#pragma once
// The part of the emulated driver that has devices and contexts, and what tests of the host's code ask of it. Included
// by driver.cpp.
//
// All devices compute alike, in one memory. A thread has one current context, which starts as none; memory and streams
// are those of any.

namespace {

char contexts[8];  // the primary context of each device is a place here
thread_local void* current_context;
long events, frees;  // events that were not destroyed; memory that was freed
void (*before_launch)();

int emulated_capability() { return (int)setting_of_process("CADRE_EMULATED_CAPABILITY", 90); }
long devices() { return std::min(setting("CADRE_EMULATED_GPUS", 1), (long)sizeof contexts); }

}  // namespace

// How many events live.
extern "C" __attribute__((visibility("default"))) long cadre_emulated_events() {
    const Lock lock(mutex);
    return events;
}
// How often memory was freed.
extern "C" __attribute__((visibility("default"))) long cadre_emulated_frees() {
    const Lock lock(mutex);
    return frees;
}
// Calls `then` once, before the next launch is enqueued; other threads may call the driver meanwhile.
extern "C" __attribute__((visibility("default"))) void cadre_emulated_before_launch(void (*then)()) {
    const Lock lock(mutex);
    before_launch = then;
}

CALL cuDeviceGetCount(int* count) {
    const Lock lock(mutex);
    *count = (int)devices();
    return kSuccess;
}
CALL cuDeviceGet(int* device, int index) {
    const Lock lock(mutex);
    *device = index;
    return 0 <= index && index < devices() ? kSuccess : kInvalidValue;
}
CALL cuDeviceGetName(char* name, int bytes, int) {
    const Lock lock(mutex);
    snprintf(name, bytes, "emulated");
    return kSuccess;
}
CALL cuDeviceGetUuid_v2(uint8_t* uuid, int device) {
    const Lock lock(mutex);
    const uint32_t own = setting("CADRE_EMULATED_OWN_GPU", 0) ? (uint32_t)getpid() : 0x454D554C;
    for (int i = 0; i < 16; ++i) uuid[i] = (uint8_t)((own + (uint32_t)device) >> 8 * (3 - i % 4));
    return kSuccess;
}
CALL cuDeviceGetAttribute(int* value, int attribute, int) {
    const Lock lock(mutex);
    // Compute capability, 3 multiprocessors.
    const int capability = emulated_capability();
    *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 16 ? 3 : -1;
    return *value < 0 ? kInvalidValue : kSuccess;
}
CALL cuDevicePrimaryCtxRetain(void** context, int device) {
    const Lock lock(mutex);
    *context = contexts + device;
    return kSuccess;
}
CALL cuDevicePrimaryCtxRelease_v2(int) {
    const Lock lock(mutex);
    return kSuccess;
}
CALL cuCtxSetCurrent(void* context) { return current_context = context, kSuccess; }
CALL cuCtxGetCurrent(void** context) { return *context = current_context, kSuccess; }
