"""A driver of real Spark, started by test_spark.py: each case prints one line of JSON. Two tasks at a time.

A session takes many seconds to start, so all cases share one, one after the other. TESTS_EVERYTHING adds
estimators and the example.
"""

import importlib
import os
import pathlib
import runpy
import signal
import tempfile
import threading
import time

import engine_digits
import numpy as np
import pyarrow
import pyarrow.parquet
from driving import failure, returns, said
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession

from hvdlite.spark import run
from hvdlite.spark.rows import Rows
from hvdlite.spark.store import LocalStore, Store

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "22_spark.py"


def raises_before_init():
    import hvdlite as hvd

    if os.environ["HVDLITE_RANK"] == "1":
        raise ValueError("before the other knows of it")
    hvd.init()


def sleeps(folder):
    import hvdlite as hvd

    hvd.init()
    (folder / str(hvd.rank())).write_text(str(os.getpid()))
    time.sleep(60)


def digits(case, **kwargs):
    began = time.time()
    results = run(engine_digits.train, kwargs=kwargs)
    said(case, results=results, seconds=time.time() - began)


def interrupted(folder):
    """Ctrl-C once both ranks are there."""

    def press():
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    failure("interrupted", lambda: run(sleeps, [folder]), KeyboardInterrupt)
    pids = [path.read_text() for path in folder.iterdir()]
    said("left", pids=[pid for pid in pids if os.path.exists(f"/proc/{pid}")])


def parted(folder):
    """The rows of each rank, by number of ranks, of 10 in three groups."""
    table = pyarrow.table({"x": list(range(10)), "y": [[float(n), 0.5] for n in range(10)]})
    (folder / "ten").mkdir()
    pyarrow.parquet.write_table(table, folder / "ten" / "part.parquet", row_group_size=4)
    found = {}
    for size in (1, 2, 3):
        parts = [Rows(Store.create(str(folder)), ["ten"], ["x", "y"], rank, size) for rank in range(size)]
        found[size] = [[x.tolist() for x, _ in part.batches(3)] for part in parts]
        for part in parts:
            shuffled, again, other = ([list(map(str, batch)) for batch in part.batches(3, seed)] for seed in (1, 1, 2))
            assert shuffled == again != other and part.count == 10 // size
            assert all(np.array_equal(y[:, 0], x) and y.dtype == np.float32 for x, y in part.batches(3, 1))
    said("parted", by_size=found)


def pipeline(kind, spark, folder):
    """Points of y = 2 a - b, where another stage has put a and b into a vector."""
    folder = folder / "store #1, 100%20"
    words = {
        "feature_cols": ["ab"],
        "label_cols": ["y.0"],
        "validation": 0.25,
        "epochs": 12,
        "batch_size": 8,
        "verbose": 0,
    }
    words.update(store=LocalStore(str(folder)), run_id=kind, num_proc=2)
    if kind == "torch":
        import torch

        from hvdlite.spark.torch import TorchEstimator

        def off(output, label):
            return (output - label).abs().mean()

        model = torch.nn.Linear(2, 1)
        loss, optimizer = torch.nn.functional.mse_loss, torch.optim.Adam(model.parameters(), 0.1)
        estimator = TorchEstimator(model=model, loss=loss, optimizer=optimizer, metrics=[off], **words)
    else:
        import keras

        from hvdlite.spark.keras import KerasEstimator

        class Mine(keras.layers.Dense):
            pass

        model, optimizer = keras.Sequential([keras.Input((2,)), Mine(1)]), keras.optimizers.Adam(0.1)
        words.update(loss=lambda y, x: keras.ops.mean((x - y) ** 2), custom_objects={"Mine": Mine})
        estimator = KerasEstimator(model=model, optimizer=optimizer, **words)
    rows = [(n % 7 / 7.0, n % 5 / 5.0, 2 * (n % 7) / 7.0 - n % 5 / 5.0) for n in range(400)]
    points = spark.createDataFrame(rows, "a double, b double, `y.0` double").coalesce(1)
    fitted = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="ab"), estimator]).fit(points)
    found = fitted.stages[1].transform(fitted.transform(points)).collect()
    error = max(abs(row["y.0__output"] - row["y.0"]) for row in found)
    failure(f"{kind}, no column", lambda: estimator.fit(points), ValueError)
    estimator.args["validation"] = "held"
    some = points.selectExpr("array(a, b) ab", "`y.0`", "nullif(a > 0.5, b > 0.5) held")
    failure(f"{kind}, nulls", lambda: estimator.fit(some), ValueError)
    estimator.args.update(validation=None, label_cols=["ab"])
    failure(f"{kind}, uneven", lambda: estimator.fit(points.selectExpr("array_repeat(a, int(a * 7)) ab")))
    left = [path.name for path in (folder / kind).iterdir()]
    said(kind, history=fitted.stages[1].getHistory(), rows=len(found), error=error, left=left)


def as_horovod():
    importlib.import_module("hvdlite.as_horovod")
    import horovod.spark
    from horovod.spark.common.store import Store as Their
    from horovod.spark.torch import TorchEstimator

    said(
        "as horovod",
        same=[horovod.spark.run is run, Their is Store, TorchEstimator.__module__ == "hvdlite.spark.torch"],
    )


def main(spark, folder):
    (folder / "pids").mkdir()
    failure("no room", lambda: run(engine_digits.train, num_proc=5))
    failure("unsendable", lambda: run(threading.Lock().acquire, num_proc=2))
    digits("digits")
    digits("next", epochs=1)
    said("env", results=run(lambda name: os.environ.get(name), ["MORE"], env={"MORE": "yes"}))
    failure("raises", lambda: run(engine_digits.train, kwargs={"fails": 1}))
    failure("before init", lambda: run(raises_before_init))
    failure("returns", lambda: run(returns, [0, True], start_timeout=20))
    failure("uneven", lambda: run(returns, [1, False]))
    digits("after it", epochs=1)
    failure("dies", lambda: run(engine_digits.train, kwargs={"dies": 1}))
    digits("after that", epochs=1)
    interrupted(folder / "pids")
    digits("at last", epochs=1)
    ours = spark.sparkContext.parallelize(range(2), 2).map(lambda _: "HVDLITE_RANK" in os.environ)
    said("variables", left=ours.collect())
    parted(folder)
    if os.environ.get("TESTS_EVERYTHING"):
        pipeline("torch", spark, folder)
        example = runpy.run_path(str(EXAMPLE), run_name="example")
        said("example", ranks=run(example["train"], [25]), estimator=example["estimate"](spark, str(folder)))
        pipeline("keras", spark, folder)
    as_horovod()
    spark.stop()
    failure("stopped", lambda: run(engine_digits.train))


if __name__ == "__main__":
    settings = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false", "spark.log.level": "OFF"}
    settings["spark.ui.showConsoleProgress"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        main(SparkSession.builder.master("local[2]").config(map=settings).getOrCreate(), pathlib.Path(folder))
