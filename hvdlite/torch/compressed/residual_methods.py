"""Methods of a distributed optimizer that save what compression has lost.

They come before those of the optimizer's own class. An optimizer without compression, or with one that keeps nothing,
has the original's state. What is saved belongs to one rank: a checkpoint that rank 0 saves for all holds the others'
part only if it was collected on rank 0 before.

Loading is in `methods.py`, since it also ends a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .residuals import KEY

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange


class ResidualMethods:
    """`state_dict` with residuals, and their sum on one rank."""

    _hvd: Exchange | None

    def state_dict(self) -> dict[str, Any]:
        """The original's state_dict. With compression that keeps residuals, these are under ``"hvdlite"``."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if self._hvd is not None and self._hvd.carrier.keeps:
            state[KEY] = self._hvd.carrier.kept()
        return state

    def collect_residuals(self, root_rank: int = 0) -> None:
        """Add up on one rank what compression has lost on all ranks. The others begin with zeros.

        Call it on all ranks before a checkpoint that one rank saves for all. Without compression it does nothing.

        Args:
            root_rank (int): global rank that keeps the sum. Default: 0.

        Raises:
            HvdPeerLostError: if a rank dies or leaves the job.
        """
        if self._hvd is not None and self._hvd.carrier.keeps:
            if self._hvd.tracker.in_flight():
                self._hvd.finish()
            self._hvd.carrier.collect(root_rank)
