"""Every text of the core ends with a code of the catalogue: each place that writes one is found in the sources.

A place either hands a format to hvd_fail, hvd_fail_rank or hvd_text_write, and then the format begins with its code, or
it is a sentence that is copied as it stands, and then HVD_ENDS is behind it. So each literal of five words or more is
looked at, wherever it stands. What may go without stands below, with its reason.
"""

import re
import sys
from pathlib import Path

import pytest

from hvdlite import catalogue

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import csource  # noqa: E402

COMPOSE = {"hvd_fail": 2, "hvd_fail_rank": 3, "hvd_text_write": 2}  # calls, and which argument is the format
CODE, ENDS = re.compile(r"HVD(\d{3})\b"), re.compile(r"HVD_ENDS\((\d{3})\)")
SENTENCE = 5  # words

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

# Sentences that are no text of their own, by the call that they are handed to ...
PARTS = {
    "add": "text.c: a mismatch grows piece by piece; its code comes last",
    "say": "finding.c: who waits for whom, told within other texts",
    "add_text": "list.c: lists that differ; the code comes last",
    "check": "what a call of CUDA should do: hvd_cuda_failed makes a text of it",
    "cuda_call": "the same",
    "hvd_cuda_failed": "the same",
    "hvd_nccl_refused": "what a call of NCCL should do",
    "hvd_mpi_failed": "what a call of MPI should do",
    "works": "the same",
    "wait_for": "the same",
    "fprintf": "a flight record",
    "LIST": "how an operation of TensorFlow is declared",
    "_Static_assert": "for who compiles it",
    "_Pragma": "for the compiler",
}
# ... by its first words ...
WITHIN = {
    "it, or its parent, is not": "record.c: why a folder is refused, within a text",
    "use one that was built": "world.c: within a text",
    "inside the host, counted": "hier.c: before another text",
    " unless ": "comm.c: within a text",
    "device %d, uuid": "comm.c: within a text",
    "%srank %d waits on": "inquiry.c: within a text or a report",
    "nothing has moved for %g s": "inquiry.c: the rest of two texts that begin with codes",
    "no MPI is loaded": "api_mpi.c: a constant, in a text that has a code",
    "it sent what is no": "link/mpi.c: why a way has ended, within a text",
    "its host has not answered": "link/tcp.c: the same",
    "rank %d: ranks have different": "list.c: the code comes last",
    "\\n  and %d other rank": "list.c: a part of it",
    "; the job ends after": "inquiry.c: within the headline of a report",
    "hvdlite: stall: ": "inquiry.c: the beginning of that headline; its end has the code",
    "nobody is left who could": "stall.c: the rest of a text that has a code",
    "%s %s, and cannot tell who": "stall.c: the same",
    "build with -D": "for who compiles it",
}
# ... or by their file.
FILES = {
    "csrc/kernel/dtype.c": "why a reduction is refused; check.c makes a text of it",
    "csrc/kernel/adasum.c": "the same",
    "csrc/kernel/identity.c": "an assertion, whose text has a code",
    "csrc/engine/watch/account.c": "states of a rank, within other texts",
}

_STRING = r'"(?:\\.|[^"\\\n])*"'
_LITERAL = re.compile(
    rf"(?:\bHVD\d{{3}}\s+)?(?:[A-Z_]{{4,}}\s+)?{_STRING}(?:\s*(?:{_STRING}|HVD_ENDS\(\d+\)|PRI\w+|#name|[A-Z_]{{4,}}\b))*"
)


class Place:
    """A literal with the macros around it, and the call whose argument it is."""

    def __init__(self, path, line, call, written):
        self.where, self.path, self.call, self.written = f"{path}:{line}", path, call, written
        self.words = "".join(word[1:-1] for word in re.findall(_STRING, written))
        self.begins = re.match(r"HVD\d{3}\s", written) is not None
        self.ends = re.search(r'HVD_ENDS\(\d{3}\)(\s*"\\n")?$', written) is not None

    def excuse(self):
        """Why it may go without a code; None: it may not."""
        first = next((why for words, why in WITHIN.items() if self.words.startswith(words)), None)
        return PARTS.get(self.call) or FILES.get(self.path) or first


def _call_around(blank, at):
    """The name before the parenthesis that is open at this place, "" at none."""
    depth = 0
    for i in range(at - 1, -1, -1):
        if blank[i] == ")":
            depth += 1
        elif blank[i] == "(" and depth:
            depth -= 1
        elif blank[i] == "(" and (name := re.search(r"(\w+)\s*$", blank[:i])):
            return name.group(1)
        elif blank[i] in ";{}" and depth == 0:
            return ""
    return ""


def _without_comments(text):
    return csource.LITERAL.sub(
        lambda found: found.group() if found.group()[0] in "\"'" else re.sub(r"[^\n]", " ", found.group()), text
    )


def places(path, text):
    """Every literal in a file."""
    code, blank = _without_comments(text), csource.blanked(text)
    for found in _LITERAL.finditer(code):
        at = found.start()
        yield Place(path, code.count("\n", 0, at) + 1, _call_around(blank, at), found.group())


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
    """Where the file composes or copies a text that has no code."""
    code, blank = _without_comments(text), csource.blanked(text)
    for call in re.finditer(r"\b(hvd_fail|hvd_fail_rank|hvd_text_write)\(", blank):
        begins, end = arguments(blank, call.end() - 1)
        which = COMPOSE[call.group(1)]
        written = code[begins[which] : begins[which + 1] - 1 if which + 1 < len(begins) else end].strip()
        declared = written.startswith("const char")
        if not declared and not CODE.match(written) and written not in QUOTES:
            yield f"{path}:{code.count(chr(10), 0, call.start()) + 1}: {call.group(1)}({written})"
    for place in places(path, text):
        long = len(re.findall(r"[^\s]*[A-Za-z][^\s]*", place.words)) >= SENTENCE
        composes = place.call in COMPOSE and place.written in QUOTES
        if long and not (place.begins or place.ends or composes or place.excuse()):
            yield f"{place.where}: {place.words[:60]}"


@pytest.fixture(scope="module")
def sources():
    files = sorted([*(ROOT / "csrc").rglob("*.c"), *(ROOT / "csrc").rglob("*.h")])
    named = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert named.pop("csrc/ground/codes.h")
    return named


def test_every_text_of_the_core_has_a_code(sources):
    found = [site for path, text in sources.items() for site in without_code(path, text)]
    assert not found, "these texts have no code (see ground.h and hvdlite/ERRORS.md):\n" + "\n".join(found)


def test_codes_in_the_core_are_those_of_the_catalogue(sources):
    used = {}
    for path, text in sources.items():
        for number in [*CODE.findall(csource.blanked(text)), *ENDS.findall(_without_comments(text))]:
            used.setdefault(f"HVD{number}", path)
    assert len(used) > 60 and not {code: path for code, path in used.items() if code not in catalogue.ROWS}
    own = {code for code in catalogue.ROWS if int(code[3:]) % 100 >= 50}
    assert not own - used.keys(), "rows of the core that nothing uses"


def test_no_exemption_is_out_of_use(sources):
    every = [place for path, text in sources.items() for place in places(path, text)]
    quoted = {place.written for place in every if place.call in COMPOSE}
    assert not QUOTES.keys() - quoted
    assert not PARTS.keys() - {place.call for place in every}
    assert not FILES.keys() - sources.keys()
    assert not [words for words in WITHIN if not any(place.words.startswith(words) for place in every)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('return hvd_fail(error, HVD_EINIT, HVD650 "no plane works");', False),
        ('return hvd_fail(error, HVD_EINIT, "no plane works");', True),
        ('hvd_fail_rank(error, code, rank_of(a, "b, c"), "%s" "x", text);', True),
        ('hvd_fail_rank(error, code, rank_of(a, "b, c"), "%s", text);', False),
        ('hvd_text_write(text, sizeof text, HVD450 "rank %d (pid %d) is" /* lost */ " lost", 1, 2);', False),
        ("hvd_text_write(text, sizeof text, words);", True),
        ('hvd_text_copy(text, bytes, "this is a sentence of six");', True),
        ('hvd_text_copy(text, bytes, "this is a sentence of six" HVD_ENDS(218));', False),
        ('snprintf(head, sizeof head, "wait for ranks that are late" HVD_ENDS(552) "\\n");', False),
        ('static const char *const why = "nobody has said anything yet";', True),
        ('/* hvd_fail(error, code, "in a comment, which is no text") */', False),
    ],
)
def test_the_search_finds_what_it_should(line, found):
    assert bool(list(without_code("csrc/engine/x.c", line))) == found
