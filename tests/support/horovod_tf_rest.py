"""A test file as users of Horovod would have it: what is around TensorFlow's collectives; nothing knows of hvdlite.

Run by test_tf_as_horovod.py under `hvdlite-run --as-horovod` on 1 to 4 ranks: questions, process sets, join,
compression, objects, tapes, optimizers of TensorFlow 1.
"""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.tensorflow.mpi_ops import rank_op
from horovod.tensorflow.util import _executing_eagerly

hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
MEAN = (SIZE + 1) / 2  # of rank + 1


def both(function):
    return function, tf.function(function)


def in_session(build):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        built = build()
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(built)


def test_questions_follow_init_and_shutdown():
    questions = {
        hvd.rank_op: RANK, hvd.size_op: SIZE, hvd.local_rank_op: RANK, hvd.local_size_op: SIZE,
        hvd.process_set_included_op: 1,
    }  # fmt: skip
    assert rank_op is hvd.rank_op and _executing_eagerly()
    for question, answer in questions.items():
        asked = tf.function(question)
        assert question().numpy() == asked().numpy() == in_session(lambda q=question: q(name="asked")) == answer
        hvd.shutdown()
        try:
            with pytest.raises(tf.errors.FailedPreconditionError):
                asked()
        finally:
            hvd.init(process_sets="dynamic")
        assert asked() == answer


@pytest.mark.skipif(SIZE == 1, reason="there is one process set")
def test_process_sets():
    sets = [add_process_set([0]), *[add_process_set(ProcessSet([rank])) for rank in range(1, SIZE)]]
    mine, other, x = sets[RANK], sets[RANK - 1], tf.fill([3, 2], float(RANK))
    for question in (hvd.size_op, hvd.process_set_included_op):
        assert question(process_set_id=mine.process_set_id).numpy() == 1
        assert in_session(lambda q=question: q(mine.process_set_id)) == 1
    asked = tf.function(lambda: hvd.process_set_included_op(other.process_set_id))
    assert asked() == 0
    calls = [
        hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter,
        lambda x, process_set: hvd.broadcast(x, process_set.ranks[0], process_set=process_set),
        lambda x, process_set: hvd.grouped_allreduce([x], process_set=process_set)[0],
        lambda x, process_set: hvd.grouped_allgather([x], process_set=process_set)[0],
        lambda x, process_set: hvd.grouped_reducescatter([x], process_set=process_set)[0],
    ]  # fmt: skip
    for call in calls:
        for run in both(lambda x, call=call: call(x, process_set=mine)):
            np.testing.assert_array_equal(run(x), x)
        for run in both(lambda x, call=call: call(x, process_set=other)):
            with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
                run(x)
    v = tf.Variable(x)
    with tf.GradientTape(persistent=True) as tape:
        y = tf.reduce_sum(hvd.allreduce(v, op=hvd.Sum, process_set=mine) * (RANK + 1.0))
    assert (tape.gradient(y, v).numpy() == RANK + 1).all()
    hvd.broadcast_variables([v], RANK, process_set=mine)
    assert hvd.broadcast_object(RANK, RANK, process_set=mine) == RANK
    assert hvd.allgather_object(4, process_set=mine) == [4]
    assert all(remove_process_set(each) for each in reversed(sets))
    assert hvd.remove_process_set(global_process_set) is False
    with pytest.raises(ValueError):
        hvd.allreduce(x, process_set=mine)
    with pytest.raises(tf.errors.InvalidArgumentError):
        asked()


def test_join():
    for run in both(lambda x: hvd.allreduce(x, op=hvd.Average)):
        if RANK == 0:
            np.testing.assert_array_equal(run(tf.ones(3)), np.full(3, 1 / SIZE, "float32"))
        assert hvd.join().numpy() == 0
    for run in both(lambda x: hvd.broadcast(x, 0)):
        if RANK == 0:
            with pytest.raises(tf.errors.FailedPreconditionError):
                run(tf.ones(3))
        hvd.join()


def test_compression():
    for name in ("float16", "float32", "float64", "int32", "uint8"):
        x = tf.cast([1, 2, 3], name)
        for kind in (hvd.Compression.fp16, hvd.Compression.none):
            small, dtype = kind.compress(x)
            narrow = kind is hvd.Compression.fp16 and name.startswith("float")
            assert small.dtype == (tf.float16 if narrow else name)
            np.testing.assert_array_equal(kind.decompress(small, dtype), x)
            for run in both(lambda x, kind=kind: hvd.allreduce(x, op=hvd.Sum, compression=kind)):
                assert run(x).dtype == name and run(x)[2] == 3 * SIZE
    assert in_session(lambda: hvd.allreduce(tf.ones(2), compression=hvd.Compression.fp16)).dtype == np.float32


def test_objects():
    wanted = {"hello": 123, 0: [1, 2]}
    mine = wanted if RANK == 0 else {}
    assert hvd.broadcast_object(mine, root_rank=0) == wanted
    assert hvd.allgather_object({"rank": RANK}) == [{"rank": rank} for rank in range(SIZE)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert hvd.broadcast_object(mine, root_rank=0, session=session) == wanted
        assert hvd.broadcast_object_fn(root_rank=0, session=session)(mine) == wanted
        assert hvd.allgather_object(RANK, session=session) == list(range(SIZE))


def test_tapes():
    v = tf.Variable([1.0, 2.0])
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        y = tf.reduce_sum(v * v) * (RANK + 1)
    wanted = np.array([2 * MEAN, 4 * MEAN])
    np.testing.assert_allclose(tape.gradient(y, v), wanted)
    np.testing.assert_allclose(tape.gradient(y, {"v": [v]})["v"][0], wanted)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(v * v) * (tf.cast(hvd.rank_op(), tf.float32) + 1)
        taped = hvd.DistributedGradientTape(tape, device_dense="/cpu:0", op=hvd.Sum)
        return taped.gradient(y, [v], use_generic_names=True)[0]

    np.testing.assert_allclose(step(), wanted * SIZE)
    with tf.GradientTape(persistent=True) as tape:
        y = v * v * (RANK + 1.0)
    tape = hvd.DistributedGradientTape(tape)
    np.testing.assert_allclose(tape.jacobian(y, v), np.diag(wanted))
    np.testing.assert_array_equal(tape.watched_variables()[0], v)
    layers = [tf.keras.layers.Dense(2), tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential(layers)
    model.build((None, 4))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(model(tf.ones([2, 4]))) * (RANK + 1.0)
    found = hvd.PartialDistributedGradientTape(tape, local_layers=layers[1:]).gradient(y, model.trainable_variables)
    np.testing.assert_allclose(found[3], np.full(3, 2 * (RANK + 1.0) / SIZE))


@pytest.mark.parametrize("passes", [1, 2])
def test_optimizers_of_tensorflow_1(passes):
    forms = [{}, {"op": hvd.Sum}, {"op": hvd.Adasum}, {"compression": hvd.Compression.fp16}, {"num_groups": 1}]
    if SIZE & (SIZE - 1):
        forms.remove({"op": hvd.Adasum})  # which is for a power of two ranks
    for terms in forms:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            v = tf.compat.v1.get_variable("v", initializer=[4.0, 4.0])
            plain = tf.compat.v1.train.MomentumOptimizer(1.0, 0.0)
            optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes, **terms)
            pairs = optimizer.compute_gradients(tf.reduce_sum(v) * (tf.cast(hvd.rank_op(), tf.float32) + 1))
            train = optimizer.apply_gradients(pairs)
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(passes):
                session.run(train)
            moved = MEAN * passes * (SIZE if terms.get("op") == hvd.Sum else 1)
            np.testing.assert_allclose(session.run(v), [4 - moved] * 2, rtol=1e-5, err_msg=str(terms))
            assert optimizer.get_slot(v, "momentum") is not None and optimizer.variables()
