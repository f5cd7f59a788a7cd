/* shelf.h - a table of sums that one launch on a device does: what ranks have laid on their shelves, into tensors.
 *
 * Shared by who writes the table (engine/shelf.c) and the kernel that reads it (shelf.cu), which is compiled ahead into
 * shelf_ptx.c, as pack.h has it. A row is one tensor: it lies at the same place of every shelf.
 */
#ifndef HVD_CUDA_SHELF_H
#define HVD_CUDA_SHELF_H

#include <stdint.h>

#define HVD_SHELF_ROWS    96
#define HVD_SHELF_RANKS   16 /* that may share a device */
#define HVD_SHELF_THREADS 256
#define HVD_SHELF_CHUNK   16384u /* bytes that one block sums; whole elements, whole 16 bytes */

enum hvd_shelf_kind { HVD_SHELF_FLOAT16, HVD_SHELF_BFLOAT16, HVD_SHELF_FLOAT32, HVD_SHELF_FLOAT64 };

struct hvd_shelf_row {
    uint64_t at, to, bytes; /* at: from the beginning of every shelf, a multiple of 16 */
};

struct hvd_shelf_table {
    struct hvd_shelf_row row[HVD_SHELF_ROWS];
    uint32_t end[HVD_SHELF_ROWS];   /* chunks of this row and all before it; the last one's is the number of blocks */
    uint64_t from[HVD_SHELF_RANKS]; /* the shelves that are added up, in this order; multiples of 16 */
    uint32_t rows, sources, kind, unused;
    double factor;
};

extern const char hvd_shelf_ptx[]; /* a module of the kernel, as a text that every driver since CUDA 9 can load */
#define HVD_SHELF_SUM "hvd_shelf_sum"

#endif
