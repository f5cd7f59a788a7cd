"""What TensorFlow's and Keras's optimizers, tapes, layers and callbacks cannot take is told where it is given: by a
text with a remedy and a code, before a step begins and before anything is sent."""

from importlib.util import find_spec

import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine

NO_SET = [3, [0], None]


def makers():
    """Whatever averages gradients: each made with the given terms."""
    import keras
    import tensorflow as tf

    import hvdlite.keras
    import hvdlite.tensorflow as hvd

    return [
        lambda **terms: hvdlite.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), **terms),
        lambda **terms: hvdlite.keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), **terms),
        lambda **terms: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **terms),
        lambda **terms: hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), **terms),
        lambda **terms: hvd.DistributedGradientTape(tf.GradientTape(), **terms),
        lambda **terms: hvd.PartialDistributedGradientTape(tf.GradientTape(), **terms),
    ]


@as_ranks(1, deadline=240)
def test_process_sets_that_are_none():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite.keras.torch_reducer import Reducer

    with pytest.raises(TypeError, match=r"HVD212\]$") as of_allreduce:
        hvd.allreduce(tf.ones(2), process_set=3)
    for make in [*makers(), hvd.SyncBatchNormalization, lambda **terms: Reducer("torch's", **terms)]:
        for wrong in NO_SET:
            with pytest.raises(TypeError, match=r"process_set must be a hvd\.ProcessSet.*\[HVD212\]$") as told:
                make(process_set=wrong)
            assert wrong != 3 or str(told.value) == str(of_allreduce.value)
        make(process_set=hvd.global_process_set)
    variable = tf.Variable([1.0])
    for wrong in NO_SET:
        with pytest.raises(TypeError, match=r"process_set must be a hvd\.ProcessSet.*\[HVD212\]$"):
            hvd.broadcast_variables([variable], 0, process_set=wrong)


@as_ranks(2, deadline=240)
def test_ranks_outside_of_a_process_set_may_make_what_uses_it():
    import hvdlite.tensorflow as hvd

    first = hvd.add_process_set([0])
    for make in [*makers(), hvd.SyncBatchNormalization]:
        make(process_set=first)
    hvd.remove_process_set(first)


@as_ranks(1, deadline=240)
def test_compressions_and_factors_that_are_none():
    import hvdlite.tensorflow as hvd
    from hvdlite.keras.torch_reducer import Reducer

    class Half:
        compress = staticmethod(lambda tensor: (tensor, None))

    for make in [*makers(), lambda **terms: Reducer("torch's", **terms)]:
        for wrong in ("fp16", None, Half):
            with pytest.raises(TypeError, match=r"compression must be hvd\.Compression\.none.*\[HVD208\]$"):
                make(compression=wrong)
        for wrong in ("2", None, 0, -1.0, float("nan"), True, [2.0]):
            with pytest.raises(ValueError, match=r"gradient_predivide_factor=.* must be a number above 0 \[HVD222\]$"):
                make(gradient_predivide_factor=wrong)
        with pytest.raises(ValueError, match=r"HVD224\]$"):
            make(gradient_predivide_factor=2, op=hvd.Sum)
        make(gradient_predivide_factor=2, compression=hvd.Compression.fp16)


@as_ranks(1, deadline=240)
def test_numbers_of_numpy_are_numbers():
    import numpy as np

    import hvdlite.keras as hvd

    for make in makers():
        make(gradient_predivide_factor=np.float32(2.0))
    hvd.callbacks.LearningRateScheduleCallback(np.float32(0.1), np.float64(0.5), np.int64(1), end_epoch=np.int64(3))
    hvd.callbacks.LearningRateWarmupCallback(np.array(0.1), np.int64(3), steps_per_epoch=np.int64(7), verbose=True)


@as_ranks(2, deadline=240)
def test_only_lists_of_variables_are_broadcast():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    variable = tf.Variable([1.0, 2.0])
    listed = [
        (model, r"not Sequential: pass model\.variables \(or model\.weights\)"),
        (keras.optimizers.SGD(0.1), r"not SGD: .*or optimizer\.variables"),
        (None, r"not NoneType: "),
        (variable, r"not one \w+: put it into a list"),
        (model.weights[0], r"not one \w+: put it into a list"),
        (tf.ones(2), r"not one \w+: put it into a list"),
        ([1, 2], r"entry 0 of the list is not a variable but int: .*hvd\.broadcast"),
        ([variable, tf.ones(2)], r"entry 1 of the list is not a variable but \w+: "),
        ([keras.optimizers.SGD(0.1)], r"entry 0 of the list is not a variable but SGD: "),
        ({"a": variable}, r"entry 0 of the list is not a variable but str: "),
        ([model], r"entry 0 of the list is not a variable but Sequential: "),
    ]
    if hvd.rank() == 0:  # nothing is sent: the other rank does not take part
        for given, text in listed:
            for send in (hvd.broadcast_variables, hvd.broadcast_):
                with pytest.raises(TypeError, match=rf"^{send.__name__}: .*{text}.*\[HVD235\]$"):
                    send(given, 0)
    variable.assign([float(hvd.rank()), 5.0])
    hvd.broadcast_variables((each for each in [variable, *model.variables]), 1)
    assert variable.numpy().tolist() == [1.0, 5.0]


@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
@as_ranks(1, 2, deadline=240)
def test_an_empty_list_is_compared_and_nothing_is_sent(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def send(count):
        if mode == "eager":
            variables = [tf.Variable([float(hvd.rank())]) for _ in range(count)]
            assert hvd.broadcast_(variables, 0) == variables
            return hvd.broadcast_variables(variables, 0)
        if mode == "function":
            variables = [tf.Variable([float(hvd.rank())]) for _ in range(count)]
            return tf.function(lambda: hvd.broadcast_variables(variables, 0))()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variables = [tf.compat.v1.get_variable(f"v{i}", [1]) for i in range(count)]
            sent = hvd.broadcast_variables(variables, 0)
            session.run(tf.compat.v1.global_variables_initializer())
            return session.run(sent)

    assert send(0) is None
    if hvd.size() > 1:
        with pytest.raises((hvd.HvdMismatchError, tf.errors.FailedPreconditionError), match="different lists") as told:
            send(hvd.rank())
        assert "0 variables" in str(told.value) and "1 variables" in str(told.value)
        assert "HVD305" in str(told.value)


@as_ranks(1, deadline=240)
def test_arguments_of_the_callbacks_of_learning_rates():
    import hvdlite.keras as hvd

    schedule, warmup = hvd.callbacks.LearningRateScheduleCallback, hvd.callbacks.LearningRateWarmupCallback
    for make, text in [
        (lambda: schedule(0.1, None), "multiplier must be a number or a function of the epoch, not None"),
        (lambda: schedule(0.1, "b"), "multiplier must be a number or a function of the epoch, not 'b'"),
        (lambda: schedule("a", 0.1), "initial_lr must be a number, not 'a'"),
        (lambda: schedule([0.1], 0.1), r"initial_lr must be a number, not \[0.1\]"),
        (lambda: schedule(0.1, 0.1, start_epoch=None), "start_epoch must be a number, not None"),
        (lambda: schedule(0.1, 0.1, end_epoch="3"), "end_epoch must be a number or None, not '3'"),
        (lambda: schedule(0.1, 0.1, steps_per_epoch="7"), "steps_per_epoch must be a number or None, not '7'"),
        (lambda: warmup("a"), "initial_lr must be a number, not 'a'"),
        (lambda: warmup(0.1, None), "warmup_epochs must be a number, not None"),
        (lambda: warmup(0.1, "5"), "warmup_epochs must be a number, not '5'"),
        (lambda: warmup(0.1, steps_per_epoch=[7]), r"steps_per_epoch must be a number or None, not \[7\]"),
        (lambda: warmup(0.1, verbose=None), "verbose must be a number, not None"),
    ]:
        with pytest.raises(TypeError, match=rf"^LearningRate\w+Callback: {text} \[HVD238\]$"):
            make()
    for make in (schedule, warmup):
        with pytest.raises(ValueError, match=r"`initial_lr` is required \[HVD238\]"):
            make(None, 1)
        with pytest.raises(ValueError, match=r"steps_per_epoch=-1 must be at least 0 \[HVD238\]"):
            make(0.1, 1, steps_per_epoch=-1)
    with pytest.raises(ValueError, match=r"warmup_epochs=-1 must be at least 0 \[HVD238\]"):
        warmup(0.1, -1)


@as_ranks(1, deadline=240)
def test_local_layers_must_be_built():
    import keras

    import hvdlite.keras as hvd

    def partial(layers):
        return hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layers)

    class Around(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="around")
            self.inner = keras.layers.Dense(1, name="inner")

        def call(self, x):
            return self.inner(x)

    dense, around = keras.layers.Dense(1, name="local"), Around()
    for layers, text in [
        (dense, "layer 'local' is not built"),
        ([keras.layers.Dropout(0.5), dense], "layer 'local' is not built"),
        (around, "layer 'inner' in 'around' is not built"),
        (keras.Sequential([keras.layers.Dense(1)], name="model"), "layer 'model' is not built"),
    ]:
        with pytest.raises(ValueError, match=rf"{text}.*model\.build\(input_shape\).*\[HVD239\]$"):
            partial(layers)
    dense.build([None, 2])
    around(keras.ops.ones([3, 2]))
    made = partial([dense, around, keras.layers.Dropout(0.5), keras.layers.ReLU()])
    assert len(made._hvd._local) == 4
