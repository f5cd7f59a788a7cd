"""Check that the state of each rank, and that of a file, has the same parts; others could not be synchronized.

A form is what a State is made of: kinds by name. Ranks compare theirs, and which training function of the script they
are in, before anything is sent: a rank with one part more would wait for a collective that no other rank begins.

Shapes and dtypes of tensors are compared where they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import HvdMismatchError, HvdStateError
from ..errors.codes import coded


def require_same(reported: Sequence[tuple[int, dict[str, str]]]) -> None:
    """reported: by rank, how many training functions it has begun and the form of its state. Raises HvdMismatchError,
    with the first rank that differs from rank 0 in `ranks`."""
    first_call, first = reported[0]
    for rank, (call, form) in enumerate(reported):
        name = next((name for name in sorted({*form, *first}) if form.get(name) != first.get(name)), None)
        if name is not None:
            has, expected = (f"{name} ({each[name]})" if name in each else f"no {name}" for each in (form, first))
            text = f"the State of rank {rank} has {has}, and that of rank 0 has {expected}: build it alike on all ranks"
        elif call != first_call:
            text = (
                f"rank {rank} is in training function {call} of its script (hvd.elastic.run), rank 0 in {first_call}: "
                "a process that joins later begins with the first, so do all training in one function"
            )
        else:
            continue
        error = HvdMismatchError(coded("HVD302", text))
        error.ranks = tuple(r for r, each in enumerate(reported) if each != reported[0])
        raise error


def of_same_names(found: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What was found. Raises HvdStateError where there are other names: what is missing would begin anew, and what is
    left would be lost at the next commit."""
    lacks, more = sorted(set(names) - found.keys()), sorted(found.keys() - set(names))
    differs = [f"it has no {', '.join(lacks)}"] * bool(lacks) + [f"this state has no {', '.join(more)}"] * bool(more)
    if differs:
        raise HvdStateError(f"{'; '.join(differs)} [HVD425]")
    return found
