/* Causal attention of two documents on a GPU, held against a loop. Build and run it with the library and its header:
 * cc -I kernels/c/include kernels/c/examples/attention.c -L target/release -lcadre_attention -lm -o attention
 * LD_LIBRARY_PATH=target/release ./attention
 */
#include <cadre_attention.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 300, DIM = 64 };
static const uint32_t documents[] = {200, 100};
static uint16_t rows[4][ROWS][DIM]; /* Q, K, V, O as bf16, one head */
static float lse[ROWS];

static float wide(uint16_t it) {
    union {
        uint32_t bits;
        float value;
    } to = {(uint32_t)it << 16};
    return to.value;
}
static void must(int fine) {
    if (!fine) fprintf(stderr, "%s\n", cadre_error()), exit(1);
}

int main(void) {
    cadre_gpu* gpu = cadre_abi() == CADRE_ABI ? cadre_open(0) : NULL;
    must(gpu != NULL);
    for (int i = 0; i < 3 * ROWS * DIM; i++) /* numbers of 1/8 to 1, of both signs */
        rows[i / DIM / ROWS][i / DIM % ROWS][i % DIM] = (uint16_t)(0x3e00 + rand() % 0x180 + (rand() & 1) * 0x8000);
    cadre_task tasks[2];
    for (uint32_t d = 0, at = 0; d < 2; at += documents[d++])
        tasks[d] = (cadre_task){CADRE_CAUSAL, documents[d], 0, documents[d], at, 0, documents[d], at, at, d};
    cadre_shape shape = {.query_heads = 1, .kv_heads = 1, .dim = DIM, .scale = 1 / sqrtf(DIM)};
    cadre_forward* plan = cadre_forward_plan(gpu, NULL, 0, shape, tasks, 2);
    cadre_buffer* memory = cadre_memory(gpu, sizeof rows + sizeof lse);
    must(plan != NULL && memory != NULL && cadre_memory_write(gpu, memory, 0, rows, sizeof rows) == 0);
    cadre_tensor tensors[5];
    for (int i = 0; i < 5; i++)
        tensors[i] = (cadre_tensor){cadre_memory_address(memory) + i * sizeof rows[0], i < 4 ? ROWS * DIM : ROWS};
    must(cadre_forward_run(gpu, plan, 0, tensors) == 0);
    static char all[sizeof rows + sizeof lse];
    must(cadre_memory_read(gpu, memory, 0, all, sizeof all) == 0);
    memcpy(rows, all, sizeof rows), memcpy(lse, all + sizeof rows, sizeof lse);
    double worst = 0;
    for (uint32_t r = 0; r < ROWS; r++) {
        double sum = 0, out[DIM] = {0};
        for (uint32_t k = r < documents[0] ? 0 : documents[0]; k <= r; k++) {
            double score = 0;
            for (int i = 0; i < DIM; i++) score += wide(rows[0][r][i]) * wide(rows[1][k][i]);
            sum += score = exp(score * shape.scale);
            for (int i = 0; i < DIM; i++) out[i] += score * wide(rows[2][k][i]);
        }
        worst = fmax(worst, fabs(log(sum) - lse[r]));
        for (int i = 0; i < DIM; i++) worst = fmax(worst, fabs(out[i] / sum - wide(rows[3][r][i])));
    }
    printf("largest difference %.4f\n", worst);
    cadre_forward_free(plan), cadre_memory_free(memory), cadre_close(gpu);
    return worst < 0.01 ? 0 : 1;
}
