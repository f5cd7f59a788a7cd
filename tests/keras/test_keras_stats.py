"""StatsCallback: what steps cost, in Keras's logs, and so in TensorBoard's callback; on any backend."""

import os

import pytest
from ranks import as_ranks, needs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
needs("keras")

PATIENCE_S = 240.0


@as_ranks(1, 2)
def test_the_logs_of_an_epoch_have_the_numbers_of_steps():
    import keras
    import numpy as np

    import hvdlite.keras as hvd

    hvd.shutdown()
    hvd.init()

    class Writes(keras.callbacks.Callback):
        """As Keras's TensorBoard callback reads them."""

        def on_epoch_end(self, epoch, logs=None):
            self.seen = dict(logs)

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    writes = Writes()
    model.fit(
        np.ones((24, 4)), np.ones((24, 2)), batch_size=4, epochs=2, verbose=0,
        callbacks=[hvd.callbacks.StatsCallback(), writes],
    )  # fmt: skip
    assert writes.seen["hvdlite/step_ms/mean"] > 0 and 0 <= writes.seen["hvdlite/exposed_share"] <= 1
    assert all(isinstance(value, float) for name, value in writes.seen.items() if name.startswith("hvdlite/"))
    assert hvd.stats()["steps"] == 12
    with pytest.raises(TypeError, match="prefix"):
        hvd.callbacks.StatsCallback(3)
