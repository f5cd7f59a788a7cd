/* shelf.c - how do ranks of one device add up their tensors without taking them down to the CPU?
 *
 * Each rank has a shelf: memory of the device that the others have opened by CUDA's IPC. A bucket is copied onto one's
 * own shelf, device to device; a kernel of our own (cuda/shelf.cu) adds up all shelves, in the order of ranks and with
 * the bits of the CPU's loops, straight into the tensors. Every rank adds up everything: it is one device, and to share
 * the sums would cost more copies than it spares.
 *
 * No rank waits for another on the device, where processes take turns. "I have given" and "I have taken" are exchanges
 * of a word over the planes that move the CPU's memory, each behind an event of the stage's stream (stage.c). So there
 * is nothing new in how ranks wait and die: a lost rank is found in the exchange, and a mapping outlives the process
 * that made the memory. Between two works nobody reads a shelf, so then it may be given to another set; freed it never
 * is (cuda/block.c). Within one, others may be reading: a job that fails leaves shelves, mappings and kernels as they
 * are.
 *
 * Whether all that works can be asked of no driver (containers, MIG and virtual machines refuse it, some only when a
 * handle is opened). So it is tried, in three steps: every rank says how its shelf, on which lies a pattern, is found;
 * all open all, add up the patterns in every dtype and compare the result with the CPU's, bit by bit; all say whether
 * it was right. One no is everybody's no, and works go by way of the CPU.
 */
#include "shelf.h"

#include "../kernel/kernel.h"
#include "stage.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#define SHELF_BYTES   ((size_t)64 << 20) /* for the largest bucket; why it does not grow: ../README.md */
#define PATTERN_BYTES 4096u
#define PATIENCE_NS   5000000000u /* for some kilobytes */

struct hello {
    int32_t code;
    uint32_t number; /* says that the memory is what was meant: the pattern follows from it */
    struct hvd_cuda_uuid uuid;
    struct hvd_cuda_ipc handle;
    char text[200]; /* why not; code is not HVD_OK */
};
_Static_assert(sizeof(struct hello) <= HVD_HELLO_BYTES, "a hello must fit");

static const int dtypes[] = {[HVD_SHELF_FLOAT16] = HVD_DTYPE_float16,
                             [HVD_SHELF_BFLOAT16] = HVD_DTYPE_bfloat16,
                             [HVD_SHELF_FLOAT32] = HVD_DTYPE_float32,
                             [HVD_SHELF_FLOAT64] = HVD_DTYPE_float64};

static int check(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

static struct hello hello_of(const void *all, int rank)
{
    struct hello hello;
    memcpy(&hello, (const unsigned char *)all + (size_t)rank * HVD_HELLO_BYTES, sizeof hello);
    hello.text[sizeof hello.text - 1] = '\0';
    return hello;
}

static void say(struct hello *hello, const struct hvd_error *error, void *mine)
{
    hello->code = error->code;
    hvd_text_copy(hello->text, sizeof hello->text, error->text);
    memset(mine, 0, HVD_HELLO_BYTES);
    memcpy(mine, hello, sizeof *hello);
}

static int kind_of(int dtype)
{
    for (size_t kind = 0; kind < HVD_COUNT_OF(dtypes); kind++)
        if (dtypes[kind] == dtype)
            return (int)kind;
    return -1;
}

bool hvd_shelf_fits(bool one_host, int size)
{
    return one_host && size > 1 && size <= HVD_SHELF_RANKS;
}

static void fill_pattern(uint32_t number, unsigned char *pattern)
{
    uint64_t state = number * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (size_t i = 0; i < PATTERN_BYTES; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        pattern[i] = (unsigned char)(state >> 56);
    }
}

/* Until all that was put on the stream is done. */
static int finish(struct hvd_stage *stage, struct hvd_error *error)
{
    uint64_t until = hvd_now_ns() + PATIENCE_NS;
    int code = stage->cuda->EventRecord(stage->on->done, stage->on->stream);
    while (code == 0 && (code = stage->cuda->EventQuery(stage->on->done)) == HVD_CUDA_NOT_READY) {
        if (hvd_now_ns() > until) {
            stage->shelf->abandoned = true;
            return hvd_fail(error, HVD_EINIT, HVD655 "the device has not copied some bytes in 5 s");
        }
        code = 0;
        sched_yield();
    }
    return check(code, "do a copy", error);
}

static int begin(struct hvd_stage *stage, struct hello *hello, struct hvd_error *error)
{
    struct hvd_shelf *shelf = stage->shelf;
    const struct hvd_cuda *cuda = stage->cuda;
    if (!cuda->IpcGetMemHandle || !cuda->IpcOpenMemHandle || !cuda->IpcCloseMemHandle)
        return hvd_fail(error, HVD_EINIT, HVD655 "its driver has no CUDA IPC");
    int code = check(cuda->DeviceGetUuid(&hello->uuid, stage->on->handle), "name a device", error);
    if (code == HVD_OK)
        code = check(cuda->ModuleLoadData(&shelf->module, hvd_shelf_ptx), "load a kernel", error);
    if (code == HVD_OK)
        code = check(cuda->ModuleGetFunction(&shelf->kernel, shelf->module, HVD_SHELF_SUM), "find a kernel", error);
    if (code == HVD_OK)
        code = hvd_pinned_reserve(cuda, &shelf->trial, PATTERN_BYTES, error);
    if (code == HVD_OK && !(shelf->block = hvd_block_lend(shelf->device - 1, SHELF_BYTES, error)))
        code = error->code;
    if (code == HVD_OK)
        code = check(cuda->IpcGetMemHandle(&hello->handle, shelf->block->at), "share memory between processes", error);
    if (code != HVD_OK)
        return code;
    fill_pattern(hello->number, shelf->trial.at);
    code = check(cuda->MemcpyHtoDAsync(shelf->block->at, shelf->trial.at, PATTERN_BYTES, stage->on->stream),
                 "do a copy", error);
    return code == HVD_OK ? finish(stage, error) : code;
}

void hvd_shelf_hello(struct hvd_stage *stage, int rank, int size, int device, bool allowed, void *mine)
{
    struct hvd_shelf *shelf = stage->shelf;
    struct hvd_error error = {0};
    struct hello hello = {.number = (uint32_t)hvd_now_ns() + (uint32_t)rank};
    *shelf = (struct hvd_shelf){.rank = rank, .size = size, .device = device, .bytes = SHELF_BYTES};
    if (!allowed)
        hvd_fail(&error, HVD_EINIT, HVD655 "HVDLITE_CUDA_IPC=0");
    else if (!device)
        hvd_fail(&error, HVD_EINIT, HVD655 "it has no tensor on a device yet");
    else if (hvd_stage_enter(stage, device, &error) == HVD_OK) {
        begin(stage, &hello, &error);
        hvd_stage_leave(stage);
    }
    say(&hello, &error, mine);
}

static int launch(struct hvd_stage *stage, struct hvd_shelf_table *table, struct hvd_error *error)
{
    void *arguments[] = {table};
    uint32_t rows = table->rows;
    table->rows = 0;
    if (rows == 0)
        return HVD_OK;
    table->rows = rows;
    int code = stage->cuda->LaunchKernel(stage->shelf->kernel, table->end[rows - 1], 1, 1, HVD_SHELF_THREADS, 1, 1, 0,
                                         stage->on->stream, arguments, NULL);
    table->rows = 0;
    return check(code, "add up shelves", error);
}

static int add(struct hvd_stage *stage, struct hvd_shelf_table *table, size_t at, uintptr_t to, size_t bytes,
               struct hvd_error *error)
{
    uint32_t before = table->rows ? table->end[table->rows - 1] : 0;
    table->row[table->rows] = (struct hvd_shelf_row){at, to, bytes};
    table->end[table->rows++] = before + (uint32_t)((bytes + HVD_SHELF_CHUNK - 1) / HVD_SHELF_CHUNK);
    return table->rows == HVD_SHELF_ROWS ? launch(stage, table, error) : HVD_OK;
}

/* The sum of all ranks' patterns in one dtype, as the device and the CPU have it. It goes behind the pattern. */
static int try_sum(struct hvd_stage *stage, const unsigned char *patterns, int kind, struct hvd_error *error)
{
    const struct hvd_shelf *shelf = stage->shelf;
    struct hvd_shelf_table table;
    struct hvd_scale scale = {.op = HVD_OP_sum, .divide = 1, .factor = 1.0 / 3, .first = 1.0};
    const void *source[HVD_SHELF_RANKS];
    unsigned char due[PATTERN_BYTES];
    memset(&table, 0, sizeof table);
    for (int rank = 0; rank < shelf->size; rank++) {
        source[rank] = patterns + (size_t)rank * PATTERN_BYTES;
        table.from[rank] = shelf->of[rank];
    }
    table.sources = (uint32_t)shelf->size;
    table.kind = (uint32_t)kind;
    table.factor = scale.factor;
    hvd_reduce(dtypes[kind], &scale, due, source, shelf->size, PATTERN_BYTES / (size_t)hvd_dtype_bytes(dtypes[kind]));
    uintptr_t result = shelf->block->at + PATTERN_BYTES;
    int code = add(stage, &table, 0, result, PATTERN_BYTES, error);
    if (code == HVD_OK)
        code = launch(stage, &table, error);
    if (code == HVD_OK)
        code = check(stage->cuda->MemcpyDtoHAsync(shelf->trial.at, result, PATTERN_BYTES, stage->on->stream),
                     "do a copy", error);
    if (code == HVD_OK)
        code = finish(stage, error);
    if (code == HVD_OK && memcmp(due, shelf->trial.at, sizeof due) != 0)
        return hvd_fail(error, HVD_EINIT, HVD655 "a sum of %s over CUDA IPC was wrong; please report this",
                        hvd_dtype_name(dtypes[kind]));
    return code;
}

static int open_all(struct hvd_stage *stage, const void *all, struct hvd_error *error)
{
    struct hvd_shelf *shelf = stage->shelf;
    unsigned char patterns[HVD_SHELF_RANKS * PATTERN_BYTES];
    int code = HVD_OK;
    for (int rank = 0; rank < shelf->size && code == HVD_OK; rank++) {
        enum { LAZY_ENABLE_PEER_ACCESS = 1 };
        struct hello hello = hello_of(all, rank);
        fill_pattern(hello.number, patterns + (size_t)rank * PATTERN_BYTES);
        if (rank == shelf->rank)
            shelf->of[rank] = shelf->block->at;
        else
            code = check(stage->cuda->IpcOpenMemHandle(&shelf->of[rank], hello.handle, LAZY_ENABLE_PEER_ACCESS),
                         "open another process's memory", error);
    }
    for (int kind = 0; kind < (int)HVD_COUNT_OF(dtypes) && code == HVD_OK; kind++)
        code = try_sum(stage, patterns, kind, error);
    return code;
}

void hvd_shelf_open(struct hvd_stage *stage, const void *all, void *mine)
{
    struct hvd_error error = {0};
    struct hello hello = hello_of(all, stage->shelf->rank);
    if (hvd_stage_enter(stage, stage->shelf->device, &error) == HVD_OK) {
        open_all(stage, all, &error);
        hvd_stage_leave(stage);
    }
    say(&hello, &error, mine);
}

int hvd_shelf_agree(const struct hvd_stage *stage, const void *all, struct hvd_error *error)
{
    struct hello first = hello_of(all, 0);
    for (int rank = 0; rank < stage->shelf->size; rank++) {
        struct hello hello = hello_of(all, rank);
        if (hello.code != HVD_OK)
            return hvd_fail_rank(error, HVD_EINIT, rank, HVD655 "rank %d: %s", rank, hello.text);
        if (memcmp(&hello.uuid, &first.uuid, sizeof first.uuid) != 0)
            return hvd_fail_rank(error, HVD_EINIT, rank, HVD655 "ranks 0 and %d use two GPUs", rank);
    }
    return HVD_OK;
}

/* Where piece i lies on every shelf, and where the next one would. */
static size_t next_place(const struct hvd_work *work, uint32_t i, size_t at)
{
    return at + HVD_ALIGN_UP(work->piece[i].count * (size_t)hvd_dtype_bytes(work->dtype), (size_t)16);
}

bool hvd_shelf_takes(const struct hvd_shelf *shelf, const struct hvd_work *work)
{
    uint64_t element = (uint64_t)hvd_dtype_bytes(work->dtype);
    bool sums = work->kind == HVD_ALLREDUCE && (work->op == HVD_OP_sum || work->op == HVD_OP_average) &&
                kind_of(work->dtype) >= 0;
    return shelf->usable && (sums || work->kind == HVD_BROADCAST) &&
           work->count * element + 16 * (uint64_t)work->pieces <= shelf->bytes;
}

static bool gives(const struct hvd_shelf *shelf, const struct hvd_piece *piece)
{
    const struct hvd_work *work = &shelf->work;
    return piece->in && piece->count && (work->kind != HVD_BROADCAST || work->root == shelf->rank);
}

int hvd_shelf_give(struct hvd_stage *stage, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_shelf *shelf = stage->shelf;
    const struct hvd_cuda *cuda = stage->cuda;
    size_t at = 0;
    int code = HVD_OK;
    shelf->work = *work;
    shelf->work.flags &= ~HVD_WORK_ON_DEVICE;
    shelf->work.ready = NULL;
    memset(shelf->said, 0, sizeof shelf->said);
    if (!work->device)
        return HVD_OK; /* it has joined */
    if (work->vacant)
        code = check(cuda->StreamWaitEvent(stage->on->stream, work->vacant, 0), "wait for memory", error);
    for (uint32_t i = 0; i < work->pieces && code == HVD_OK; at = next_place(work, i++, at)) {
        const struct hvd_piece *piece = &work->piece[i];
        if (work->ready && work->ready[i])
            code = check(cuda->StreamWaitEvent(stage->on->stream, work->ready[i], 0), "wait for a tensor", error);
        shelf->said[0] |= piece->in != NULL;
        if (gives(shelf, piece) && code == HVD_OK)
            code = check(cuda->MemcpyDtoDAsync(shelf->block->at + at, (uintptr_t)piece->in,
                                               piece->count * (size_t)hvd_dtype_bytes(work->dtype), stage->on->stream),
                         "copy a tensor for other ranks", error);
    }
    return code;
}

void hvd_shelf_say(struct hvd_shelf *shelf, struct hvd_work *work)
{
    for (int rank = 0; rank < shelf->size; rank++)
        shelf->count_of[rank] = HVD_SHELF_WORD;
    shelf->words = (struct hvd_piece){shelf->said, shelf->all, HVD_SHELF_WORD};
    *work = (struct hvd_work){.kind = HVD_ALLGATHER,
                              .dtype = HVD_DTYPE_uint8,
                              .piece = &shelf->words,
                              .pieces = 1,
                              .count = HVD_SHELF_WORD,
                              .count_of = shelf->count_of};
}

/* What one rank has given, as it is. */
static int copy_from(struct hvd_stage *stage, int rank, struct hvd_error *error)
{
    const struct hvd_work *work = &stage->shelf->work;
    size_t at = 0;
    int code = HVD_OK;
    for (uint32_t i = 0; i < work->pieces && code == HVD_OK; at = next_place(work, i++, at))
        if (work->piece[i].out && work->piece[i].count &&
            (rank != stage->shelf->rank || work->piece[i].out != work->piece[i].in))
            code = check(stage->cuda->MemcpyDtoDAsync((uintptr_t)work->piece[i].out, stage->shelf->of[rank] + at,
                                                      work->piece[i].count * (size_t)hvd_dtype_bytes(work->dtype),
                                                      stage->on->stream),
                         "copy a result", error);
    return code;
}

int hvd_shelf_take(struct hvd_stage *stage, struct hvd_error *error)
{
    const struct hvd_shelf *shelf = stage->shelf;
    const struct hvd_work *work = &shelf->work;
    struct hvd_shelf_table table;
    size_t at = 0, element = (size_t)hvd_dtype_bytes(work->dtype);
    int code = HVD_OK, last = 0;
    if (work->kind == HVD_BROADCAST)
        return copy_from(stage, work->root, error);
    table.rows = table.sources = table.unused = 0;
    for (int rank = 0; rank < shelf->size; rank++)
        if (shelf->all[rank * HVD_SHELF_WORD]) {
            table.from[table.sources++] = shelf->of[rank];
            last = rank;
        }
    table.kind = (uint32_t)kind_of(work->dtype);
    table.factor = hvd_scale_fold(work->op, work->dtype, work->active ? work->active : shelf->size, work->divide_by,
                                  work->prescale, work->postscale)
                       .factor;
    if (table.sources == 1 && table.factor == 1.0)
        return copy_from(stage, last, error);
    for (uint32_t i = 0; i < work->pieces && code == HVD_OK; at = next_place(work, i++, at))
        if (work->piece[i].out && work->piece[i].count)
            code = add(stage, &table, at, (uintptr_t)work->piece[i].out, work->piece[i].count * element, error);
    return code == HVD_OK ? launch(stage, &table, error) : code;
}

void hvd_shelf_refused(struct hvd_shelf *shelf)
{
    if (!shelf->block || shelf->abandoned)
        return;
    hvd_block_give_back(shelf->block, NULL);
    shelf->block = NULL;
}

void hvd_shelf_close(struct hvd_stage *stage, struct hvd_shelf *shelf)
{
    struct hvd_error ignored = {0};
    bool any = shelf->module || shelf->trial.at || shelf->block;
    shelf->usable = false;
    if (shelf->abandoned && shelf->block) {
        hvd_block_leave(shelf->block, shelf->trial.at);
        *shelf = (struct hvd_shelf){.abandoned = true};
        return;
    }
    if (!any || shelf->abandoned || hvd_cuda_hangs() || hvd_stage_enter(stage, shelf->device, &ignored) != HVD_OK)
        return;
    for (int rank = 0; rank < shelf->size; rank++)
        if (shelf->of[rank] && rank != shelf->rank)
            stage->cuda->IpcCloseMemHandle(shelf->of[rank]);
    hvd_pinned_free(stage->cuda, &shelf->trial);
    if (shelf->module)
        stage->cuda->ModuleUnload(shelf->module);
    hvd_stage_leave(stage);
    if (shelf->block)
        hvd_block_give_back(shelf->block, NULL);
    *shelf = (struct hvd_shelf){.usable = false};
}
