/* Right calls that are easily served wrong: from several streams and threads, in captures, beside a context of the
 * caller. Prints a line for each. Over the emulated driver, whose streams run nothing before somebody waits for them.
 */
#define _GNU_SOURCE
#include <cadre_attention.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(CADRE_WINDOW(5u) == 7u, "a window counts the rows before");
_Static_assert(CADRE_WINDOW(0xfffffffeu) == CADRE_CAUSAL && CADRE_WINDOW(-1) == CADRE_CAUSAL, "the longest is causal");

/* The driver's, and what the emulated one has for tests. */
extern int cuDevicePrimaryCtxRetain(void**, int), cuCtxSetCurrent(void*), cuCtxGetCurrent(void**);
extern int cuStreamCreate(void**, unsigned), cuMemsetD32Async(uint64_t, unsigned, size_t, void*);
extern int cuMemHostAlloc(void**, size_t, unsigned), cuMemFreeHost(void*);
extern int cuStreamBeginCapture_v2(void*, int), cuStreamEndCapture(void*, void**);
extern int cuGraphInstantiateWithFlags(void**, void*, uint64_t), cuGraphLaunch(void*, void*);
extern long cadre_emulated_events(void), cadre_emulated_frees(void);
extern void cadre_emulated_before_launch(void (*)(void));

enum { ROWS = 200, DIM = 64, NUMBERS = ROWS * DIM, O_BYTES = 2 * NUMBERS + 4 * ROWS, GRADIENTS = 3 * 4 * NUMBERS };
static cadre_gpu* gpu;
static cadre_buffer *inputs, *sinks; /* Q, K, V, dO; LSE, delta */
static char right_o[O_BYTES], right_gradients[GRADIENTS], got[GRADIENTS];
static const cadre_shape shape = {
    .query_heads = 1, .kv_heads = 1, .dim = DIM, .segment = 128, .fixed_order = 1, .scale = 0.125f};

static void must(int fine) {
    if (!fine) fprintf(stderr, "%s\n", cadre_error()), exit(1);
}
static void say(const char* what, int fine) { printf("%s: %s\n", what, fine ? "fine" : "WRONG"); }
static cadre_stream stream_of_ours(void) {
    void* stream;
    must(cuStreamCreate(&stream, 1) == 0);
    return (cadre_stream)stream;
}
static cadre_task document(uint32_t rows) { return (cadre_task){CADRE_CAUSAL, rows, 0, rows, 0, 0, rows, 0, 0, 0}; }
static cadre_forward* forward_plan(const cadre_scratch* workspace, cadre_stream on, uint32_t rows) {
    cadre_task task = document(rows);
    return cadre_forward_plan(gpu, workspace, on, shape, &task, 1);
}
static cadre_backward* backward_plan(const cadre_scratch* workspace, cadre_stream on, uint32_t rows) {
    cadre_task task = document(rows);
    return cadre_backward_plan(gpu, workspace, on, shape, &task, 1);
}
static cadre_tensor place(const cadre_buffer* of, uint64_t byte, uint64_t numbers) {
    return (cadre_tensor){cadre_memory_address(of) + byte, numbers};
}
static cadre_tensor input(int which) {
    return place(inputs, which < 4 ? 2 * NUMBERS * which : 8 * NUMBERS + 4 * ROWS * (which - 4),
                 which < 4 ? NUMBERS : ROWS);
}
static int forward(cadre_forward* plan, cadre_stream on, const cadre_buffer* to) {
    cadre_tensor tensors[] = {input(0), input(1), input(2), place(to, 0, NUMBERS), place(to, 2 * NUMBERS, ROWS)};
    return cadre_forward_run(gpu, plan, on, tensors);
}
static int with_sinks(cadre_forward* plan, cadre_stream on, const cadre_buffer* to) {
    cadre_tensor tensors[] = {place(sinks, 0, 1), place(to, 0, NUMBERS), place(to, 2 * NUMBERS, ROWS)};
    return cadre_forward_sink(gpu, plan, on, tensors);
}
static int backward(cadre_backward* plan, cadre_stream on, const cadre_buffer* to) {
    cadre_tensor tensors[] = {input(0),
                              input(3),
                              input(1),
                              input(2),
                              input(4),
                              input(5),
                              place(to, 0, NUMBERS),
                              place(to, 4 * NUMBERS, NUMBERS),
                              place(to, 8 * NUMBERS, NUMBERS)};
    return cadre_backward_run(gpu, plan, on, tensors, 0);
}
/* Whether memory holds `right` once `on` is done. */
static int holds(const cadre_buffer* memory, cadre_stream on, const char* right, uint64_t bytes) {
    must(cadre_memory_read(gpu, memory, on, got, bytes) == 0);
    return memcmp(got, right, bytes) == 0;
}
/* An emulated GPU's memory is that of the process: whether it is so already. */
static int holds_now(const cadre_buffer* memory, const char* right, uint64_t bytes) {
    return memcmp((const void*)cadre_memory_address(memory), right, bytes) == 0;
}

static void contexts(void) {
    void *theirs, *now;
    int kept = cuDevicePrimaryCtxRetain(&theirs, 1) == 0 && cuCtxSetCurrent(theirs) == 0;
#define KEEPS(call) (call, cuCtxGetCurrent(&now), kept = kept && now == theirs)
    KEEPS(gpu = cadre_open(0));
    must(gpu != NULL);
    KEEPS(cadre_processors(gpu));
    cadre_buffer* memory;
    KEEPS(memory = cadre_memory(gpu, 64));
    KEEPS(cadre_memory_write(gpu, memory, 0, right_o, 64));
    KEEPS(cadre_memory_read(gpu, memory, 0, got, 64));
    cadre_forward* plan;
    KEEPS(plan = forward_plan(NULL, 0, ROWS));
    KEEPS(cadre_forward_run(gpu, plan, 0, NULL));
    KEEPS(cadre_wait(gpu, 0, UINT64_MAX));
    KEEPS(cadre_memory_free(memory));
    KEEPS(cadre_forward_free(plan));
    KEEPS(cadre_close(gpu));
    say("the caller's context stays", kept);
    cuCtxSetCurrent(NULL);
}

static void polls(cadre_stream on) {
    cadre_buffer* memory = cadre_memory(gpu, 4);
    for (int i = 0; i < 200; i++) must(cuMemsetD32Async(cadre_memory_address(memory), 0, 1, (void*)on) == 0);
    long before = cadre_emulated_events(), polled = 0;
    int left;
    while ((left = cadre_wait(gpu, on, 0)) == 1 && polled < 1000) polled++;
    say("a stream is polled without leaving events", left == 0 && polled > 100 && cadre_emulated_events() == before);
    cadre_memory_free(memory);
}

static void two_streams(cadre_stream first, cadre_stream second, cadre_buffer* const to[4]) {
    cadre_forward* plan = forward_plan(NULL, first, ROWS);
    must(plan != NULL && forward(plan, second, to[0]) == 0);
    say("a forward plan runs on another stream than it was made on", holds(to[0], second, right_o, O_BYTES));
    must(forward(plan, second, to[1]) == 0 && forward(plan, first, to[0]) == 0);
    int behind = holds(to[0], first, right_o, O_BYTES) && holds_now(to[1], right_o, O_BYTES);
    say("its runs come one behind the other", behind);

    cadre_backward* back = backward_plan(NULL, first, ROWS);
    must(back != NULL && backward(back, second, to[2]) == 0);
    say("so does a backward plan", holds(to[2], second, right_gradients, GRADIENTS));
    must(backward(back, second, to[3]) == 0 && backward(back, first, to[2]) == 0);
    behind = holds(to[2], first, right_gradients, GRADIENTS) && holds_now(to[3], right_gradients, GRADIENTS);
    say("and its runs", behind);

    cadre_scratch* workspace = cadre_workspace(gpu);
    cadre_backward* small = backward_plan(workspace, first, 100);
    must(small != NULL && backward(small, first, to[2]) == 0);
    must(cadre_memory_read(gpu, to[2], first, got, 4 * 100 * DIM) == 0);
    static char once[4 * 100 * DIM];
    memcpy(once, got, sizeof once);
    cadre_backward* large = backward_plan(workspace, second, ROWS);
    must(large != NULL && backward(small, first, to[2]) == 0);
    say("a plan on one stream leaves sums of another as they were", holds(to[2], first, once, sizeof once));
    cadre_forward_free(plan), cadre_backward_free(back), cadre_backward_free(small), cadre_backward_free(large);
    cadre_workspace_free(workspace);
}

static void pinned(cadre_stream on) {
    void *host, *context;
    cadre_buffer* memory = cadre_memory(gpu, 64);
    static char seven[64];
    memset(seven, 7, sizeof seven);
    must(cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    must(cuMemHostAlloc(&host, 64, 3) == 0);
    memcpy(host, seven, 64);
    must(cadre_memory_write(gpu, memory, on, host, 64) == 0);
    memset(host, 0, 64);
    say("bytes of pinned memory have been read when a write returns", holds(memory, on, seven, 64));
    cuMemFreeHost(host), cadre_memory_free(memory);
}

static cadre_scratch* shared;
static cadre_stream planners;
static cadre_forward* larger;
static pthread_t planner;
static int planner_id, is_planned, was_planned_meanwhile, freed_meanwhile;

static void* plan_larger(void* nothing) {
    __atomic_store_n(&planner_id, gettid(), __ATOMIC_SEQ_CST);
    larger = forward_plan(shared, planners, ROWS);
    __atomic_store_n(&is_planned, 1, __ATOMIC_SEQ_CST);
    return nothing;
}
/* Whether the planner has been asleep whenever it was looked at. */
static int sleeps(void) {
    char path[64], state = 'R';
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", __atomic_load_n(&planner_id, __ATOMIC_SEQ_CST));
    for (int looks = 0; looks < 1000; looks++) {
        FILE* file = fopen(path, "r");
        int read = file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
        if (file) fclose(file);
        if (!read || state != 'S') return 0;
        sched_yield();
    }
    return 1;
}
/* In the midst of a run: another thread makes a plan, or waits for the run. */
static void in_the_midst(void) {
    long before = cadre_emulated_frees();
    must(pthread_create(&planner, NULL, plan_larger, NULL) == 0);
    while (!__atomic_load_n(&is_planned, __ATOMIC_SEQ_CST) && !sleeps()) sched_yield();
    was_planned_meanwhile = is_planned, freed_meanwhile = cadre_emulated_frees() != before;
}
static void threads(cadre_stream first, cadre_stream second, const cadre_buffer* to) {
    shared = cadre_workspace(gpu), planners = second;
    cadre_forward* plan = forward_plan(shared, first, 150);
    must(plan != NULL && cadre_wait(gpu, first, 10000) == 0);
    cadre_emulated_before_launch(in_the_midst);
    must(forward(plan, first, to) == 0 && pthread_join(planner, NULL) == 0 && larger != NULL);
    int fine = !was_planned_meanwhile && !freed_meanwhile && holds(to, first, right_o, 2 * 150 * DIM);
    say("a plan of another thread waits for a run that is being enqueued", fine);
    cadre_forward_free(plan), cadre_forward_free(larger), cadre_workspace_free(shared);
}

static void captures(cadre_stream first, cadre_stream second, cadre_buffer* const to[2]) {
    cadre_scratch* workspace = cadre_workspace(gpu);
    cadre_forward *plan = forward_plan(workspace, first, ROWS), *plain = forward_plan(NULL, first, ROWS);
    static char right[O_BYTES];
    must(plain != NULL && forward(plain, first, to[0]) == 0 && with_sinks(plain, first, to[0]) == 0);
    must(cadre_memory_read(gpu, to[0], first, right, O_BYTES) == 0 && memcmp(right, right_o, O_BYTES) != 0);
    must(forward(plain, first, to[0]) == 0 && with_sinks(plain, second, to[0]) == 0);
    say("sinks on another stream come behind the run", holds(to[0], second, right, O_BYTES));
    void *graph = NULL, *runs = NULL;
    cadre_tensor none[5] = {{0, 0}};
    must(cuStreamBeginCapture_v2((void*)second, 1) == 0);
    int refused = cadre_forward_run(gpu, plan, second, none) != 0;
    must(cuStreamEndCapture((void*)second, &graph) == 0);
    cadre_forward* after = forward_plan(workspace, first, ROWS + 100);
    say("a run that is refused in a capture leaves the workspace free", refused && after != NULL);
    cadre_forward_free(after);
    must(cuStreamBeginCapture_v2((void*)second, 1) == 0);
    int put = forward(plan, second, to[1]) == 0 && with_sinks(plan, second, to[1]) == 0;
    put = cuStreamEndCapture((void*)second, &graph) == 0 && put;
    say("a run and its sinks are captured on another stream", put);
    if (!put) return;
    must(cuGraphInstantiateWithFlags(&runs, graph, 0) == 0);
    for (int i = 0; i < 2; i++) must(cuGraphLaunch(runs, (void*)second) == 0);
    say("and repeated", holds(to[1], second, right, O_BYTES));
    puts(forward_plan(workspace, first, 2 * ROWS) ? "was not refused" : cadre_error());
    must(forward(plan, first, to[1]) == 0);
    say("the plan runs as before", holds(to[1], first, right_o, O_BYTES));
    cadre_forward_free(plan), cadre_forward_free(plain), cadre_workspace_free(workspace);
}

int main(void) {
    contexts();
    must((gpu = cadre_open(0)) != NULL);
    static uint16_t rows[4 * NUMBERS + 4 * ROWS];
    for (int i = 0; i < 4 * NUMBERS; i++) /* numbers of 1/8 to 1, of both signs */
        rows[i] = (uint16_t)(0x3e00 + rand() % 0x180 + (rand() & 1) * 0x8000);
    inputs = cadre_memory(gpu, sizeof rows), sinks = cadre_memory(gpu, 4);
    cadre_buffer* to[4];
    for (int i = 0; i < 4; i++) to[i] = cadre_memory(gpu, i < 2 ? O_BYTES : GRADIENTS);
    must(cadre_memory_write(gpu, inputs, 0, rows, sizeof rows) == 0);
    must(cadre_memory_write(gpu, sinks, 0, &(float){0.5f}, 4) == 0 && cadre_wait(gpu, 0, 10000) == 0);
    cadre_stream first = stream_of_ours(), second = stream_of_ours();
    cadre_forward* plan = forward_plan(NULL, first, ROWS);
    must(plan != NULL && forward(plan, first, to[0]) == 0);
    must(cadre_memory_read(gpu, to[0], first, right_o, O_BYTES) == 0);
    /* LSE is that of the run; delta 0 will do. */
    must(cadre_memory_read(gpu, to[0], first, got, O_BYTES) == 0);
    memcpy(rows + 4 * NUMBERS, got + 2 * NUMBERS, 4 * ROWS);
    must(cadre_memory_write(gpu, inputs, first, rows, sizeof rows) == 0 && cadre_wait(gpu, first, 10000) == 0);
    cadre_backward* back = backward_plan(NULL, first, ROWS);
    must(back != NULL && backward(back, first, to[2]) == 0);
    must(cadre_memory_read(gpu, to[2], first, right_gradients, GRADIENTS) == 0);
    polls(first);
    pinned(first);
    threads(first, second, to[0]);
    two_streams(first, second, to);
    captures(first, second, to);
    cadre_forward_free(plan), cadre_backward_free(back);
    cadre_close(gpu);
    return 0;
}
