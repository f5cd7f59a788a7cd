"""An error of a socket, or a signal handler's? The TimeoutError of an alarm is an OSError, as what sockets raise."""

import functools
import os
import signal
import socket

import pytest

from hvdlite.errors import let_out


def raised():
    raise TimeoutError("enough")


def plain(number, frame):
    raised()


class Handler:
    def method(self, number, frame):
        raised()

    def __call__(self, number, frame):
        raised()


HANDLERS = {
    "function": plain,
    "method": Handler().method,
    "object": Handler(),
    "partial": functools.partial(lambda extra, number, frame: raised(), 1),
    "lambda": lambda *_: raised(),
}


def of_a_signal():
    os.kill(os.getpid(), signal.SIGALRM)
    for _ in range(1000):
        pass  # Python runs handlers between instructions


@pytest.fixture(params=HANDLERS)
def handled(request):
    before = signal.signal(signal.SIGALRM, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGALRM, before)


def test_what_a_handler_raises_comes_out(handled):
    with pytest.raises(TimeoutError, match="enough"):
        try:
            of_a_signal()
        except OSError as error:
            let_out(error)
            pytest.fail("taken for a socket's")


def test_what_a_socket_raises_stays_whoever_has_made_it(handled):
    """Libraries like gevent put sockets of their own in the place of Python's."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.settimeout(0.01)
        for fails in (lambda: mine.recv(1), raised):
            try:
                fails()
            except OSError as error:
                let_out(error)


def test_what_is_not_pythons_is_no_handler():
    for handler in (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler, print):
        before = signal.signal(signal.SIGALRM, handler)
        try:
            raised()
        except OSError as error:
            let_out(error)
        finally:
            signal.signal(signal.SIGALRM, before)
