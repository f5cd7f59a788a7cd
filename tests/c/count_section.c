/* count_section.c - the two calls of count.h for a program in another language, as a shared library.
 *
 * tests/tools/count_hook.py loads it. They are functions here because what valgrind understands are instructions that
 * only a C compiler can place.
 */
#include "count.h"

void count_section_begin(void)
{
    count_begin();
}

void count_section_end(const char *name, int times)
{
    count_end(name, times);
}
