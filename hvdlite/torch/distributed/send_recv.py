"""send and recv of torch.distributed: two ranks of a group, a tag.

The two find each other by a name: of the group, the tag, and how many were sent this way before. A receive from any
source posts one receive for each rank; the first that is answered counts, and the others stay posted for later receives
of that tag. So all ranks that send with one tag to such a receiver must send one shape. The core has no wait for the
first of several, so it is polled.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ... import _core
from ...errors import HvdTimeoutError
from .submission import _NAMES, Submission
from .tensors import copy_back, device_terms, dtype_of, gpu_of, moved, read
from .work import AGAIN, HvdWork, named, ranged

_Posted = tuple[_core.Pending, torch.Tensor]


class Pairs(Submission):
    """Calls between two ranks."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int, bool], int] = {}  # peer, tag, whether it is sent: how many so far
        self._posted: dict[tuple[int, int], _Posted] = {}  # peer, tag: receives that are for no call yet

    def _between(self, tensor: torch.Tensor, peer: int, tag: int, sends: bool, quiet: int) -> _Posted:
        if peer == self._me or not 0 <= peer < self._count:
            raise ValueError(f"rank {self._me} of a group of {self._count} has no rank {peer} to send to [HVD217]")
        source, key = moved(tensor), (peer, tag, sends)
        number = self._pairs[key] = self._pairs.get(key, 0) + 1
        mine, other = self._set_ranks[self._me], self._set_ranks[peer]
        pending = _core.submit(
            _core.SEND, 0, dtype_of(source), f"send.{self._label}.{tag}.{number % _NAMES}", source.shape,
            source.data_ptr(), 0 if sends else source.data_ptr(), (source.untyped_storage(), tensor),
            root=mine if sends else other, peer=other if sends else mine, process_set=self._in, quiet=quiet,
            **({} if gpu_of([tensor]) is None else device_terms(source)),
        )  # fmt: skip
        return pending, source

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank of the group."""
        text = self._text(f"send to rank {dst} of the group, tag {tag}")
        try:
            with ranged("send"):
                pending, _ = self._between(tensors[0], dst, tag, True, _core.SOON)
        except Exception as error:
            named(error, text)
            raise
        return HvdWork([pending], list(tensors), self._limit, text, None, gpu_of(tensors))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receives a tensor of the same shape and dtype from a rank of the group."""
        (tensor,), text = tensors, self._text(f"recv from rank {src} of the group, tag {tag}")
        early = self._posted.pop((src, tag), None)  # by a recv from any source that another rank answered
        try:
            with ranged("recv"):
                pending, came = early or self._between(tensor, src, tag, False, _core.SOON)
        except Exception as error:
            named(error, text)
            raise
        work = HvdWork([pending], [tensor], self._limit, text, lambda _: _copy_back(came, tensor), gpu_of(tensors))
        work._source = src
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives a tensor from the rank whose tensor comes first."""
        (tensor,) = tensors
        for peer in range(self._count):
            if peer != self._me and (peer, tag) not in self._posted:
                self._posted[peer, tag] = self._between(torch.empty_like(tensor), peer, tag, False, _core.ASIDE)
        text = self._text(f"recv from any source, tag {tag}")
        return _AnySource(self._posted, tensor, tag, self._limit, text, None, gpu_of(tensors))

    recvAnysource = recv_anysource


class _AnySource(HvdWork):
    """A receive that one of several posted ones answers."""

    def __init__(self, posted: dict[tuple[int, int], _Posted], tensor: torch.Tensor, tag: int, *more: Any) -> None:
        super().__init__([], [tensor], *more)
        self._posted, self._tensor, self._tag = posted, tensor, tag

    def _poll(self) -> bool:
        return any(tag == self._tag and pending.done() for (_, tag), (pending, _) in list(self._posted.items()))

    def _complete(self, until: float | None, seconds: float | None) -> None:
        pause = 1e-5
        while not self._ended:
            for (peer, tag), (pending, came) in list(self._posted.items()):
                if tag == self._tag and pending.done():
                    self._posted.pop((peer, tag), None)
                    self._pending, self._source = [pending], peer
                    self._finish = lambda _, came=came: _copy_back(came, self._tensor)
                    super()._complete(None, None)
                    return
            if until is not None and time.monotonic() > until:
                raise HvdTimeoutError(
                    f"{self._text()}: rank {_core.rank()} has waited its whole timeout of {seconds:g} s, and no "
                    f"rank has sent: {AGAIN} [HVD502]"
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)


def _copy_back(came: torch.Tensor, tensor: torch.Tensor) -> None:
    if came.data_ptr() != tensor.data_ptr():
        real = read(tensor)
        copy_back(came.view(real.dtype).view(real.shape), tensor)
