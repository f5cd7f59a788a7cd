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

from pyspark.sql import SparkSession

import hvdlite.spark

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "22_spark.py"


def meets(value, fails=None, folder=None, slow=0.0):
    """fails: what rank 1 does once it has met the other; folder: where ranks write their pids."""
    import hvdlite.numpy as hvd

    begun = time.time()
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


def run(*args, **words):
    """What came of it, and when."""
    begun = time.time()
    try:
        found = {"results": hvdlite.spark.run(*args, **words)}
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


def cases(spark, folder):
    """By name."""
    (folder / "killed").mkdir()
    (folder / "interrupted").mkdir()
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    yield "no room", run(meets, [1.0], num_proc=5)
    yield "unsendable", run(threading.Lock().acquire, num_proc=2)
    yield "first", run(meets, [1.0], num_proc=2)
    yield "next", run(meets, kwargs={"value": 2.0}, env={"MORE": "1"})
    yield "digits", run(example["train"], [25])
    yield "raises", run(meets, [1.0, "raises"], num_proc=2)
    yield "after it", run(meets, [1.0], num_proc=2)
    yield "dies", run(meets, [1.0, "dies", str(folder / "killed")], num_proc=2)
    yield "after that", run(meets, [1.0], num_proc=2)
    yield "interrupted", interrupted(folder / "interrupted")
    yield "at last", run(meets, [1.0], num_proc=2)
    spark.stop()
    yield "stopped", run(meets, [1.0], num_proc=2)


def main(folder):
    settings = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false", "spark.log.level": "OFF"}
    begun = time.time()
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    found = {"session_s": time.time() - begun}
    for name, case in cases(spark, folder):
        found[name] = case
        print(f"{name}: {time.time() - begun:.2f} s after the start", flush=True)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
