"""Graph breaks of torch.compile at functions of hvdlite, which run as they are.

The compiler would follow the call into our Python, down to the C library, and fail on what it finds there. It offers
`torch.compiler.disable`, but using that means importing the compiler, which takes seconds that programs without it do
not want to spend. So the functions get what `disable` gives them: a mark that says "do not trace into this", and an
entry in the table that the interpreter's frame hook reads, "run this and all that it calls without me". Without a
compiler neither costs anything.

On a version of PyTorch that has no such table nothing happens: there, mark your own function with
torch.compiler.disable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def keep_off_graph(*functions: Callable[..., Any]) -> None:
    """torch.compile breaks its graph at calls of these."""
    for function in functions:
        plain = getattr(function, "__func__", function)
        if isinstance(plain, FunctionType) and plain.__code__.co_filename.startswith(_PACKAGE):  # no wrapper of others'
            plain._torchdynamo_disable = True  # type: ignore[attr-defined]
            plain._torchdynamo_disable_msg = "it communicates with other ranks"  # type: ignore[attr-defined]
            _run_as_it_is(plain)


def _run_as_it_is(function: FunctionType) -> None:
    hook: Any = getattr(torch._C._dynamo, "eval_frame", None)
    try:
        skip = hook._FrameAction.SKIP
        hook.set_code_exec_strategy(function.__code__, hook._FrameExecStrategy(skip, skip))
    except AttributeError:
        return
