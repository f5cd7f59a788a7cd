/* pack.h - a table of copies that one launch on a device does: a bucket's tensors into one memory, or out of it.
 *
 * Shared by who writes the table (plane/nccl/pack.c) and the kernels that read it (pack.cu), which are compiled ahead
 * into pack_ptx.c; so it includes nothing of ours. A table travels as the launch's argument, by value: it needs no
 * memory on the device and may be forgotten at once. A launch may have 4096 bytes of arguments.
 */
#ifndef HVD_CUDA_PACK_H
#define HVD_CUDA_PACK_H

#include <stdint.h>

#define HVD_PACK_ROWS    128
#define HVD_PACK_THREADS 256
#define HVD_PACK_CHUNK   16384u /* bytes that one block copies; whole elements, whole 16 bytes */

enum hvd_pack_kind { HVD_PACK_FLOAT16, HVD_PACK_BFLOAT16, HVD_PACK_FLOAT32, HVD_PACK_FLOAT64 };
#define HVD_PACK_OF_FLOAT64 4u /* added to the kind: the wide end is float64, not float32 */

struct hvd_pack_row {
    uint64_t from, to, bytes; /* where it is cast: of the wide end */
};

struct hvd_pack_table {
    struct hvd_pack_row row[HVD_PACK_ROWS];
    uint32_t end[HVD_PACK_ROWS]; /* chunks of this row and all before it; the last one's is the number of blocks */
    uint32_t rows, kind;         /* kind: of the values, where they are multiplied; of the narrow end, where cast */
    double factor;
};

extern const char hvd_pack_ptx[]; /* a module of the kernels, as a text that every driver since CUDA 9 can load */
/* Their names: one copies, one multiplies every value by the factor on the way, one does that and makes a value of 16
 * bits of it, one brings that back. */
#define HVD_PACK_COPY   "hvd_pack_copy"
#define HVD_PACK_SCALE  "hvd_pack_scale"
#define HVD_PACK_NARROW "hvd_pack_narrow"
#define HVD_PACK_WIDEN  "hvd_pack_widen"

#endif
