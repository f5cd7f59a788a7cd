"""Warnings that point at the user's line: the nearest frame outside of hvdlite and its frameworks.

Frameworks are recognized by the first part of a module's name, so it does not matter where they are installed.
A fixed stacklevel cannot do this: the same warning comes from `step()`, a hook of autograd and a callback of Keras.
In a thread without a line of the user's (a reader, TensorFlow's own) the warning names hvdlite's line.
"""

from __future__ import annotations

import sys
import warnings

_PASSED = {"hvdlite", "horovod", "torch", "tensorflow", "keras", "tf_keras", "contextlib", "functools", "weakref"}
_PASSED |= {"threading", "concurrent", "importlib"}


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """warnings.warn, with the user's line. Raises the warning where a filter makes it an error."""
    own = frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED:
        if frame.f_back is None:
            frame = own
            break
        frame = frame.f_back
    module, seen = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, seen)
