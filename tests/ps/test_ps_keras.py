"""Keras's fit on a table: rows and gradients are those of keras.layers.Embedding, on each backend, and ranks learn.

A process has one backend, so there is a job for each. Its two ranks learn with a real table; then each does, alone, a
part that needs one process and a table that is a NumPy array.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from launching import launch
from ranks import everything

if find_spec("tensorflow") is None or find_spec("torch") is None:
    pytest.skip("TensorFlow or PyTorch is not installed", allow_module_level=True)


def model_on(embedding, seed=1):
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.Input((3,), dtype="int64"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def fit_is_that_of_a_dense_layer():
    import keras
    from one_table import OneTable

    import hvdlite.keras as hvd

    table, ids = OneTable(), np.random.default_rng(1).integers(0, 20, (8, 3))
    ours, theirs = model_on(hvd.ps.Embedding(table)), model_on(keras.layers.Embedding(50, 4, name="rows"))
    theirs.get_layer("rows").set_weights([table.weight])
    for model in (ours, theirs):
        model.compile(keras.optimizers.SGD(1.0), "mse")
    assert ours.output_shape == theirs.output_shape and not table.pulls  # nothing is pulled to find shapes
    assert np.array_equal(ours.predict(ids, verbose=0), theirs.predict(ids, verbose=0))
    step = hvd.ps.Step([table])
    log = ours.fit(ids, ids[:, 0], batch_size=8, verbose=0, callbacks=[step], validation_data=(ids, ids[:, 0]))
    expected = theirs.fit(ids, ids[:, 0], batch_size=8, verbose=0)
    np.testing.assert_allclose(log.history["loss"], expected.history["loss"], rtol=1e-6)
    assert table.steps == 1 and len(table.pushes) == 1, (table.steps, table.pushes)
    assert len(table.pulls) == 3, table.pulls  # to predict, to fit and to validate
    moved = table.weight - theirs.get_layer("rows").get_weights()[0]
    np.testing.assert_allclose(table.pushed(), moved, atol=1e-5)
    for mine, other in zip(ours.layers[-1].get_weights(), theirs.layers[-1].get_weights()):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    mine, other = hvd.ps.Embedding(table, mask_zero=True), keras.layers.Embedding(50, 4, mask_zero=True)
    assert np.array_equal(*map(keras.ops.convert_to_numpy, (mine.compute_mask(ids), other.compute_mask(ids))))
    pooled = keras.layers.GlobalAveragePooling1D()(mine(ids))  # by the mask
    expected = [table.weight[row[row != 0]].mean(axis=0) for row in ids]
    np.testing.assert_allclose(keras.ops.convert_to_numpy(pooled), expected, rtol=1e-5)
    assert mine.get_config()["mask_zero"] and ours.layers[0].compute_mask(ids) is None
    ours.layers[0].trainable = False
    ours.compile(keras.optimizers.SGD(1.0), "mse")
    ours.fit(ids, ids[:, 0], verbose=0)
    assert not table.pushes


def mistakes_are_told():
    import keras
    from one_table import OneTable

    import hvdlite.keras as hvd

    table, ids = OneTable(), np.zeros((8, 3), np.int64)
    model = model_on(hvd.ps.Embedding(table))
    model.compile("sgd", "mse", steps_per_execution=2)
    of_backend = {"tensorflow": r"\[HVD036\]$", "torch": "`steps_per_execution` must be 1"}  # Keras's own
    with pytest.raises(ValueError, match=of_backend[keras.backend.backend()]):
        model.fit(ids, ids[:, 0], verbose=0, callbacks=[hvd.ps.Step([table])])
    with pytest.raises(ValueError, match=r"\[HVD025\]$"):
        hvd.ps.Embedding(table, dtype="mixed_float16")
    model.compile("sgd", "mse")
    with pytest.raises(Exception, match="no row 50"):
        model.predict(ids + 50, verbose=0)
    rows = hvd.ps.Embedding(table, dtype="mixed_bfloat16")(ids)
    assert keras.backend.standardize_dtype(rows.dtype) == "bfloat16" and rows.shape == (8, 3, 4)


def ranks_learn(path):
    import keras

    import hvdlite.keras as hvd

    hvd.init()
    hvd.ps.serve(1)
    table = hvd.ps.Table("users", rows=1000, dim=8, optimizer=hvd.ps.Adagrad(lr=0.3), init=hvd.ps.uniform(0.05))
    model = model_on(hvd.ps.Embedding(table), seed=1 + hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-2)), "mse")
    ids = np.random.default_rng(hvd.rank()).integers(0, 1000, (640, 3))
    labels = (ids % 2).sum(axis=1)

    def follow(batch, logs):
        table.lr = 20 * float(model.optimizer.learning_rate)

    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.ps.Step([table])]
    calls.append(keras.callbacks.LambdaCallback(on_train_batch_end=follow))
    log = model.fit(ids, labels, batch_size=64, epochs=8, verbose=0, callbacks=calls, validation_data=(ids, labels))
    assert log.history["loss"][-1] < 0.3 * log.history["loss"][0] and (table.clock, round(table.lr, 6)) == (80, 0.2)
    hvd.check_consistency(model)
    expected = model.predict(ids[:8], verbose=0)
    assert len({each.tobytes() for each in hvd.allgather_object(model.predict(np.arange(9).reshape(3, 3)))}) == 1
    model.save(f"{path}/{hvd.rank()}.keras")
    loaded = hvd.load_model(f"{path}/{hvd.rank()}.keras")
    assert np.array_equal(loaded.predict(ids[:8], verbose=0), expected) and loaded.layers[0].table is table
    with pytest.raises(ValueError, match=r"table 'items'.*\[HVD034\]$"):
        hvd.ps.Embedding.from_config({"name": "embedding", "table": "items"})


@pytest.mark.parametrize("backend", ["tensorflow", *everything("torch")])
def test_on_each_backend(backend, tmp_path):
    alone = "(t.fit_is_that_of_a_dense_layer, t.mistakes_are_told)[hvd.rank()]()"
    program = f"import sys, ranks, test_ps_keras as t, hvdlite as hvd; t.ranks_learn(sys.argv[1]); {alone}"
    words = ("-np", 2, sys.executable, "-c", program, tmp_path)  # each start of a backend takes seconds
    code, out, err = launch(
        *words, KERAS_BACKEND=backend, PYTHONPATH=str(Path(__file__).resolve().parents[1] / "support")
    )
    assert code == 0, out + err
