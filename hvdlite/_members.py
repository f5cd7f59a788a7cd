"""Process sets that only their members open: for groups of torch.distributed, which ask nobody else.

Not there yet: `add_process_set` takes all ranks of the job, so a set of some of them is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from .errors import HvdNotYetError


def open_among(ranks: list[int], exchange: Callable[[bytes], list[bytes]]) -> NoReturn:
    """Raises HvdNotYetError."""
    raise HvdNotYetError(f"a group of the ranks {ranks}, which are not all: use groups of all ranks [HVD126]")
