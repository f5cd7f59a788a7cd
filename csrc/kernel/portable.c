/* portable.c - the loops for any processor: what the compiler's baseline gives.
 *
 * On x86-64 that is SSE2, on aarch64 NEON. This variant is also the reading copy: the others are the same
 * source under another target, and the tests compare them bit by bit.
 */
#define VARIANT portable
#define TARGET
#define VECTOR 16
#include "every_dtype.h"
