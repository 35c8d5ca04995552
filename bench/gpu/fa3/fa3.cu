// A C face of FlashAttention 3, head dim 128, bf16, causal or full: a peer of the bench that needs no Python package.
//
// In: device addresses and sizes; cu_q, cu_k null for sequences of equal length that lie one behind the other. Out:
// launches on a stream, as FlashAttention's own flash_api.cpp makes them (hopper/, its mha_fwd and mha_bwd); 0, or −1
// where the runtime refuses. Allocates nothing. What it clears before a run, theirs clears, too. Only
// scripts/flash-attention builds it.
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
    int batch, total_q, total_k, max_q, max_k, heads, kv_heads, causal, deterministic, processors;
    float scale;
};
}

namespace {

constexpr int kDim = 128;

int rounded(int n, int to) { return (n + to - 1) / to * to; }

template <class Params>
void common(Params& p, const Fa3& it, int block_m, int block_n) {
    p.is_bf16 = true, p.is_causal = it.causal, p.arch = 90, p.num_sm = it.processors;
    p.b = it.batch, p.h = it.heads, p.h_k = it.kv_heads, p.d = p.dv = p.d_rounded = p.dv_rounded = kDim;
    p.seqlen_q = it.max_q, p.seqlen_k = it.max_k, p.total_q = it.total_q, p.total_k = it.total_k;
    p.seqlen_q_rounded = rounded(it.max_q, block_m), p.seqlen_k_rounded = rounded(it.max_k, block_n);
    p.scale_softmax = it.scale, p.p_dropout = 1.f, p.rp_dropout = 1.f, p.p_dropout_in_uint8_t = 255;
    p.window_size_left = it.max_k - 1, p.window_size_right = it.causal ? 0 : it.max_q - 1;
    p.q_ptr = it.q, p.k_ptr = it.k, p.v_ptr = it.v, p.o_ptr = it.o, p.softmax_lse_ptr = it.lse;
    p.cu_seqlens_q = static_cast<int*>(it.cu_q), p.cu_seqlens_k = static_cast<int*>(it.cu_k);
    p.q_row_stride = p.o_row_stride = (int64_t)it.heads * kDim, p.k_row_stride = (int64_t)it.kv_heads * kDim;
    p.v_row_stride = p.k_row_stride, p.v_dim_stride = 1;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = kDim;
    if (!it.cu_q) {
        p.q_batch_stride = p.o_batch_stride = p.q_row_stride * it.max_q;
        p.k_batch_stride = p.v_batch_stride = p.k_row_stride * it.max_k;
    }
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
    run_mha_fwd_<90, cutlass::bfloat16_t, kDim, kDim, false, false, false, false>(p, stream);
    return cudaGetLastError() == cudaSuccess ? 0 : -1;
}

extern "C" __attribute__((visibility("default"))) int fa3_backward(const Fa3* asked, void* stream_handle) {
    const Fa3& it = *asked;
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    Flash_bwd_params p = {};
    common(p, it, it.causal ? 64 : 80, 128);
    p.do_ptr = it.dout, p.dq_ptr = it.dq, p.dk_ptr = it.dk, p.dv_ptr = it.dv;
    p.do_row_stride = p.dq_row_stride = p.q_row_stride, p.dk_row_stride = p.dv_row_stride = p.k_row_stride;
    p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = kDim;
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
    run_mha_bwd_<90, cutlass::bfloat16_t, kDim, false>(p, stream);
    return cudaGetLastError() == cudaSuccess ? 0 : -1;
}
