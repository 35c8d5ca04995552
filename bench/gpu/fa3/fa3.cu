// A C face of FlashAttention 3, head dims 64, 128 and 256, bf16, causal or full: a peer of the bench without a Python
// package.
//
// In: device addresses and sizes; cu_q, cu_k null for sequences of equal length that lie one behind the other. Out:
// launches on a stream, as FlashAttention's own flash_api.cpp makes them (hopper/, its mha_fwd and mha_bwd); 0, or −1
// where the runtime refuses, or where there are no kernels for the head dim. Allocates nothing. What it clears before a
// run, theirs clears, too. Only scripts/flash-attention builds it.
#include <cutlass/numeric_types.h>

#include <cstdint>

#include "cuda_check.h"
#include "flash.h"

extern "C" {

// Sizes of the scratch are in flash3.py. Names are FlashAttention's.
struct Fa3 {
    void *q, *k, *v, *o, *lse, *cu_q, *cu_k, *metadata;
    void *dout, *dq, *dk, *dv, *dq_accum, *dk_accum, *dv_accum, *delta, *lse_log2, *dq_semaphore, *dkv_semaphores;
    int64_t dk_accum_bytes, dkv_semaphore_bytes;
    int batch, total_q, total_k, max_q, max_k, heads, kv_heads, causal, deterministic, processors, dim;
    float scale;
};
}

namespace {

int rounded(int n, int to) { return (n + to - 1) / to * to; }

template <class Params>
void common(Params& p, const Fa3& it, int block_m, int block_n) {
    p.is_bf16 = true, p.is_causal = it.causal, p.arch = 90, p.num_sm = it.processors;
    p.b = it.batch, p.h = it.heads, p.h_k = it.kv_heads, p.d = p.dv = p.d_rounded = p.dv_rounded = it.dim;
    p.seqlen_q = it.max_q, p.seqlen_k = it.max_k, p.total_q = it.total_q, p.total_k = it.total_k;
    p.seqlen_q_rounded = rounded(it.max_q, block_m), p.seqlen_k_rounded = rounded(it.max_k, block_n);
    p.scale_softmax = it.scale, p.p_dropout = 1.f, p.rp_dropout = 1.f, p.p_dropout_in_uint8_t = 255;
    p.window_size_left = it.max_k - 1, p.window_size_right = it.causal ? 0 : it.max_q - 1;
    p.q_ptr = it.q, p.k_ptr = it.k, p.v_ptr = it.v, p.o_ptr = it.o, p.softmax_lse_ptr = it.lse;
    p.cu_seqlens_q = static_cast<int*>(it.cu_q), p.cu_seqlens_k = static_cast<int*>(it.cu_k);
    p.q_row_stride = p.o_row_stride = (int64_t)it.heads * it.dim, p.k_row_stride = (int64_t)it.kv_heads * it.dim;
    p.v_row_stride = p.k_row_stride, p.v_dim_stride = 1;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = it.dim;
    if (!it.cu_q) {
        p.q_batch_stride = p.o_batch_stride = p.q_row_stride * it.max_q;
        p.k_batch_stride = p.v_batch_stride = p.k_row_stride * it.max_k;
    }
}

// Tiles of the backward kernels of each head dim, as mha_bwd has them.
int block_m(const Fa3& it) { return it.dim == 64 ? 128 : it.dim == 128 && !it.causal ? 80 : 64; }
int block_n(const Fa3& it) { return it.dim == 256 ? 80 : 128; }

template <int kDim>
void launch(Flash_fwd_params& p, cudaStream_t stream) {
    run_mha_fwd_<90, cutlass::bfloat16_t, kDim, kDim, false, false, false, false>(p, stream);
}

template <int kDim>
void launch(Flash_bwd_params& p, cudaStream_t stream) {
    run_mha_bwd_<90, cutlass::bfloat16_t, kDim, false>(p, stream);
}

template <class Params>
int run(int dim, Params& p, cudaStream_t stream) {
    switch (dim) {
        case 64:
            launch<64>(p, stream);
            break;
        case 128:
            launch<128>(p, stream);
            break;
        case 256:
            launch<256>(p, stream);
            break;
        default:
            return -1;
    }
    return cudaGetLastError() == cudaSuccess ? 0 : -1;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int fa3_forward(const Fa3* asked, void* stream_handle) {
    const Fa3& it = *asked;
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    Flash_fwd_params p = {};
    common(p, it, 128, 128);
    p.num_splits = 1;
    const bool varlen = it.cu_q;
    const int b = rounded(it.batch, 4);
    int* metadata = static_cast<int*>(it.metadata);
    p.varlen_sort_batches = true, p.head_swizzle = it.causal;
    p.tile_count_semaphore = metadata + 4 * b;
    if (varlen) {
        p.prepare_varlen_pdl = it.batch <= 992;
        p.num_splits_dynamic_ptr = metadata, p.num_m_blocks_ptr = metadata + b,
        p.varlen_batch_idx_ptr = metadata + 2 * b;
        p.num_nheads_in_l2_ptr = it.causal ? metadata + 3 * b : nullptr;
    } else if (cudaMemsetAsync(p.tile_count_semaphore, 0, 4, stream) != cudaSuccess) {
        return -1;
    }
    return run(it.dim, p, stream);
}

extern "C" __attribute__((visibility("default"))) int fa3_backward(const Fa3* asked, void* stream_handle) {
    const Fa3& it = *asked;
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    // As mha_bwd has it.
    if (it.deterministic && it.dim == 256) return -1;
    Flash_bwd_params p = {};
    common(p, it, block_m(it), block_n(it));
    p.do_ptr = it.dout, p.dq_ptr = it.dq, p.dk_ptr = it.dk, p.dv_ptr = it.dv;
    p.do_row_stride = p.dq_row_stride = p.q_row_stride, p.dk_row_stride = p.dv_row_stride = p.k_row_stride;
    p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = it.dim;
    p.do_batch_stride = p.dq_batch_stride = p.q_batch_stride, p.dk_batch_stride = p.dv_batch_stride = p.k_batch_stride;
    p.dq_accum_ptr = it.dq_accum, p.dsoftmax_sum = it.delta, p.softmax_lse_log2_ptr = it.lse_log2;
    p.deterministic = it.deterministic, p.dq_semaphore = static_cast<int*>(it.dq_semaphore);
    if (it.heads != it.kv_heads) {
        p.dk_accum_ptr = it.dk_accum, p.dv_accum_ptr = it.dv_accum;
        const bool cleared = cudaMemsetAsync(it.dk_accum, 0, it.dk_accum_bytes, stream) == cudaSuccess &&
                             cudaMemsetAsync(it.dv_accum, 0, it.dk_accum_bytes, stream) == cudaSuccess &&
                             cudaMemsetAsync(it.dkv_semaphores, 0, 2 * it.dkv_semaphore_bytes, stream) == cudaSuccess;
        if (!cleared) return -1;
        p.dk_semaphore = static_cast<int*>(it.dkv_semaphores);
        p.dv_semaphore = p.dk_semaphore + it.dkv_semaphore_bytes / 4;
    }
    return run(it.dim, p, stream);
}
