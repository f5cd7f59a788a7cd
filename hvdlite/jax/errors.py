"""Errors of compiled functions as the classes of hvdlite: XLA makes one class of all, and keeps the text.

The handler begins its text with the name of the class, so nothing has to be remembered: also of several functions that
were dispatched before the first result is looked at, each error is its own.

JAX raises where a result is used first, which no decorator of a compiled function can see.
"""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Iterator

from .. import _core, errors

_TEXT = re.compile(r"\b(Hvd[A-Za-z]+|HorovodInternalError|MemoryError): (.*\[HVD\d{3}\])", re.DOTALL)


def error_of(error: BaseException) -> BaseException:
    """The error of hvdlite that a compiled function has failed with; or the error itself, if it has another cause."""
    found = _TEXT.search(str(error)) if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") else None
    if found is None:
        return error
    kind = getattr(errors, found[1], None) or getattr(builtins, found[1])
    made: BaseException = kind(found[2])
    if isinstance(made, errors.HorovodInternalError):
        made.rank = _core.failed_rank()
    return made


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raise errors of compiled functions as errors of hvdlite. It is a context manager and a decorator.

    JAX raises ``jax.errors.JaxRuntimeError`` for all of them, where the result is used first. So the result must be
    used inside: by ``jax.block_until_ready``, ``float`` or ``np.asarray``. ``hvd.elastic.run`` does the same.

    Returns:
        context manager: its block raises the errors of ``allreduce``, with JAX's error as their cause.

    Raises:
        HvdError: a subclass, as ``HvdPeerLostError``.

    Example:
        >>> mean = jax.jit(lambda x: hvd.allreduce(x, name="x"))
        >>> try:
        ...     with hvd.translate_errors():
        ...         jax.block_until_ready(mean(jnp.zeros(3 + hvd.rank())))
        ... except hvd.HvdMismatchError as error:
        ...     print(error.code)
        HVD350
    """
    try:
        yield
    except Exception as error:
        found = error_of(error)
        if found is error:
            raise
        raise found from error
