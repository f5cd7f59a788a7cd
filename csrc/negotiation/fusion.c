/* fusion.c - tensor fusion: cut a plan into buckets.
 *
 * Allreduces that one reduction can serve (same op, dtype, scales and plane flag) travel together up to
 * bucket_bytes. A class of such items keeps one bucket open while others pass, so that a bfloat16 gradient
 * between float32 ones does not cut their bucket in two; when an item does not fit, the class opens the next
 * one (next fit: small items never wait behind, and the order inside a class is kept). The decision reads only
 * what all ranks agree on. At most CLASSES classes are looked at, the one opened longest ago makes room: a plan
 * with more kinds of reduction than that gets smaller buckets, not a longer search.
 */
#include "state.h"

#define CLASSES 16

struct class
{
    const struct hvd_plan_item *like;
    uint64_t bytes;
    uint32_t bucket;
};

static bool same_class(const struct hvd_plan_item *a, const struct hvd_plan_item *b)
{
    return a->signature.op == b->signature.op && a->signature.dtype == b->signature.dtype && a->flags == b->flags &&
           memcmp(&a->signature.prescale, &b->signature.prescale, sizeof(double)) == 0 &&
           memcmp(&a->signature.postscale, &b->signature.postscale, sizeof(double)) == 0;
}

void hvd_plan_fuse(struct hvd_plan *plan, uint64_t bucket_bytes, const uint8_t *bytes_of)
{
    struct class open[CLASSES];
    uint32_t classes = 0, oldest = 0;
    plan->buckets = 0;
    for (uint32_t i = 0; i < plan->items; i++) {
        struct hvd_plan_item *item = &plan->item[i];
        uint64_t bytes;
        if (item->signature.kind != HVD_ALLREDUCE || item->code != HVD_OK ||
            __builtin_mul_overflow(item->count, (uint64_t)bytes_of[item->signature.dtype], &bytes) ||
            bytes > bucket_bytes || bucket_bytes == 0) {
            item->bucket = plan->buckets++;
            continue;
        }
        uint32_t at = 0;
        while (at < classes && !same_class(open[at].like, item))
            at++;
        if (at == classes && classes < CLASSES) {
            open[classes++].like = NULL;
        } else if (at == classes) {
            at = oldest++ % CLASSES;
            open[at].like = NULL;
        }
        if (!open[at].like || open[at].bytes > bucket_bytes - bytes)
            open[at] = (struct class){item, 0, plan->buckets++};
        open[at].bytes += bytes;
        item->bucket = open[at].bucket;
    }
}
