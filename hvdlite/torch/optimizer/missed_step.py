"""Check that this rank has taken the step that the others took.

No other rank sees an exception of the user's script between backward and step on one rank: the averages are there,
the other ranks step with them, and the script may catch it and go on with the next batch. So a rank remembers that a
round was completed and no step taken since. All ranks may have that in common: GradScaler skips a step, several rounds
add up, a generator's pass reaches the discriminator, a loss is no number. If not, one of them has missed a step.

That is reported with the next round, at no cost where there is nothing to report: the gradient of one parameter has a
priority then that no gradient has, the ranks disagree on it, and each has the error. It lasts until the ranks are made
equal: by a state that is loaded or broadcast, or by any write to the parameter.

A comm hook sends what it likes, so with `register_comm_hook` nothing is reported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ...errors import HvdMismatchError

PRIORITY = -(2**31)
_SAID = re.compile(rf"(ranks? \d[\d, and-]*?)(?: said|:) (?:(?!ranks? \d)[^\n])*?{PRIORITY}")


class Untaken:
    """A round whose step is not taken yet, and the first of the parameters as it was then."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._first = next((each for each in parameters if each.requires_grad), None)
        self._version = None if self._first is None else self._first._version

    def told_by(self, names: Sequence[str], silent: Sequence[int]) -> int | None:
        """The number of the gradient that reports it: the first by its name of those that travelled in the last round,
        which is the same on all ranks. None: the parameter has been written to since."""
        if self._first is None or self._first._version != self._version:
            return None
        return min((n for n in range(len(names)) if n not in silent), key=names.__getitem__, default=None)


def parted(error: Exception) -> HvdMismatchError | None:
    """The error that names the rank that has missed a step, if that is why the exchange failed."""
    found = _SAID.search(str(error)) if isinstance(error, HvdMismatchError) else None
    if found is None:
        return None
    return HvdMismatchError(
        f"{found[1]} did not take the step that the other ranks took with the averages of the last round, so the "
        "weights differ between ranks: the script caught an exception between backward() and optimizer.step() there, "
        "or left out step(). To go on, call optimizer.zero_grad() on all ranks. Then load a checkpoint on all ranks, "
        "or call hvd.broadcast_parameters and hvd.broadcast_optimizer_state. Where the script catches such an "
        "exception, call optimizer.step() as on the other ranks [HVD309]"
    )
