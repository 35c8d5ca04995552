/* Calls that are wrong, one after the other: prints the words of each, and that a right one still works. */
#include <cadre_attention.h>
#include <stdio.h>

#define REFUSED(call, failed) puts((call) == (failed) ? cadre_error() : "was not refused")

int main(void) {
    cadre_gpu* gpu = cadre_open(0);
    cadre_task tasks[] = {{CADRE_CAUSAL, 100, 0, 100, 0, 0, 100, 0, 0, 0},
                          {CADRE_CAUSAL, 100, 0, 50, 50, 0, 50, 0, 0, 1}};
    cadre_shape shape = {.query_heads = 1, .kv_heads = 1, .dim = 64, .scale = 0.125f}, wrong = shape;
    REFUSED(cadre_forward_plan(NULL, NULL, 0, shape, tasks, 1), NULL);
    wrong.dim = 80;
    REFUSED(cadre_forward_plan(gpu, NULL, 0, wrong, tasks, 1), NULL);
    wrong = shape, wrong.query_heads = 3, wrong.kv_heads = 2;
    REFUSED(cadre_backward_plan(gpu, NULL, 0, wrong, tasks, 1), NULL);
    REFUSED(cadre_forward_plan(gpu, NULL, 0, shape, tasks, 2), NULL);
    REFUSED(cadre_forward_plan(gpu, NULL, 0, shape, NULL, 1), NULL);
    tasks[1].bundle = 0;
    REFUSED(cadre_backward_plan(gpu, NULL, 0, shape, tasks, 2), NULL);

    cadre_scratch* workspace = cadre_workspace(gpu);
    cadre_forward* plan = cadre_forward_plan(gpu, workspace, 0, shape, tasks, 1);
    cadre_buffer* memory = cadre_memory(gpu, 5 * 2 * 6400);
    uint64_t at = cadre_memory_address(memory);
    cadre_tensor tensors[] = {
        {at, 6400}, {at + 12800, 6400}, {at + 25600, 6400}, {at + 38400, 6400}, {at + 51200, 100}};
    tensors[0].numbers = 63;
    REFUSED(cadre_forward_run(gpu, plan, 0, tensors), -1);
    tensors[0].numbers = 6400, tensors[3].address = 2;
    REFUSED(cadre_forward_run(gpu, plan, 0, tensors), -1);
    tensors[3].address = at + 38400;
    REFUSED(cadre_forward_run(gpu, NULL, 0, tensors), -1);
    cadre_buffer* small = cadre_memory(gpu, 8);
    REFUSED(cadre_memory_write(gpu, small, 0, "123456789", 9), -1);
    wrong = shape, wrong.launches = UINT32_MAX;
    REFUSED(cadre_backward_plan(gpu, NULL, 0, wrong, tasks, 1), NULL);
    cadre_gpu* other = cadre_open(1);
    REFUSED(cadre_forward_plan(other, workspace, 0, shape, tasks, 1), NULL);
    REFUSED(cadre_forward_run(other, plan, 0, tensors), -1);
    REFUSED(cadre_memory_write(other, small, 0, "1", 1), -1);
    cadre_close(other);

    int fine = cadre_forward_run(gpu, plan, 0, tensors) == 0 && cadre_wait(gpu, 0, 10000) == 0;
    fine = fine && cadre_forward_bytes(plan) > 0 && cadre_workspace_bytes(workspace) == 0 && cadre_processors(gpu) > 0;
    cadre_close(gpu); /* a plan keeps it open */
    cadre_forward_free(plan), cadre_workspace_free(workspace), cadre_memory_free(memory), cadre_memory_free(small);
    cadre_forward_free(NULL), cadre_close(NULL);
    puts(fine ? "fine" : "a right call failed");
    return 0;
}
