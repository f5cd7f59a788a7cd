/* avx2.c - the loops for x86-64 processors since about 2013: 32-byte vectors.
 *
 * FMA stays off in the target: a fused multiply-add rounds once instead of twice and would give other bits
 * than the other variants. Nothing here runs before cpu_dispatch.c has asked the processor.
 */
#include "loops.h"

#if HVD_KERNEL_X86
#define NAME              "avx2"
#define VARIANT           avx2
#define TARGET            __attribute__((target("prfchw,avx2,f16c")))
#define VECTOR            32
#define WIDEN(from)       _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define NARROW(to, value) _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT))
#include <immintrin.h>
#include "every_dtype.h"
#endif
