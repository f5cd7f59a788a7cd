/* error.c - one failure, written once, where the fact is known.
 *
 * A failing function ends in `return hvd_fail(error, HVD_E..., "which rank, which tensor, what to do")`.
 * The first failure wins: callers up the stack may add nothing, so the text that a user reads is the one
 * that was written next to the cause.
 */
#include "ground.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(struct hvd_error *error, int code, int culprit, const char *format, va_list arguments)
{
    if (error && error->code == HVD_OK) {
        error->code = code;
        error->culprit = culprit;
        vsnprintf(error->text, sizeof error->text, format, arguments);
    }
    return code;
}

int hvd_fail(struct hvd_error *error, int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fail(error, code, -1, format, arguments);
    va_end(arguments);
    return code;
}

int hvd_fail_rank(struct hvd_error *error, int code, int culprit, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fail(error, code, culprit, format, arguments);
    va_end(arguments);
    return code;
}

void hvd_text_copy(char *text, size_t text_bytes, const char *from)
{
    if (!text || text_bytes == 0)
        return;
    size_t length = strlen(from);
    if (length >= text_bytes)
        length = text_bytes - 1;
    memcpy(text, from, length);
    text[length] = '\0';
}

_Noreturn void hvd_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "hvdlite: internal assertion failed: %s (%s:%d)\n", condition, file, line);
    abort();
}
