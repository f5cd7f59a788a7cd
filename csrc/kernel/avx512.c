/* avx512.c - the loops for x86-64 processors with AVX-512 (F, BW, DQ, VL): 64-byte vectors.
 *
 * FMA is part of AVX-512 F; -ffp-contract=off, with which everything is built, keeps it out of the sums.
 * Nothing here runs before cpu_dispatch.c has asked the processor.
 */
#include "loops.h"

#if HVD_KERNEL_X86
#define NAME              "avx512"
#define VARIANT           avx512
#define TARGET            __attribute__((target("prfchw,avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define VECTOR            64
#define WIDEN(from)       _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define NARROW(to, value) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT))
#include <immintrin.h>
#include "every_dtype.h"
#endif
