/* gradient_allocator.c - allocates PyTorch's gradients in plane memory.
 *
 * zero_grad(), as it is by default, drops gradients, and autograd allocates new ones in every backward pass. What lies
 * outside plane memory is copied on its way to the other ranks and back (plane/shm/allreduce.c); to copy it there first
 * costs as much. So PyTorch gets a CPU allocator that serves gradients from plane memory, and asks PyTorch's own for
 * everything else.
 *
 * - Which allocations? Those that have the exact size of a gradient and are made in a backward pass that adds to one.
 *   A pass is known by its graph task: autograd keeps a set of its nodes, and it is asked once per task and thread
 *   whether the node that accumulates a registered parameter is among them and will be executed. A pass of another
 *   model, or torch.autograd.grad, gets nothing. In an own pass, another tensor of that size may get a block. It is
 *   ordinary memory for whoever has it, and comes back with the tensor.
 * - How? Nothing is compiled against PyTorch. A c10::Allocator is one word, the address of a table of functions. `self`
 *   is such an object; its table is that of the default allocator with allocate, raw_deleter and the destructors
 *   replaced. The other functions of that table use no members. A DataPtr is four words, returned in memory as a struct
 *   of C is. The set of nodes is a std::unordered_set of libstdc++. Python offers all of this only to versions of
 *   PyTorch that tests have run with (hvdlite/torch/optimizer/gradient_allocator.py); what can be checked is checked.
 * - Whose blocks? Each optimizer has a slab, one allocation of hvd_alloc. Blocks of one size are common to all slabs.
 *   Without a free block, memory comes from the default allocator. hvd_grad_alloc_end withdraws the free blocks of a
 *   slab; its memory is freed with the last tensor in it, so gradients outlive optimizer and job.
 *
 * One mutex protects slabs and blocks. Nothing is called while it is held, save the lookup in a task. An allocation of
 * any other size reads two words, and takes no lock. A forked child has a copy of all of it (plane/shm/arena.c).
 */
#include "../hvdlite.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define SLABS_MAX 64
#define SIZE_BITS 10
#define SIZES     (1u << SIZE_BITS)
#define SIZES_MAX (SIZES / 2)
#define ALIGN     64u
#define UP(bytes) (((bytes) + ALIGN - 1) / ALIGN * ALIGN)

typedef void (*deleter)(void *context);

struct data_ptr { /* c10::DataPtr */
    void *data;
    deleter deleter;
    void *context;
    uint64_t device; /* two bytes of it */
};

struct table { /* of c10::Allocator; an object points to `destroy` */
    uintptr_t offset, type;
    void (*destroy)(void *self), (*destroy_and_free)(void *self);
    struct data_ptr (*allocate)(void *self, size_t bytes);
    bool (*is_simple)(const void *self, const struct data_ptr *memory);
    deleter (*raw_deleter)(const void *self);
    void (*copy_data)(const void *self, void *to, const void *from, size_t bytes);
};

struct element { /* of a std::unordered_set<Node *>, or of a map with such keys */
    const struct element *next;
    uintptr_t key;
    bool needed; /* first member of GraphTask::ExecInfo */
};

struct nodes {
    const struct element *const *before; /* the first element of each bucket */
    size_t buckets;
    const struct element *first;
    size_t count;
};

struct size {
    _Atomic uint64_t bytes; /* 0: none */
    uint32_t free, room;
    void **block;
};

struct slab {
    char *begin, *end;
    uintptr_t *node; /* that accumulate its gradients; NULL: it has ended */
    int nodes;
    uint32_t used; /* blocks in tensors, and one until it ends */
};

static struct {
    pthread_mutex_t mutex;
    void *original;
    struct data_ptr (*allocate)(void *self, size_t bytes);
    deleter release;
    int (*task)(void);                    /* the graph task of this thread; -1: none */
    const struct nodes *(*in_task)(void); /* its nodes */
    const struct nodes *(*chosen)(void);  /* those that it executes; empty: all */
    uint64_t device;                      /* CPU, as a DataPtr has it */
    _Atomic uint32_t sizes, version;      /* version: of the slabs, which decide what an own task is */
    struct slab slab[SLABS_MAX];
    struct size size[SIZES];
    struct table table;
} all = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static const void *self = &all.table.destroy; /* &self is the c10::Allocator */

static const struct element *find(const struct nodes *nodes, uintptr_t key)
{
    size_t bucket = key % nodes->buckets;
    const struct element *at = nodes->before[bucket];
    for (at = at ? at->next : NULL; at && at->key % nodes->buckets == bucket; at = at->next)
        if (at->key == key)
            return at;
    return NULL;
}

static bool slab_in_task(const struct slab *slab, const struct nodes *nodes, const struct nodes *chosen)
{
    for (int i = 0; i < slab->nodes; i++) {
        const struct element *found = find(chosen->count ? chosen : nodes, slab->node[i]);
        if (found && (!chosen->count || found->needed))
            return true;
    }
    return false;
}

/* Whether this thread runs a backward pass that adds to a gradient of a slab. */
static bool in_own_task(void)
{
    static _Thread_local struct {
        int task;
        uint32_t version;
        bool own;
    } last = {.task = -1};
    int task = all.task();
    uint32_t version = atomic_load_explicit(&all.version, memory_order_relaxed);
    if (task < 0 || (task == last.task && version == last.version))
        return task >= 0 && last.own;
    const struct nodes *nodes = all.in_task(), *chosen = all.chosen();
    bool own = false;
    pthread_mutex_lock(&all.mutex);
    for (int i = 0; i < SLABS_MAX && nodes && chosen && !own; i++)
        own = all.slab[i].node && slab_in_task(&all.slab[i], nodes, chosen);
    pthread_mutex_unlock(&all.mutex);
    last.task = task;
    last.version = version;
    last.own = own;
    return own;
}

static struct size *size_of(uint64_t bytes)
{
    uint32_t at = (uint32_t)(bytes * UINT64_C(0x9e3779b97f4a7c15) >> (64 - SIZE_BITS));
    for (;; at = (at + 1) % SIZES) {
        uint64_t found = atomic_load_explicit(&all.size[at].bytes, memory_order_relaxed);
        if (!found || found == bytes)
            return &all.size[at];
    }
}

static struct slab *slab_of(const void *memory)
{
    for (int i = 0; i < SLABS_MAX; i++)
        if ((const char *)memory >= all.slab[i].begin && (const char *)memory < all.slab[i].end)
            return &all.slab[i];
    return NULL;
}

/* One use less: what is to be freed then. */
static void *unused(struct slab *slab)
{
    if (--slab->used)
        return NULL;
    void *memory = slab->begin;
    *slab = (struct slab){0};
    return memory;
}

/* The deleter of blocks, and of raw_deallocate, which frees other memory as well. */
static void release(void *memory)
{
    pthread_mutex_lock(&all.mutex);
    struct slab *slab = slab_of(memory);
    void *freed = NULL;
    if (slab) {
        struct size *size = size_of(*(uint64_t *)(void *)((char *)memory - ALIGN));
        if (slab->node)
            size->block[size->free++] = memory;
        freed = unused(slab);
    }
    pthread_mutex_unlock(&all.mutex);
    if (!slab)
        all.release(memory);
    else if (freed)
        hvd_free(freed);
}

static void *take(struct size *size)
{
    void *memory = NULL;
    pthread_mutex_lock(&all.mutex);
    if (size->free) {
        memory = size->block[--size->free];
        slab_of(memory)->used++;
    }
    pthread_mutex_unlock(&all.mutex);
    return memory;
}

static struct data_ptr allocate(void *object, size_t bytes)
{
    (void)object;
    if (bytes && atomic_load_explicit(&all.sizes, memory_order_relaxed)) {
        struct size *size = size_of(bytes);
        void *memory = atomic_load_explicit(&size->bytes, memory_order_relaxed) && in_own_task() ? take(size) : NULL;
        if (memory)
            return (struct data_ptr){memory, release, memory, all.device};
    }
    return all.allocate(all.original, bytes);
}

static deleter raw_deleter(const void *object)
{
    (void)object;
    return release;
}

static void destroy(void *object)
{
    (void)object; /* it stays */
}

static void before_fork(void)
{
    pthread_mutex_lock(&all.mutex);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&all.mutex);
}

/* The object for SetCPUAllocator, made of the default allocator and of three functions of autograd: the current graph
 * task, its nodes, and those that it executes. 0: they are not as expected. */
uintptr_t hvd_grad_alloc_open(uintptr_t allocator, uintptr_t task, uintptr_t in_task, uintptr_t chosen)
{
    void **object = (void **)allocator;
    if (all.original)
        return all.original == object ? (uintptr_t)&self : 0;
    memcpy(&all.table, (char *)*object - offsetof(struct table, destroy), sizeof all.table);
    all.allocate = all.table.allocate;
    struct data_ptr sample = all.allocate(object, 64);
    if (!sample.data || sample.context != sample.data || (sample.device & 0xff) != 0 ||
        all.table.raw_deleter(object) != sample.deleter || !all.table.is_simple(object, &sample))
        return 0;
    sample.deleter(sample.data);
    all.release = sample.deleter;
    all.device = sample.device & 0xffff;
    all.task = (int (*)(void))task;
    all.in_task = (const struct nodes *(*)(void))in_task;
    all.chosen = (const struct nodes *(*)(void))chosen;
    all.table.destroy = all.table.destroy_and_free = destroy;
    all.table.allocate = allocate;
    all.table.raw_deleter = raw_deleter;
    all.original = object;
    pthread_atfork(before_fork, after_fork, after_fork);
    return (uintptr_t)&self;
}

/* Room for so many more blocks of a size. */
static bool widen(struct size *size, uint64_t bytes, uint32_t count)
{
    bool known = atomic_load_explicit(&size->bytes, memory_order_relaxed) != 0;
    void **block = known || all.sizes < SIZES_MAX ? realloc(size->block, (size->room + count) * sizeof *block) : NULL;
    if (!block)
        return false;
    size->block = block;
    size->room += count;
    atomic_store_explicit(&size->bytes, bytes, memory_order_relaxed);
    atomic_fetch_add(&all.sizes, !known);
    return true;
}

int hvd_grad_alloc_give(const uint64_t *bytes, const uint32_t *counts, int sizes, const uintptr_t *nodes, int count)
{
    uint64_t total = 0;
    for (int i = 0; i < sizes; i++)
        total += counts[i] * (UP(bytes[i]) + ALIGN);
    uintptr_t *node = malloc((size_t)count * sizeof *node + 1);
    char *memory = node && all.original && total ? hvd_alloc(total) : NULL, *at = memory;
    int slab = 0;
    pthread_mutex_lock(&all.mutex);
    while (memory && slab < SLABS_MAX && all.slab[slab].begin)
        slab++;
    if (!memory || slab == SLABS_MAX) {
        pthread_mutex_unlock(&all.mutex);
        hvd_free(memory);
        free(node);
        return -1;
    }
    memcpy(node, nodes, (size_t)count * sizeof *node);
    all.slab[slab] = (struct slab){memory, memory + total, node, count, 1};
    for (int i = 0; i < sizes; i++) {
        struct size *size = size_of(bytes[i]);
        for (uint32_t k = widen(size, bytes[i], counts[i]) ? counts[i] : 0; k; k--) {
            memcpy(at, &bytes[i], sizeof *bytes); /* what the block begins with */
            size->block[size->free++] = at + ALIGN;
            at += UP(bytes[i]) + ALIGN;
        }
    }
    all.slab[slab].end = at;
    atomic_fetch_add(&all.version, 1);
    pthread_mutex_unlock(&all.mutex);
    return slab;
}

void hvd_grad_alloc_end(int number)
{
    pthread_mutex_lock(&all.mutex);
    struct slab *slab = &all.slab[number];
    for (uint32_t i = 0; i < SIZES; i++) {
        struct size *size = &all.size[i];
        uint32_t left = 0;
        for (uint32_t k = 0; k < size->free; k++)
            if (slab_of(size->block[k]) != slab)
                size->block[left++] = size->block[k];
        size->free = left;
    }
    for (const char *at = slab->begin; at < slab->end; at += UP(*(const uint64_t *)(const void *)at) + ALIGN)
        size_of(*(const uint64_t *)(const void *)at)->room--;
    free(slab->node);
    slab->node = NULL;
    slab->nodes = 0;
    void *freed = unused(slab);
    atomic_fetch_add(&all.version, 1);
    pthread_mutex_unlock(&all.mutex);
    if (freed)
        hvd_free(freed);
}

int hvd_grad_alloc_has(uintptr_t memory)
{
    pthread_mutex_lock(&all.mutex);
    bool found = slab_of((const void *)memory) != NULL;
    pthread_mutex_unlock(&all.mutex);
    return found;
}
