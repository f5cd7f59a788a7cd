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
from collections.abc import Iterable

import hvdlite.torch as hvd

from ..elastic import checkpoint
from ..errors import HvdStateError
from ..errors.codes import coded
from .exchange import Layers

_OLD_S = 3600.0


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
            why = why or f"there is no {path}: all hosts must see the folder"
            break
        found[number] = layer
    for rank, each in enumerate(hvd.allgather_object(why, "elastic_pipeline.read")):
        if each:
            raise HvdStateError(coded("HVD425", f"rank {rank}: {each}"))
    return found
