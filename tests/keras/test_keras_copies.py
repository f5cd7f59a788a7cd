"""Copies of distributed optimizers, and of models with one, are distributed: they train to the same on all ranks."""

from importlib.util import find_spec

import numpy as np
import pytest
from fitting import FIT, the_same_everywhere
from ranks import as_ranks, everything
from test_keras_differ import rows, small

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


@as_ranks(2, deadline=300)
def test_copies_of_an_optimizer_are_distributed_and_told_the_same():
    import copy
    import pickle

    import keras

    import hvdlite.keras as hvd

    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.25, momentum=0.5), name="mine", compression=hvd.Compression.fp16
    )
    copies = {
        "copy": copy.copy(optimizer),
        "deepcopy": copy.deepcopy(optimizer),
        "pickle": pickle.loads(pickle.dumps(optimizer)),
        "from_config": optimizer.from_config(optimizer.get_config()),
        "of the type": type(optimizer).from_config(dict(optimizer.get_config())),
        "of the class": optimizer.__class__.from_config(optimizer.get_config()),
        "a copy of a copy": copy.deepcopy(copy.copy(optimizer)),
    }
    x, y = rows(hvd.rank())
    weights = []
    for how, each in copies.items():
        assert each is not optimizer and each._hvd.compression is hvd.Compression.fp16, how
        assert each._hvd.prefix == "mine" and each.momentum == 0.5 and float(each.learning_rate) == 0.25, how
        model = small()
        model.compile(each, "mse")
        model.fit(x, y, **FIT)
        the_same_everywhere(model.get_weights())
        weights.append(model.get_weights())
    for other in weights[1:]:
        for one, two in zip(weights[0], other):
            np.testing.assert_array_equal(one, two)
    anew = hvd.DistributedOptimizer(optimizer.__class__.from_config(optimizer.get_config()), op=hvd.Sum)
    assert anew._hvd.op == hvd.Sum and anew._hvd.prefix != "mine"  # as scripts do: told anew
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    plain = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(plain) is keras.optimizers.SGD  # as in files
    assert type(pickle.loads(pickle.dumps(optimizer.get_config()))) is dict


@as_ranks(2, deadline=300)
def test_a_copy_has_passes_of_its_own_and_knows_local_variables():
    import copy

    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    first, second = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([first, second])
    optimizer.register_local_var(second)
    scale = hvd.rank() + 1.0
    gradients = [tf.constant([scale]), tf.constant([scale])]
    optimizer.apply(gradients, [first, second])  # half a window
    other = copy.deepcopy(optimizer)
    other.apply(gradients, [first, second])
    np.testing.assert_array_equal(first, [0.0])
    other.apply(gradients, [first, second])
    np.testing.assert_array_equal(first, [-3.0])
    np.testing.assert_array_equal(second, [-scale])
    optimizer.apply(gradients, [first, second])
    np.testing.assert_array_equal(first, [-6.0])


@pytest.mark.parametrize("mixed", [False, *everything(True)])
@as_ranks(2, deadline=300)
def test_copied_models_go_on_distributed(mixed):
    import copy
    import pickle

    import keras

    import hvdlite.keras as hvd

    x, y = rows(hvd.rank())
    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16" if mixed else "float32")
    try:
        model = small()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=False)
        model.fit(x, y, **FIT)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model.fit(x, y, **FIT)
        for each in copies:
            each.fit(x, y, **FIT)
            the_same_everywhere(each.get_weights())
            for one, two in zip(model.get_weights(), each.get_weights()):
                np.testing.assert_array_equal(one, two)  # with the state, too
    finally:
        keras.mixed_precision.set_dtype_policy(policy)


@as_ranks(2, deadline=300)
def test_saved_batch_norm_opens_with_its_process_set():
    import os
    import tempfile

    import keras

    import hvdlite.keras as hvd
    from hvdlite.tensorflow import SyncBatchNormalization

    x, y = rows(hvd.rank())
    alone = [hvd.add_process_set([rank]) for rank in (0, 1)]
    model = small(SyncBatchNormalization(name="all"), SyncBatchNormalization(process_set=alone[hvd.rank()]))
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.losses.MeanSquaredError(), jit_compile=False
    )
    model.fit(x, y, **FIT)
    for ending in (".keras", ".h5"):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model" + ending)
            model.save(path)
            for opened in (hvd.load_model(path), keras.models.load_model(path)):
                layers = opened.layers[:2]
                assert all(type(layer) is SyncBatchNormalization for layer in layers)
                assert [layer._hvd_process_set.ranks for layer in layers] == [[0, 1], [hvd.rank()]]
                assert (opened.layers[0]._hvd_process_set is hvd.global_process_set) and layers[0].name == "all"
                np.testing.assert_array_equal(opened.predict(x, verbose=0), model.predict(x, verbose=0))
    config = model.layers[1].get_config()
    for each in alone:
        hvd.remove_process_set(each)
    with pytest.raises(ValueError, match=rf"rank {hvd.rank()}: .*process set of ranks \[{hvd.rank()}\].*add_process"):
        type(model.layers[1]).from_config(config)
