// What every GPU from sm_80 on has: copies that a thread starts, products of a warp, additions in global memory.
//
// Copies of 16 bytes go into shared memory in groups; a thread waits for its own, and a barrier tells the others. A
// product D[16×8] += A[16×16]·B[16×8] is mma.sync.m16n8k16: lane l holds of D the rows l/4 and that + 8, in each the
// columns 2·(l%4) and the next; of A four words, rows l/4 and that + 8 of its first 8 columns, then of its last. Blocks
// of 8 columns come in pairs, whose B four 8×8 matrices are: both halves of K of the first block, then of the second.
// Included by ptx.cuh only.
#pragma once

namespace ptx {

// 16 bytes from global memory, zeros where nobody holds them; `from` is then not read.
DEVICE void copy_async(uint32_t to, const void* from, bool held) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(held ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups of this thread are there.
DEVICE void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

DEVICE void store_word(uint32_t to, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// N times four 8×8 matrices of b16, `stride` bytes between: lanes 8i..8i+7 name the rows of matrix i, word i holds this
// lane's pair of it.
template <int N>
DEVICE void load_matrices(uint32_t* to, uint32_t from, uint32_t stride) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[4 * i]), "=r"(to[4 * i + 1]), "=r"(to[4 * i + 2]), "=r"(to[4 * i + 3])
                     : "r"(from + i * stride)
                     : "memory");
    }
}
// The same, each matrix transposed.
template <int N>
DEVICE void load_transposed(uint32_t* to, uint32_t from, uint32_t stride) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[4 * i]), "=r"(to[4 * i + 1]), "=r"(to[4 * i + 2]), "=r"(to[4 * i + 3])
                     : "r"(from + i * stride)
                     : "memory");
    }
}

// D += A·B for N pairs of blocks of 8 columns: 8·N numbers of D, 4 words of A, 4·N of B.
template <int N>
DEVICE void multiply(float* d, const uint32_t* a, const uint32_t* b) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[4 * i]), "+f"(d[4 * i + 1]), "+f"(d[4 * i + 2]), "+f"(d[4 * i + 3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
    }
}

// Adds four numbers to global memory, each by itself; done at `adds_done`.
DEVICE void add_numbers(float* to, float a, float b, float c, float d) {
    asm volatile(
        "red.relaxed.gpu.global.add.f32 [%0], %1;\nred.relaxed.gpu.global.add.f32 [%0+4], %2;\n"
        "red.relaxed.gpu.global.add.f32 [%0+8], %3;\nred.relaxed.gpu.global.add.f32 [%0+12], %4;" ::"l"(to),
        "f"(a), "f"(b), "f"(c), "f"(d)
        : "memory");
}
// This thread's additions come before what it, or who meets it at a barrier afterwards, tells other blocks.
DEVICE void adds_done() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Order between blocks where no async proxy takes part.
DEVICE void await_turn(const uint32_t* turn, uint32_t mine) {
    uint32_t now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != mine);
}
DEVICE void end_turn(uint32_t* turn) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory"); }

}  // namespace ptx
