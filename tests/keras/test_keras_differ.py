"""What ranks do not do alike on Keras and TensorFlow: they meet nevertheless, or all say what differs; none waits."""

import warnings
from importlib.util import find_spec

import numpy as np
import pytest
from fitting import FIT, the_same_everywhere
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def small(*layers):
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(2)])


def rows(rank, count=32):
    noise = np.random.RandomState(rank).randn(count, 6).astype("float32")
    return noise[:, :4], noise[:, 4:]


@as_ranks(2, deadline=300)
def test_batch_norm_meets_where_a_rank_has_made_more_layers():
    import hvdlite.tensorflow as hvd

    if hvd.rank() == 1:
        hvd.SyncBatchNormalization()
    layers = [hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()]
    assert len(set(hvd.allgather_object(layers[0].name))) == 2  # or the test shows nothing
    x, y = rows(hvd.rank())
    model = small(*layers)
    import keras

    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    model.fit(x, y, **FIT)
    the_same_everywhere(model.get_weights())


@as_ranks(2, deadline=300)
def test_metrics_that_not_all_ranks_have_stay_their_own():
    import keras

    import hvdlite.keras as hvd

    rank = hvd.rank()
    model = small()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    x, y = rows(rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = model.fit(
            x, y, epochs=2, validation_data=(x, y) if rank == 0 else None,
            callbacks=[hvd.callbacks.MetricAverageCallback()], **FIT,
        ).history  # fmt: skip
    assert ("val_loss" in history) == (rank == 0)
    assert len(set(map(str, hvd.allgather_object(history["loss"])))) == 1
    texts = [str(each.message) for each in said if "not averaged" in str(each.message)]
    assert len(texts) == 1 and f"rank {rank}: " in texts[0] and "val_loss: only ranks [0]" in texts[0]

    logs = [{"loss": 1.0, "both": 4.0}, {"loss": 2.0, "both": 8.0, "odd": 7.0, "rows": np.ones(3)}][rank]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert (logs["loss"], logs["both"], logs.get("odd")) == (1.5, 6.0, [None, 7.0][rank])


@as_ranks(2, deadline=300)
def test_the_best_model_is_best_on_all_ranks_and_rank_0_writes_it():
    import os
    import tempfile

    import keras

    import hvdlite.keras as hvd

    rank = hvd.rank()
    scores = [[3.0, 1.0, 2.0], [0.0, 4.0, 0.0]][rank]  # rank 0 alone would choose the second epoch, all the third

    class Score(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = scores[epoch]

    model = small()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    x, y = rows(rank)
    with tempfile.TemporaryDirectory() as folder:
        whole, weights = (os.path.join(folder, "{epoch}" + ending) for ending in (".keras", ".weights.h5"))
        best = [
            hvd.callbacks.BestModelCheckpoint("score", mode="min", filepath=whole),
            hvd.callbacks.BestModelCheckpoint("score", mode="min", filepath=weights, save_weights_only=True),
        ]
        model.fit(x, y, epochs=3, callbacks=[Score(), hvd.callbacks.MetricAverageCallback(), *best], **FIT)
        written = ["1.keras", "1.weights.h5", "3.keras", "3.weights.h5"]
        assert sorted(os.listdir(folder)) == (written if rank == 0 else [])
        if rank == 0:
            again = hvd.load_model(whole.format(epoch=3))
            assert hasattr(again.optimizer, "register_local_var")
            for one, two in zip(again.get_weights(), model.get_weights()):
                np.testing.assert_array_equal(one, two)
