"""Checkpoint of unfinished gradient accumulation: the sums are saved in the model's file.

The sums are this rank's alone until the window ends, so they are no variables of the optimizer: those are sent from
rank 0 to all, and a plain optimizer, which a file must open as, refuses a state that is longer than its own. Keras
saves with an optimizer whatever it finds among its attributes that is of a class of its own and has
`save_own_variables`; a loss is the lightest such class. So a window is one: it travels in .keras files, in
.weights.h5 and in copies of models, and code that does not know it skips it. HDF5 files of whole models have no such
place, nor have Keras 2's optimizers one for sums: there only the number of passes is kept, in .keras files.

Where each rank opens its own file it goes on as if never interrupted; where all open that of one rank, its sums stand
for those of all. Where only some open one, ranks would end their windows at different times, and wait for each other:
so ranks compare at the first pass where they are, and all begin a window if that differs.
"""

from __future__ import annotations

import io
import os
import weakref
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import _core
from ..errors import HvdArgumentError, HvdMismatchError
from ..errors.codes import uncoded
from ..errors.user_warning import warn
from ..ops.objects import allgather_object
from ..process_sets.process_set import ProcessSet
from .backend import keras

ATTRIBUTE = "_hvd_window"
_INSIDE = ("optimizer", "optimizer/inner_optimizer")


class Window(keras.losses.Loss):  # type: ignore[misc]
    """What of an optimizer's passes is saved: `passes` adds up, for `optimizer`."""

    def __init__(self, passes: Any, optimizer: Any) -> None:
        super().__init__(name="window")
        self._passes, self._optimizer = passes, weakref.ref(optimizer)

    def kept(self) -> dict[str, np.ndarray]:
        """Count, average and place in the window; in the middle of one also the sums, by the optimizer's order."""
        passes, position = self._passes, self._passes.position()
        found = {"terms": np.array([passes.count, int(passes.average), position], np.int64)}
        return {**found, **(passes.kept(self._optimizer()) if position and hasattr(passes, "kept") else {})}

    def position(self) -> int:
        """How many passes of the window are done."""
        return int(self._passes.position())

    def take(self, kept: Mapping[str, Any], agreed: bool = False) -> None:
        """Goes on where `kept` was made. `agreed`: all ranks do so now, and need not compare."""
        position = int(np.asarray(kept["terms"])[2])
        sums = {int(key.rpartition("_")[2]): np.asarray(value) for key, value in kept.items() if key != "terms"}
        if hasattr(self._passes, "take") and int(np.asarray(kept["terms"])[0]) == self._passes.count:
            self._passes.take(self._optimizer(), position, sums, agreed)
            return
        if agreed:
            self._passes.clear()
        if position:
            _forgotten(f"it was saved after {position} passes and cannot be continued")

    def save_own_variables(self, store: Any) -> None:
        """Keras calls it."""
        for key, value in self.kept().items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        """Keras calls it, with nothing where the file has no window. A window that has begun goes on, with a warning:
        other ranks may load nothing now."""
        kept = {key: store[key] for key in list(store.keys())}
        if not self._passes.begun():
            if kept:
                self.take(kept)
            return
        here, there = self._passes.position(), int(np.asarray(kept["terms"])[2]) if kept else 0
        if here or there:
            warn(
                f"rank {_core.rank()}: weights were loaded after {here} of {self._passes.count} passes of a window "
                f"of backward_passes_per_step. The window keeps its own sums (the file was saved after {there} "
                "passes): load weights before the first pass, or at the end of a window [HVD243]"
            )


def _forgotten(why: str) -> None:
    warn(f"rank {_core.rank()}: a window of backward_passes_per_step restarts: {why} [HVD243]")


def agree(count: int, position: int, members: ProcessSet) -> bool:
    """Whether all ranks of the set are at the same place of a window. HvdMismatchError if their windows are not of the
    same number of passes, or cannot be compared since a rank has joined."""
    if not members.included() or members.size() == 1:
        return True
    try:
        of_all = allgather_object((count, position), "backward_passes_per_step", members)
    except (HvdArgumentError, HvdMismatchError) as error:  # a rank has joined: it has no position
        raise HvdMismatchError(
            f"rank {_core.rank()}: backward_passes_per_step={count}, after {position} passes of a window: ranks must "
            f"compare it before their first pass, and not all can ({uncoded(str(error))}). Call hvd.join() after a "
            "first step of the optimizer on every rank, or use backward_passes_per_step=1. [HVD304]"
        ) from None
    if len({each for each, _ in of_all}) > 1:
        counts = ", ".join(f"{each} on rank {rank}" for (each, _), rank in zip(of_all, members.ranks))
        raise HvdMismatchError(
            f"rank {_core.rank()}: backward_passes_per_step differs: {counts}. Give all ranks the same value. [HVD304]"
        )
    if len(set(of_all)) == 1:
        return True
    if position:
        _forgotten("not all ranks have opened a file that was saved in the middle of one")
    return False


def saved(file: Any) -> tuple[str, dict[str, np.ndarray]] | None:
    """The window in a file of a model (a path, or a file of bytes), and of which optimizer in it. None: there is none.

    The file is one of Keras 3 or 2 in the .keras format; in others no window is found.
    """
    folder = isinstance(file, (str, os.PathLike)) and os.path.isdir(file)
    if not folder and not zipfile.is_zipfile(file):
        return None
    import h5py

    if folder:
        path = os.path.join(file, "model.weights.h5")
        block = open(path, "rb").read() if os.path.exists(path) else b""
    else:
        with zipfile.ZipFile(file) as archive:
            block = archive.read("model.weights.h5") if "model.weights.h5" in archive.namelist() else b""
    if not block:
        return None
    with h5py.File(io.BytesIO(block), "r") as weights:
        for owner in _INSIDE:
            group = weights.get(f"{owner}/{ATTRIBUTE}/vars")
            if group is not None:
                return owner, {key: value[()] for key, value in group.items()}
    return None


def terms_of(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of DistributedOptimizer."""
    count, average, _ = (int(each) for each in np.asarray(kept["terms"]))
    return {"backward_passes_per_step": count, "average_aggregated_gradients": bool(average)}
