/* load.c - which MPI is this library, and where are its functions and handles?
 *
 * The library is opened by the name that the caller has found (one that is in the process already is never loaded
 * twice: the dynamic linker sees to it). Also the file of a module that is linked with MPI will do, as mpi4py's is:
 * dlsym looks through what that depends on, and so finds exactly the MPI that mpi4py uses.
 *
 * Three ABIs are known, and how they are told apart matters, because MPICH's own library exports the functions of
 * the standard ABI, too:
 *
 *     Open MPI       has the variable ompi_mpi_comm_world; predefined handles are addresses of such variables
 *     MPI standard   MPI_Abi_get_version answers with a version above 0
 *     MPICH          its version string says MPICH, or the name of a descendant; predefined handles are numbers
 *
 * Anything else is refused with its version string: to guess numbers would crash in the first call.
 */
#include "mpi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define VERSION_MAX 8192 /* the longest that any MPI writes, by its header */

enum abi { ABI_OPEN_MPI, ABI_MPICH, ABI_STANDARD, ABI_UNKNOWN };

static struct hvd_mpi loaded;

const struct hvd_mpi *hvd_mpi_loaded(void)
{
    return &loaded;
}

int hvd_mpi_failed(int code, const char *what, struct hvd_error *error)
{
    char text[VERSION_MAX] = "";
    int length = 0;
    if (!loaded.Error_string || loaded.Error_string(code, text, &length) != 0)
        snprintf(text, sizeof text, "error %d", code);
    return hvd_fail(error, HVD_EINIT, HVD666 "MPI could not %s: %.400s", what, text);
}

static enum abi abi_of(void *library, const char *version)
{
    static const char *const mpich[] = {"MPICH", "Intel(R) MPI", "MVAPICH", "ParaStation"};
    if (dlsym(library, "ompi_mpi_comm_world"))
        return ABI_OPEN_MPI;
    int (*get_version)(int *major, int *minor), major = -1, minor = -1;
    *(void **)(void *)&get_version = dlsym(library, "MPI_Abi_get_version");
    if (get_version && get_version(&major, &minor) == 0 && major > 0)
        return ABI_STANDARD;
    for (size_t i = 0; i < HVD_COUNT_OF(mpich); i++)
        if (strstr(version, mpich[i]))
            return ABI_MPICH;
    return ABI_UNKNOWN;
}

/* The first line of the version, without what would disturb a sentence. */
static void keep_version(struct hvd_mpi *mpi, const char *version)
{
    size_t i = 0;
    for (; version[i] && version[i] != '\n' && i < sizeof mpi->version - 1; i++)
        mpi->version[i] = version[i] == '\t' ? ' ' : version[i];
    while (i > 0 && mpi->version[i - 1] == ' ')
        i--;
    mpi->version[i] = '\0';
}

static const char *plain_calls(void *library, struct hvd_mpi *mpi)
{
#define X(name, arguments)                                       \
    *(void **)(void *)&mpi->name = dlsym(library, "MPI_" #name); \
    if (!mpi->name)                                              \
        return "MPI_" #name;
    HVD_MPI_PLAIN_CALLS(X)
#undef X
    return NULL;
}

/* Predefined handles, by the ABI; a name that is missing, or NULL. */
static const char *constants(void *library, enum abi abi, struct hvd_mpi *mpi)
{
    if (abi == ABI_OPEN_MPI) {
#define X(name, symbol, mpich, standard)                  \
    if (!(mpi->name = (uintptr_t)dlsym(library, symbol))) \
        return symbol;
        HVD_MPI_CONSTANTS(X)
#undef X
        return NULL;
    }
#define X(name, symbol, mpich, standard) mpi->name = abi == ABI_MPICH ? (uintptr_t)(mpich) : (uintptr_t)(standard);
    HVD_MPI_CONSTANTS(X)
#undef X
    return NULL;
}

static int fill(void *library, const char *path, struct hvd_mpi *mpi, struct hvd_error *error)
{
    static const char *const names[] = {"Open MPI", "MPICH", "MPI standard"};
    char version[VERSION_MAX] = "";
    int length = 0;
    const char *missing = plain_calls(library, mpi);
    if (missing)
        return hvd_fail(error, HVD_EINIT, HVD665 "%s is not an MPI library that hvdlite can use: it has no %s", path,
                        missing);
    mpi->Get_library_version(version, &length);
    keep_version(mpi, version);
    enum abi abi = abi_of(library, version);
    if (abi == ABI_UNKNOWN)
        return hvd_fail(
            error, HVD_EINIT,
            HVD665 "%s is an MPI library with an unknown binary interface (\"%s\"): hvdlite supports those of Open "
                   "MPI, of MPICH (also Intel MPI, MVAPICH, Cray) and of the MPI 5 standard. Name another library in "
                   "HVDLITE_MPI_LIBRARY",
            path, mpi->version);
    missing = constants(library, abi, mpi);
    if (!missing)
        missing =
            abi == ABI_MPICH ? hvd_mpi_int_handles(library, &mpi->call) : hvd_mpi_pointer_handles(library, &mpi->call);
    if (missing)
        return hvd_fail(error, HVD_EINIT, HVD665 "%s (%s) has no %s: MPI 3.1 or later is needed", path, mpi->version,
                        missing);
    mpi->in_place = (void *)(intptr_t)(abi == ABI_MPICH ? -1 : 1);
    mpi->status_ignore = (void *)(intptr_t)(abi == ABI_MPICH ? 1 : 0);
    mpi->thread_multiple = abi == ABI_STANDARD ? 4096 : 3;
    mpi->abi = names[abi];
    return HVD_OK;
}

int hvd_mpi_load(const char *path, struct hvd_error *error)
{
    if (loaded.abi)
        return HVD_OK;
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
    if (!library) /* Open MPI's parts look for its symbols in what is global */
        library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return hvd_fail(error, HVD_EINIT, HVD601 "%s", dlerror());
    struct hvd_mpi mpi = {.abi = NULL};
    int code = fill(library, path, &mpi, error);
    if (code == HVD_OK) {
        hvd_text_copy(mpi.path, sizeof mpi.path, path);
        loaded = mpi;
    }
    return code;
}
