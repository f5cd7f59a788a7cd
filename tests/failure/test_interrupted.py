"""A signal handler raises while a collective is under way: whose memory is it then, and what becomes of the collective?

Python runs handlers between any two instructions of its own. So a tracer raises at each instruction of hvdlite's Python
in turn: that reaches every place where a handle could get lost, and depends on nobody's speed. Real signals come where
the wait itself is the subject. Rank 1 is late each time. Before it comes rank 0 fills the memory that it has given back
with sevens: whoever still writes there is seen, and who still reads there is seen as a wrong result on rank 1.

INTERRUPT_EVERY=1 raises at every instruction and in every millisecond; by default at a part of them, which is larger in
`tests/run everything`.
"""

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from ranks import EVERYTHING, Job, as_ranks, everything

import hvdlite as hvd
from hvdlite import _core

COUNT = 1 << 15  # floats: so much memory malloc gives back to the system
EVERY = int(os.environ.get("INTERRUPT_EVERY", 5 if EVERYTHING else 127))
OURS = os.path.dirname(hvd.__file__)
LATE_S = 0.06  # longer than one wait in the core
ERRORS = (KeyboardInterrupt, TimeoutError, SystemExit, hvd.HvdError)


def given(value):
    return np.full(COUNT, value, np.float32)


FORMS = {  # what to call, and the greatest number of rank 1's result where the ranks give 1 and 100
    "allreduce": (lambda value, name: hvd.allreduce(given(value), op=hvd.Sum, name=name), 101),
    "allreduce_": (lambda value, name: hvd.allreduce_(given(value), op=hvd.Sum, name=name), 101),
    "async": (lambda value, name: hvd.synchronize(hvd.allreduce_async(given(value), op=hvd.Sum, name=name)), 101),
    "broadcast": (lambda value, name: hvd.broadcast(given(value), 0, name=name), 1),
    "allgather": (lambda value, name: hvd.allgather(given(value), name=name), 100),
    "alltoall": (lambda value, name: hvd.alltoall(given(value), name=name), 100),
    "reducescatter": (lambda value, name: hvd.reducescatter(given(value), op=hvd.Sum, name=name), 101),
    "reduce": (lambda value, name: hvd.reduce(given(value), 1, op=hvd.Sum, name=name), 101),
    "group": (lambda value, name: hvd.grouped_allreduce([given(value)] * 3, op=hvd.Sum, name=name)[2], 101),
}


class Raises:
    """A tracer that raises at the instruction of hvdlite that has this number, or after it, in none that is spared."""

    def __init__(self, number, error, spared=()):
        self.left, self.error, self.spared = number, error, spared

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left <= 0 and frame.f_code.co_name not in self.spared:
                sys.settrace(None)
                raise self.error
        return self


def at_instruction(number):
    """Of what is called by a function that is given: runs it, and says whether there was such an instruction."""

    def run(call, error):
        tracer = Raises(number, error)
        sys.settrace(tracer)
        try:
            call()
        finally:
            sys.settrace(None)
        return tracer.left <= 0

    return run


def after_ms(number, members=1):
    """The same of a signal so many milliseconds after the collective, or its last member, was submitted."""

    def run(call, error):
        def handler(*_):
            raise error

        before, kept = submits(), signal.signal(signal.SIGUSR2, handler)

        def send():
            until = time.monotonic() + 5
            while submits() - before < members and time.monotonic() < until:
                time.sleep(0.0002)
            time.sleep(number / 1000)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)

        sender = threading.Thread(target=send)
        try:
            sender.start()
            call()
            sender.join()
        finally:
            while sender.is_alive():
                sender.join()
            signal.signal(signal.SIGUSR2, kept)
        return True

    return run


def submits():
    return _core.lib.hvd_counter(0)


def tell(number):
    """Rank 0's number, on both ranks."""
    return int(hvd.broadcast(np.array([int(number)]), 0, name="tell")[0])


def interrupted(call, due, members, name, run, error):
    """One trial on both ranks; False: there was no instruction to be interrupted at."""
    if hvd.rank() == 1:
        began = tell(0)
        assert began in (0, members), f"{began} of {members} members of a group would be waited for, for ever"
        if began:
            assert float(call(100.0, name).max()) == due, error
        return tell(0)
    before, here, told = submits(), threading.Event(), []

    def invite():  # rank 1, once rank 0 has been interrupted or has waited for long
        while not here.wait(LATE_S) and submits() - before < members:
            pass
        told.append(submits() - before)
        tell(told[0])

    other = threading.Thread(target=invite)
    other.start()
    try:
        found = run(lambda: call(1.0, name), error)
    except BaseException as raised:
        assert raised is error, raised
        raised.__traceback__ = None
        found = True
    gc.collect()
    mine = [given(7.0) for _ in range(8)]
    here.set()
    other.join()
    tell(found)  # rank 1 has its result by then
    assert all((each == 7.0).all() for each in mine), error
    return found


@pytest.mark.parametrize("form", FORMS)
@as_ranks(2, deadline=600)
def test_an_exception_at_any_instruction_leaves_no_memory_without_an_owner(form):
    call, due = FORMS[form]
    for number in range(1 + len(form) % EVERY, 5000, EVERY):
        error, members = ERRORS[number % len(ERRORS)]("mine"), 3 if form == "group" else 1
        if not interrupted(call, due, members, f"at.{form}", at_instruction(number), error):
            break
    assert 100 < number < 4000


@pytest.mark.parametrize("form", FORMS)
@as_ranks(2, deadline=600)
def test_a_signal_in_any_millisecond_comes_out_at_once_and_leaves_no_memory_without_an_owner(form):
    call, due = FORMS[form]
    for number in range(0, 58, min(EVERY, 6 if EVERYTHING else 19)):
        error, members = ERRORS[number % len(ERRORS)]("mine"), 3 if form == "group" else 1
        assert interrupted(call, due, members, f"in.{form}", after_ms(number), error)


@as_ranks(2)
def test_a_handle_whose_wait_was_interrupted_may_be_synchronized_again():
    for number, error in enumerate(ERRORS):
        start = lambda value: hvd.allreduce_async(given(value), op=hvd.Sum, name=f"again.{number}")  # noqa: B023, E731
        if hvd.rank() == 0:
            handle = start(1.0)
            with pytest.raises(error, match="mine"):
                raised_in_wait(lambda: hvd.synchronize(handle), error("mine"))  # noqa: B023
            assert not hvd.poll(handle)
        tell(0)
        assert hvd.synchronize(handle if hvd.rank() == 0 else start(2.0))[0] == 3


@as_ranks(2)
def test_a_shutdown_that_was_interrupted_goes_on_with_the_next_call():
    """Rank 0 waits for rank 1, whose process is stopped, to acknowledge that it leaves."""
    pids = hvd.allgather(np.array([os.getpid()]))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        until_stopped(pids[1])
        with pytest.raises(TimeoutError, match="mine"):
            raised_in(hvd.shutdown, TimeoutError("mine"))
        assert hvd.is_initialized()
        os.kill(pids[1], signal.SIGCONT)
    hvd.shutdown()
    assert not hvd.is_initialized()


def until_stopped(pid):
    while open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.001)


def raised_in(call, error):
    """A signal 5 ms after this, whose handler raises."""

    def handler(*_):
        raise error

    kept = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)


def raised_in_wait(call, error):
    """A signal once the call waits for the engine, whose handler raises: all that it sends has been sent by then."""

    def handler(*_):
        raise error

    def send():
        while not over.wait(0.001):
            code = sys._current_frames()[main].f_code
            if code.co_name in ("ended", "wait") and code.co_filename.startswith(OURS):
                signal.pthread_kill(main, signal.SIGUSR2)
                return

    main, over, kept = threading.get_ident(), threading.Event(), signal.signal(signal.SIGUSR2, handler)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        call()
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR2, kept)


@as_ranks(2)
def test_a_join_that_was_interrupted_may_be_waited_for_again():
    """Twice, while rank 1 is stopped."""
    pids = hvd.allgather(np.array([os.getpid()]))
    for number, error in enumerate(ERRORS):
        if hvd.rank() == 0:
            until_stopped(pids[1])
            for _ in range(2):
                with pytest.raises(error, match="mine"):
                    raised_in_wait(hvd.join, error("mine"))
            os.kill(pids[1], signal.SIGCONT)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
            assert hvd.allreduce(given(1.0), op=hvd.Sum, name=f"joined.{number}")[0] == 1
        assert hvd.join() == 1


LATE_INIT = """
import os, signal, time
import hvdlite as hvd

def handler(*_):
    raise {kind}("mine")

signal.signal(signal.SIGALRM, handler)
if os.environ["HVDLITE_RANK"] == "1":
    time.sleep(600)
signal.setitimer(signal.ITIMER_REAL, {seconds})
try:
    hvd.init()
except {kind} as error:
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert type(error) is {kind} and str(error) == "mine", repr(error)
    print("came out", flush=True)
os._exit(7)
"""


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", *everything("TimeoutError", "ConnectionError")])
def test_what_a_handler_raises_while_init_waits_comes_out_as_it_is(kind):
    with Job(2, [sys.executable, "-c", LATE_INIT.format(kind=kind, seconds=0.5)]) as job:
        assert job.wait(60) == 7, job.text()
        assert "came out" in job.text()
