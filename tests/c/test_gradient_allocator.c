/* test_gradient_allocator.c - blocks for gradients among threads, without PyTorch.
 *
 * The allocator, autograd's task and its set of nodes are made here, as the C++ library lays them out. Threads run
 * tasks of their own model and of another one, allocate, keep and free, while slabs come and go. No two tensors share
 * memory, another model gets no block, no slab stays, and the thread sanitizer has nothing to say.
 */
#define hvd_alloc test_alloc
#define hvd_free  test_free
#include "../../csrc/torch/gradient_allocator.c"
#include "check.h"

#include <time.h>

#define THREADS 4
#define KEPT    8
#define ROUNDS  20000

static _Atomic int slabs_left;
static _Thread_local int task_now = -1;

void *test_alloc(size_t bytes)
{
    slabs_left++;
    return malloc(bytes);
}

void test_free(void *memory)
{
    slabs_left -= memory != NULL;
    free(memory);
}

static struct data_ptr plain_allocate(void *object, size_t bytes)
{
    void *memory = malloc(bytes);
    return (struct data_ptr){memory, free, memory, 0xff00};
}

static bool plain_is_simple(const void *object, const struct data_ptr *memory)
{
    return memory->data == memory->context;
}

static deleter plain_deleter(const void *object)
{
    return free;
}

static struct table plain_table = {
    .allocate = plain_allocate, .is_simple = plain_is_simple, .raw_deleter = plain_deleter};
static const void *plain = &plain_table.destroy;

static int task_number(void)
{
    return task_now;
}

/* Two nodes in three buckets, 6 and 9 in one of them: of odd tasks; those of even ones are 4 and 7. */
static const struct nodes *nodes_of_task(void)
{
    static const struct element list[2][3] = {{{&list[0][1], 0, 0}, {&list[0][2], 4, 0}, {NULL, 7, 0}},
                                              {{&list[1][1], 0, 0}, {&list[1][2], 6, 1}, {NULL, 9, 0}}};
    static const struct element *const even[3] = {NULL, &list[0][0], NULL}, *const odd[3] = {&list[1][0], NULL, NULL};
    static const struct nodes sets[2] = {{even, 3, NULL, 2}, {odd, 3, NULL, 2}};
    return task_now < 0 ? NULL : &sets[task_now % 2];
}

static bool chosen_only;

static const struct nodes *chosen_nodes(void)
{
    static const struct element *const none[1];
    static const struct nodes empty = {none, 1, NULL, 0};
    return chosen_only ? nodes_of_task() : &empty;
}

static struct data_ptr ask(size_t bytes)
{
    void *object = (void *)&self;
    return ((const struct table *)(const void *)((const char *)self - offsetof(struct table, destroy)))
        ->allocate(object, bytes);
}

static void *work(void *number)
{
    static _Atomic int tasks;
    struct data_ptr kept[KEPT] = {{0}};
    size_t size[KEPT] = {0};
    unsigned random = (unsigned)(uintptr_t)number;
    for (int i = 0; i < ROUNDS; i++) {
        random = random * 1664525u + 1013904223u;
        int at = (int)(random >> 16) % KEPT;
        if (kept[at].data) {
            for (size_t k = 0; k < size[at]; k++)
                CHECK(((char *)kept[at].data)[k] == (char)at + (char)(uintptr_t)number, "byte %zu", k);
            kept[at].deleter(kept[at].context);
        }
        task_now = i % 16 ? task_now : (int)(random >> 8) % 3 ? atomic_fetch_add(&tasks, 1) : -1;
        size[at] = (random >> 4) % 3 * 100 + 100;
        kept[at] = ask(size[at]);
        if (task_now < 0 || task_now % 2 == 0)
            CHECK(!hvd_grad_alloc_has((uintptr_t)kept[at].data), "a block of task %d", task_now);
        memset(kept[at].data, (char)at + (char)(uintptr_t)number, size[at]);
    }
    for (int at = 0; at < KEPT; at++)
        if (kept[at].data)
            kept[at].deleter(kept[at].context);
    return NULL;
}

static int give(uintptr_t node)
{
    return hvd_grad_alloc_give((uint64_t[]){100, 200}, (uint32_t[]){3, 4}, 2, (uintptr_t[]){5, node}, 2);
}

static void test_threads(void)
{
    pthread_t thread[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, work, (void *)(uintptr_t)(16 * i + 16));
    for (int i = 0; i < 200; i++) {
        int first = give(6), second = give(9);
        CHECK(first >= 0 && second >= 0, "%d, %d", first, second);
        nanosleep(&(struct timespec){0, 100000}, NULL);
        hvd_grad_alloc_end(first);
        hvd_grad_alloc_end(second);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    CHECK(slabs_left == 0, "%d slabs", slabs_left);
    CHECK(size_of(100)->room == 0 && size_of(200)->free == 0, "%u blocks", size_of(100)->room);
}

static void test_blocks(void)
{
    struct data_ptr block[4];
    int slab = give(6);
    task_now = 101;
    for (int i = 0; i < 4; i++) {
        block[i] = ask(100);
        CHECK(hvd_grad_alloc_has((uintptr_t)block[i].data) == (i < 3), "%d", i);
        CHECK((uintptr_t)block[i].data % ALIGN == 0 || i == 3, "%p", block[i].data);
    }
    raw_deleter(NULL)(block[3].context);
    block[1].deleter(block[1].context);
    CHECK(ask(100).data == block[1].data, "a block is used again");
    block[1].deleter(block[1].context);
    chosen_only = true;
    task_now = 103;
    CHECK(ask(100).data == block[1].data, "backward(inputs=...)");
    hvd_grad_alloc_end(slab);
    slab = give(9);
    block[3] = ask(100);
    CHECK(!hvd_grad_alloc_has((uintptr_t)block[3].data), "torch.autograd.grad");
    block[3].deleter(block[3].context);
    hvd_grad_alloc_end(slab);
    for (int i = 0; i < 3; i++) {
        CHECK(slabs_left == 1, "%d slabs", slabs_left);
        block[i].deleter(block[i].context);
    }
    CHECK(slabs_left == 0, "%d slabs", slabs_left);
    chosen_only = false;
}

int main(void)
{
    CHECK(give(6) < 0, "there is no allocator yet");
    uintptr_t made = hvd_grad_alloc_open((uintptr_t)&plain, (uintptr_t)task_number, (uintptr_t)nodes_of_task,
                                         (uintptr_t)chosen_nodes);
    CHECK(made == (uintptr_t)&self, "%p", (void *)made);
    test_blocks();
    test_threads();
    return 0;
}
