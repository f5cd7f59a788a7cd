/* test_ground_error.c - the first failure wins, texts are cut and terminated, an assertion stops the process. */
#include "check.h"
#include "ground/ground.h"

#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static void the_first_failure_wins(void)
{
    struct hvd_error error = {0};
    CHECK(hvd_fail_rank(&error, HVD_EPEER, 3, "rank %d is gone", 3) == HVD_EPEER, "the code comes back");
    CHECK(hvd_fail(&error, HVD_EINIT, "later") == HVD_EINIT, "the later code comes back, too");
    CHECK(error.code == HVD_EPEER && error.culprit == 3 && strcmp(error.text, "rank 3 is gone") == 0,
          "kept: %d, rank %d, %s", error.code, error.culprit, error.text);
}

static void without_a_culprit_it_is_nobody(void)
{
    struct hvd_error error = {0};
    hvd_fail(&error, HVD_ENOMEM, "no room for %s", "this");
    CHECK(error.culprit == -1 && error.code == HVD_ENOMEM, "culprit %d", error.culprit);
    CHECK(hvd_fail(NULL, HVD_EDUP, "nobody reads this") == HVD_EDUP, "error may be NULL");
}

static void a_long_text_is_cut(void)
{
    static char huge[HVD_TEXT_MAX * 2];
    memset(huge, 'x', sizeof huge - 1);
    struct hvd_error error = {0};
    hvd_fail(&error, HVD_EINVAL, "%s", huge);
    CHECK(strlen(error.text) == HVD_TEXT_MAX - 1, "%zu", strlen(error.text));
}

static void text_copies_are_terminated(void)
{
    char text[4] = "zzz";
    hvd_text_copy(text, sizeof text, "abcdef");
    CHECK(strcmp(text, "abc") == 0, "%s", text);
    hvd_text_copy(text, sizeof text, "a");
    CHECK(strcmp(text, "a") == 0, "%s", text);
    hvd_text_copy(text, 1, "abc");
    CHECK(text[0] == '\0', "%s", text);
    text[0] = 'q';
    hvd_text_copy(text, 0, "abc");
    hvd_text_copy(NULL, 9, "abc");
    CHECK(text[0] == 'q', "no room, no write");
}

static void a_failed_assertion_says_where_and_stops(void)
{
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        alarm(20);
        signal(SIGABRT, SIG_DFL);
        dup2(ends[1], 2);
        HVD_ASSERT(1 + 1 == 2);
        HVD_ASSERT(1 + 1 == 3);
        _exit(0);
    }
    close(ends[1]);
    char text[512] = "";
    size_t length = 0;
    for (ssize_t got; (got = read(ends[0], text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)got;
    close(ends[0]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "status %#x",
          status);
    CHECK(strstr(text, "1 + 1 == 3") && strstr(text, __FILE__), "it said: %s", text);
}

int main(void)
{
    the_first_failure_wins();
    without_a_culprit_it_is_nobody();
    a_long_text_is_cut();
    text_copies_are_terminated();
    a_failed_assertion_says_where_and_stops();
    return 0;
}
