"""Every failure of the core has a code of the catalogue: each call that composes a text of one is found in the sources.

The format that hvd_fail, hvd_fail_rank or hvd_text_write gets begins with its code. A text that is copied as it stands
ends with HVD_ENDS. Formats that pass on another text stand below, with the reason.
"""

import re
import sys
from pathlib import Path

import pytest

from hvdlite.errors import catalogue

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import csource  # noqa: E402

COMPOSE = {"hvd_fail": 2, "hvd_fail_rank": 3, "hvd_text_write": 2}  # calls, and which argument is the format
CODE, ENDS = re.compile(r"HVD(\d{3})\b"), re.compile(r"HVD_ENDS\((\d{3})\)")

# Formats without a code: the text that they pass on ends with one already.
QUOTES = {
    '"%s"': "another error's text, as it is",
    '"%.*s"': "as it is, of a seat or a frame",
    '"%.223s"': "as it is, of a place in an exchange",
    '"%.251s"': "as it is, of a place in an exchange",
    '"%s%s"': "plane hier's: of one of its two planes, perhaps with words before it",
    "\"%s of '%.*s' on rank %d%s: %s\"": "abort.c: what was pending, and why it fails",
    '"%s on rank %d%s: %s"': "abort.c: the same of a request without a name",
}


def _without_comments(text):
    return csource.LITERAL.sub(
        lambda found: found.group() if found.group()[0] in "\"'" else re.sub(r"[^\n]", " ", found.group()), text
    )


def arguments(blank, at):
    """Where the arguments of the call begin whose parenthesis opens at this place, then where it ends."""
    depth, begins = 0, [at + 1]
    for i in range(at, len(blank)):
        depth += {"(": 1, ")": -1}.get(blank[i], 0)
        if depth == 0:
            return begins, i
        if blank[i] == "," and depth == 1:
            begins.append(i + 1)
    raise AssertionError("a call that does not end")


def without_code(path, text):
    """Where the file composes a text that has no code."""
    code, blank = _without_comments(text), csource.blanked(text)
    for call in re.finditer(r"\b(hvd_fail|hvd_fail_rank|hvd_text_write)\(", blank):
        begins, end = arguments(blank, call.end() - 1)
        which = COMPOSE[call.group(1)]
        written = code[begins[which] : begins[which + 1] - 1 if which + 1 < len(begins) else end].strip()
        declared = written.startswith("const char")
        if not declared and not CODE.match(written) and written not in QUOTES:
            yield f"{path}:{code.count(chr(10), 0, call.start()) + 1}: {call.group(1)}({written})"


@pytest.fixture(scope="module")
def sources():
    files = sorted([*(ROOT / "csrc").rglob("*.c"), *(ROOT / "csrc").rglob("*.h")])
    named = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert named.pop("csrc/base/codes.h")
    return named


def test_every_text_of_the_core_has_a_code(sources):
    found = [site for path, text in sources.items() for site in without_code(path, text)]
    assert not found, "these texts have no code (see base.h and hvdlite/ERRORS.md):\n" + "\n".join(found)


def test_codes_in_the_core_are_those_of_the_catalogue(sources):
    used = {}
    for path, text in sources.items():
        for number in [*CODE.findall(csource.blanked(text)), *ENDS.findall(_without_comments(text))]:
            used.setdefault(f"HVD{number}", path)
    assert len(used) > 60 and not {code: path for code, path in used.items() if code not in catalogue.ROWS}
    own = {code for code in catalogue.ROWS if int(code[3:]) % 100 >= 50}
    assert not own - used.keys(), "rows of the core that nothing uses"


def test_no_exemption_is_out_of_use(sources):
    code = "".join(_without_comments(text) for text in sources.values())
    assert not [quoted for quoted in QUOTES if quoted not in code]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('return hvd_fail(error, HVD_EINIT, HVD650 "no plane works");', False),
        ('return hvd_fail(error, HVD_EINIT, "no plane works");', True),
        ('hvd_fail_rank(error, code, rank_of(a, "b, c"), "%s" "x", text);', True),
        ('hvd_fail_rank(error, code, rank_of(a, "b, c"), "%s", text);', False),
        ('hvd_text_write(text, sizeof text, HVD450 "rank %d (pid %d) is" /* lost */ " lost", 1, 2);', False),
        ("hvd_text_write(text, sizeof text, words);", True),
        ('/* hvd_fail(error, code, "in a comment, which is no text") */', False),
    ],
)
def test_the_search_finds_what_it_should(line, found):
    assert bool(list(without_code("csrc/engine/x.c", line))) == found
