/* Cadre's attention kernels for NVIDIA GPUs from sm_80 on, for programs in C and whatever calls C.
 *
 * A batch of documents of any lengths, causal, full or with a window; grouped KV heads; head dim 64, 128 or 256, and on
 * GPUs that run the portable kernels (all but those of compute capability 9.0) each multiple of 8 up to 256; bf16 in
 * and out, f32 sums. O, LSE, dK, dV, and dQ in a fixed order, have the same bits run after run.
 *
 * Make a plan of a batch's tasks once, then run it for each layer, on your own stream. A run enqueues kernels and
 * returns. Nothing here waits for the GPU except cadre_wait, cadre_memory_read, the calls that free, and making a plan
 * for which its workspace has to grow.
 *
 * Calls return NULL, -1 or 0 where they fail; cadre_error then has the words. Any thread may call, but one at a time
 * uses a plan or a memory. Tensors are contiguous, rows first, and stay where they are until the stream has done the
 * run. Symbols of the library that are not here are for Cadre's own check.
 *
 * A plan runs on any stream of its GPU, behind the stream that it was made on. Runs of a plan, and of plans that share
 * a workspace, come one behind the other in the order of the calls, on whichever streams.
 *
 * A run may be captured in a CUDA graph. Wait for the stream of the plan before you launch the graph; in which order
 * its launches and other runs come is then up to you. The graph holds the plan and its workspace, which cannot grow any
 * more. A run before the capture spares the graph a memset.
 *
 * The library loads libcuda.so.1 itself and uses the primary context of the GPU, as the CUDA runtime and PyTorch do.
 * The calling thread keeps its current context.
 */
#ifndef CADRE_ATTENTION_H
#define CADRE_ATTENTION_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Compare with cadre_abi() before anything else: other numbers have other structures. */
#define CADRE_ABI 1

typedef struct cadre_gpu cadre_gpu;
typedef struct cadre_scratch cadre_scratch;   /* a workspace: what plans share while they run */
typedef struct cadre_forward cadre_forward;   /* a forward plan */
typedef struct cadre_backward cadre_backward; /* a backward plan */
typedef struct cadre_buffer cadre_buffer;     /* memory of the GPU */
typedef uint64_t cadre_stream;                /* a CUstream or cudaStream_t as a number; 0 is the default stream */

/* Which keys a row attends to: all of its document; those up to itself; itself and so many before it. */
#define CADRE_FULL 0u
#define CADRE_CAUSAL 1u
#define CADRE_WINDOW(before) ((before) + 0u > 0xfffffffdu ? CADRE_CAUSAL : (before) + 2u)

/* Heads and scale of a launch, and how it is cut. */
typedef struct {
    uint32_t query_heads, kv_heads, dim; /* query_heads is a multiple of kv_heads */
    uint32_t segment;                    /* keys that are summed in one go, a multiple of 128; 0: Cadre's own number */
    uint32_t blocks;      /* thread blocks at most, so that other kernels run beside; 0: every processor */
    uint32_t fixed_order; /* backward: 1 sums dQ in one order, so its bits repeat; 0 is as they come */
    uint32_t launches;    /* backward: launches that share the key tiles, mostly 1, at most 1024 */
    float scale;          /* factor of the scores, mostly 1 / sqrt(dim) */
    float softcap;        /* softcap * tanh(score / softcap), before the mask; 0: none */
} cadre_shape;

/* Query rows of a document and the keys that they read. A whole document of n rows that begins at row r of the tensors
 * is {mask, n, 0, n, r, 0, n, r, r, its number}. Documents may be cut into tasks, whose rows may lie anywhere. */
typedef struct {
    uint32_t mask;
    uint32_t document_rows;
    uint32_t rows_begin, rows_end; /* positions of the query rows in the document */
    uint32_t q_row;                /* row of the first one in Q, O, dO, LSE, delta and dQ */
    uint32_t keys_begin, keys_end; /* positions of the keys: at least all that the mask keeps for the rows */
    uint32_t kv_row;               /* row of the first one in K and V */
    uint32_t dkv_row;              /* backward: row of the first one in dK and dV */
    uint32_t bundle; /* backward: tasks side by side with one number add to the same dK and dV, in their order */
} cadre_task;

/* A tensor on the GPU: its address, a multiple of 16, and how many numbers (not bytes) it has. */
typedef struct {
    uint64_t address, numbers;
} cadre_tensor;

uint32_t cadre_abi(void);
const char* cadre_error(void); /* of this thread's last call that failed; valid until its next one */

cadre_gpu* cadre_open(uint32_t ordinal);
void cadre_close(cadre_gpu*);
uint32_t cadre_processors(const cadre_gpu*);
/* 0: what is on the stream now is done; 1: it is not, after so long;
 * -1: something on the stream went wrong. */
int32_t cadre_wait(const cadre_gpu*, cadre_stream, uint64_t milliseconds);

/* A workspace grows to what the largest of its plans needs. Without one (NULL) a plan has its own. */
cadre_scratch* cadre_workspace(const cadre_gpu*);
uint64_t cadre_workspace_bytes(const cadre_scratch*);
void cadre_workspace_free(cadre_scratch*);

/* Refuses tasks that the kernels cannot do by their index. Lists of tiles go to the GPU; the caller's are not kept. */
cadre_forward* cadre_forward_plan(const cadre_gpu*, const cadre_scratch*, cadre_stream, cadre_shape, const cadre_task*,
                                  uint64_t count);
/* Q [rows, query heads, dim], K, V [rows, KV heads, dim], O as Q: bf16; LSE [rows, query heads]: f32, natural
 * logarithm. */
int32_t cadre_forward_run(const cadre_gpu*, cadre_forward*, cadre_stream, const cadre_tensor tensors[5]);
/* Behind a run: applies learnt sinks, f32, one a query head, to its O and LSE. */
int32_t cadre_forward_sink(const cadre_gpu*, cadre_forward*, cadre_stream, const cadre_tensor tensors[3]);
uint64_t cadre_forward_bytes(const cadre_forward*);
void cadre_forward_free(cadre_forward*);

cadre_backward* cadre_backward_plan(const cadre_gpu*, const cadre_scratch*, cadre_stream, cadre_shape,
                                    const cadre_task*, uint64_t count);
/* Q, dO, K, V: bf16; LSE, and delta = the sum of dO * O over a row, [rows, query heads]: f32; dQ: f32, or bf16 if
 * narrow; dK and dV: f32. */
int32_t cadre_backward_run(const cadre_gpu*, cadre_backward*, cadre_stream, const cadre_tensor tensors[9],
                           uint32_t narrow);
uint64_t cadre_backward_bytes(const cadre_backward*);
void cadre_backward_free(cadre_backward*);

/* Memory of the GPU, for callers without a CUDA runtime. write and read copy to and from its beginning, and
 * wait for the stream, so they are not for captures. */
cadre_buffer* cadre_memory(const cadre_gpu*, uint64_t bytes);
uint64_t cadre_memory_address(const cadre_buffer*);
int32_t cadre_memory_write(const cadre_gpu*, cadre_buffer*, cadre_stream, const void* from, uint64_t bytes);
int32_t cadre_memory_read(const cadre_gpu*, const cadre_buffer*, cadre_stream, void* to, uint64_t bytes);
void cadre_memory_free(cadre_buffer*);

#ifdef __cplusplus
}
#endif

#endif
