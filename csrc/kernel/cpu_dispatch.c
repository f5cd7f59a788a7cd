/* cpu_dispatch.c - which variant of the loops this processor runs, and the calls of kernel.h that use it.
 *
 * The processor is asked once, by CPUID and XGETBV (the operating system must save the wide registers, too),
 * and the answer is kept in one atomic pointer to a constant table. That is no state of the library: any
 * thread may compute it again and gets the same, and every variant gives the same bits. Plain function
 * pointers, no ifunc: those are resolved before a sanitizer is ready. The compiler's own cpu_supports builtin
 * is not used, because it needs a run-time library that not every compiler ships.
 */
#include "loops.h"

#include <stdatomic.h>
#include <string.h>

#if HVD_KERNEL_X86
#include <cpuid.h>

/* The XCR0 register: which registers the operating system saves. */
static uint64_t saved_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has_avx2(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_F16C))
        return false;
    if ((saved_registers() & 0x6) != 0x6)
        return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

static bool has_avx512(void)
{
    const uint32_t wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    uint32_t a, b, c, d;
    return has_avx2() && (saved_registers() & 0xe6) == 0xe6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (b & wanted) == wanted;
}
#endif

static bool always(void)
{
    return true;
}

/* Best first. */
static const struct {
    const struct hvd_loops *loops;
    bool (*runs)(void);
} variants[] = {
#if HVD_KERNEL_X86
    {&hvd_loops_avx512, has_avx512},
    {&hvd_loops_avx2, has_avx2},
#endif
    {&hvd_loops_portable, always},
};

static const struct hvd_loops *_Atomic chosen;

const struct hvd_loops *hvd_loops_chosen(void)
{
    const struct hvd_loops *loops = atomic_load_explicit(&chosen, memory_order_relaxed);
    for (size_t i = 0; !loops; i++)
        if (variants[i].runs())
            loops = variants[i].loops;
    atomic_store_explicit(&chosen, loops, memory_order_relaxed);
    return loops;
}

const char *hvd_kernel_name(void)
{
    return hvd_loops_chosen()->name;
}

int hvd_kernel_use(const char *name)
{
    for (size_t i = 0; name && i < HVD_COUNT_OF(variants); i++)
        if (strcmp(variants[i].loops->name, name) == 0 && variants[i].runs()) {
            atomic_store_explicit(&chosen, variants[i].loops, memory_order_relaxed);
            return HVD_OK;
        }
    if (name)
        return HVD_EINVAL;
    atomic_store_explicit(&chosen, NULL, memory_order_relaxed);
    return HVD_OK;
}

void hvd_reduce(int dtype, const struct hvd_scale *scale, void *dst, const void *const *src, int n, size_t count)
{
    HVD_ASSERT(dtype >= 0 && dtype < HVD_DTYPES_MAX && n >= 1 && n <= HVD_RANKS_MAX);
    bool scaled = hvd_is_scaled(scale);
    if (count == 0)
        return;
    if (n == 1 && !scaled) {
        if (dst != src[0])
            hvd_copy(dst, src[0], count * (size_t)hvd_dtype_bytes(dtype));
        return;
    }
    const struct hvd_loops *loops = hvd_loops_chosen();
    hvd_loop *loop = scaled && loops->wide[dtype] ? loops->wide[dtype] : loops->reduce[dtype][scale->op];
    loop(scale, dst, src, n, count);
}
