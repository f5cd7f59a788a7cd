"""Lists of gradients and of variables that differ between ranks: an error on all of them in every mode, and no wait."""

from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)


def modes(mode):
    """Whether this rank makes a graph."""
    import hvdlite as hvd

    return {"eager": False, "graph": True, "mixed": hvd.rank() == 1}[mode]


def fails(call, *says):
    """An error of TensorFlow's that says all this."""
    import tensorflow as tf

    import hvdlite as hvd

    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        call()
    for each in (f"rank {hvd.rank()}: tensor ", *says):
        assert each in str(caught.value), str(caught.value)


@pytest.mark.parametrize("mode", ["eager", "graph", "mixed"])
@as_ranks(2, deadline=240)
def test_gradients_that_not_all_ranks_have(mode):
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank, graph = hvd.rank(), modes(mode)
    made = [tf.Variable([float(i), 1.0], name=f"v{i}") for i in range(3)]

    def tape_of(sources, used):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each) for each in used])
        return hvd.DistributedGradientTape(tape).gradient(loss, sources)

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(made)

    def apply(count):
        optimizer.apply_gradients([(tf.ones(2), each) for each in made[:count]])

    def as_asked(call):
        return tf.function(call) if graph else call

    fewer, whole = made[: 3 - rank], "rank 0: 3 gradients (..., v2)"
    fails(as_asked(lambda: tape_of(fewer, fewer)), whole, "rank 1: 2 gradients (...)", "freeze")
    assert [float(each[0]) for each in as_asked(lambda: tape_of(made, made))()] == [1, 1, 1]
    fails(as_asked(lambda: tape_of(made, fewer)), whole, "rank 1: 2 gradients (..., v2 without gradient)")
    other = tf.Variable(1.0)  # the only rank without any gradient has a list, too
    fails(as_asked(lambda: tape_of(made, made if rank == 0 else [other])), "rank 0: 3 gradients", "rank 1: 0 gradients")
    fails(as_asked(lambda: apply(3 - rank)), "DistributedOptimizer.list", whole, "rank 1: 2 gradients (...)")
    as_asked(lambda: apply(3))()
    for i, each in enumerate(made):
        np.testing.assert_allclose(each, [i - 0.1, 0.9], rtol=1e-6)


@as_ranks(3, deadline=240)
def test_ranks_with_one_list_are_told_once_and_others_go_on_in_their_set():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    made = [tf.Variable([1.0], name=f"layer_{i}/kernel") for i in range(60)]
    count = 60 - (rank == 1)
    for graph in (False, True):

        def send(count=count):
            hvd.broadcast_variables(made[:count], root_rank=0)

        call = tf.function(send) if graph else send
        fails(call, "rank 0: 60 variables (..., kernel float32[1])", "rank 1: 59 variables (...)", "and 1 other rank\n")
    pair = hvd.add_process_set([1, 2])
    if rank > 0:

        def send_pair():
            hvd.broadcast_variables(made[:rank], root_rank=1, process_set=pair)

        fails(tf.function(send_pair) if rank == 1 else send_pair, "rank 1: 1 variables (...)", "rank 2: 2 variables")
    hvd.remove_process_set(pair)


@pytest.mark.parametrize("mode", ["eager", "graph", "mixed"])
@as_ranks(2, deadline=240)
def test_variables_of_other_numbers_and_shapes(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank, graph = hvd.rank(), modes(mode)
    made = [tf.Variable(np.full(2, rank, np.float32), name=name) for name in ("alpha", "beta", "gamma")]
    odd = [made[0], tf.Variable(np.zeros(2 + rank, np.float32), name="delta")]

    def send(variables):
        call = lambda: hvd.broadcast_variables(variables, root_rank=1)  # noqa: E731
        (tf.function(call) if graph else call)()

    fails(lambda: send(made[: 2 + rank]), "rank 0: 2 variables (...)", "rank 1: 3 variables (..., gamma float32[2])")
    fails(
        lambda: send(odd), "rank 0: 2 variables (..., delta float32[2])", "(..., delta float32[3])", "optimizer.build"
    )
    send(made)
    assert [float(each[0]) for each in made] == [1, 1, 1]


@as_ranks(2, deadline=240)
def test_lists_in_a_session():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        made = [v1.get_variable(name, initializer=np.ones(2, np.float32)) for name in ("a", "b", "c")]
        losses = [tf.reduce_sum(each * (rank + 1.0)) for each in made]
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
        wrong = optimizer.minimize(tf.add_n(losses), var_list=made[: 3 - rank])
        send = hvd.broadcast_variables(made[: 2 + rank], root_rank=0)
        both = [
            optimizer.minimize(losses[0], var_list=made[:1]),
            optimizer.minimize(losses[1] * 10, var_list=made[1:2]),
        ]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            fails(lambda: session.run(wrong), "rank 0: 3 gradients (..., c)", "rank 1: 2 gradients (...)")
            fails(lambda: session.run(send), "rank 0: 2 variables (...)", "rank 1: 3 variables (..., c float32[2])")
            for _ in range(10):  # two steps of one optimizer at a time, whose lists look alike
                session.run(both)
            a, b, c = session.run(made)
    np.testing.assert_allclose([a[0], b[0], c[0]], [1 - 10 * 0.75, 1 - 10 * 7.5, 1], rtol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "graph", "mixed"])
@as_ranks(3, deadline=240)
def test_while_a_rank_has_joined_each_shows_its_own_list(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank, graph = hvd.rank(), modes(mode)
    made = [tf.Variable([1.0], name=name) for name in ("alpha", "größe" * 60)][: 1 + rank % 2]

    def send():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each) for each in made])
        return hvd.DistributedGradientTape(tape).gradient(loss, made)

    if rank < 2:
        own = ["rank 0: 1 gradients (alpha)", "rank 1: 2 gradients (alpha, größe"][rank]
        fails(tf.function(send) if graph else send, own, "another rank has joined", "are not available", "freeze")
    hvd.join()
    assert len(hvd.allgather_object(rank)) == 3


@as_ranks(2, deadline=240)
def test_a_name_too_long_to_show_is_cut_between_two_letters():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    for cut in range(3):  # each of the three bytes of a letter is where the text ends
        made = [tf.Variable(np.ones(1 + hvd.rank()), name="x" * cut + "漢" * 1500)]
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            tf.function(lambda made=made: hvd.broadcast_variables(made, 0))()
        assert "漢" in str(caught.value) and "\ufffd" not in str(caught.value)
