/* virtual_atomic.c - atomic accesses in virtual time, and weak memory: the calls of the thread sanitizer. See
 * virtual.c.
 */
#define _GNU_SOURCE
#include "virtual_parts.h"

static struct store {
    volatile void *at; /* NULL: nothing is in the buffer */
    uint64_t value;
    unsigned bytes;
    bool ordered; /* sequentially consistent */
} buffer[VIRTUAL_THREADS];

static struct store *mine(void)
{
    return &buffer[virtual_me < 0 ? 0 : virtual_me];
}

/* Weak memory. */
void virtual_write_out(int thread)
{
    const struct store *of = &buffer[thread];
    volatile void *at = of->at;
    buffer[thread].at = NULL;
    if (!at)
        return;
    if (of->bytes == 1)
        *(volatile uint8_t *)at = (uint8_t)of->value;
    else if (of->bytes == 2)
        *(volatile uint16_t *)at = (uint16_t)of->value;
    else if (of->bytes == 4)
        *(volatile uint32_t *)at = (uint32_t)of->value;
    else
        *(volatile uint64_t *)at = of->value;
}
static void virtual_access(const volatile void *at, size_t bytes)
{
    const struct store *own = mine();
    if (own->at && (const volatile char *)at < (volatile char *)own->at + own->bytes &&
        (volatile char *)own->at < (const volatile char *)at + bytes)
        virtual_write_out(virtual_me);
}

WRAP(void, free, (void *memory))
{
    if (virtual_me >= 0)
        virtual_write_out(virtual_me);
    __real_free(memory);
}

WRAP(int, munmap, (void *memory, size_t bytes))
{
    virtual_call();
    return __real_munmap(memory, bytes);
}

/* The calls of the sanitizer. Plain reads and writes are no places to go on: without a race nobody sees between them.
 */
void __tsan_init(void) {}
void __tsan_read_range(void *at, long bytes)
{
    virtual_access(at, (size_t)bytes);
}
void __tsan_write_range(void *at, long bytes)
{
    virtual_access(at, (size_t)bytes);
}
#define PLAIN(what, n)                        \
    void __tsan_##what##n(void *at)           \
    {                                         \
        virtual_access(at, n);                \
    }                                         \
    void __tsan_unaligned_##what##n(void *at) \
    {                                         \
        virtual_access(at, n);                \
    }                                         \
    void __tsan_volatile_##what##n(void *at)  \
    {                                         \
        virtual_access(at, n);                \
        virtual_point();                      \
    }
#define PLAINS(what) PLAIN(what, 1) PLAIN(what, 2) PLAIN(what, 4) PLAIN(what, 8) PLAIN(what, 16)
PLAINS(read)
PLAINS(write)

/* Does this thread read its own store, of which nobody else knows? A sequentially consistent load comes after such a
 * store. */
static bool own_store(const volatile void *at, size_t bytes, int order)
{
    const struct store *own = mine();
    if (own->at == at && own->bytes == bytes && !(order == __ATOMIC_SEQ_CST && own->ordered))
        return true;
    if (order == __ATOMIC_SEQ_CST && own->ordered)
        virtual_write_out(virtual_me);
    virtual_access(at, bytes);
    return false;
}

static bool buffered(volatile void *at, uint64_t value, unsigned bytes, int order)
{
    if (!virtual_plan.weak || virtual_me < 0)
        return false;
    struct store *own = mine();
    virtual_write_out(virtual_me);
    own->at = at, own->value = value, own->bytes = bytes;
    own->ordered = order == __ATOMIC_SEQ_CST;
    return true;
}

#define READS_AND_WRITES(bits, type, name)                                      \
    type __tsan_atomic##bits##_##name(volatile type *at, type value, int order) \
    {                                                                           \
        (void)order;                                                            \
        virtual_call();                                                         \
        return __atomic_##name(at, value, __ATOMIC_SEQ_CST);                    \
    }
#define ATOMIC(bits, type)                                                                                            \
    type __tsan_atomic##bits##_load(const volatile type *at, int order)                                               \
    {                                                                                                                 \
        virtual_point();                                                                                              \
        return own_store(at, sizeof(type), order) ? (type)mine()->value : __atomic_load_n(at, __ATOMIC_SEQ_CST);      \
    }                                                                                                                 \
    void __tsan_atomic##bits##_store(volatile type *at, type value, int order)                                        \
    {                                                                                                                 \
        virtual_point();                                                                                              \
        if (!buffered(at, value, sizeof(type), order))                                                                \
            __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                                 \
    type __tsan_atomic##bits##_exchange(volatile type *at, type value, int order)                                     \
    {                                                                                                                 \
        (void)order;                                                                                                  \
        virtual_call();                                                                                               \
        return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                                      \
    }                                                                                                                 \
    READS_AND_WRITES(bits, type, fetch_add)                                                                           \
    READS_AND_WRITES(bits, type, fetch_sub)                                                                           \
    READS_AND_WRITES(bits, type, fetch_and)                                                                           \
    READS_AND_WRITES(bits, type, fetch_or)                                                                            \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type *at, type *was, type value, int order, int else_) \
    {                                                                                                                 \
        (void)order, (void)else_;                                                                                     \
        virtual_call();                                                                                               \
        return __atomic_compare_exchange_n(at, was, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
    }                                                                                                                 \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile type *at, type *was, type value, int order, int else_)   \
    {                                                                                                                 \
        (void)order, (void)else_;                                                                                     \
        virtual_call();                                                                                               \
        if (!CHANCE(32)) /* it may fail for no reason */                                                              \
            return __atomic_compare_exchange_n(at, was, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
        *was = __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                                 \
        return 0;                                                                                                     \
    }                                                                                                                 \
    type __tsan_atomic##bits##_compare_exchange_val(volatile type *at, type was, type value, int order, int else_)    \
    {                                                                                                                 \
        __tsan_atomic##bits##_compare_exchange_strong(at, &was, value, order, else_);                                 \
        return was;                                                                                                   \
    }
ATOMIC(8, uint8_t)
ATOMIC(16, uint16_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)

void __tsan_atomic_thread_fence(int order)
{
    virtual_point();
    if (virtual_me >= 0 && order == __ATOMIC_SEQ_CST)
        virtual_write_out(virtual_me);
}
void __tsan_atomic_signal_fence(int order)
{
    (void)order;
}
