"""Which answers does hvdlite.spark give on a real Spark? The driver of test_spark.py: all cases in one session.

A session takes many seconds to start, so all cases share one, one after the other; that the next case works is a part
of each. What a case gives, or what it raises, goes into the file named in the command line, as JSON.
"""

import json
import os
import pathlib
import runpy
import signal
import sys
import threading
import time

import numpy as np
from pyspark.sql import SparkSession

import hvdlite.spark

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "22_spark.py"


def meets(value, fails=None, folder=None, slow=0.0):
    """fails: what rank 1 does once it has met the other; folder: where ranks write their pids."""
    import hvdlite.numpy as hvd

    begun = time.time()
    if fails == "before" and os.environ["HVDLITE_RANK"] == "1":
        raise ValueError("before the other knows of it")
    hvd.init()
    ready = time.time()
    if folder:
        (pathlib.Path(folder) / str(hvd.rank())).write_text(str(os.getpid()))
    if hvd.rank() == 1 and fails == "raises":
        raise ValueError("boom")
    if hvd.rank() == 1 and fails == "dies":
        (pathlib.Path(folder) / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(slow)
    total = float(hvd.allreduce(value, op=hvd.Sum, name="value"))
    return {"rank": hvd.rank(), "total": total, "began": begun, "ready": ready, "local": hvd.local_size()}


def run(*args, call=hvdlite.spark.run, **words):
    """What came of it, and when."""
    begun = time.time()
    try:
        found = {"results": call(*args, **words)}
    except (Exception, KeyboardInterrupt) as error:
        kind, cause = type(error).__name__, type(error.__cause__).__name__
        found = {"kind": kind, "cause": cause, "text": str(error), "rank": getattr(error, "rank", None)}
    left = [name for name in os.environ if name.startswith("HVDLITE_")]
    return {**found, "begun": begun, "ended": time.time(), "left": left}


def interrupted(folder):
    """Ctrl-C once both ranks are there."""

    def press():
        while sum(path.name in "01" for path in folder.iterdir()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    return run(meets, [1.0, None, str(folder), 60.0], num_proc=2)


def parted(folder):
    """The rows of each rank, by number of ranks, of 10 in three groups; in order and shuffled."""
    import pyarrow
    import pyarrow.parquet

    from hvdlite.spark.rows import Rows
    from hvdlite.spark.store import Store

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
    return found


def line(spark):
    """Points of y = 2 a - b, a and b in one vector."""
    from pyspark.ml.feature import VectorAssembler

    rows = [(n % 7 / 7.0, n % 5 / 5.0, 2 * (n % 7) / 7.0 - n % 5 / 5.0) for n in range(400)]
    return VectorAssembler(inputCols=["a", "b"], outputCol="ab"), spark.createDataFrame(
        rows, "a double, b double, y double"
    )


def fitted(spark, folder, kind):
    """An estimator behind one that makes vectors, with validation; history, the greatest error, what is left."""
    from pyspark.ml import Pipeline

    from hvdlite.spark.store import LocalStore

    words = {
        "feature_cols": ["ab"],
        "label_cols": ["y"],
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
            return (output.squeeze() - label).abs().mean()

        model = torch.nn.Linear(2, 1)
        loss, optimizer = lambda x, y: ((x.squeeze() - y) ** 2).mean(), torch.optim.Adam(model.parameters(), 0.1)
        estimator = TorchEstimator(model=model, loss=loss, optimizer=optimizer, metrics=[off], **words)
    else:
        import keras

        from hvdlite.spark.keras import KerasEstimator

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        estimator = KerasEstimator(model=model, loss="mse", optimizer=keras.optimizers.Adam(0.1), **words)
    assembler, points = line(spark)
    pipeline = Pipeline(stages=[assembler, estimator]).fit(points)
    found = pipeline.transform(points).collect()
    wrong = run(points.selectExpr("array_repeat(a, int(a * 7)) ab", "y"), call=estimator.fit)
    error = max(abs(row.y__output - row.y) for row in found)
    left = sorted(path.name for path in (folder / kind).iterdir())
    return {
        "history": pipeline.stages[1].getHistory(),
        "error": error,
        "left": left,
        "rows": len(found),
        "wrong": wrong,
    }


def cases(spark, folder, everything):
    """By name."""
    (folder / "killed").mkdir()
    (folder / "interrupted").mkdir()
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    yield "no room", run(meets, [1.0], num_proc=5)
    yield "unsendable", run(threading.Lock().acquire, num_proc=2)
    yield "first", run(meets, [1.0], num_proc=2)
    yield "next", run(meets, kwargs={"value": 2.0}, env={"MORE": "1"})
    yield "digits", run(example["train"], [25])
    yield "estimator", example["estimate"](spark, str(folder / "store"))
    yield "parted", parted(folder)
    yield "torch", fitted(spark, folder, "torch")
    if everything:
        yield "keras", fitted(spark, folder, "keras")
    yield "raises", run(meets, [1.0, "raises"], num_proc=2)
    yield "before", run(meets, [1.0, "before"], num_proc=2)
    yield "after it", run(meets, [1.0], num_proc=2)
    yield "dies", run(meets, [1.0, "dies", str(folder / "killed")], num_proc=2)
    yield "after that", run(meets, [1.0], num_proc=2)
    yield "interrupted", interrupted(folder / "interrupted")
    yield "at last", run(meets, [1.0], num_proc=2)
    spark.stop()
    yield "stopped", run(meets, [1.0], num_proc=2)


def main(folder, everything):
    settings = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false", "spark.log.level": "OFF"}
    begun = time.time()
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    found = {"session_s": time.time() - begun}
    for name, case in cases(spark, folder, everything):
        found[name] = case
        print(f"{name}: {time.time() - begun:.2f} s after the start", flush=True)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
