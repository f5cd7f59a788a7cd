/* api.h - for the files of the public API beside api.c: the engine of this process, counted in and out.
 *
 * Private to csrc/api*.c. enter: NULL when there is no engine to be had (before init, after shutdown, in a forked
 * child); else go_out must follow, soon and from the same thread, because hvd_shutdown waits for it before it frees
 * the engine. Nothing here blocks.
 */
#ifndef HVD_API_H
#define HVD_API_H

#include "engine/engine.h"

struct hvd_engine *hvd_api_enter(void);
void hvd_api_go_out(void);
int hvd_api_state(char *text, size_t text_bytes); /* why there is none: HVD_ESTATE or HVD_EFORK, and in words */

#endif
