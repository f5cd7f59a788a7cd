/* test_base_error.c - the first failure wins, texts are cut and terminated, each ends with one code, an assertion
 * stops the process. */
#include "check.h"
#include "base/base.h"

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

static void says(const char *text, const char *expected)
{
    CHECK(strcmp(text, expected) == 0, "it says \"%s\"", text);
}

static void a_code_goes_to_the_end(void)
{
    struct hvd_error error = {0}, again = {0}, copied = {0};
    CHECK(hvd_fail_rank(&error, HVD_EPEER, 3, HVD450 "rank %d is gone", 3) == HVD_EPEER, "the code comes back");
    says(error.text, "rank 3 is gone [HVD450]");
    hvd_fail(&copied, HVD_EPEER, "%s", error.text); /* somebody else's text */
    says(copied.text, error.text);
    hvd_fail(&again, HVD_EINIT, HVD650 "rank %d: %s", 1, error.text); /* quoted at the end: nearer to the cause */
    says(again.text, "rank 1: rank 3 is gone [HVD450]");
    char text[64];
    hvd_text_write(text, sizeof text, HVD650 "%s (rank %d) and %s", error.text, 2, "[HVD12] [HVD6500]");
    says(text, "rank 3 is gone (rank 2) and [HVD12] [HVD6500] [HVD450]");
    hvd_text_write(text, sizeof text, HVD650 "%s; %s", error.text, "no driver [HVD653]"); /* the first of several */
    says(text, "rank 3 is gone; no driver [HVD450]");
    hvd_text_write(text, sizeof text, HVD650 "%s, twice", text); /* from its own memory */
    says(text, "rank 3 is gone; no driver, twice [HVD450]");
    hvd_text_bare(text);
    says(text, "rank 3 is gone; no driver, twice");
    hvd_text_write(text, sizeof text, HVD650 "no plane: %s", text);
    says(text, "no plane: rank 3 is gone; no driver, twice [HVD650]");
}

static void without_a_code_a_text_stays(void)
{
    char text[64];
    const char *const alike[] = {
        "", " ", "[HVD450]", " [HVD450", "a [HVD45x] b", "a [HVD450] b", "a [HVD450] [HVD450]"};
    for (size_t i = 0; i < HVD_COUNT_OF(alike); i++) {
        hvd_text_write(text, sizeof text, "%s", alike[i]);
        says(text, alike[i]);
    }
    hvd_text_write(text, sizeof text, HVD450 "%s", "");
    says(text, " [HVD450]");
    hvd_text_bare(text);
    says(text, "");
    hvd_text_bare(text);
    says(text, "");
}

static void a_cut_text_keeps_its_code(void)
{
    static char huge[2 * HVD_TEXT_MAX];
    memset(huge, 'x', HVD_TEXT_MAX - 1);
    struct hvd_error error = {0}, again = {0};
    hvd_fail(&error, HVD_EINVAL, HVD251 "tensor '%s'", huge);
    CHECK(strlen(error.text) == HVD_TEXT_MAX - 1, "%zu", strlen(error.text));
    says(error.text + HVD_TEXT_MAX - 1 - 12, "xxx [HVD251]");
    hvd_fail(&again, HVD_EINVAL, HVD650 "once more: %s", error.text); /* there is no room for that, either */
    CHECK(strlen(again.text) == HVD_TEXT_MAX - 1, "%zu", strlen(again.text));
    says(again.text + HVD_TEXT_MAX - 1 - 12, "xxx [HVD251]");
    char small[16], tiny[10];
    hvd_text_copy(small, sizeof small, error.text);
    says(small, "tensor [HVD251]");
    hvd_text_copy(tiny, sizeof tiny, error.text); /* a code alone says nothing */
    says(tiny, "tensor 'x");
    hvd_text_copy(small, sizeof small, "\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9 [HVD251]"); /* not inside of a letter */
    says(small, "\xc3\xa9\xc3\xa9\xc3\xa9 [HVD251]");
    memset(huge, 'x', sizeof huge - 1);
    error.code = HVD_OK;
    hvd_fail(&error, HVD_EINVAL, HVD251 "%s", huge);
    says(error.text + HVD_TEXT_MAX - 1 - 12, "xxx [HVD251]");
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
    CHECK(strstr(text, "1 + 1 == 3") && strstr(text, __FILE__) && strstr(text, ") [HVD901]\n"), "it said: %s", text);
}

static void a_name_is_shown_in_one_line(void)
{
    char room[64];
    says(hvd_text_shown(room, sizeof room, "layer.\\0.w\xc3\xa4\xe6\xbc\xa2\xf0\x9f\x90\x8d%s"),
         "layer.\\0.w\xc3\xa4\xe6\xbc\xa2\xf0\x9f\x90\x8d%s");
    says(hvd_text_shown(room, sizeof room, "a\nb\tc\rd\x1b[31m\x7f"), "a\\nb\\tc\\x0dd\\x1b[31m\\x7f");
    says(hvd_text_shown(room, sizeof room, "\xff\xc3(\xe6\xbc\xc2\x9b\xed\xa0\x80\xc0\xaf\xf8"),
         "\\xff\\xc3(\\xe6\\xbc\\xc2\\x9b\\xed\\xa0\\x80\\xc0\\xaf\\xf8");
    says(hvd_text_shown(room, 5, "abc\n"), "abc");
    says(hvd_text_shown(room, 5, "abc\xc3\xa4"), "abc");
    says(HVD_SHOWN("\x1b"), "\\x1b");
}

int main(void)
{
    a_name_is_shown_in_one_line();
    the_first_failure_wins();
    without_a_culprit_it_is_nobody();
    a_long_text_is_cut();
    a_code_goes_to_the_end();
    without_a_code_a_text_stays();
    a_cut_text_keeps_its_code();
    text_copies_are_terminated();
    a_failed_assertion_says_where_and_stops();
    return 0;
}
