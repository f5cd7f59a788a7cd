/* cuda.c - the driver: contexts, streams that are threads, events. See stub.h. */
#include "stub.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNSAFE                        \
    do {                              \
        int refused_ = stub_unsafe(); \
        if (refused_)                 \
            return refused_;          \
    } while (0)
#define NEEDS_CURRENT                    \
    do {                                 \
        if (!stub_current(NULL))         \
            return 201; /* no context */ \
    } while (0)

struct item {
    void (*run)(void *self);
    void *self;
    struct item *next;
};
struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct item *first, **last;
    bool ends;
    int device;
    _Atomic uint64_t put, done;
    struct stream *next; /* of all */
};
struct event {
    uint64_t recorded, reached;
    int users; /* the owner, and what is on streams */
};

static _Thread_local int stack[16], depth; /* 1 + device */
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams;
static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER; /* of all events */
static pthread_cond_t reached = PTHREAD_COND_INITIALIZER;

bool stub_current(int *device)
{
    if (depth && device)
        *device = stack[depth - 1] - 1;
    return depth > 0;
}

static void *work_off(void *self)
{
    struct stream *stream = self;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ends)
            pthread_cond_wait(&stream->news, &stream->lock);
        struct item *item = stream->first;
        if (!item)
            break;
        stream->first = item->next;
        if (!stream->first)
            stream->last = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        item->run(item->self);
        free(item);
        atomic_fetch_add(&stream->done, 1);
        pthread_mutex_lock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

void stub_put(void *to, void (*run)(void *self), void *self)
{
    struct stream *stream = to;
    struct item *item = malloc(sizeof *item);
    *item = (struct item){run, self, NULL};
    pthread_mutex_lock(&stream->lock);
    atomic_fetch_add(&stream->put, 1);
    *stream->last = item;
    stream->last = &item->next;
    pthread_cond_signal(&stream->news);
    pthread_mutex_unlock(&stream->lock);
}

/* What is put later is not waited for. */
void stub_drain(int device)
{
    enum { MANY = 256 };
    struct {
        const struct stream *stream;
        uint64_t put;
    } due[MANY];
    int count = 0;
    bool busy = true;
    pthread_mutex_lock(&streams_lock);
    for (struct stream *one = streams; one && count < MANY; one = one->next)
        if (one->device == device) {
            due[count].stream = one;
            due[count++].put = atomic_load(&one->put);
        }
    while (busy) {
        busy = false;
        for (struct stream *one = streams; one; one = one->next)
            for (int i = 0; i < count; i++)
                busy |= due[i].stream == one && atomic_load(&one->done) < due[i].put;
        pthread_mutex_unlock(&streams_lock);
        if (busy)
            usleep(50);
        pthread_mutex_lock(&streams_lock);
    }
    pthread_mutex_unlock(&streams_lock);
}

EXPORT int cuCtxPushCurrent_v2(void *ctx)
{
    stack[depth++] = (int)(uintptr_t)ctx;
    return 0;
}

EXPORT int cuCtxPopCurrent_v2(void **ctx)
{
    *ctx = (void *)(uintptr_t)stack[--depth];
    return 0;
}

EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return 0;
}

EXPORT int cuStreamCreateWithPriority(void **made, unsigned flags, int priority)
{
    NEEDS_CURRENT;
    UNSAFE;
    if (flags != 1 || priority != -5)
        return 1;
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->news, NULL);
    stream->last = &stream->first;
    stub_current(&stream->device);
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    pthread_create(&stream->thread, NULL, work_off, stream);
    *made = stream;
    return 0;
}

EXPORT int cuStreamDestroy_v2(void *self)
{
    struct stream *stream = self; /* CUDA would not wait for it, as is done here */
    pthread_mutex_lock(&stream->lock);
    stream->ends = true;
    pthread_cond_signal(&stream->news);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&streams_lock);
    struct stream **at = &streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&streams_lock);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->news);
    free(stream);
    return 0;
}

EXPORT int cuEventCreate(void **made, unsigned flags)
{
    (void)flags;
    NEEDS_CURRENT;
    UNSAFE;
    struct event *event = calloc(1, sizeof *event);
    event->users = 1;
    *made = event;
    return 0;
}

static void drop_event(struct event *event)
{
    pthread_mutex_lock(&events_lock);
    int left = --event->users;
    pthread_mutex_unlock(&events_lock);
    if (!left)
        free(event);
}

EXPORT int cuEventDestroy_v2(void *self)
{
    drop_event(self);
    return 0;
}

struct mark {
    struct event *event;
    uint64_t number;
};

static struct mark *mark_of(struct event *event, bool next)
{
    struct mark *mark = malloc(sizeof *mark);
    pthread_mutex_lock(&events_lock);
    event->recorded += next;
    event->users++;
    *mark = (struct mark){event, event->recorded};
    pthread_mutex_unlock(&events_lock);
    return mark;
}

static void reach(void *self)
{
    struct mark *mark = self;
    pthread_mutex_lock(&events_lock);
    if (mark->event->reached < mark->number)
        mark->event->reached = mark->number;
    pthread_cond_broadcast(&reached);
    pthread_mutex_unlock(&events_lock);
    drop_event(mark->event);
    free(mark);
}

static void await(void *self)
{
    struct mark *mark = self;
    pthread_mutex_lock(&events_lock);
    while (mark->event->reached < mark->number)
        pthread_cond_wait(&reached, &events_lock);
    pthread_mutex_unlock(&events_lock);
    drop_event(mark->event);
    free(mark);
}

EXPORT int cuEventRecord(void *event, void *stream)
{
    NEEDS_CURRENT;
    stub_put(stream, reach, mark_of(event, true));
    return 0;
}

EXPORT int cuEventQuery(void *self)
{
    struct event *event = self;
    NEEDS_CURRENT;
    UNSAFE;
    pthread_mutex_lock(&events_lock);
    int code = event->reached >= event->recorded ? 0 : 600;
    pthread_mutex_unlock(&events_lock);
    return code;
}

EXPORT int cuStreamSynchronize(void *stream)
{
    void *event = NULL;
    UNSAFE;
    stack[depth++] = 1;
    cuEventCreate(&event, 0);
    depth--;
    stub_put(stream, reach, mark_of(event, true));
    await(mark_of(event, false));
    drop_event(event);
    return 0;
}

EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    (void)flags;
    CALLED("cuStreamWaitEvent");
    NEEDS_CURRENT;
    stub_put(stream, await, mark_of(event, false));
    return 0;
}

void *stub_gate(void)
{
    void *event = NULL;
    stack[depth++] = 1;
    cuEventCreate(&event, 0);
    depth--;
    ((struct event *)event)->recorded = 1;
    return event;
}

void stub_open_gate(void *event)
{
    reach(mark_of(event, false));
}
