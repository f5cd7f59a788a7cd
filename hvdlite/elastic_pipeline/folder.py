"""Commits of a pipeline in a folder, one file for each layer: which files there are, and when they go.

    state                 the objects, and the token of the commit; replaced as a whole (elastic/checkpoint.py)
    layers-TOKEN/0, 1 ..  a layer each, with its length and hash as the file above

Each commit has files of its own, and those of the commit before go when `state` names the new ones. So whatever happens
meanwhile, `state` names a commit of which all layers are there. What a job that was killed has left goes an hour later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hvdlite.torch as hvd

from ..elastic import ObjectState, checkpoint
from ..errors import HvdStateError
from ..errors.codes import coded, uncoded
from ..plan import Layout
from .exchange import Layers
from .recipe import SEEDS, Commit, Recipe

_OLD_S = 3600.0  # seconds that the files of a job that was killed stay


class Folder:
    """Of one job. head: the path of its file `state`. current: the token of the commit that it has, as far as known:
    the rank that has replaced it since may be lost."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.head = os.path.join(self.path, "state")
        self.current: str | None = None

    def files(self, token: str) -> str:
        """Where the layers of a commit are."""
        return os.path.join(self.path, f"layers-{token}")

    def write(self, token: str, layers: Layers) -> None:
        """Raises OSError."""
        os.makedirs(self.files(token) if layers else self.path, exist_ok=True)
        for number, layer in layers.items():
            checkpoint.write(os.path.join(self.files(token), str(number)), layer)

    def remove_but(self, kept: str | None, job: str) -> None:
        """Removes the files of this job's other commits, and what no job writes any more. job: begins its tokens."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path):
                token = entry.name.removeprefix("layers-")
                if token not in (entry.name, kept) and (
                    token == self.current or token.startswith(job) or time.time() - entry.stat().st_mtime > _OLD_S
                ):
                    shutil.rmtree(entry.path, ignore_errors=True)


def read(files: str, numbers: Iterable[int]) -> Layers:
    """The layers of these numbers. All ranks call it. HvdStateError on all ranks where one cannot read a layer."""
    found, why = Layers(), ""
    for number in numbers:
        path = os.path.join(files, str(number))
        try:
            layer = checkpoint.read(path)
        except (OSError, HvdStateError) as error:
            layer, why = None, f"{path} cannot be read: {error}"
        if layer is None:
            why = why or f"there is no {path}: the folder is damaged, or this host does not see it"
            break
        found[number] = layer
    for rank, each in enumerate(hvd.allgather_object(why, "elastic_pipeline.read")):
        if each:
            raise HvdStateError(coded("HVD425", f"rank {rank}: {each}"))
    return found


class InFolder(ObjectState):
    """The part of a PipelineState that keeps commits in a folder."""

    _kept: dict[int, Commit]  # by number
    _recipe: Recipe
    layout: Layout | None
    _copies: int
    _job: str  # all tokens of this job begin with it
    _folder: Folder | None = None
    _found: Commit | None = None  # in the folder, from which all are to go on
    _needed: Callable[[int], list[list[int]]]

    def save_to(self, path: str | Path, seconds: float = 0.0) -> None:
        """Also keep commits in a folder, from which a job that is started again goes on with any number of ranks.

        Each layer is a file, written by a rank that holds it. A file ``state`` names them and is replaced last, so the
        folder always has one whole commit. If all ranks that held a layer are lost at once, the job goes on from the
        folder, too. Otherwise it is as ``State.save_to``.

        Args:
            path (str or Path): the folder, which all hosts see. It need not exist.
            seconds (float): the least time between two writes, in seconds. 0 (default): every commit writes.

        Raises:
            HvdStateError: when the training function begins: the folder is damaged or has another model.

        Example:
            >>> state.save_to("run7", seconds=60)  # doctest: +SKIP
            >>> # skipped in tests: it needs the state
        """
        self._folder = Folder(os.fspath(path))
        self._file = checkpoint.Kept(self._folder.head, seconds, unread=self._number < 0)

    def _go_back(self, missing: list[int]) -> None:
        """To the commit in the folder. HvdStateError where there is none."""
        text = (
            f"layers {', '.join(map(str, missing))} of the last commit are lost: all ranks that held them are gone. "
            f"Keep more than copies={self._copies}, or use save_to"
        )
        why = ""
        if hvd.rank() == 0 and self._file is not None:
            try:
                self._file.load_into(self)
                token = self._found.token if self._found is not None else self._job
                if not token.startswith(self._job) and self._folder and token != self._folder.current:
                    self._found, why = None, ". The folder has a commit of another job"
            except HvdStateError as error:
                why = f". {uncoded(str(error))}"
        found, why = hvd.broadcast_object((self._found is not None, why), name="elastic_pipeline.back")
        if not found:
            raise HvdStateError(f"{text}{why} [HVD425]")

    def state_dict(self) -> dict[str, Any]:
        """Return what the folder's file ``state`` has: the objects, and which files have the layers.

        Returns:
            dict: ``{"objects": {name: value}, "pipeline": {"token", "shared", "layers"}}``.
        """
        commit = self._kept.get(max(0, self._number), Commit(SEEDS, {}, {}))
        found = {"token": commit.token, "shared": commit.shared, "layers": len(self._recipe.layers)}
        return {**super().state_dict(), "pipeline": found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the objects, and go on from the layers in the folder at the next ``sync``.

        Args:
            state_dict (dict): the value of ``state_dict``.

        Raises:
            HvdStateError: it is of another number of layers, or the names of objects differ.
        """
        found = state_dict["pipeline"]
        if found["layers"] != len(self._recipe.layers):
            raise HvdStateError(
                f"it has {found['layers']} layers, and this model has {len(self._recipe.layers)} [HVD425]"
            )
        super().load_state_dict(state_dict)
        self._found = Commit(found["token"], found["shared"], {})

    def _commit_to_file(self, file: checkpoint.Kept) -> None:
        file.behind = True
        if self._bcast_object(file.is_due()):
            self._last_to_file(file)

    def _end_to_file(self, file: checkpoint.Kept) -> None:
        if self._bcast_object(file.behind and not file.taken):
            self._last_to_file(file)

    def _last_to_file(self, file: checkpoint.Kept) -> bool:
        """Each layer by the first rank that holds it, then by rank 0 the file that names them."""
        assert self._folder is not None and self.layout is not None
        commit, why, done = self._kept[self._number], "", False
        layers = {n: commit.layers[n] for n in self._needed(1)[hvd.rank()] if hvd.rank() < len(self.layout.balance)}
        try:
            self._folder.write(commit.token, layers if commit.token != SEEDS else {})
        except OSError as error:
            why = error.strerror or str(error)
        problems = [each for each in hvd.allgather_object(why, "elastic_pipeline.written") if each]
        if hvd.rank() == 0:
            done = file.write(self.state_dict()) if not problems else file.failed(problems[0])
            self._folder.remove_but(commit.token if done else self._folder.current, self._job)
        if done := self._bcast_object(done):
            self._folder.current = commit.token
        return done
