/* covered.c - what a forked rank has run counts, too, when coverage is counted.
 *
 * gcov writes its counts at exit, and a forked process of a test ends by _exit. So the coverage build links every call
 * of _exit to this one (--wrap), which writes them first. What is killed by a signal is lost: nobody can write then.
 */
#ifdef HVD_COVERED

void __gcov_dump(void);
_Noreturn void __real__exit(int code);
_Noreturn void __wrap__exit(int code);

_Noreturn void __wrap__exit(int code)
{
    __gcov_dump();
    __real__exit(code);
}

#else

typedef int covered_nothing; /* C wants a declaration */

#endif
