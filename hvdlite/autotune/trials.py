"""The file of trials: a row for each as soon as it is over, so that a job that is killed leaves what it has found.

Columns are Horovod's, then ours. Of Horovod's, what hvdlite does not have says what it always does: nothing
hierarchical, known tensors remembered, a cycle of 0 ms. `tensor_fusion_threshold` is in MB as there. `score` is steps
per second, so the greatest is the best as there, but it is the time of whole steps, not bytes per microsecond.
Ours: the number of the trial, the step (from the first one counted) at which it ended, milliseconds per step, and
whether the row is a verdict: the last row of a search, which repeats the chosen setting with its median time.
"""

from __future__ import annotations

import sys
from typing import Literal, TextIO

from ..errors import HvdOptionError

HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score,trial,step,step_ms,chosen"
)
_started: set[str] = set()  # files that this process has begun; later incarnations and searches append to them


class Trials:
    """Where the rows of this process go; nowhere without a file name."""

    def __init__(self, filename: str | None) -> None:
        """Opens the file, anew the first time. HvdOptionError if it cannot be written."""
        self.filename = filename
        self.count = 0
        self._file: TextIO | None = None
        if filename is not None:
            self._file = _open(filename, "a" if filename in _started else "w")
            if filename not in _started:
                _started.add(filename)
                self._write_row(HEADER)

    def add(self, fusion_bytes: int, step: int, milliseconds: float, chosen: bool = False) -> None:
        """One row: a trial, or with `chosen` the verdict on those before it."""
        self.count += not chosen
        score = 1000 / milliseconds
        ours = f"{self.count},{step},{milliseconds:.4f},{int(chosen)}"
        self._write_row(f"0,0,0,1,0,{fusion_bytes / (1 << 20):.10g},{score:.6g},{ours}")

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write_row(self, row: str) -> None:
        """A full disk ends the file, not the training."""
        if self._file is None:
            return
        try:
            self._file.write(row + "\n")
            self._file.flush()
        except OSError as error:
            print(
                f"hvdlite: autotune: cannot write {self.filename} any more: {error.strerror} [HVD805]",
                file=sys.stderr,
                flush=True,
            )
            self._file = None


def check(filename: str) -> None:
    """Can it be written? Changes nothing in a file that is there. HvdOptionError if not."""
    _open(filename, "a").close()


def _open(filename: str, mode: Literal["a", "w"]) -> TextIO:
    try:
        return open(filename, mode, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise HvdOptionError(
            f"HVDLITE_AUTOTUNE_LOG={filename!r} cannot be written by rank 0: {reason}. "
            "Name a file in a folder that is there and may be written. [HVD805]"
        ) from None
