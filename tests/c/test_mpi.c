/* test_mpi.c - MPI as the place where ranks meet: which libraries are taken and which refused, who begins and ends MPI,
 * communicators, exchanges that are waited for in pieces, and calls that fail. Over an MPI that is none, in both widths
 * of handles; a process has one MPI for life, so each case is a child.
 */
#define _GNU_SOURCE
#include "check.h"
#include "hvdlite.h"
#include "mpi/world.h"
#include "mpis.h"

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char text[HVD_TEXT_MAX];

static void what_is_no_mpi_is_refused(bool standard)
{
    int rank, size;
    uintptr_t comm;
    char all[8];
    CHECK(hvd_mpi_word(0) == NULL && hvd_mpi_running() == 0, "there is none yet");
    CHECK(hvd_mpi_begin(text, sizeof text) == HVD_ESTATE && strstr(text, "hvd_mpi_open comes first"), "%s", text);
    CHECK(hvd_mpi_comm(0, NULL, 0, 0, &comm, text, sizeof text) == HVD_ESTATE && strstr(text, "does not run"), "%s",
          text);
    CHECK(hvd_mpi_exchange(0, "x", 1, all, 0, text, sizeof text) == HVD_ESTATE, "%s", text);
    CHECK(hvd_mpi_place(0, &rank, &size) == HVD_ESTATE && hvd_mpi_comm_lend(0) == HVD_ESTATE, "nothing runs");
    hvd_mpi_comm_free(1);
    hvd_mpi_end(0);
    CHECK(hvd_mpi_open("/nowhere/libmpi.so", text, sizeof text) == HVD_EINIT && strstr(text, "nowhere"), "%s", text);
    CHECK(hvd_mpi_open("libm.so.6", text, sizeof text) == HVD_EINIT && strstr(text, "has no MPI_Init_thread"), "%s",
          text);
}

static void begin(bool standard)
{
    mpis_load(standard);
    CHECK(strcmp(hvd_mpi_word(0), standard ? "MPI standard" : "MPICH") == 0, "it is taken for %s", hvd_mpi_word(0));
    CHECK(strstr(hvd_mpi_word(1), "that is none  of any release") && !strchr(hvd_mpi_word(1), '\n'), "%s",
          hvd_mpi_word(1));
    CHECK(strcmp(hvd_mpi_word(2), mpis_file(standard)) == 0 && !hvd_mpi_word(3), "%s", hvd_mpi_word(2));
    CHECK(hvd_mpi_open("/another", text, sizeof text) == HVD_OK, "a second library is loaded: %s", text);
    CHECK(hvd_mpi_begin(text, sizeof text) == HVD_OK && hvd_mpi_running() == 2, "%s", text);
}

static void who_begins_ends(bool standard)
{
    begin(standard);
    hvd_mpi_poke(0);
    CHECK(mpis_probes() == 1, "it is called for nothing");
    hvd_mpi_end(0);
    CHECK(hvd_mpi_running() == 0, "it runs on");
    hvd_mpi_linger(hvd_mpi_loaded()->world, 0);
    CHECK(mpis_probes() == 1, "an MPI that is finalized was called");
    CHECK(hvd_mpi_begin(text, sizeof text) == HVD_EINIT && strstr(text, "MPI was finalized"), "%s", text);
}

static void what_others_have_begun_goes_on(bool standard)
{
    mpis_load(standard);
    mpis_state(1, 0, standard ? 4096 : 3);
    CHECK(hvd_mpi_begin(text, sizeof text) == HVD_OK && hvd_mpi_running() == 1, "%s", text);
    hvd_mpi_end(0);
    CHECK(hvd_mpi_running() == 1, "it was ended for others");
    mpis_state(1, 0, 1);
    CHECK(hvd_mpi_begin(text, sizeof text) == HVD_EINIT && strstr(text, "initialized by this script"), "%s", text);
    mpis_state(0, 0, 1);
    CHECK(hvd_mpi_begin(text, sizeof text) == HVD_EINIT && strstr(text, "does not offer"), "%s", text);
    mpis_state(0, 0, 1);
    mpis_fail("Init_thread");
    CHECK(hvd_mpi_begin(text, sizeof text) == HVD_EINIT && strstr(text, "could not start: the stub's error 5"), "%s",
          text);
}

static void ranks_meet(bool standard)
{
    uintptr_t all = 0, some = 0;
    int rank = -1, size = -1;
    char got[5] = "";
    begin(standard);
    mpis_hold(1);
    CHECK(hvd_mpi_comm(0, NULL, 0, 5, &all, text, sizeof text) == HVD_AGAIN, "it was not held");
    mpis_hold(0);
    CHECK(hvd_mpi_comm(0, NULL, 0, 5, &all, text, sizeof text) == HVD_OK && all, "%s", text);
    CHECK(hvd_mpi_comm(all, (const int[]){0}, 1, 5, &some, text, sizeof text) == HVD_OK && some != all, "%s", text);
    CHECK(hvd_mpi_place(some, &rank, &size) == HVD_OK && rank == 0 && size == 1, "rank %d of %d", rank, size);
    CHECK(hvd_mpi_place(0, &rank, &size) == HVD_OK && size == 1, "a world of %d", size);
    mpis_hold(1);
    CHECK(hvd_mpi_exchange(all, "four", 4, got, 0, text, sizeof text) == HVD_AGAIN && !got[0], "it was not held");
    mpis_hold(0);
    CHECK(hvd_mpi_exchange(all, "four", 4, got, 1000, text, sizeof text) == HVD_OK && !strcmp(got, "four"), "%s", text);
    hvd_mpi_comm_free(some);
    CHECK(mpis_freed() == 1, "%d were freed", mpis_freed());
    hvd_mpi_comm_keep(all);
    hvd_mpi_comm_free(all);
    CHECK(mpis_freed() == 1, "one was freed on which messages may still come");
    for (uintptr_t other = 1; other < 300; other++)
        hvd_mpi_comm_keep(other << 20);
    hvd_mpi_comm_free(7);
    CHECK(mpis_freed() == 1, "with too many to remember none may be freed");
}

static void calls_that_fail_say_which(bool standard)
{
    uintptr_t comm;
    char got[4];
    begin(standard);
    mpis_fail("Comm_idup");
    CHECK(hvd_mpi_comm(0, NULL, 0, 5, &comm, text, sizeof text) == HVD_EINIT && strstr(text, "duplicate"), "%s", text);
    mpis_fail("Comm_set_errhandler");
    CHECK(hvd_mpi_comm(0, NULL, 0, 5, &comm, text, sizeof text) == HVD_EINIT && strstr(text, "handler"), "%s", text);
    mpis_fail("Comm_group");
    CHECK(hvd_mpi_comm(0, (const int[]){0}, 1, 5, &comm, text, sizeof text) == HVD_EINIT && strstr(text, "some ranks"),
          "%s", text);
    CHECK(hvd_mpi_comm(0, NULL, 0, 5, &comm, text, sizeof text) == HVD_OK, "%s", text);
    mpis_fail("Comm_size");
    CHECK(hvd_mpi_exchange(comm, "x", 1, got, 5, text, sizeof text) == HVD_EINIT && strstr(text, "tell the size"), "%s",
          text);
    mpis_fail("Iallgather");
    CHECK(hvd_mpi_exchange(comm, "x", 1, got, 5, text, sizeof text) == HVD_EINIT && strstr(text, "gather what"), "%s",
          text);
    mpis_fail("Test");
    CHECK(hvd_mpi_exchange(comm, "x", 1, got, 5, text, sizeof text) == HVD_EINIT && strstr(text, "error 5"), "%s",
          text);
    CHECK(hvd_mpi_exchange(comm, "x", (size_t)1 << 40, got, 5, text, sizeof text) == HVD_EINVAL &&
              strstr(text, "too many"),
          "%s", text);
}

static void an_abort_is_mpis(bool standard)
{
    begin(standard);
    hvd_mpi_end(7);
}

int main(void)
{
    static const struct {
        void (*run)(bool standard);
        int code;
    } cases[] = {{what_is_no_mpi_is_refused, 0},      {who_begins_ends, 0},
                 {what_others_have_begun_goes_on, 0}, {ranks_meet, 0},
                 {calls_that_fail_say_which, 0},      {an_abort_is_mpis, 7}};
    for (size_t i = 0; i < HVD_COUNT_OF(cases); i++)
        for (int standard = 0; standard < 2; standard++) {
            int status;
            pid_t pid = fork();
            if (pid == 0) {
                alarm(60);
                cases[i].run(standard);
                exit(0);
            }
            CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == cases[i].code,
                  "case %zu of ABI %d: status %x", i, standard, (unsigned)status);
        }
    return 0;
}
