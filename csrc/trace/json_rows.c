/* json_rows.c - how does a row of a timeline become text, at little cost?
 *
 * A rank makes tens of thousands of rows a second while its processors have other work, so rows are put together by
 * hand: no format is read, and nothing is allocated once the text has grown to what a batch needs.
 */
#include "json_rows.h"

#include "json_string.h"

#include <stdlib.h>
#include <string.h>

#define ROOM_FIRST 65536
#define DIGITS     20 /* of a number of 64 bits, at most */

/* Where the next `bytes` go; NULL: there is no room. */
static char *more(struct hvd_rows *rows, size_t bytes)
{
    if (rows->bytes + bytes > rows->room) {
        size_t room = rows->room ? rows->room : ROOM_FIRST;
        while (room < rows->bytes + bytes)
            room *= 2;
        char *text = realloc(rows->text, room);
        if (!text) {
            rows->failed = true;
            return NULL;
        }
        rows->text = text;
        rows->room = room;
    }
    return rows->text + rows->bytes;
}

static void put(struct hvd_rows *rows, const char *text, size_t bytes)
{
    char *to = more(rows, bytes);
    if (to) {
        memcpy(to, text, bytes);
        rows->bytes += bytes;
    }
}

static void put_text(struct hvd_rows *rows, const char *text)
{
    put(rows, text, strlen(text));
}

/* At least so many digits. */
static void put_digits(struct hvd_rows *rows, uint64_t number, int least)
{
    char text[DIGITS];
    int at = DIGITS;
    for (; number || DIGITS - at < least; number /= 10)
        text[--at] = (char)('0' + number % 10);
    put(rows, text + at, (size_t)(DIGITS - at));
}

static void put_number(struct hvd_rows *rows, int64_t number)
{
    if (number < 0)
        put(rows, "-", 1);
    put_digits(rows, number < 0 ? -(uint64_t)number : (uint64_t)number, 1);
}

static void put_letters(struct hvd_rows *rows, const char *text)
{
    while (*text) {
        char *to = more(rows, HVD_JSON_LETTER);
        if (!to)
            return;
        rows->bytes += (size_t)hvd_json_put(to, &text);
    }
}

static void put_quoted(struct hvd_rows *rows, const char *text)
{
    put(rows, "\"", 1);
    put_letters(rows, text);
    put(rows, "\"", 1);
}

void hvd_row_begin(struct hvd_rows *rows, char phase, int rank, int lane)
{
    put_text(rows, ",\n{\"ph\":\"");
    put(rows, &phase, 1);
    put_text(rows, "\",\"pid\":");
    put_number(rows, rank);
    put_text(rows, ",\"tid\":");
    put_number(rows, lane);
    rows->inside = false;
}

void hvd_row_time(struct hvd_rows *rows, int64_t ns)
{
    put_text(rows, ns < 0 ? ",\"ts\":-" : ",\"ts\":");
    uint64_t all = ns < 0 ? -(uint64_t)ns : (uint64_t)ns;
    put_digits(rows, all / 1000, 1);
    put(rows, ".", 1);
    put_digits(rows, all % 1000, 3);
}

void hvd_row_name(struct hvd_rows *rows, const char *text)
{
    put_text(rows, ",\"name\":");
    put_quoted(rows, text);
}

static void put_capitals(struct hvd_rows *rows, const char *text)
{
    char capitals[64];
    size_t bytes = 0;
    for (; text[bytes] && bytes + 1 < sizeof capitals; bytes++)
        capitals[bytes] = (char)(text[bytes] >= 'a' && text[bytes] <= 'z' ? text[bytes] - 'a' + 'A' : text[bytes]);
    capitals[bytes] = '\0';
    put_letters(rows, capitals);
}

void hvd_row_activity(struct hvd_rows *rows, const char *before, const char *kind)
{
    put_text(rows, ",\"name\":\"");
    put_capitals(rows, before);
    put_capitals(rows, kind);
    put(rows, "\"", 1);
}

void hvd_row_literal(struct hvd_rows *rows, const char *members)
{
    put_text(rows, members);
}

static void argument(struct hvd_rows *rows, const char *name)
{
    put_text(rows, rows->inside ? ",\"" : ",\"args\":{\"");
    put_text(rows, name);
    put_text(rows, "\":");
    rows->inside = true;
}

void hvd_row_argument(struct hvd_rows *rows, const char *name, int64_t number)
{
    argument(rows, name);
    put_number(rows, number);
}

void hvd_row_argument_text(struct hvd_rows *rows, const char *name, const char *text)
{
    argument(rows, name);
    put_quoted(rows, text);
}

void hvd_row_end(struct hvd_rows *rows)
{
    put_text(rows, rows->inside ? "}}" : "}");
}

const char *hvd_rows_take(struct hvd_rows *rows, const char *ending, size_t *bytes)
{
    *bytes = rows->bytes;
    put_text(rows, ending);
    rows->bytes = 0;
    return rows->failed ? NULL : rows->text;
}
