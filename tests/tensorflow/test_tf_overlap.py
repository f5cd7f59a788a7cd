"""Do gradients travel while backward still runs, inside tf.function and in fit? The timeline tells.

Backward of the first layer waits until the average of the last layer's gradient has come: without overlap it would wait
for ever. The timeline, which the core writes of what it does, must say the same: the last layer's allreduce is over
before the first layer's gradient is even submitted, in each step.
"""

import json
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine
STEPS = 3


class Meeting:
    """`between`: a place in a model whose backward waits until `note` has seen an average."""

    def __init__(self):
        import tensorflow as tf

        arrived, self.waits = threading.Event(), 0

        def wait(gradient):
            assert arrived.wait(60), "no gradient travels before backward is over"
            arrived.clear()
            self.waits += 1
            return gradient

        def seen(average):
            arrived.set()
            return average

        @tf.custom_gradient
        def between(x):
            def backward(gradient):
                waited = tf.numpy_function(wait, [gradient], tf.float32, stateful=False)
                return tf.ensure_shape(waited, gradient.shape)

            return tf.identity(x), backward

        def note(average):
            noted = tf.numpy_function(seen, [average], tf.float32, stateful=False)
            return tf.ensure_shape(noted, average.shape)

        self.between, self.note = between, note


def spans_of(rows):
    """{lane's title: [(submitted, over)]} of each allreduce, in microseconds of this rank's clock."""
    titles = {row["tid"]: row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
    open_, submitted, spans = {}, {}, {}
    for row in rows:
        title = titles.get(row["tid"], "")
        if row["ph"] not in "BE" or not title.startswith("allreduce."):
            continue
        inside = open_.setdefault(title, [])
        if row["ph"] == "B":
            inside.append(row["name"])
            if row["name"] == "NEGOTIATE_ALLREDUCE":
                submitted[title] = row["ts"]
        elif inside.pop() == "ALLREDUCE":
            spans.setdefault(title, []).append((submitted[title], row["ts"]))
    return spans


def overlap_is_in_the_timeline(train):
    """`train` takes STEPS steps of two gradients, 0of2 of the first layer and 1of2 of the last."""
    import hvdlite.tensorflow as hvd

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "line.json"
        hvd.start_timeline(path)
        try:
            train()
        finally:
            hvd.stop_timeline()
        mine = path if hvd.rank() == 0 else Path(f"{path}.rank-{hvd.rank()}.json")
        spans = spans_of(json.loads(mine.read_text()))
    of_first, of_last = ([each for title, each in spans.items() if f".{i}of2." in title] for i in (0, 1))
    assert len(of_first) == len(of_last) == 1, spans
    assert len(of_first[0]) == len(of_last[0]) == STEPS, spans
    for (first_submitted, _), (last_submitted, last_over) in zip(of_first[0], of_last[0]):
        assert last_submitted < last_over < first_submitted, spans


@as_ranks(2)
def test_a_tape_in_a_graph_reduces_the_last_gradient_before_the_first_is_computed():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    meeting, first, last = Meeting(), tf.Variable(tf.ones([2, 3])), tf.Variable(tf.ones([3, 2]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(meeting.between(tf.matmul(x, first)), last))
        one, two = hvd.DistributedGradientTape(tape).gradient(loss, [first, last])
        return one, meeting.note(two)

    def train():
        for number in range(STEPS):
            one, two = step(tf.fill([1, 2], float(hvd.rank() + number)))
            np.testing.assert_array_equal(one, np.full([2, 3], 2 * (0.5 + number)))
            np.testing.assert_array_equal(two, np.full([3, 2], 2 * (0.5 + number)))

    overlap_is_in_the_timeline(train)
    assert meeting.waits == STEPS


@as_ranks(2)
def test_fit_reduces_the_last_gradient_before_the_first_is_computed():
    import keras
    from fitting import the_same_everywhere

    import hvdlite.keras as hvd

    meeting = Meeting()

    class Between(keras.layers.Layer):
        def call(self, x):
            return meeting.between(x)

    class Noting(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen = meeting.note(gradient) if gradient.shape == [3, 2] else gradient
            super().update_step(seen, variable, learning_rate)

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3, use_bias=False, name="first"),
            Between(),
            keras.layers.Dense(2, use_bias=False, name="last"),
        ]
    )
    model.compile(hvd.DistributedOptimizer(Noting(0.1)), "mse")
    x, y = (np.random.RandomState(hvd.rank()).randn(STEPS * 4, width).astype("float32") for width in (4, 2))
    overlap_is_in_the_timeline(lambda: model.fit(x, y, batch_size=4, verbose=0))
    assert meeting.waits == STEPS
    the_same_everywhere(model.get_weights())
