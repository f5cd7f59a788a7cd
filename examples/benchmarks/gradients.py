"""The 161 gradients of a ResNet-50 (102 MB of float32), submitted at once: how long until all are summed?

    hvdlite-run -np 2 python examples/benchmarks/gradients.py --library hvdlite     # or gloo, horovod
    python examples/benchmarks/run_all.py --only gradients                          # beside each other

They lie in ordinary memory, and with hvdlite also in plane memory (hvd.empty), which moves without a copy. All are
written anew before each time, as backward does, which is not counted. Beside the 161, one tensor of as many bytes. What
counts is the slower rank of each iteration; sums are checked in every one.
"""

import math

import torch

from libraries import asked, library
from measure import report, timed_us

ITERATIONS = {"full": (3, 12), "quick": (3, 5), "tiny": (1, 2)}  # to warm up, counted


def resnet50_shapes() -> "list[tuple[int, ...]]":
    """Shapes of the parameters of a ResNet-50, first layer first: convolutions, then batch norms' weight and bias."""

    def convolution(out: int, into: int, size: int) -> "list[tuple[int, ...]]":
        return [(out, into, size, size), (out,), (out,)]

    shapes = convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, into, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:  # the shortcut changes the number of channels
                shapes += convolution(4 * width, into, 1)
            into = 4 * width
    shapes += [(1000, 2048), (1000,)]
    assert len(shapes) == 161 and sum(map(math.prod, shapes)) == 25_557_032
    return shapes


def iterate(lib, gradients: "list[torch.Tensor]", prefix: str, times: int) -> "list[float]":
    """Milliseconds of each time, of the slower rank."""

    def all_of_them() -> None:
        handles = [lib.start(gradient, f"{prefix}.{i}") for i, gradient in enumerate(gradients)]
        for handle in handles:
            lib.finish(handle)

    taken = []
    for _ in range(times):
        for gradient in gradients:
            gradient.fill_(lib.rank + 1.0)
        lib.barrier()
        taken.append(timed_us(all_of_them) / 1000)
        expected = lib.size * (lib.size + 1) / 2
        assert all(gradient.view(-1)[[0, -1]].eq(expected).all() for gradient in gradients), "a wrong sum"
    return [max(of_ranks) for of_ranks in zip(*lib.gather(taken))]


def main() -> None:
    args = asked("Summing the gradients of a ResNet-50.")
    lib, shapes = library(args.library), resnet50_shapes()
    elements = sum(map(math.prod, shapes))
    if args.patience == "tiny":
        shapes, elements = shapes[:5], 1000
    rivals = [
        ("161 gradients of ResNet-50", args.library, [torch.empty(shape) for shape in shapes]),
        ("one tensor of 102 MB", args.library, [torch.empty(elements)]),
    ]
    if lib.plane_memory((1,)) is not None:
        column = f"{args.library}, plane memory"
        rivals.append((rivals[0][0], column, [lib.plane_memory(shape) for shape in shapes]))
        rivals.append((rivals[1][0], column, [lib.plane_memory((elements,))]))
    warm_up, counted = ITERATIONS[args.patience]
    for number, (work, column, gradients) in enumerate(rivals):
        taken = iterate(lib, gradients, f"g{number}", warm_up + counted)[warm_up:]
        if lib.rank == 0:
            report(work, column, "ms", taken)
    lib.close()


if __name__ == "__main__":
    main()
