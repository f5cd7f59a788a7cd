/* portable.c - the loops for any processor: what the compiler's baseline gives.
 *
 * On x86-64 that is SSE2; on aarch64 it is NEON, which converts float16 by itself, and the variant says so in its
 * name. The others are the same source under another target, and the tests compare them bit by bit.
 */
#if defined(__aarch64__)
#include <arm_neon.h>
#define NAME              "neon"
#define WIDEN(from)       (lanes)(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))))
#define NARROW(to, value) vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(value))))
#else
#define NAME "portable"
#endif

#define VARIANT portable
#define TARGET
#define VECTOR 16
#include "every_dtype.h"
