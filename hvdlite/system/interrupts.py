"""Deferred Ctrl-C: its handler runs when an operation that must not be split is complete.

Python runs the handler of SIGINT in the main thread, between any two instructions, and it raises KeyboardInterrupt
there. A message that is half sent, or a number that is given out and not sent, would then be wrong for good. What must
not be torn never waits, so the delay is not noticed. Other threads are not concerned.

A small call of hvd.ps defers three times. The functions of `signal` convert each argument and result to an enum, which
takes 8 us a time, so those of `_signal` are called: the same functions without the conversion.
"""

from __future__ import annotations

import _signal
import threading
from typing import Any


class Deferred:
    """`with Deferred() as whole:` a signal waits until the end, or until `whole.open()`, which precedes a wait.

    `whole.close()` follows the wait.
    """

    __slots__ = ("_came", "_handler", "_is_main")

    def __init__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        self._handler: Any = None  # the user's, while ours takes its place
        self._came: list[Any] = []

    def __enter__(self) -> Deferred:
        self.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def close(self) -> None:
        """Signals wait from now on."""
        if self._is_main and self._handler is None:
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), Deferred):
                self._handler = handler
                _signal.signal(_signal.SIGINT, self._keep)

    def open(self) -> None:
        """Signals that have come are handled now. Raises what the user's handler raises."""
        if self._handler is not None:
            handler, self._handler = self._handler, None
            _signal.signal(_signal.SIGINT, handler)
            if self._came:
                came, self._came = self._came[0], []
                handler(*came)

    def _keep(self, *what: Any) -> None:
        self._came.append(what)
