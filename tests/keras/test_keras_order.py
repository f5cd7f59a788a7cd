"""Layers that ranks make in different orders: an error before values get to another variable; their numbers are not."""

import re
from importlib.util import find_spec

import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def branches(names, made=None):
    """A model of layers of one shape, in the order of the names; made: the order in which they get no names."""
    import keras

    given = keras.layers.Input((4,))
    layers = {name: keras.layers.Dense(2, name=None if made else name) for name in made or names}
    return keras.Model(given, keras.layers.concatenate([layers[name](given) for name in names]))


@as_ranks(2, deadline=300)
def test_keras_3_says_who_has_which_order():
    import keras
    import numpy as np
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd
    from hvdlite.tensorflow import broadcast_variables

    names = ["user_1", "item_1"][:: 1 - 2 * hvd.rank()]
    model = branches(names)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    rows, callback = np.ones((4, 4), "float32"), hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    sgd = "sgd/{}_kernel_momentum float32[4, 2]"
    for call, said in (
        (lambda: broadcast_variables(model.weights, 0), "{}/kernel float32[4, 2]"),
        (tf.function(lambda: broadcast_variables(model.weights, 0)), "{}/kernel float32[4, 2]"),
        (lambda: broadcast_variables(optimizer.variables, 0), sgd),
        (lambda: hvd.elastic.KerasState(model).sync(), "{}/kernel float32[4, 2]"),
        (lambda: model.fit(rows, rows, verbose=0, callbacks=[callback]), "{}/kernel float32[4, 2]"),
    ):
        first, other = (re.escape(said.format(name)) for name in ("user_1", "item_1"))
        text = rf"(?s)order.list'.*rank 0: \d+ variables \([., ]*{first}.*rank 1: \d+ variables \([., ]*{other}.*sorted"
        with pytest.raises(tf.errors.FailedPreconditionError, match=text):
            call()


@as_ranks(2, deadline=300)
def test_places_decide_where_names_are_numbers_or_differ():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd
    from hvdlite.tensorflow import broadcast_variables

    rank = hvd.rank()

    class Tower(keras.layers.Dense):
        pass

    def send(variables):
        call = lambda: broadcast_variables(variables, 0)  # noqa: E731
        (tf.function(call) if rank else call)()

    made = [Tower(2), Tower(2)][:: 1 - 2 * rank]
    for layer in made:
        layer.build((None, 4))
    counted = branches("ab", made="ab"[:: 1 - 2 * rank])
    other = branches(["left", "right"] if rank else ["right", "middle"])
    for variables in ([*made[0].weights, *made[1].weights], counted.weights, other.weights):
        values = [tf.fill(each.shape, float(2 * i + rank)) for i, each in enumerate(variables)]
        for variable, value in zip(variables, values):
            variable.assign(value)
        send(variables)
        assert [float(tf.reduce_max(each)) for each in variables] == [0.0, 2.0, 4.0, 6.0]


@as_ranks(2, deadline=300)
def test_variables_of_tensorflow_and_the_graph_of_a_session():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    names = ["user", "item"][:: 1 - 2 * hvd.rank()]
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"(?s)user float32.*rank 1: .*item float32"):
        hvd.broadcast_variables([tf.Variable([1.0], name=name) for name in names], 0)
    with tf.Graph().as_default():
        for name in names:
            tf.compat.v1.get_variable(name, initializer=[1.0])
        send = hvd.broadcast_global_variables(0)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            with pytest.raises(tf.errors.FailedPreconditionError, match=r"(?s)user float32.*rank 1: .*item float32"):
                session.run(send)
