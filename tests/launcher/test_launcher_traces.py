"""Of ranks that fail in the same calls one traceback is shown, whole, and its last call is the user's."""

import sys

import pytest
from launching import launch

from hvdlite.launcher.output.lines import Piece
from hvdlite.launcher.output.tracebacks import ALIKE_S, SILENT_S, Traces, parted

FIRST = b"Traceback (most recent call last):\n"
CALLS = FIRST + b'  File "a.py", line 3, in f\n    g()\n    ^^^\n  [Previous line repeated 7 more times]\n'


def block(text):
    return Piece(text, block=True)


def test_what_was_raised_begins_after_the_last_call():
    chained = CALLS + b"KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n" + CALLS
    for calls in (CALLS, chained):
        assert parted(calls + b"ValueError: a\n  rank 0: 2\n") == (calls, b"ValueError: a\n  rank 0: 2\n")
    assert parted(CALLS[:-1])[1] == parted(FIRST)[0] == b""
    assert parted(FIRST + b"KeyboardInterrupt\n")[0] == b""


def test_a_traceback_comes_whole_and_others_with_the_same_calls_in_one_line():
    traces = Traces()
    for part in (b"before\n" + FIRST, *CALLS[len(FIRST) :].splitlines(True)):
        shown = traces.feed(0, [block(part)], 1.0, 5)
        assert shown == ([block(b"before\n")] if b"before" in part else [])
        assert traces.feed(1, [block(part)], 1.0, 5) == shown
    assert traces.due() == 1 + SILENT_S and traces.silent(1.1) == [] and traces.silent(1.3) == [0, 1]
    for rank in (0, 1):
        traces.feed(rank, [block(b"ValueError: %d\n" % rank)], 1.2, 5)
    assert traces.flush(0, 2.0, 6) == [block(CALLS + b"ValueError: 0\n")] and traces.flush(0, 2.0, 6) == []
    assert traces.flush(1, 2.0, 7) == [block(b"(calls as on rank 0) ValueError: 1\n")]
    assert traces.due() is None and traces.line(CALLS + b"x\n") == 6 and traces.line(FIRST + b"x\n") is None
    for rank, now in ((0, 3.0), (2, 3.0 + ALIKE_S)):  # the same rank again; much later
        traces.feed(rank, [block(CALLS + b"E\n")], now, 9)
        assert traces.flush(rank, now, 9) == [block(CALLS + b"E\n")]
    for rank in (0, 1):  # no calls to compare
        traces.feed(rank, [block(FIRST + b"KeyboardInterrupt\n")], 40.0, 9)
        assert traces.flush(rank, 40.0, 9) == [block(FIRST + b"KeyboardInterrupt\n")]
    for tenth in range(11):  # who writes on and on waits no longer
        traces.feed(3, [block(FIRST)], 60 + tenth / 10, 9)
    assert traces.silent(60.9) == [] and traces.silent(61.0) == [3] and traces.flush(3, 61.0, 9) != []
    long = block(FIRST + b"x" * 20000 + b"\n")
    assert traces.feed(0, [long, part := Piece(b"prompt")], 50.0, 9) == [long, part]
    assert traces.feed(0, [long], 50.0, 9) == [long]


PROGRAM = """
import sys, numpy, hvdlite as hvd
def train():
    hvd.allreduce(numpy.ones(2 + hvd.rank()), name="g")
if sys.argv[1] != "early":
    hvd.init()
try:
    {}["lr"]
except KeyError:
    train() if sys.argv[1] != "early" else hvd.rank()
"""


@pytest.mark.parametrize("way, code", [("shapes", "HVD350"), ("dev", "HVD350"), ("early", "HVD101")])
def test_ranks_that_make_the_same_mistake_show_it_once(way, code, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    more = ["-X", "dev"] if way == "dev" else []
    ended, out, err = launch("-np", 2, "--failure-grace", 20, sys.executable, *more, script, way)
    assert ended == 1 and err.count("Traceback") == 2 and err.count("KeyError: 'lr'") == 1, err  # of one rank, chained
    assert err.count("(calls as on rank ") == 1, err
    said = [line for line in err.splitlines() if line.startswith("hvdlite-run: rank ")]
    assert len(said) == 1 and said[0].endswith(f"[{code}]") and said[0].count("[HVD") == 1, err
    assert ("hvdlite/ops/" in err) == (way == "dev") and ("(train.py:4)" in said[0]) == (way != "early"), err
    assert way != "early" or "last words: hvdlite.errors.HvdNotInitializedError" in said[0], err
