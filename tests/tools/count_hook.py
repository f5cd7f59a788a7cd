"""What one gradient hook costs in instructions: one rank's program, of which counts.py runs rank 0 under callgrind.

A backward pass that computes nothing hands a gradient to each of 161 small parameters, once with the hooks of a
DistributedOptimizer and once with hooks that do nothing; counts.py takes the difference per parameter. Only the thread
that runs backward is counted, and waiting is left to step(), so the count does not depend on the other rank.

    count_hook.py LIBRARY    a shared library with count_begin and count_end (count.h)
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

import hvdlite.torch as hvd

PARAMETERS, WARM_UPS = 161, 5


class HandOut(torch.autograd.Function):
    """Passes a token on; backward gives its parameter a gradient that was ready before."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, parameter: torch.Tensor, ready: torch.Tensor) -> torch.Tensor:
        ctx.ready = ready
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        return token, ctx.ready, None


def make() -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters, and a function whose result's backward reaches all of them."""
    parameters = [torch.nn.Parameter(torch.zeros(16)) for _ in range(PARAMETERS)]
    ready = torch.ones(16)

    def forward() -> torch.Tensor:
        token = torch.zeros((), requires_grad=True)
        for parameter in parameters:
            token = HandOut.apply(token, parameter, ready)
        return token

    return parameters, forward


def main() -> None:
    count = ctypes.CDLL(sys.argv[1])
    hvd.init()
    with_hooks, forward = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(with_hooks, lr=0.0),
        named_parameters=[(f"p{i}", p) for i, p in enumerate(with_hooks)],
    )
    optimizer.wait_in_backward = False
    with_none, forward_alone = make()
    for parameter in with_none:
        parameter.register_hook(lambda gradient: None)
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    plain = torch.optim.SGD(with_none, lr=0.0)
    for passed in range(WARM_UPS + 1):
        for name, stepping, run in ((b"hooks", optimizer, forward), (b"empty-hooks", plain, forward_alone)):
            stepping.zero_grad()
            loss = run()
            hvd.barrier()
            if passed == WARM_UPS:
                count.count_section_begin()
            loss.backward()
            if passed == WARM_UPS:
                count.count_section_end(name, PARAMETERS)
            stepping.step()
    hvd.shutdown()


if __name__ == "__main__":
    main()
