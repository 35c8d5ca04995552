// Bytes and numbers: tensor copies into shared memory, bulk additions out of it, stores of fragments, bf16 and 2^x.
//
// Operands of wgmma lie in shared memory as panels of 64 bf16 (128 bytes a row) with the 128-byte swizzle: bits 4–6 of
// an address are exclusive-ored with bits 7–9. Tensor copies apply it; who stores by hand uses `swizzled`. Included by
// ptx.cuh only.
#pragma once

namespace ptx {

using TensorMap = CUtensorMap;

DEVICE uint32_t swizzled(uint32_t panel, int row, int sixteenth) {
    return panel + row * 128 + ((sixteenth ^ (row & 7)) << 4);
}

DEVICE void prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map)); }
// A box of a [rows, heads, dim] tensor. Rows outside the tensor, before it too, come as zeros.
DEVICE void load_box(uint32_t to, const TensorMap& map, uint32_t barrier, int dim, int head, int row) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], [%2];" ::
            "r"(to),
        "l"(&map), "r"(barrier), "r"(dim), "r"(head), "r"(row)
        : "memory");
}

// Adds `bytes` (a multiple of 16) of f32 in shared memory to global memory, asynchronously, element by element.
DEVICE void add_bulk(float* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's bulk additions have read shared memory.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Until they are done.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

DEVICE void store_shared(uint32_t to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// Four 8×8 matrices of b16: lanes 8i..8i+7 name the rows of matrix i, register i holds this lane's pair of it.
DEVICE void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
// Makes this thread's stores to shared memory visible to wgmma and bulk copies.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE float2 unpack_bf16(uint32_t both) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}
DEVICE float exp2(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Relative error at most 2^-11; as many a clock as exp2.
DEVICE float tanh(float x) {
    float y;
    asm volatile("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE uint32_t as_bits(float x) { return __float_as_uint(x); }
DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
// Of two numbers; NaN if one is.
DEVICE float larger(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

}  // namespace ptx
