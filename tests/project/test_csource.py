"""The small C parser that the house rules stand on finds what a reader would find."""

import csource

SOURCE = """/* An essay
 * of two lines. */
#include "a.h"
/* #include "commented.h" */
#include <stdio.h>
#define MACRO(x) \\
    do {         \\
    } while (0)
#ifdef __cplusplus
extern "C" {
#endif
struct pair { int first; };
static const int table[] = {1, 2};
int declared(void) __attribute__((noinline));
__attribute__((target("avx2"))) static void
counted(int a, int (*call)(int))
{
    char brace = '{'; const char *text = "}{ getenv"; /* } */
    if (a) { call(brace + *text); }
}
static int one_line(void) { return 1; }
#ifdef __cplusplus
}
#endif
"""


def test_functions_and_macros_are_found_with_their_lengths():
    assert [(f.name, f.line, f.lines) for f in csource.functions(SOURCE)] == [
        ("counted", 15, 6),
        ("one_line", 21, 1),
        ("MACRO", 6, 3),
    ]


def test_includes_in_comments_do_not_count():
    assert list(csource.includes(SOURCE)) == ['"a.h"', "<stdio.h>"]


def test_identifiers_leave_literals_and_comments_out():
    found = csource.identifiers(SOURCE)
    assert "call" in found and "getenv" not in found and "essay" not in found


def test_the_essay_is_the_comment_at_the_top():
    assert csource.essay_lines(SOURCE) == 2
    assert csource.essay_lines("// a\n// b\n// c\nint x;\n") == 3
    assert csource.essay_lines("int x; /* late */\n") == 0
