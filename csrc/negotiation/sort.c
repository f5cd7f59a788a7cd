/* sort.c - the order of items, without a callback and without memory.
 *
 * Three things are sorted: the descriptors of a vote (by the round's order of keys), the new slots of a
 * round and the items of a plan (greatest priority first, then by order, then key). All are turned into the same small
 * tuple, so one heap sort serves. The items of a plan nearly always come sorted, because slots were handed out in that
 * order: looking for that first makes the usual case linear. A stable order is not needed, since no two keys are equal.
 */
#include "state.h"

static bool less(const struct hvd_sortable *a, const struct hvd_sortable *b)
{
    if (a->front != b->front)
        return a->front < b->front;
    if (a->major != b->major)
        return a->major < b->major;
    if (a->high != b->high)
        return a->high < b->high;
    return a->low < b->low;
}

static void sink(struct hvd_sortable *heap, uint32_t count, uint32_t at, struct hvd_sortable item)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && less(&heap[child], &heap[child + 1]))
            child++;
        if (!less(&item, &heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

void hvd_sort(struct hvd_sortable *item, uint32_t count)
{
    uint32_t sorted = 1;
    while (sorted < count && !less(&item[sorted], &item[sorted - 1]))
        sorted++;
    if (sorted >= count)
        return;
    for (uint32_t at = count / 2; at-- > 0;)
        sink(item, count, at, item[at]);
    for (uint32_t end = count - 1; end > 0; end--) {
        struct hvd_sortable last = item[end];
        item[end] = item[0];
        sink(item, end, 0, last);
    }
}

void hvd_sort_keep(struct hvd_sortable *heap, uint32_t *count, uint32_t max, struct hvd_sortable item)
{
    if (*count == max) {
        if (less(&item, &heap[0]))
            sink(heap, max, 0, item);
        return;
    }
    uint32_t at = (*count)++;
    while (at > 0 && less(&heap[(at - 1) / 2], &item)) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = item;
}
