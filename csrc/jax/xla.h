/* xla.h - what is XLA's C ABI for handlers, as far as it is read?
 *
 * It is version 0.x: each struct begins with its size, and newer versions only append. So the lowest version that has
 * all that is read is asked for, and a size says whether what came later is there.
 */
#ifndef HVD_JAX_XLA_H
#define HVD_JAX_XLA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Types of extensions and attributes; codes of errors. */
enum { METADATA = 1, SCALAR = 3, STRING = 4, INVALID = 3, ABORTED = 10 };

struct extension {
    size_t size;
    int type;
    struct extension *next;
};
struct version {
    size_t size;
    struct extension *ext;
    int major, minor;
};
struct metadata {
    size_t size;
    struct version version;
    uint32_t traits;
};
struct metadata_extension {
    struct extension base;
    struct metadata *metadata;
};
struct buffer {
    size_t size;
    struct extension *ext;
    int dtype;
    void *data;
    int64_t rank, *dims;
};
struct buffers {
    size_t size;
    struct extension *ext;
    int64_t count;
    int *types;
    struct buffer **at;
};
struct span {
    const char *text;
    size_t bytes;
};
struct scalar {
    int dtype;
    void *value;
};
struct attributes {
    size_t size;
    struct extension *ext;
    int64_t count;
    int *types;
    struct span **names;
    void **at;
};
struct error_args {
    size_t size;
    struct extension *ext;
    const char *text;
    int code;
};
struct api {
    size_t size;
    struct extension *ext;
    struct version version;
    void *internal;
    void *(*error)(struct error_args *);
};
struct frame {
    size_t size;
    struct extension *ext;
    const struct api *api;
    void *context;
    int stage;
    struct buffers arguments, results;
    struct attributes attributes;
};
_Static_assert(sizeof(struct version) == 24 && sizeof(struct buffer) == 48 && sizeof(struct attributes) == 48,
               "XLA's FFI, 0.x");
_Static_assert(offsetof(struct frame, arguments) == 40 && offsetof(struct api, error) == 48, "XLA's FFI, 0.x");

/* An attribute of a call by its name and type; NULL: it has none. */
static inline void *attribute(const struct frame *frame, const char *name, int type)
{
    const struct attributes *all = &frame->attributes;
    for (int64_t i = 0; i < all->count; i++)
        if (all->types[i] == type && all->names[i]->bytes == strlen(name) &&
            !memcmp(all->names[i]->text, name, strlen(name)))
            return all->at[i];
    return NULL;
}

static inline int number(const struct frame *frame, const char *name)
{
    const struct scalar *found = attribute(frame, name, SCALAR);
    return found ? *(const int32_t *)found->value : 0;
}

static inline double real(const struct frame *frame, const char *name)
{
    const struct scalar *found = attribute(frame, name, SCALAR);
    return found ? *(const double *)found->value : 1.0;
}

#endif
