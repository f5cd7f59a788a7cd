"""The first failure of a job is what every rank raises and what the launcher says last, once, whatever it was.

Ranks that die without a word are in test_deaths.py; these fail in Python.
"""

import sys

import pytest
from launching import launch

from hvdlite import _core
from hvdlite.errors import HvdPeerLostError, catalogue
from hvdlite.errors.codes import ending
from hvdlite.lifecycle import uncaught

PROGRAM = """
import os, sys, threading, numpy
rank, way = int(os.environ["HVDLITE_RANK"]), sys.argv[1]
if way == "before" and rank == 1:
    raise ValueError("boom")
if way == "not at all" and rank == 1:
    sys.exit(0)
import hvdlite as hvd
def boom():
    raise ValueError("boom")
def train():
    for _ in range(3):
        hvd.allreduce(numpy.ones(3), name="t")
def fail():
    if way in ("raise", "two", "in flight"):
        if way == "in flight":
            flying = hvd.allreduce_async(numpy.ones(3), name="z")
        boom()
    if way == "thread":
        thread = threading.Thread(target=lambda: (train(), boom()), name="trainer")
        thread.start()
        thread.join()
    if way == "exit":
        try:
            boom()
        except ValueError:
            sys.exit(3)
    if way == "exit with words":
        sys.exit("no data")
    if way == "exit by a builtin":
        exit(3)
    if way == "own hook":
        sys.excepthook = lambda *_: None
        boom()
    if way == "control":
        raise ValueError("a\\0\\x1b[31mred")
    if way == "interrupt":
        raise KeyboardInterrupt
    if way == "quiet":
        raise SystemExit(4)
    if way == "caught":
        try:
            sys.exit(2)
        except SystemExit:
            pass
        train()
        sys.exit(0)
try:
    hvd.init()
    train()
    if rank == 1 or (way == "two" and rank == 0):
        fail()
    for _ in range(10**6):
        train()
except hvd.HvdError as error:
    assert error.code and str(error).endswith(f" [{error.code}]"), error
    print(f"saw {error.rank} {type(error).__name__} {error}", flush=True)
    raise
"""
LEFT = "rank 1 left the job"
WAYS = {
    "raise": (1, "rank 1 raised ValueError: boom (<string>:10)"),
    "two": (1, " raised ValueError: boom (<string>:"),
    "in flight": (1, "rank 1 raised ValueError: boom (<string>:"),
    "thread": (1, "in thread 'trainer'"),
    "exit": (3, "rank 1 called sys.exit(3) (<string>:"),
    "exit with words": (1, "rank 1 called sys.exit('no data') (<string>:"),
    "exit by a builtin": (3, "rank 1 called exit(3) (<string>:"),
    "own hook": (1, "rank 1 raised ValueError: boom (<string>:"),
    "control": (1, r"rank 1 raised ValueError: a\x00\x1b[31mred (<string>:"),
    "interrupt": (130, "rank 1 raised KeyboardInterrupt (<string>:"),
    "quiet": (4, LEFT),
    "caught": (1, LEFT),
    "before": (1, "exited with code 1 (last words: ValueError: boom) and did not call init"),
    "not at all": (1, "exited with code 0 and did not call init"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_raises_the_first_error_and_the_launcher_says_it_once(way):
    code, out, err = launch("-np", 3, "--failure-grace", 20, "--term-grace", 5, sys.executable, "-c", PROGRAM, way)
    expected, words = WAYS[way]
    told = [line for line in out.splitlines() if "saw " in line]
    assert code == expected, out + err
    least, most = {"two": (1, 2), "thread": (3, 3)}.get(way, (2, 2))  # its own next collective says so, too
    assert least <= len(told) <= most and all(words in line for line in told), out + err
    culprits = {line.split("saw ")[1].split()[0] for line in told}
    assert len(culprits) == 1 and (culprits == {"1"} or way == "two"), out + err
    assert all("HvdPeerLostError" in line for line in told), out + err
    headlines = [line for line in err.splitlines() if line.startswith("hvdlite-run: rank ")]
    culprit = headlines[0].split()[2] if way in ("caught", "not at all") else culprits.pop()  # it ended with 0
    assert len(headlines) == 1 and headlines[0].startswith(f"hvdlite-run: rank {culprit} "), err
    assert way == "two" or (culprit == "1") == (way not in ("caught", "not at all")), err
    assert way in ("before", "quiet", "interrupt") or words in headlines[0], err
    traces = [line for line in err.splitlines() if "Traceback (most recent call last)" in line]
    assert {line[:3] for line in traces} <= {"[1]"} or way == "two", err
    assert len(traces) <= {"two": 3, "thread": 2, "before": 2}.get(way, 1), err  # or again, after what others said
    after = err.split(headlines[0])[1].splitlines()[1:]
    assert all(line.startswith(f"[{culprit}]<stderr>:") for line in after), err


def test_a_reason_ends_with_one_code_the_first_that_it_quotes():
    assert ending("HVD401", "rank 1 raised X: boom", 1500) == b"rank 1 raised X: boom [HVD401]"
    quotes = "rank 1 raised X: mine: no [HVD204] (see docs) [HVD205] (a.py:3)"
    assert ending("HVD401", quotes, 1500) == b"rank 1 raised X: mine: no (see docs) (a.py:3) [HVD204]"
    cut = ending("HVD401", "\u00e9" * 5000, 100)
    assert cut.decode().endswith("\u00e9 [HVD401]") and 98 < len(cut) <= 100


def test_after_a_sys_exit_that_was_caught_the_script_may_end_well():
    body = """
import sys, numpy, hvdlite as hvd
hvd.init()
try:
    sys.exit("a parser of arguments")
except SystemExit:
    pass
hvd.allreduce(numpy.ones(3))
if hvd.rank() == 0:  # the others are at their end, or not
    try:
        sys.exit("a tool that exports models")
    except SystemExit as caught:
        pass
    try:
        exit(2)
    except SystemExit as caught:
        kept = caught
"""
    code, _, err = launch("-np", 2, sys.executable, "-c", body)
    assert code == 0 and "exit" not in err, err


def test_a_hook_says_it_though_the_handler_of_a_signal_raises_meanwhile(capsys):
    class Interrupted(Exception):
        interrupted = 0

        def __str__(self):
            self.interrupted += 1
            if self.interrupted == 1:
                raise KeyboardInterrupt
            return "boom"

    told, error = [], Interrupted()

    def report(what, error):
        told.append(what)
        if len(told) == 1:
            raise RuntimeError("a worker has died")

    what = uncaught._described(Interrupted, error, None)
    uncaught._report(report, what, error)
    assert told == ["Interrupted: boom"] * 2 and capsys.readouterr().err == ""
    uncaught._report(lambda *_: 1 // 0, what, error)
    assert "ZeroDivisionError" in capsys.readouterr().err


def described(text):
    return uncaught.describe(RuntimeError, RuntimeError(text), None)


def test_of_a_text_around_one_of_ours_the_paragraph_with_the_code_is_said():
    ours = "rank 0: tensor 'x': different lists:\n  rank 0: 2\n  rank 1: 4\nAverage the same."
    said = "RuntimeError: rank 0: tensor 'x': different lists: rank 0: 2 rank 1: 4 Average the same. [HVD305]"
    graph = "Graph execution error:\n\nDetected at node HvdGate\n" + '  File "trainer.py", line 9, in fit\n\n' * 50
    assert described(f"{graph}{ours} [HVD305]\n\t [[{{{{node HvdGate}}}}]] [Op:__inference_step_1]") == said
    assert described(f"{graph}{ours} [HVD305]") == said
    several = f"{graph}2 errors found.\n  (0) UNKNOWN: {ours} [HVD305]\n\t [[node]]\n  (1) UNKNOWN: no [HVD301]\n"
    assert described(several) == said
    assert described(f"In a layer:\n\n\x1b[1m{ours} [HVD305]\x1b[0m\n\nArguments:\n  x=1") == said
    long = described("\n\n" + "a" * 5000 + " [HVD305]\n [[node]]")
    assert long == f"RuntimeError: {'a' * 986} [HVD305]"
    for whole in ("epoch 1 failed:\n\nno [HVD301]", "a\n\nb", "a [HVD30]\nb", "no [HVD301] (see docs)"):
        assert uncaught._cause(whole) == whole


def test_an_error_that_quotes_a_lost_rank_means_that_rank():
    for code, row in catalogue.ROWS.items():
        own = _core.lib.hvd_rank()
        error = RuntimeError(f"Graph:\n\nallreduce of 'rank 7 x' on rank {own}: rank 3 is lost [{code}]\n [[node]]")
        meant = uncaught.meant(error)
        assert isinstance(meant, HvdPeerLostError) == ("HvdPeerLostError" in row.raises) == (meant is not error), code
        assert meant is error or (meant.rank, meant.code) == (3, code)
    assert uncaught.meant(None) is None
    for text in ("boom", "the launcher of this job has ended [HVD455]"):
        assert uncaught.meant(error := RuntimeError(text)) is error
    lost = uncaught.meant(RuntimeError("epoch 1: rank 3 left the job [HVD451]"))
    assert lost.rank == 3 and uncaught.meant(lost) is lost
