/* error.c - one failure, written once, where the fact is known.
 *
 * A failing function ends in `return hvd_fail(error, HVD_E..., "which rank, which tensor, what to do")`.
 * The first failure wins: callers up the stack may add nothing, so the text that a user reads is the one
 * that was written next to the cause.
 *
 * Each text ends with the code under which ERRORS.md tells more: "... [HVD202]". At its site the code stands before
 * the format, as a macro of codes.h; here it goes to the end, and room is kept for it where a text is cut. No text
 * has two: one that quotes another, from a call below or another rank, ends with the code that was quoted, which is
 * nearer to the cause. A format without a code is a text of somebody else's, passed on as it is. All of that reads
 * the text alone, so ranks that make the same text from the same words still have the same one.
 */
#include "base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CODE_BYTES 9 /* " [HVD202]" */

static bool code_at(const char *at)
{
    if (strncmp(at, " [HVD", 5) != 0)
        return false;
    for (int i = 5; i < 8; i++)
        if (at[i] < '0' || at[i] > '9')
            return false;
    return at[8] == ']';
}

/* Take all codes out of the text, and keep the first. */
static void take_out(char *text, char code[CODE_BYTES + 1])
{
    for (char *at = text; (at = strstr(at, " [HVD"));)
        if (code_at(at)) {
            if (code && !code[0])
                memcpy(code, at, CODE_BYTES);
            memmove(at, at + CODE_BYTES, strlen(at + CODE_BYTES) + 1);
        } else {
            at++;
        }
}

static void compose(char *text, size_t text_bytes, const char *format, va_list arguments)
{
    char whole[2 * HVD_TEXT_MAX], mark[CODE_BYTES + 1] = " ", code[CODE_BYTES + 1] = "";
    strncpy(mark + 1, format, CODE_BYTES - 1);
    bool marked = code_at(mark) && format[CODE_BYTES - 1] == ' ';
    int wrote = vsnprintf(whole, sizeof whole - CODE_BYTES, format + (marked ? CODE_BYTES : 0), arguments);
    if (wrote < 0)
        whole[0] = '\0';
    if (marked) {
        take_out(whole, code);
        strcat(whole, code[0] ? code : mark);
    }
    hvd_text_copy(text, text_bytes, whole);
}

void hvd_text_write(char *text, size_t text_bytes, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    compose(text, text_bytes, format, arguments);
    va_end(arguments);
}

void hvd_text_bare(char *text)
{
    take_out(text, NULL);
}

static int fail(struct hvd_error *error, int code, int culprit, const char *format, va_list arguments)
{
    if (error && error->code == HVD_OK) {
        error->code = code;
        error->culprit = culprit;
        compose(error->text, sizeof error->text, format, arguments);
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
    size_t length = strlen(from), room = text_bytes - 1;
    if (length <= room) {
        memcpy(text, from, length + 1);
        return;
    }
    size_t code = room > CODE_BYTES && code_at(from + length - CODE_BYTES) ? CODE_BYTES : 0;
    size_t kept = room - code;
    while (kept && ((unsigned char)from[kept] & 0xc0) == 0x80) /* not inside of a character */
        kept--;
    memcpy(text, from, kept);
    memcpy(text + kept, from + length - code, code);
    text[kept + code] = '\0';
}

/* Bytes of the character of UTF-8 that begins here and can be shown as it is; 0: there is none. */
static size_t shown_bytes(const unsigned char *at)
{
    if (at[0] < 0x80)
        return at[0] >= ' ' && at[0] != 0x7f;
    size_t bytes = at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : 2;
    uint32_t letter = at[0] & (0x7fu >> bytes);
    for (size_t i = 1; i < bytes; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        letter = letter << 6 | (at[i] & 0x3f);
    }
    static const uint32_t least[] = {0, 0, 0xa0, 0x800, 0x10000}; /* U+0080 to U+009F are control characters, too */
    bool whole = at[0] >= 0xc0 && at[0] < 0xf8 && letter >= least[bytes] && letter < 0x110000;
    return whole && (letter < 0xd800 || letter > 0xdfff) ? bytes : 0;
}

const char *hvd_text_shown(char *into, size_t into_bytes, const char *name)
{
    const unsigned char *at = (const unsigned char *)name;
    size_t used = 0;
    while (*at) {
        char escaped[8];
        size_t as_it_is = shown_bytes(at), bytes = as_it_is;
        if (!as_it_is)
            bytes = (size_t)snprintf(escaped, sizeof escaped,
                                     *at == '\n'   ? "\\n"
                                     : *at == '\t' ? "\\t"
                                                   : "\\x%02x",
                                     *at);
        if (used + bytes >= into_bytes)
            break;
        memcpy(into + used, as_it_is ? (const char *)at : escaped, bytes);
        used += bytes;
        at += as_it_is ? as_it_is : 1;
    }
    into[used] = '\0';
    return into;
}

_Noreturn void hvd_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "hvdlite: internal assertion failed: %s (%s:%d)" HVD_ENDS(901) "\n", condition, file, line);
    abort();
}
