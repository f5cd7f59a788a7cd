"""A driver of real Dask, started by test_dask.py: each case prints one line of JSON. Two worker processes."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import engine_digits
from distributed import Client, LocalCluster
from driving import failure, returns, said

import hvdlite as hvd
from hvdlite.dask import run


def collect_for_ever():
    hvd.init()
    for _ in range(10**6):
        hvd.barrier()
        time.sleep(0.01)


def child():
    hvd.init()
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()
    return process.exitcode, multiprocessing.current_process().daemon, hvd.rank()


def together(client, count):
    """Jobs of two ranks at the same time."""
    results = []

    def call():
        results.append([each["bits"] for each in run(client, engine_digits.train, kwargs={"epochs": 1})])

    threads = [threading.Thread(target=call) for _ in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def main():
    frame = sys._getframe()  # cannot be pickled
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster, Client(cluster) as client:
        began = time.time()
        said("digits", results=run(client, engine_digits.train), began=began)
        began = time.time()
        said("digits again", results=run(client, engine_digits.train), began=began)
        failure("raises", lambda: run(client, engine_digits.train, kwargs={"fails": 1}))
        failure("returns", lambda: run(client, returns, [0, True], start_timeout=20))
        failure("uneven", lambda: run(client, returns, [1, False]))
        said("again", results=run(client, engine_digits.train, kwargs={"epochs": 1}))
        said("child", results=run(client, child))
        said(
            "env",
            results=run(client, os.getenv, ["MINE"], env={"MINE": "yes"}),
        )
        said("together", results=together(client, 3))
        failure("too many", lambda: run(client, engine_digits.train, num_proc=3))
        failure("unknown", lambda: run(client, engine_digits.train, workers=["tcp://nowhere:1"]))
        failure("unpicklable", lambda: run(client, lambda: frame))
        threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        failure("interrupted", lambda: run(client, collect_for_ever), KeyboardInterrupt)
        said("after", results=run(client, engine_digits.train, kwargs={"epochs": 1}))
        failure("dies", lambda: run(client, engine_digits.train, kwargs={"dies": 1}))
        said("next", results=run(client, engine_digits.train, kwargs={"epochs": 1}))


if __name__ == "__main__":
    main()
