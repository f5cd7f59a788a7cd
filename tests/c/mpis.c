/* mpis.c - see mpis.h. */
#define _GNU_SOURCE
#include "mpis.h"

#include "check.h"
#include "mpi/world.h"

#include <dlfcn.h>

void (*mpis_hold)(int yes);
void (*mpis_lazy)(int yes);
void (*mpis_fail)(const char *name);
void (*mpis_state)(int started, int over, int level);
int (*mpis_freed)(void);
int (*mpis_probes)(void);
intptr_t (*mpis_comm)(int size);

const char *mpis_file(bool standard)
{
    return standard ? TESTS_MPI "-standard.so" : TESTS_MPI "-mpich.so";
}

static void *symbol(bool standard, const char *name)
{
    void *library = dlopen(mpis_file(standard), RTLD_NOW | RTLD_GLOBAL);
    CHECK(library, "%s", dlerror());
    return dlsym(library, name);
}

void mpis_load(bool standard)
{
    struct hvd_error error = {0};
    *(void **)(void *)&mpis_hold = symbol(standard, "stub_mpi_hold");
    *(void **)(void *)&mpis_lazy = symbol(standard, "stub_mpi_lazy");
    *(void **)(void *)&mpis_fail = symbol(standard, "stub_mpi_fail");
    *(void **)(void *)&mpis_state = symbol(standard, "stub_mpi_state");
    *(void **)(void *)&mpis_freed = symbol(standard, "stub_mpi_freed");
    *(void **)(void *)&mpis_probes = symbol(standard, "stub_mpi_probes");
    *(void **)(void *)&mpis_comm = symbol(standard, "stub_mpi_comm");
    CHECK(hvd_mpi_load(mpis_file(standard), &error) == HVD_OK, "%s", error.text);
}
