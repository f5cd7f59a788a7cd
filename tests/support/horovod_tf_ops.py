"""A test file as users of Horovod would have it: every collective on TensorFlow, and nothing here knows of hvdlite.

Run by test_tf_as_horovod.py under `hvdlite-run --as-horovod` on 1 to 5 ranks. Each collective runs eagerly, in
tf.function and in a session of TensorFlow 1, with several dtypes and numbers of dimensions.
"""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LAST = SIZE - 1
REDUCED = ["uint8", "float16"]
MOVED = [*REDUCED, "bool"]
FLOATS = ["float16", "float32"]


def numbers(dtype, dims, rank, rows=5):
    """Small whole numbers that differ from rank to rank."""
    values = np.random.RandomState(7 * dims + rank).randint(0, 4, [rows] + [3] * (dims - 1))
    return values.astype(dtype)


def in_session(function, *arrays):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(function(*[tf.constant(array) for array in arrays]))


def each_way(function, *arrays):
    """The results, as arrays: eager, in tf.function, in a session."""
    for run in (function, tf.function(function)):
        found = run(*[tf.constant(array) for array in arrays])
        yield tf.nest.map_structure(lambda each: each.numpy(), found)
    yield in_session(function, *arrays)


def same(found, wanted):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    np.testing.assert_allclose(found.astype("float64"), wanted.astype("float64"), rtol=1e-3)


def raises(kind, function, *arrays):
    """In each of the three ways."""
    for run in (function, tf.function(function)):
        with pytest.raises(kind):
            run(*[tf.constant(array) for array in arrays])
    with pytest.raises(kind):
        in_session(function, *arrays)


@pytest.mark.parametrize("dtype", REDUCED)
def test_allreduce(dtype):
    for dims in (1, 3):
        given = [numbers(dtype, dims, rank) for rank in range(SIZE)]
        total = np.sum(given, 0).astype(dtype)
        ops = {"Sum": total, "Min": np.min(given, 0), "Max": np.max(given, 0)}
        ops["Product"] = np.prod(given, 0).astype(dtype)
        if dtype in FLOATS or dims == 1:
            ops["Average"] = (total / SIZE).astype(dtype)
        for op, wanted in ops.items():
            for found in each_way(lambda x, op=op: hvd.allreduce(x, op=getattr(hvd, op)), given[RANK]):
                same(found, wanted)
        for found in each_way(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum), given[RANK]):
            same(found[0], total)
            same(found[1], total)


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_allreduce_with_factors(dtype):
    given = [numbers(dtype, 2, rank) for rank in range(SIZE)]
    halves = sum((np.trunc(each * 0.5) if "int" in dtype else each * 0.5) for each in given).astype(dtype)
    for found in each_way(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5), given[RANK]):
        same(found, halves)
    total = np.sum(given, 0)
    for found in each_way(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5), given[RANK]):
        same(found, (np.trunc(total * 0.5) if "int" in dtype else total * 0.5).astype(dtype))


def test_allreduce_of_the_old_argument_and_of_what_becomes_a_tensor():
    assert hvd.allreduce(tf.constant(3.0), average=False).numpy() == 3 * SIZE
    assert hvd.allreduce(tf.Variable(3.0), average=True).numpy() == 3
    assert hvd.allreduce(np.float32(RANK)).numpy() == (SIZE - 1) / 2
    assert hvd.allreduce(tf.zeros([0, 3]), op=hvd.Sum).shape == (0, 3)
    with pytest.raises(ValueError):
        hvd.allreduce(tf.constant(3.0), average=True, op=hvd.Sum)
    with tf.device("/cpu:0"):
        assert hvd.allreduce(tf.constant([1.0])).numpy() == 1


@pytest.mark.skipif(SIZE == 1, reason="nobody to disagree with")
def test_what_ranks_disagree_about():
    failed = tf.errors.FailedPreconditionError
    taller, flat = np.ones([7 + RANK, 3], "float32"), np.ones([9] if RANK else [3, 3], "float32")
    other, wider = np.ones(7, "int32" if RANK else "float32"), np.ones([6, 3 + RANK], "float32")
    for wrong in (taller, flat, other):
        raises(failed, hvd.allreduce, wrong)
        raises(failed, lambda x: hvd.grouped_allreduce([x, x]), wrong)
        raises(failed, lambda x: hvd.broadcast(x, 0), wrong)
    for wrong in (wider, other, flat):
        raises(failed, hvd.allgather, wrong)
        raises(failed, lambda x: hvd.grouped_allgather([x, x]), wrong)
    for wrong in (wider, other):
        raises(failed, lambda x: hvd.alltoall(x, [1] * SIZE), wrong)
        raises(failed, hvd.reducescatter, wrong)
    raises(failed, lambda x: hvd.broadcast(x, hvd.rank()), np.ones(3, "float32"))
    for wrong in (tf.Variable(taller), tf.Variable(other)):
        with pytest.raises(failed):
            hvd.broadcast_([wrong], 0)
    assert hvd.allreduce(tf.ones(2)).numpy()[0] == 1  # and the job goes on


@pytest.mark.parametrize("dtype", MOVED)
def test_allgather(dtype):
    for dims in (1, 3):
        given = [numbers(dtype, dims, rank, rows=2 + 3 * rank) for rank in range(SIZE)]
        for found in each_way(hvd.allgather, given[RANK]):
            same(found, np.concatenate(given))
        for found in each_way(lambda x: hvd.grouped_allgather([x, x[:1]]), given[RANK]):
            same(found[0], np.concatenate(given))
            same(found[1], np.concatenate([each[:1] for each in given]))
    for found in each_way(hvd.allgather, np.ones([0 if RANK else 3, 2], dtype)):
        assert found.shape == (3, 2)


@pytest.mark.parametrize("dtype", MOVED)
def test_broadcast(dtype):
    for dims in (1, 3):
        for root in range(SIZE):
            wanted = numbers(dtype, dims, root)
            for found in each_way(lambda x, root=root: hvd.broadcast(x, root), numbers(dtype, dims, RANK)):
                same(found, wanted)
            variables = [tf.Variable(numbers(dtype, dims, RANK)), tf.Variable(numbers(dtype, 1, RANK))]
            assert len(hvd.broadcast_(variables, root)) == 2
            same(variables[0].numpy(), wanted)
            same(variables[1].numpy(), numbers(dtype, 1, root))
            variables[0].assign(numbers(dtype, dims, RANK))
            hvd.broadcast_variables(variables, root_rank=root, inplace=dims == 3)
            same(variables[0].numpy(), wanted)


@pytest.mark.parametrize("resource", [True, False])
def test_broadcast_of_variables_in_a_session(resource):
    sends = (
        lambda all_of_them: hvd.broadcast_(all_of_them, LAST),
        lambda all_of_them: hvd.broadcast_variables(all_of_them, LAST, inplace=True),
        lambda all_of_them: hvd.broadcast_variables(all_of_them, LAST),
        lambda _: hvd.broadcast_global_variables(LAST),
    )
    for send in sends:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            made = [
                tf.compat.v1.get_variable(name, initializer=np.full(4, RANK, "float32"), use_resource=resource)
                for name in ("v", "w")
            ]
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(send(made))
            for found in session.run(made):
                np.testing.assert_array_equal(found, np.full(4, LAST))


@pytest.mark.parametrize("dtype", [each for each in MOVED if each != "bool"])
def test_alltoall(dtype):
    for dims in (1, 3):
        mine = np.repeat(np.arange(SIZE), RANK + 1).astype(dtype).reshape([-1] + [1] * (dims - 1))
        splits = np.full(SIZE, RANK + 1, "int32")
        for found, received in each_way(lambda x, splits: hvd.alltoall(x, splits=splits), mine, splits):
            same(found, np.full([SIZE * (SIZE + 1) // 2] + [1] * (dims - 1), RANK, dtype))
            same(received, np.arange(1, SIZE + 1, dtype="int32"))
        for found in each_way(hvd.alltoall, np.repeat(np.arange(SIZE), 2).astype(dtype)):
            same(found, np.full(2 * SIZE, RANK, dtype))
    giver, nothing = np.arange(SIZE).astype(dtype), np.zeros(0, dtype)
    splits = np.full(SIZE, int(RANK == LAST), "int32")
    for found, received in each_way(lambda x, s: hvd.alltoall(x, s), giver if RANK == LAST else nothing, splits):
        assert found == [RANK] and received.sum() == 1
    splits = np.array([int(rank != LAST) for rank in range(SIZE)], "int32")
    for found, _ in each_way(lambda x, s: hvd.alltoall(x, s), np.ones([LAST, 2], dtype), splits):
        assert found.shape == ((0 if RANK == LAST else SIZE, 2))
    for found in each_way(hvd.alltoall, np.zeros([0, 3], dtype)):
        assert found.shape == (0, 3)


def test_alltoall_with_wrong_splits():
    invalid = tf.errors.InvalidArgumentError
    ones = np.ones(SIZE, "float32")
    raises(invalid, lambda x, s: hvd.alltoall(x, s), ones, np.ones(SIZE + 1, "int32"))
    raises(invalid, lambda x, s: hvd.alltoall(x, s), ones[1:], np.ones(SIZE, "int32"))
    raises((invalid, ValueError), lambda x, s: hvd.alltoall(x, s), ones, np.ones(SIZE, "float32"))
    raises(invalid, lambda x, s: hvd.alltoall(x, s), ones, np.ones([1, SIZE], "int32"))
    if SIZE > 1:
        raises(invalid, hvd.alltoall, np.ones(SIZE + 1, "float32"))


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_reducescatter(dtype):
    for dims in (1, 3):
        for rows in (2 * SIZE, 2 * SIZE + 1, 1):
            given = [numbers(dtype, dims, rank, rows) for rank in range(SIZE)]
            wanted = np.array_split(np.sum(given, 0).astype(dtype), SIZE)[RANK]
            for found in each_way(lambda x: hvd.reducescatter(x, op=hvd.Sum), given[RANK]):
                same(found, wanted)
            for found in each_way(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum), given[RANK]):
                same(found[1], wanted)
            if dtype in FLOATS:
                for found in each_way(hvd.reducescatter, given[RANK]):
                    same(found, (wanted / SIZE).astype(dtype))
    raises(tf.errors.InvalidArgumentError, hvd.reducescatter, np.float32(1))
