// A libcublasLt.so that multiplies on the CPU, for tests of the host's code beside the emulated libcuda.so.1.
//
// In: the calls of cuBLASLt that kernels/src/device/blas.rs makes. Out: products of f32, summed in f64, as work on the
// emulated driver's streams: it asks that driver for order (cuLaunchHostFunc) and for bounds (cuMemGetAddressRange), so
// a result that is read too early is poison and an operand beyond its allocation is refused.
//
// It refuses what the library would: shapes that do not fit, an algorithm that no heuristic gave for these shapes, and
// pointers below the alignment that heuristics assume (256 bytes). Says nothing of speed, nor of the library's own
// choice and rounding. CADRE_EMULATED_NO_ALGORITHM: heuristics find none.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int cuLaunchHostFunc(void* stream, void (*work)(void*), void* data);
int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address);
}

namespace {

enum Status { kSuccess = 0, kInvalidValue = 7, kExecutionFailed = 13, kNotSupported = 15 };
constexpr int kFloat32 = 0, kCompute32 = 68;
constexpr uint64_t kAlignment = 256;

struct Operation {
    int transposed[2] = {0, 0};
};
// Column-major.
struct Layout {
    uint64_t rows, columns;
    int64_t stride;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t reductions = 7;
};
struct Algorithm {
    uint64_t magic, m, n, k, operations, workspace, unused[2];
};
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
constexpr uint64_t kMagic = 0xCAD2E;

struct Shape {
    uint64_t m, n, k;
    bool fits;
};
Shape shape_of(const Operation& operation, const Layout& a, const Layout& b, const Layout& c) {
    const uint64_t m = operation.transposed[0] ? a.columns : a.rows,
                   of_a = operation.transposed[0] ? a.rows : a.columns;
    const uint64_t n = operation.transposed[1] ? b.rows : b.columns,
                   of_b = operation.transposed[1] ? b.columns : b.rows;
    const bool strides = a.stride >= (int64_t)a.rows && b.stride >= (int64_t)b.rows && c.stride >= (int64_t)c.rows;
    return {m, n, of_a, of_a == of_b && c.rows == m && c.columns == n && strides};
}
uint64_t bits(const Operation& operation) { return operation.transposed[0] + 2 * operation.transposed[1]; }

bool held(const void* place, const Layout& it) {
    const auto address = reinterpret_cast<uint64_t>(place);
    uint64_t base = 0;
    size_t bytes = 0;
    const uint64_t needed = it.columns == 0 ? 0 : ((it.columns - 1) * it.stride + it.rows) * 4;
    return address % kAlignment == 0 && cuMemGetAddressRange_v2(&base, &bytes, address) == 0 &&
           address + needed <= base + bytes;
}

struct Work {
    Operation operation;
    Layout of_a, of_b, of_c;
    const float *a, *b;
    float* c;
    float alpha, beta;
    Shape shape;
};

void multiply(void* data) {
    const Work& it = *static_cast<Work*>(data);
    const auto [m, n, k, fits] = it.shape;
    // One operand a column at a time, so that the inner loop goes along memory.
    std::vector<double> sums(m);
    for (uint64_t j = 0; j < n; ++j) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (uint64_t l = 0; l < k; ++l) {
            const double factor =
                it.operation.transposed[1] ? it.b[l * it.of_b.stride + j] : it.b[j * it.of_b.stride + l];
            if (it.operation.transposed[0]) {
                for (uint64_t i = 0; i < m; ++i) sums[i] += factor * it.a[i * it.of_a.stride + l];
            } else {
                for (uint64_t i = 0; i < m; ++i) sums[i] += factor * it.a[l * it.of_a.stride + i];
            }
        }
        for (uint64_t i = 0; i < m; ++i) {
            float& to = it.c[j * it.of_c.stride + i];
            // As the library: a C with factor 0 is not read.
            to = (float)(it.alpha * sums[i] + (it.beta == 0 ? 0.0 : (double)it.beta * to));
        }
    }
    delete &it;
}

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) int

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 130000; }
extern "C" __attribute__((visibility("default"))) const char* cublasLtGetStatusName(int status) {
    return status == kInvalidValue      ? "CUBLAS_STATUS_INVALID_VALUE"
           : status == kExecutionFailed ? "CUBLAS_STATUS_EXECUTION_FAILED"
                                        : "CUBLAS_STATUS_NOT_SUPPORTED";
}
CALL cublasLtCreate(void** handle) {
    *handle = new int(0);
    return kSuccess;
}
CALL cublasLtDestroy(void* handle) {
    delete static_cast<int*>(handle);
    return kSuccess;
}
CALL cublasLtMatmulDescCreate(Operation** to, int compute, int scale) {
    if (compute != kCompute32 || scale != kFloat32) return kNotSupported;
    *to = new Operation;
    return kSuccess;
}
CALL cublasLtMatmulDescDestroy(Operation* it) {
    delete it;
    return kSuccess;
}
CALL cublasLtMatmulDescSetAttribute(Operation* it, int attribute, const void* value, size_t bytes) {
    // 3 and 4: how A and B are read; 0 as they are, 1 transposed.
    if ((attribute != 3 && attribute != 4) || bytes != 4) return kInvalidValue;
    memcpy(&it->transposed[attribute - 3], value, bytes);
    return it->transposed[attribute - 3] == 0 || it->transposed[attribute - 3] == 1 ? kSuccess : kInvalidValue;
}
CALL cublasLtMatrixLayoutCreate(Layout** to, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if (type != kFloat32) return kNotSupported;
    *to = new Layout{rows, columns, stride};
    return kSuccess;
}
CALL cublasLtMatrixLayoutDestroy(Layout* it) {
    delete it;
    return kSuccess;
}
CALL cublasLtMatmulPreferenceCreate(Preference** to) {
    *to = new Preference;
    return kSuccess;
}
CALL cublasLtMatmulPreferenceDestroy(Preference* it) {
    delete it;
    return kSuccess;
}
CALL cublasLtMatmulPreferenceSetAttribute(Preference* it, int attribute, const void* value, size_t bytes) {
    // 1: bytes of workspace; 3: reduction schemes that may be taken.
    if (attribute == 1 && bytes == 8) return memcpy(&it->workspace, value, 8), kSuccess;
    if (attribute == 3 && bytes == 4) return memcpy(&it->reductions, value, 4), kSuccess;
    return kInvalidValue;
}
CALL cublasLtMatmulAlgoGetHeuristic(void*, const Operation* operation, const Layout* a, const Layout* b,
                                    const Layout* c, const Layout* d, const Preference* preference, int asked,
                                    Heuristic* results, int* found) {
    const Shape shape = shape_of(*operation, *a, *b, *c);
    *found = 0;
    // Sums may not be divided: the bits of the host's promise.
    if (!shape.fits || c != d || asked < 1 || preference->reductions != 0) return kInvalidValue;
    if (getenv("CADRE_EMULATED_NO_ALGORITHM")) return kNotSupported;
    results[0] = Heuristic{};
    // It takes all that it may.
    results[0].algorithm = {kMagic, shape.m, shape.n, shape.k, bits(*operation), preference->workspace, {}};
    *found = 1;
    return kSuccess;
}
CALL cublasLtMatmul(void*, const Operation* operation, const float* alpha, const float* a, const Layout* of_a,
                    const float* b, const Layout* of_b, const float* beta, const float* c, const Layout* of_c, float* d,
                    const Layout* of_d, const Algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
    const Shape shape = shape_of(*operation, *of_a, *of_b, *of_c);
    const bool known = algorithm && algorithm->magic == kMagic && algorithm->m == shape.m && algorithm->n == shape.n &&
                       algorithm->k == shape.k && algorithm->operations == bits(*operation);
    const Layout of_workspace{bytes / 4, 1, (int64_t)(bytes / 4)};
    if (!shape.fits || !known || c != d || of_c != of_d || !held(a, *of_a) || !held(b, *of_b) || !held(d, *of_d) ||
        bytes < algorithm->workspace || !held(workspace, of_workspace)) {
        return kInvalidValue;
    }
    auto* work = new Work{*operation, *of_a, *of_b, *of_c, a, b, d, *alpha, *beta, shape};
    return cuLaunchHostFunc(stream, multiply, work) == 0 ? kSuccess : kExecutionFailed;
}
