"""What collectives cost inside tf.function, and the 161 gradients of a ResNet-50 from TensorFlow beside PyTorch's.

    python examples/benchmarks/tensorflow_ops.py                        # one rank: a collective over an identity node
    hvdlite-run -np 2 python examples/benchmarks/tensorflow_ops.py      # two: the gradients as well

The first work is a function of 100 allreduces of 16 floats, one after the other, and another with identity nodes in
their place: the difference, in microseconds for each. The second starts and awaits 161 allreduces in one function; the
slower rank's times in milliseconds, by turns with hvdlite.torch in the same process. The third is a training step of
as many variables: how much longer it takes than the same step without communication, in milliseconds.
"""

import argparse

import tensorflow as tf
import torch
from gradients import resnet50_shapes

import hvdlite.tensorflow as hvd
import hvdlite.torch as in_torch
from measure import PATIENCE, report, timed_us

NODES = 100
TIMES = {"full": (20, 300, 12), "quick": (10, 100, 5), "tiny": (1, 2, 1)}  # to warm up, calls, steps


def chain(node):
    """A function of many nodes in a row."""

    @tf.function(autograph=False)
    def function(x):
        for number in range(NODES):
            x = node(x, number) + 1.0
        return x

    return function


def cost_of_a_node(warm_up: int, times: int) -> "list[float]":
    """Microseconds that an allreduce takes beyond an identity node."""
    reduced = chain(lambda x, number: hvd.allreduce(x, name=f"node.{number}"))
    plain = chain(lambda x, _: tf.identity(x))
    x = tf.ones(16)
    for _ in range(warm_up):
        reduced(x), plain(x)
    return [(timed_us(lambda: reduced(x)) - timed_us(lambda: plain(x))) / NODES for _ in range(times)]


def gradients(shapes, warm_up: int, times: int) -> "dict[str, list[float]]":
    """Milliseconds of a step's reduction, of the slower rank."""
    ours = [tf.ones(shape) for shape in shapes]
    theirs = [torch.ones(shape) for shape in shapes]

    @tf.function(autograph=False)
    def step(*tensors):
        return [hvd.allreduce(each, name=f"tf.{i}", op=hvd.Sum)[..., :1] for i, each in enumerate(tensors)]

    def step_of_torch():
        handles = [in_torch.allreduce_async(each, name=f"torch.{i}", op=hvd.Sum) for i, each in enumerate(theirs)]
        for handle in handles:
            in_torch.synchronize(handle)

    taken = {"tf.function": [], "hvdlite.torch": []}
    for number in range(warm_up + times):
        for name, work in (("tf.function", lambda: step(*ours)), ("hvdlite.torch", step_of_torch)):
            hvd.barrier()
            of_ranks = hvd.allgather_object(timed_us(work) / 1000)
            if number >= warm_up:
                taken[name].append(max(of_ranks))
    return taken


def step_over_compute(shapes, warm_up: int, times: int) -> "list[float]":
    """Milliseconds that a step takes beyond one whose gradients stay local, of the slower rank."""
    variables = [tf.Variable(tf.ones(shape)) for shape in shapes]
    scale = 1.0 + hvd.rank()  # hvdlite warns of ranks with equal gradients

    def step_of(taped):
        @tf.function(autograph=False)
        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(each * each) for each in variables]) * scale
            for variable, gradient in zip(variables, taped(tape).gradient(loss, variables)):
                variable.assign_sub(1e-3 * gradient)

        return step

    local, averaged = step_of(lambda tape: tape), step_of(hvd.DistributedGradientTape)
    taken = []
    for _ in range(warm_up + times):
        slower = []
        for step in (local, averaged):
            hvd.barrier()
            slower.append(max(hvd.allgather_object(timed_us(step) / 1000)))
        taken.append(slower[1] - slower[0])
    return taken[warm_up:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Collectives inside tf.function.")
    parser.add_argument("--patience", choices=PATIENCE, default="full")
    patience = parser.parse_args().patience
    hvd.init()
    warm_up, times, steps = TIMES[patience]
    values = cost_of_a_node(warm_up, times)
    if hvd.rank() == 0:
        report(f"allreduce in tf.function, {hvd.size()} ranks", "over an identity node", "us", values)
    if hvd.size() > 1:
        shapes = resnet50_shapes()[: 5 if patience == "tiny" else None]
        for column, found in gradients(shapes, min(warm_up, 3), steps).items():
            if hvd.rank() == 0:
                report("161 gradients of ResNet-50", column, "ms", found)
        found = step_over_compute(shapes, min(warm_up, 5), steps)
        if hvd.rank() == 0:
            report("a training step of 161 variables", "over compute", "ms", found)


if __name__ == "__main__":
    main()
