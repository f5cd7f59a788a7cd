"""What the hook of one gradient costs in Python, beyond a hook that does nothing.

    hvdlite-run -np 2 python examples/benchmarks/hook.py --library hvdlite     # or horovod

A backward pass that computes nothing hands ready-made gradients of 16 elements to 400 parameters, by turns with the
hooks of a distributed optimizer and with empty ones. Timed from the first parameter's hook to the last one's, per
parameter: once by the clock, in which the engine's thread competes for the processors, and once as processor time of
the thread that runs backward. The slower rank's figures.
"""

import time

import torch

from libraries import NAMES, asked, library
from measure import report, slower_rank, spread

PARAMETERS = 400
PASSES = {"full": 60, "quick": 30, "tiny": 2}


class HandOut(torch.autograd.Function):
    """Passes a token on; backward gives its parameter a gradient that was ready before."""

    @staticmethod
    def forward(ctx, token, parameter, ready):
        ctx.ready = ready
        return token.clone()

    @staticmethod
    def backward(ctx, token):
        return token, ctx.ready, None


class Model(torch.nn.Module):
    """Parameters without a computation, and the times of the first and the last hook of each backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(16)) for _ in range(PARAMETERS)])
        self.ready = torch.ones(16)
        self.first = self.last = (0, 0)

    def watch(self) -> None:
        """After the optimizer, so that its hooks have run when these do."""
        self.layers[-1].register_post_accumulate_grad_hook(lambda parameter: self.tick("first"))
        self.layers[0].register_post_accumulate_grad_hook(lambda parameter: self.tick("last"))

    def tick(self, which: str) -> None:
        setattr(self, which, (time.perf_counter_ns(), time.thread_time_ns()))

    def backward(self) -> "tuple[float, float]":
        """Microseconds between the two, by the clock and of this thread."""
        token = torch.zeros((), requires_grad=True)
        for parameter in self.layers:
            token = HandOut.apply(token, parameter, self.ready)
        token.backward()
        return (self.last[0] - self.first[0]) / 1000, (self.last[1] - self.first[1]) / 1000


def main() -> None:
    args = asked("The cost of a gradient's hook.", [name for name in NAMES if name != "gloo"])
    torch.set_num_threads(1)
    lib, empty, hooked = library(args.library), Model(), Model()
    for parameter in empty.layers:
        parameter.register_hook(lambda gradient: None)
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    _, optimizer = lib.distribute(hooked, torch.optim.SGD(hooked.parameters(), lr=0.0))
    empty.watch()
    hooked.watch()
    taken: dict = {empty: [], hooked: []}
    for passed in range(10 + PASSES[args.patience]):
        for model in (empty, hooked):
            model.zero_grad()
            lib.barrier()
            times = model.backward()
            if model is hooked:
                optimizer.synchronize()
            if passed >= 10:
                taken[model].append(times)
    for which, work in enumerate(("gradient hook, by the clock", "gradient hook, its thread's processor time")):
        nothing = spread([times[which] for times in taken[empty]])[1]
        values = [(times[which] - nothing) / (PARAMETERS - 1) for times in taken[hooked]]
        slower = slower_rank(lib, values)
        if lib.rank == 0:
            report(work, args.library, "us", slower)
    lib.close()


if __name__ == "__main__":
    main()
