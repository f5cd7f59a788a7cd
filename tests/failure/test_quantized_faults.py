"""Sums in 8 and 4 bits that go wrong: ranks that disagree, die, or are interrupted at any instruction.

Such a sum is a chain of requests. Whatever happens, no rank waits for one that another rank does not send.
"""

import contextlib
import os
import random
import signal
import sys

import exchanges
import numpy as np
import pytest
from exchanges import exchange, given, lay_on, summed
from ranks import Job, as_ranks
from test_interrupted import at_instruction

import hvdlite as hvd

TRIALS = 1000


@pytest.mark.parametrize("hosts", [(1, 1, 1, 1), (2, 2)], ids=str)
@as_ranks(4)
def test_ranks_that_disagree_are_named_and_the_job_goes_on(hosts):
    lay_on(*hosts)
    odd, ones = hvd.rank() == 3, lambda count=5000: [np.ones(count, np.float32)]
    first = len(hosts) == 4 or hvd.rank() in (0, 2)  # the others only hear that it failed between hosts
    refuses = "rank 3" if len(hosts) == 4 or hvd.rank() > 1 else "rank 2 said .*0, 0, 0"  # of another host
    cases = {
        "bits": (lambda: summed(8 if hvd.rank() < 2 else 4, ones(), "bits"), "int8.*int4"),
        "plain": (lambda: hvd.allreduce(ones()[0], name="plain") if odd else summed(8, ones(), "plain"), "rank"),
        "counts": (lambda: summed(8, ones(1280 if hvd.rank() > 1 else 5000), "counts"), "5000.*1280"),
        "refused": (lambda: getattr(exchange(8, ones(), "refused"), "refuse" if odd else "begin")().wait(), refuses),
    }
    if len(hosts) == 2:  # a plain sum is in another process set there: nobody can compare the two
        del cases["plain"]
    for name, (call, words) in cases.items():
        with pytest.raises(hvd.HvdMismatchError, match=words if first else "0, 0, 0|rank 3") as caught:
            call()
        assert name in str(caught.value) and "HVD3" in str(caught.value)
        assert (summed(4, ones(), "after")[0] == 4).all()


@as_ranks(2)
def test_a_wait_that_an_exception_interrupts_anywhere_goes_on_and_adds_the_residual_once():
    """At one instruction of hvdlite after the other, then by real signals."""
    lay_on(1, 1, plane="p2p")
    start, sizes = [np.full(size, 0.3, np.float32) for size in (300, 0, 700)], (300, 0, 700)
    expected, due = given(5, sizes), [each.copy() for each in start]
    summed(8, expected, "due", due)

    def alarm(*_):
        raise TimeoutError("mine")

    def by_signal(call, _):
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 4e-4))
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    chance, before, reached = random.Random(3), signal.signal(signal.SIGALRM, alarm), set()
    try:
        for trial in range(TRIALS):
            arrays, kept = given(5, sizes), [each.copy() for each in start]
            job, run = exchange(8, arrays, "again", kept), at_instruction(4 * trial + 1) if trial % 2 else by_signal
            if hvd.rank() == 0:
                with contextlib.suppress(TimeoutError):
                    reached.add((trial % 2, run(lambda: job.begin().wait(), TimeoutError("mine"))))  # noqa: B023
            job.begin().wait()
            assert all(np.array_equal(a, b) for a, b in zip([*arrays, *kept], [*expected, *due])), trial
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hvd.rank() == 1 or (1, False) in reached, "there are instructions that no trial has reached"


@as_ranks(4, deadline=30)
def test_a_failure_that_an_exception_interrupts_reaches_all_ranks():
    lay_on(2, 2)
    for number in range(1, 1500, 13):
        job = exchange(8 if hvd.rank() < 2 else 4, [np.ones(300, np.float32)], "fails")
        if hvd.rank() == 0:
            with contextlib.suppress(TimeoutError, hvd.HvdMismatchError):
                at_instruction(number)(lambda: job.begin().wait(), TimeoutError("mine"))  # noqa: B023
        with pytest.raises(hvd.HvdMismatchError):
            job.begin().wait()


DIES = """
import os, sys
sys.path.append({path!r})
import numpy as np
import hvdlite as hvd
from exchanges import exchange, lay_on
lay_on(*{hosts}, plane="p2p")
try:
    exchange(8, [np.ones(5000, np.float32)], "first").begin().wait()  # others may be in it when the victim dies
    job = exchange(8, [np.ones(5000, np.float32)], "second").begin()
    if hvd.rank() == {victim}:
        job._state[3].ended()  # the alltoall is over on this rank
        os.kill(os.getpid(), 9)
    job.wait()
    print("no error", flush=True)
except hvd.HvdPeerLostError as error:
    print(f"lost {{error}}", flush=True)
"""


@pytest.mark.parametrize(("hosts", "victim"), [((1, 1, 1), 1), ((2, 2), 2)], ids=str)
def test_a_rank_that_dies_between_the_two_exchanges_is_named_by_all(hosts, victim):
    text = DIES.format(path=os.path.dirname(exchanges.__file__), hosts=hosts, victim=victim)
    with Job(sum(hosts), [sys.executable, "-c", text]) as job:
        job.wait(60)
        named = [f"rank {victim}" in line for line in job.text().splitlines() if ":lost" in line]
        assert len(named) == sum(hosts) - 1 and all(named), job.text()
