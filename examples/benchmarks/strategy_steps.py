"""How long is a step under hvd.Strategy, beside TensorFlow's own MultiWorkerMirroredStrategy?

    hvdlite-run -np 2 python examples/benchmarks/strategy_steps.py [--rounds 100]

The same ranks have both strategies and train the same model over both, step by step in turns, so that both see the same
machine. Prints for each model the medians in milliseconds and their ratio; below 1.0, hvdlite is the faster one.
"""

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import hvdlite

MODELS = ((24, 64), (80, 64), (8, 512), (4, 1024))  # layers, width


def of_tensorflow() -> Any:
    """TensorFlow's own strategy, of the workers that the ranks are. It must be the first that TensorFlow makes."""
    import tensorflow as tf

    with socket.create_server(("127.0.0.1", 0)) as held:
        ports = hvdlite.allgather_object(held.getsockname()[1])
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": hvdlite.rank()}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def of_hvdlite() -> Any:
    """hvdlite's, which refuses to be the second in a process: what it looks at is reset here, for a comparison only."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    import hvdlite.tensorflow as hvd

    context.context()._collective_leader = None
    with tf.device(f"/job:worker/replica:0/task:{hvd.rank()}/device:CPU:0"):
        return hvd.Strategy()


def step_of(strategy: Any, layers: int, width: int) -> tuple[Callable[[], Any], int, float]:
    """A compiled step of a model of dense layers, how many variables it has, and their megabytes."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        dense = [keras.layers.Dense(width, activation="tanh") for _ in range(layers)]
        model = keras.Sequential([keras.layers.Input((width,)), *dense])
        optimizer = keras.optimizers.SGD(0.01)
    rows = tf.ones((16, width))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(rows) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return tf.function(lambda: strategy.run(step)), 2 * layers, 4e-6 * model.count_params()


def main() -> None:
    """Measure, and print a line for each model on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    hvdlite.init()
    strategies = of_tensorflow(), of_hvdlite()
    for layers, width in MODELS:
        made = [step_of(strategy, layers, width) for strategy in strategies]
        times: list[list[float]] = [[], []]
        for _ in range(options.rounds + 5):
            for (step, _, _), seen in zip(made, times):
                begun = time.perf_counter()
                step()
                seen.append(1e3 * (time.perf_counter() - begun))
        theirs, ours = (statistics.median(seen[5:]) for seen in times)
        if hvdlite.rank() == 0:
            print(
                f"{made[0][1]} variables, {made[0][2]:.1f} MB: TensorFlow {theirs:.1f} ms, hvdlite {ours:.1f} ms, "
                f"ratio {ours / theirs:.2f}",
                flush=True,
            )
        hvdlite.barrier()


if __name__ == "__main__":
    main()
