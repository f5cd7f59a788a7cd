"""Ranks that keep the others waiting are named, with what they do instead; then the job ends, and says the same."""

import re
import sys
import time
from pathlib import Path

import pytest
from launching import launch
from ranks import EVERYTHING, everything

PROGRAM = str(Path(__file__).resolve().parents[1] / "support/stalling.py")
WAITED = (
    "'allreduce.wanted', 'allreduce.more.0', 'allreduce.more.1' and 7 more: submitted by ranks 0, 2, missing on rank 1"
)
ALIVE = r"rank 1 \(pid \d+\) is alive; it submitted 'allreduce.first' last, and waits for no collective"
ORDER = "'allreduce.layer.2': submitted by ranks 0, 2, missing on rank 1"
WAYS = {
    "sleep": (WAITED, ALIVE, "in sleeps_here"),
    "gil": (WAITED, ALIVE, "in holds_the_lock"),
    "stop": (WAITED, r"rank 1 \(pid \d+\) is stopped", None),
    "other": (WAITED, r"it submitted 'allreduce.another' last, and waits for 'allreduce.another'", "in wait"),
    "order": (ORDER, r"rank 1 \(pid \d+\) is alive; it submitted 'allreduce.layer.0' last", "in sleeps_here"),
    "set": ("'allreduce.wanted' in process set 1: submitted by rank 0, missing on rank 1", ALIVE, "in sleeps_here"),
    "joined": (WAITED.replace("ranks 0, 2", "rank 0"), ALIVE, "in sleeps_here"),
    "join": ("join: submitted by ranks 0, 2, missing on rank 1", ALIVE, "in sleeps_here"),
}


@pytest.mark.parametrize("way", [way for way in WAYS if EVERYTHING or way in ("stop", "join")])
def test_who_keeps_the_others_waiting_is_told_and_ends_the_job(way):
    waited, state, stack = WAYS[way]
    words = ("-np", 3, "--stall-check-time", 1, "--collective-timeout", 2, "--failure-grace", 1)
    code, out, err = launch(*words, sys.executable, PROGRAM, way)
    assert code != 0, out + err
    said = [line.removeprefix("[0]<stderr>:") for line in err.splitlines() if line.startswith("[0]<stderr>:")]
    begin = next((at for at, line in enumerate(said) if line.startswith("hvdlite: stall: ")), None)
    assert begin is not None, err
    assert not any("hvdlite: stall: " in line and not line.startswith("[0]") for line in err.splitlines()), err
    report = "\n".join(said[begin : begin + 60])
    assert waited in report and re.search(state, report), report
    if stack is not None:
        assert "the Python stack of its main thread, the innermost call first" in report and stack in report, report
    told = [line for line in out.splitlines() if "saw " in line]
    texts = {line.split("nothing has moved for 2 s")[1] for line in told}
    assert len(told) >= (1 if way == "set" else 2) and len(texts) == 1, out + err
    assert all("saw HvdTimeoutError" in line and "HVDLITE_COLLECTIVE_TIMEOUT" in line for line in told), out
    assert waited.split(":")[0] in texts.pop() and err.count("rank 0 says: nothing has moved") <= 1, out + err


def test_rank_0_itself_is_named_where_it_is_stopped():
    """Others end the job by themselves, a little later."""
    words = ("-np", 3, "--stall-check-time", 1, "--collective-timeout", 2, "--failure-grace", 1)
    code, out, err = launch(*words, sys.executable, PROGRAM, "first")
    told = [line for line in out.splitlines() if "saw HvdTimeoutError 0 " in line]
    assert code != 0 and len(told) == 2 and all(re.search(r"rank 0 .*is stopped", line) for line in told), out + err


def test_the_next_rank_makes_the_reports_when_rank_0_has_left():
    """Sets without it go on: report, timeout= and the end of the job name the rank that is late, and not rank 0."""
    words = ("-np", 3, "--stall-check-time", 1, "--collective-timeout", 3, "--failure-grace", 1)
    code, out, err = launch(*words, sys.executable, PROGRAM, "left")
    waited = "submitted by rank 1, missing on rank 2"
    late = r"rank 2 \(pid \d+\) is alive; it submitted 'allreduce.first' last"
    said = out + err
    assert code != 0 and "[1]<stderr>:hvdlite: stall: " in err, said
    assert f"'allreduce.wanted' in process set 1: {waited}" in err and "in sleeps_here" in err, said
    assert re.search(rf"heard rank 1 has waited its whole timeout of 0.5 s .*{waited}; {late}", out), said
    assert re.search(rf"saw HvdTimeoutError 2 .*nothing has moved for 3 s .*{waited}; {late}", out), said
    assert re.search(r"hvdlite-run: rank 2 .* rank 1 says: nothing has moved", err), said


@pytest.mark.parametrize("rank", [2, *everything(0)])
def test_a_rank_that_is_stopped_in_init_is_the_cause_and_not_who_waited_for_it(rank):
    program = PROGRAM.replace("stalling", "stops_in_init")
    words = ("-np", 3, "--start-timeout", 2, "--failure-grace", 0.5, sys.executable, program, rank)
    code, _, err = launch(*words)
    assert code != 0 and "HvdTimeoutError: rank" in err, err
    last = [line for line in err.splitlines() if line.startswith("hvdlite-run: rank")][-1]
    ended = rf"rank {rank} \(pid \d+\) did not end by itself and was stopped; rank \d says: rank {rank} did not "
    assert re.search(ended, last), err


def test_a_rank_that_is_stopped_behind_a_crowd_of_strangers_is_not_waited_for_without_end():
    """Who knocks at a full queue would wait until somebody is taken out of it."""
    program = PROGRAM.replace("stalling", "stops_in_init")
    began = time.monotonic()
    code, _, err = launch("-np", 3, "--start-timeout", 2, sys.executable, program, 0, "crowd")
    assert code != 0 and err.count("rank 0 did not answer in time during init; is it stopped?") >= 2, err
    assert time.monotonic() - began < 20


def test_who_comes_late_is_told_and_the_job_goes_on(tmp_path):
    """The report does no harm, comes again only later, and is not there where it is switched off."""
    body = """
import sys, time, numpy, hvdlite as hvd
hvd.init()
if hvd.rank() == 0:
    time.sleep(2.5)
assert hvd.allreduce(numpy.ones(3), op=hvd.Sum)[0] == 2
hvd.join()
"""
    code, _, err = launch("-np", 2, "--stall-check-time", 0.4, sys.executable, "-c", body)
    assert code == 0 and 1 <= err.count("hvdlite: stall: ") <= 4, err
    assert "missing on rank 0" in err and "line 5 in <module>" in err, err
    code, _, err = launch("-np", 2, "--no-stall-check", sys.executable, "-c", body, HVDLITE_STALL_CHECK_TIME="0.4")
    assert code == 0 and "stall" not in err, err


def test_who_has_joined_waits_as_long_as_the_others_train():
    """Longer than any limit; a rank that comes late then is told, to those that train and to those that have joined."""
    body = """
import sys, time, numpy, hvdlite as hvd
hvd.init()
until = time.monotonic() + 2.5
while hvd.rank() > 0 and hvd.allreduce(numpy.array([time.monotonic()]), op=hvd.Min)[0] < until:
    time.sleep(0.05)
print("last", hvd.join() > 0, flush=True)
"""
    words = ("-np", 3, "--stall-check-time", 0.5, "--collective-timeout", 1)
    code, out, err = launch(*words, sys.executable, "-c", body)
    assert code == 0 and out.count("last True") == 3 and "stall" not in err, out + err


def test_who_calls_more_tensors_otherwise_than_can_be_listed_is_named():
    """A model that is wrapped on one rank alone; and names that would break the lines, and colour them."""
    body = """
import numpy, hvdlite as hvd
hvd.init()
model = "model" if hvd.rank() == 0 else "mod\\x1b[31m\\nule.model"
ones = numpy.ones(3)
hvd.allreduce(ones, name="first")
handles = [hvd.allreduce_async(ones, name=f"{model}.{i}") for i in range(161)]
try:
    hvd.synchronize(handles[130], timeout=1.5)
except hvd.HvdTimeoutError as error:
    print("soon", error, flush=True)
try:
    hvd.synchronize(handles[0])
except hvd.HvdTimeoutError as error:
    print("saw", error, flush=True)
    raise
"""
    words = ("-np", 2, "--stall-check-time", 1, "--collective-timeout", 4, "--failure-grace", 20)
    code, out, err = launch(*words, sys.executable, "-c", body)
    assert code != 0 and "\x1b" not in out + err and "submitted by all" not in out + err, out + err
    report = err[err.index("hvdlite: stall: ") :]
    odd = r"allreduce.mod\x1b[31m\nule.model"
    first = ", ".join(f"'{{}}.{i}'" for i in range(3)) + " and 158 more: submitted by rank {}, missing on rank {}\n"
    assert first.format(*["allreduce.model"] * 3, 0, 1) in report, report
    assert first.format(*[odd] * 3, 1, 0) in report, report
    assert f"waits for '{odd}." in report and "waits for 'allreduce.model." in report, report
    for rank, other in ((0, 1), (1, 0)):
        soon = [line for line in out.splitlines() if line.startswith(f"[{rank}]<stdout>:soon ")]
        assert len(soon) == 1 and f"submitted by rank {rank}, missing on rank {other}; rank {other} (pid" in soon[0], (
            out
        )
    told = [line.split("nothing has moved for ")[1] for line in out.splitlines() if "saw " in line]
    assert len(told) == 2 and told[0] == told[1] and "was submitted by rank 0, missing on rank 1; " in told[0], out
    assert "'...'" not in told[0] + report, told[0]
