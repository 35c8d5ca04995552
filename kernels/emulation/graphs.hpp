#pragma once
// The part of the emulated driver that records what is put on a stream, to launch it again. Included by driver.cpp.
//
// While a stream records, its work goes to the recording instead of its queue, and what a driver cannot record fails:
// waits, memory that is allocated, and copies of memory of the host. Runs of a graph come one behind the other.
#include <utility>

namespace {
Graph* recording(void* stream) { return stream_of(stream).recording; }
}  // namespace

CALL cuStreamBeginCapture_v2(void* stream, int mode) {
    const Lock lock(mutex);
    // 1: other threads are left alone.
    if (mode != 1 || recording(stream)) return kInvalidValue;
    stream_of(stream).recording = new Graph, captures = &stream_of(stream);
    return kSuccess;
}
CALL cuStreamEndCapture(void* stream, Graph** graph) {
    const Lock lock(mutex);
    Graph* recorded = std::exchange(stream_of(stream).recording, nullptr);
    captures = nullptr;
    if (!recorded || recorded->broken) {
        delete recorded;
        return *graph = nullptr, kCaptureInvalidated;
    }
    return *graph = recorded, kSuccess;
}
CALL cuStreamIsCapturing(void* stream, int* status) {
    const Lock lock(mutex);
    // 1: it records; 2: and something was refused.
    *status = !recording(stream) ? 0 : recording(stream)->broken ? 2 : 1;
    return kSuccess;
}
CALL cuGraphInstantiateWithFlags(Graph** to, const Graph* graph, uint64_t flags) {
    const Lock lock(mutex);
    *to = new Graph(*graph);
    return flags == 0 ? kSuccess : kInvalidValue;
}
CALL cuGraphDestroy(Graph* graph) {
    const Lock lock(mutex);
    delete graph;
    return kSuccess;
}
CALL cuGraphExecDestroy(Graph* graph) {
    const Lock lock(mutex);
    // Its runs hold copies of its work.
    delete graph;
    return kSuccess;
}
CALL cuGraphLaunch(const Graph* graph, void* stream) {
    const Lock lock(mutex);
    if (lost) return lost_with;
    for (const auto& work : graph->work) stream_of(stream).put(work);
    return kSuccess;
}
