"""Random numbers of ranks: dropout is equal where a tensor is replicated, and differs where it is divided.

torch's default generator gets a seed from this rank's place on all axes but tp: so its numbers are alike over tp, and
differ over dp and pp. For a region whose tensors are cut over tp, `with` takes a number from that generator, adds the
place on tp, and seeds the generator with it until the region ends. No state is kept beside torch's own: what saves and
restores that, as recomputing a forward (`torch.utils.checkpoint`) and a checkpoint do, has all of it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

from ..process_sets.mesh import Mesh


def seeded(mesh: Mesh, seed: int, cut: str = "tp") -> CutRegion:
    """Seed torch's default generators by this rank's place in a mesh.

    Dropout is then the same where tensors are replicated, and differs where they are cut. All ranks must call it with
    the same seed. Outside of ``with``, numbers are the same over the axis ``cut`` and differ over the other axes.
    Inside of ``with``, they differ over ``cut`` too.

    Args:
        mesh (Mesh): the layout of the ranks.
        seed (int): the seed, the same on all ranks.
        cut (str): the axis over which tensors are cut. The mesh may lack it. Default: ``"tp"``.

    Returns:
        CutRegion: a context manager for regions whose tensors are cut. It may be entered repeatedly.

    Example:
        >>> from hvdlite import parallel
        >>> rng = parallel.seeded(hvd.Mesh(tp=2), seed=1)
        >>> len(set(hvd.allgather_object(float(torch.rand(1)))))
        1
        >>> with rng:
        ...     len(set(hvd.allgather_object(float(torch.rand(1)))))
        2
    """
    torch.manual_seed(_number(seed, *((axis, mesh.coordinate(axis)) for axis in mesh.shape if axis != cut)))
    return CutRegion(mesh.coordinate(cut) if cut in mesh.shape else 0)


class CutRegion:
    """Random numbers that differ over tp, within `with`. It may be entered again and again, also within itself."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._outside: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __enter__(self) -> CutRegion:
        on_gpu = torch.cuda.is_available()
        drawn = int(torch.randint(2**62, (1,), device="cpu"))
        self._outside.append((torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None))
        torch.default_generator.manual_seed(_number(drawn, self._position))
        if on_gpu:
            torch.cuda.manual_seed(_number(drawn, self._position))
        return self

    def __exit__(self, *_: Any) -> None:
        cpu, gpu = self._outside.pop()
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)


def _number(*words: Any) -> int:
    """A seed of 63 bits; near words give seeds that have nothing to do with each other."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "big") >> 1
