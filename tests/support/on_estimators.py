"""What estimators do without a session of Spark, started by test_estimators.py: each case prints one line of JSON.

TESTS_EVERYTHING adds Keras.

Data are written as Spark would, and `train` is called as on a rank, in a job of one.
"""

import os
import pathlib
import pickle
import tempfile

import cloudpickle
import pyarrow
import pyarrow.parquet
import torch
from driving import failure, said

import hvdlite as hvd
from hvdlite.spark import run
from hvdlite.spark.estimator import _predict
from hvdlite.spark.rows import Rows
from hvdlite.spark.store import Store
from hvdlite.spark.torch import TorchEstimator

POINTS = [(n % 7 / 7.0, n % 5 / 5.0) for n in range(200)]
COLUMNS = {
    "ab": pyarrow.array(POINTS, pyarrow.list_(pyarrow.float64())),
    "y": [2 * a - b for a, b in POINTS],
    "of a class": pyarrow.array([int(a > b) for a, b in POINTS], pyarrow.int32()),
}


class Two(torch.nn.Linear):
    def forward(self, ab):
        return super().forward(ab), ab


def trained(kind, store, labels=("y",), **more):
    """What a rank gives back, what the model became, and the checkpoint."""
    given = {"feature_cols": ["ab"], "label_cols": list(labels), "store": store, "batch_size": 20, "epochs": 30}
    given = kind(**given, verbose=0, **more).args
    given = cloudpickle.loads(cloudpickle.dumps(kind.model_class.sent(given, given["custom_objects"])))
    rows, kept = Rows(store, ("run", "train"), ["ab", *labels], 0, 1), []
    history, shapes = kind.train(given, rows, None, lambda checkpoint: kept.append(checkpoint()))
    return history, shapes, kind.model_class.opened(given, kept[-1])


def with_torch(store, outputs=1, model=torch.nn.Linear, loss=torch.nn.functional.mse_loss, **more):
    torch.manual_seed(1)
    model = model(2, outputs)
    return trained(
        TorchEstimator, store, model=model, loss=loss, optimizer=torch.optim.Adam(model.parameters(), 0.05), **more
    )


def off(output, label):
    return (output - label).abs().mean()


def shapes(store):
    """Outputs (N, 1) and labels (N,), and labels of classes."""
    history, rows, model = with_torch(store, metrics=[off])
    said("regression", weights=model.weight.tolist()[0], off=history[-1]["off"], rows=rows)
    history, rows, _ = with_torch(store, 2, loss=torch.nn.functional.cross_entropy, labels=["of a class"])
    said("classes", loss=history[-1]["loss"], rows=rows)
    said("autoencoder", losses=[each["loss"] for each in with_torch(store, 2, labels=["ab"])[0]])


def lengths(store):
    """Lists that do not go together."""
    mse, labels = torch.nn.functional.mse_loss, ["y", "ab"]
    for name, words in (
        ("loss", {"loss": [mse] * 3, "labels": labels}),
        ("loss_weights", {"loss_weights": [1.0], "labels": labels}),
        ("input_shapes", {"input_shapes": [[-1, 2]] * 2}),
        ("validation", {"validation": 0}),
        ("metrics", {"metrics": [off, off]}),
        ("outputs", {"labels": labels}),
        ("more outputs", {"model": Two}),
    ):
        failure(name, lambda words=words: with_torch(store, **words), ValueError)


def predictions():
    """Of batches as Spark gives them, with a null, and with an output too many."""
    for name, row, outputs in (("null", None, [1]), ("predicts two", [0.0, 0.0], [1, 2])):
        batch = pyarrow.RecordBatch.from_arrays([pyarrow.array([row], pyarrow.list_(pyarrow.float32()))], ["in"])
        rest = (lambda model, arrays, outputs=outputs: outputs, None, None, ["ab"], {"y": ()}, [], [batch])
        failure(name, lambda rest=rest: list(_predict(*rest)), ValueError)


def folders(folder):
    """Names that an URI quotes, each written, read, and deleted from."""
    for name in ("a b", "a#b", "a%20b", "\u00fcml\u00e4ut", "a?b"):
        store = pickle.loads(pickle.dumps(Store.create(str(folder / name))))
        store.write(b"kept", "run", "checkpoint")
        (folder / name / "run" / "train").mkdir()
        pyarrow.parquet.write_table(pyarrow.table({"x.y": [1]}), folder / name / "run" / "train" / "part.parquet")
        read = next(Rows(store, ("run", "train"), ["x.y"], 0, 1).batches(1))[0].tolist()
        store.delete("run", "train")
        said(name, read=[store.read("run", "checkpoint").decode(), read], left=os.listdir(folder / name / "run"))


def with_keras(store):
    import keras

    class Mine(keras.layers.Dense):
        pass

    def fitted(layer, loss, **more):
        model, optimizer = keras.Sequential([keras.Input((2,)), layer(1)]), keras.optimizers.Adam(0.05)
        return trained(store=store, kind=KerasEstimator, model=model, optimizer=optimizer, loss=loss, **more)

    from hvdlite.spark.keras import KerasEstimator

    _, rows, model = fitted(Mine, lambda y, x: keras.ops.mean((x - y) ** 2), custom_objects={"Mine": Mine})
    said("keras", weights=model.get_weights()[0].ravel().tolist(), rows=rows, layer=type(model.layers[0]) is Mine)
    failure("keras, outputs", lambda: fitted(keras.layers.Dense, "mse", labels=["y", "ab"]), ValueError)


def main(folder):
    store = Store.create(str(folder))
    (folder / "run" / "train").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table(COLUMNS), folder / "run" / "train" / "part.parquet")
    failure("env", lambda: run(main, env={"A": 3}))
    folders(folder)
    predictions()
    hvd.init()
    shapes(store)
    lengths(store)
    if os.environ.get("TESTS_EVERYTHING"):
        with_keras(store)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(pathlib.Path(folder))
