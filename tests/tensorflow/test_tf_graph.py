"""What only graphs have: order, pruning, loops, retracing, few threads, and failures that come out of a node.

All of it with one thread for TensorFlow's nodes, where a node that waits in vain holds up everything.
"""

import logging
import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from ranks import HERE, Job, as_ranks, everything

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine

FRESH_RANKS = True  # one thread for operations must be asked for before TensorFlow does anything in a process


def flights(which=0):
    from hvdlite.tensorflow.ops.kernels import library

    return library().flights(which)


class Said(logging.Handler):
    """What the logger of hvdlite says from now on."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logger = logging.getLogger("hvdlite")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.lines.append((record.levelno, record.getMessage()))


def none_is_left():
    """Waits until every collective of a graph is forgotten: a pruned one is when its last rank has started it."""
    import time

    until = time.monotonic() + 20
    while flights() and time.monotonic() < until:
        time.sleep(0.005)
    assert flights() == 0


@as_ranks(2, deadline=240)
def test_a_result_that_nobody_wants_is_pruned_and_forgotten():
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)  # before anything else in this process
    import hvdlite.tensorflow as hvd

    said = Said()

    @tf.function
    def step(x):
        hvd.allreduce(x, name="unwanted")
        return hvd.allreduce(x * 2, op=hvd.Sum, name="wanted")

    before = flights(1)
    for _ in range(20):
        assert step(tf.ones(5))[0] == 4
    assert flights(1) == before + 40
    assert len(said.lines) == 1 and "without holding a thread" in said.lines[0][1]  # once, when the library is opened
    none_is_left()


@as_ranks(2, deadline=240)
def test_a_constant_and_the_same_tensor_twice_are_sent_each_time():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    @tf.function
    def step():
        x = tf.constant([1.0, 2.0])
        return hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, op=hvd.Sum)

    before = flights(1)
    for _ in range(3):
        one, two = step()
        np.testing.assert_array_equal(one, [2, 4])
        np.testing.assert_array_equal(two, [2, 4])
    assert flights(1) == before + 6


@as_ranks(2, deadline=240)
def test_an_allreduce_works_in_the_memory_of_a_tensor_that_no_other_node_reads():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    places = []

    def note(x):
        places.append(np.asarray(memoryview(x)).ctypes.data)

    def reduced(x):
        with tf.control_dependencies([tf.py_function(note, [x], [])]):
            return hvd.allreduce(tf.identity(x), op=hvd.Sum)

    @tf.function
    def alone(v):
        return reduced(v * 2)

    @tf.function
    def shared(v):
        x = v * 2
        return reduced(x), x, reduced(v)

    v = tf.Variable(tf.range(1000.0) + hvd.rank())
    mine, total = v.numpy(), np.arange(1000.0) * 2 + 1
    for _ in range(3):
        result = alone(v)
        note(result)
        np.testing.assert_array_equal(result, total * 2)
        assert places[-1] == places[-2]
        result, x, of_variable = shared(v)
        np.testing.assert_array_equal(result, total * 2)
        np.testing.assert_array_equal(x, mine * 2)
        np.testing.assert_array_equal(of_variable, total)
        np.testing.assert_array_equal(v, mine)


@as_ranks(2, deadline=240)
def test_one_rank_alone_traces_again():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def step(batch):
        mean = tf.reduce_mean(batch)
        first = hvd.allreduce(mean, op=hvd.Sum)
        return first + inner(mean) + inner(mean * 2) + hvd.allreduce(mean, op=hvd.Sum)

    for number in range(6):
        rows = 3 if hvd.rank() == 0 and number == 4 else 8  # rank 0's batch 4 is smaller
        assert step(tf.fill([rows, 2], 1.0)).numpy() == 5.0 * hvd.size()
    assert step.experimental_get_tracing_count() == (2 if hvd.rank() == 0 else 1)
    none_is_left()


@as_ranks(2, deadline=240)
def test_iterations_of_a_loop_run_ahead_and_meet_their_like():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    scale = float(hvd.rank() + 1)

    @tf.function
    def looped():
        def body(i, found):
            here = hvd.allreduce(tf.fill([4], tf.cast(i, tf.float32) * scale), op=hvd.Sum)
            return i + 1, found.write(i, here)

        start = tf.TensorArray(tf.float32, 30)
        return tf.while_loop(lambda i, _: i < 30, body, (0, start), parallel_iterations=10)[1].stack()

    for _ in range(5):
        np.testing.assert_array_equal(looped()[:, 0], [3.0 * i for i in range(30)])
    none_is_left()


@as_ranks(2, deadline=240)
def test_a_branch_that_all_take():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    @tf.function
    def step(x, which):
        if which:  # noqa: SIM108  (autograph makes tf.cond of it)
            y = hvd.allreduce(x, op=hvd.Sum)
        else:
            y = hvd.allgather(x)[:2] * 10
        return y

    for which in (True, False, True):
        np.testing.assert_array_equal(step(tf.ones(2), tf.constant(which)), [2, 2] if which else [10, 10])


@as_ranks(2, deadline=240)
def test_a_wait_that_holds_its_thread_is_right_too():
    """What is left where std::function is laid out otherwise. Last of what needs no failure: it cannot be undone."""
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite.tensorflow.ops.kernels import library, log_how_it_waits

    said = Said()
    assert library().asynchronous
    log_how_it_waits(library())
    library().native.hvd_tf_asynchronous(1)
    assert not library().asynchronous
    log_how_it_waits(library())
    assert [level for level, _ in said.lines] == [logging.INFO, logging.WARNING]
    assert "without holding a thread" in said.lines[0][1] and "hold a thread while they wait" in said.lines[1][1]

    @tf.function
    def step(x):
        return hvd.grouped_allreduce([x, x * 2, x * 3], op=hvd.Sum), hvd.allgather(x)

    for _ in range(20):
        (one, two, three), rows = step(tf.ones(2))
        np.testing.assert_array_equal(tf.concat([one, two, three, rows], 0), [2, 2, 4, 4, 6, 6, 1, 1, 1, 1])
    none_is_left()


@as_ranks(2, deadline=240)
def test_failures_are_tensorflows_name_rank_and_tensor_and_leave_the_job_working():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def shapes(x):
        return hvd.allreduce(x, name="differs")

    for function in (shapes, tf.function(shapes)):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"differs") as caught:
            function(tf.ones(3 + hvd.rank()))
        assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"root"):
            tf.function(lambda: hvd.broadcast(tf.ones(2), hvd.rank(), name="roots"))()
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"greater than the first dimension|do not fit|splits"):
            tf.function(lambda: hvd.alltoall(tf.ones(2), [5, 5], name="splits"))()
        assert function(tf.ones(3))[0] == 1
    with pytest.raises(tf.errors.FailedPreconditionError, match="differs") as caught:
        shapes(tf.ones(3 + hvd.rank()))
    assert isinstance(caught.value, hvd.HvdMismatchError)
    with pytest.raises(ValueError, match="complex64"):
        tf.function(lambda: hvd.allreduce(tf.ones(2, tf.complex64)))()
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one dimension"):
        hvd.allgather(1.0)
    none_is_left()


@pytest.mark.parametrize("threads", ["1", *everything("2")])
def test_few_threads_starve_no_collective(threads):
    """A deadlock shows in the first steps; starving.py takes their number, for a longer run by hand."""
    with Job(2, [sys.executable, str(HERE / "starving.py"), threads, "100"], "--start-timeout", "120") as job:
        assert job.wait(240) == 0, job.text()
        assert f"{threads} threads, 100 steps" in job.text() and "none left" in job.text()


ABSENT = """
import sys, time
import tensorflow as tf, hvdlite.tensorflow as hvd
from hvdlite.tensorflow.ops.kernels import library
hvd.init()
if "block" in sys.argv:
    library().native.hvd_tf_asynchronous(1)
for _ in range(10 * (hvd.rank() == 0)):  # the other's join takes longer than the limit
    time.sleep(0.2)
    hvd.allreduce(tf.ones(4), name="trained")
tf.function(hvd.join)()

@tf.function
def step(x):
    return hvd.allreduce(x, name="gradient")

if hvd.rank() == 1:
    time.sleep(600)
try:
    step(tf.ones(4))
except tf.errors.DeadlineExceededError as error:
    print("said", error.message, flush=True)
    raise
"""


@pytest.mark.parametrize("way", ["move", *everything("block")])
def test_a_graph_waits_no_longer_than_the_limit(way):
    command = [sys.executable, "-c", ABSENT, way]
    with Job(2, command, "--start-timeout", "120", "--collective-timeout", "1") as job:
        assert job.wait(240) != 0
        said = re.findall(
            r"^\[(\d)\]<stdout>:.*nothing has moved for 1 s .*: '(\S+)' was submitted by rank 0", job.text(), re.M
        )
        assert said == [("0", "allreduce.gradient")], job.text()


DEATH = """
import os, signal, sys
import tensorflow as tf, hvdlite.tensorflow as hvd
hvd.init()

@tf.function
def step(x):
    return [hvd.allreduce(x + i, name=f"last.{i}") for i in range(8)]

try:
    step(tf.ones(4))  # as it ends here, rank 1 may be lost already
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(tf.ones(4))
except tf.errors.UnknownError as error:
    print("all waits ended:", error.message, flush=True)
    sys.exit(7)
"""


def test_a_dead_rank_ends_every_wait_of_a_graph_and_is_named():
    with Job(2, [sys.executable, "-c", DEATH], "--start-timeout", "120") as job:
        assert job.wait(240) != 0
        assert "all waits ended:" in job.text() and "rank 1" in job.text().split("all waits ended:")[1], job.text()
