/* api_mpi.c - the public C API, continued: MPI, before and after the life of an engine.
 *
 * All but one need no engine: Python finds a library, starts MPI, makes communicators and meets the other ranks over
 * them, and only then opens an engine; after that has ended it lets go of them. csrc/mpi/ does the work, these are ways
 * in. Like hvd_init they are called by one thread at a time.
 */
#include "api.h"
#include "mpi/world.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

int hvd_mpi_open(const char *library, char *text, size_t text_bytes)
{
    struct hvd_error error = {0};
    int code = hvd_mpi_load(library, &error);
    hvd_text_copy(text, text_bytes, error.text);
    return code;
}

const char *hvd_mpi_word(int which)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    if (!mpi->abi)
        return NULL;
    const char *const words[] = {mpi->abi, mpi->version, mpi->path};
    return which >= 0 && which < 3 ? words[which] : NULL;
}

static const char *const NOT_OPEN = "no MPI is loaded: hvd_mpi_open comes first";

int hvd_mpi_begin(char *text, size_t text_bytes)
{
    struct hvd_error error = {0};
    int code = hvd_mpi_loaded()->abi ? hvd_mpi_start(&error) : hvd_fail(&error, HVD_ESTATE, HVD668 "%s", NOT_OPEN);
    hvd_text_copy(text, text_bytes, error.text);
    return code;
}

int hvd_mpi_running(void)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    int started = 0, over = 0;
    if (!mpi->abi || mpi->Initialized(&started) != 0 || !started || mpi->Finalized(&over) != 0 || over)
        return 0;
    return hvd_mpi_ours() ? 2 : 1;
}

void hvd_mpi_end(int abort_code)
{
    if (!hvd_mpi_running())
        return;
    if (abort_code)
        hvd_mpi_loaded()->call.Abort(hvd_mpi_loaded()->world, abort_code);
    else
        hvd_mpi_finish();
}

static int exit_code;

static void exit_now(void)
{
    fflush(NULL);
    _exit(exit_code);
}

void (*hvd_mpi_exit(int code))(void)
{
    exit_code = code;
    return exit_now;
}

int hvd_mpi_comm(uintptr_t from, const int *ranks, int count, int timeout_ms, uintptr_t *made, char *text,
                 size_t text_bytes)
{
    struct hvd_error error = {0};
    int code = hvd_mpi_running() ? hvd_mpi_comm_open(from, ranks, count, timeout_ms, made, &error)
                                 : hvd_fail(&error, HVD_ESTATE, HVD668 "MPI does not run in this process");
    hvd_text_copy(text, text_bytes, error.text);
    return code;
}

void hvd_mpi_comm_free(uintptr_t comm)
{
    if (hvd_mpi_running())
        hvd_mpi_comm_close(comm);
}

int hvd_mpi_comm_lend(uintptr_t comm)
{
    struct hvd_engine *engine = hvd_api_enter();
    if (!engine)
        return hvd_api_state(NULL, 0);
    engine->comm = comm;
    hvd_api_go_out();
    return HVD_OK;
}

int hvd_mpi_place(uintptr_t comm, int *rank, int *size)
{
    const struct hvd_mpi *mpi = hvd_mpi_loaded();
    if (!hvd_mpi_running())
        return HVD_ESTATE;
    uintptr_t of = comm ? comm : mpi->world;
    return mpi->call.Comm_rank(of, rank) == 0 && mpi->call.Comm_size(of, size) == 0 ? HVD_OK : HVD_EINVAL;
}

void hvd_mpi_poke(uintptr_t comm)
{
    int rank, size;
    if (hvd_mpi_place(comm, &rank, &size) == HVD_OK)
        hvd_mpi_linger(comm ? comm : hvd_mpi_loaded()->world, (rank + 1) % size);
}

int hvd_mpi_exchange(uintptr_t comm, const void *mine, size_t bytes, void *all, int timeout_ms, char *text,
                     size_t text_bytes)
{
    struct hvd_error error = {0};
    int code = hvd_mpi_running() ? hvd_mpi_allgather(comm, mine, bytes, all, timeout_ms, &error)
                                 : hvd_fail(&error, HVD_ESTATE, HVD668 "MPI does not run in this process");
    hvd_text_copy(text, text_bytes, error.text);
    return code;
}
