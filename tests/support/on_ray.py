"""A driver of real Ray, started by test_ray.py: each case prints one line of JSON. Two workers on this machine.

TESTS_EVERYTHING adds GPUs, interrupts and Ray Train.
"""

import json
import os
import signal
import sys
import threading
import time

import engine_digits
import ray
import ray.train
from driving import failure, returns, said

from hvdlite.errors import HvdRunError
from hvdlite.ray import RayExecutor


class Counter:
    def __init__(self, start, step=1):
        self.value, self.step = start, step

    def add(self):
        self.value += self.step
        return self.value


def leaves():
    import hvdlite as hvd

    hvd.init()
    if hvd.rank() == 1:
        hvd.shutdown()


def works(call, seconds):
    """Rank 0 goes on alone, longer than others are asked who waits for them. They stay in the job."""
    import hvdlite as hvd

    if call == 0:
        hvd.init()
        time.sleep(seconds * (hvd.rank() == 0))
    return hvd.is_initialized()


def loop(config):
    for fails in (None, 1):
        print(json.dumps(engine_digits.train(fails)), flush=True)
        ray.train.report({"fails": fails})


def trained():
    """A trainer of Ray Train: digits, and then rank 1 raises."""
    from ray.train import ScalingConfig

    from hvdlite.ray.train import HvdliteTrainer

    trainer = HvdliteTrainer(loop, train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
    failure("trainer", trainer.fit, Exception)


def interrupt(seconds):
    threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()


def main():
    frame = sys._getframe()  # cannot be pickled
    path = os.pathsep.join(sys.path)
    began = time.time()
    ray.init(
        "local",
        num_cpus=3,
        num_gpus=2,  # nobody looks for them
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        logging_level="error",
    )
    said("ray", seconds=time.time() - began)
    executor = RayExecutor(num_workers=2)
    failure("not started", lambda: executor.run(engine_digits.train))
    began = time.time()
    executor.start(Counter, [5], {"step": 2}, extra_env_vars={"MINE": "yes"})
    said("start", seconds=time.time() - began)
    began = time.time()
    said("digits", results=executor.run(engine_digits.train), began=began)
    failure("raises", lambda: executor.run(engine_digits.train, kwargs={"fails": 1}))
    failure("returns", lambda: executor.run(returns, [0, True]))
    failure("uneven", lambda: executor.run(returns, [1, False]))
    said("again", results=executor.run(engine_digits.train, kwargs={"epochs": 1}))
    executor.run(works, [0, 1.5])
    said("others work on", results=executor.run(works, [1, 0]))
    executor.run(leaves)
    said("after leaving", results=executor.run(engine_digits.train, kwargs={"epochs": 1}))
    os.environ["RANK"], os.environ["HVDLITE_RANK"] = "5", "6"  # the driver may be one itself
    said("variables", results=executor.run(os.getenv, ["RANK"]))
    said("execute", results=executor.execute(Counter.add), one=executor.execute_single(Counter.add))
    said("remote", results=ray.get(executor.run_remote(os.getenv, ["MINE"])))
    failure("unpicklable", lambda: executor.run(lambda: frame))
    failure("dies", lambda: executor.run(engine_digits.train, kwargs={"dies": 1}))
    failure("lost", lambda: executor.run(engine_digits.train), HvdRunError)
    failure("too many", lambda: RayExecutor(num_workers=4).start())
    failure("too many hosts", lambda: RayExecutor(num_hosts=2).start())
    if os.environ.get("TESTS_EVERYTHING"):
        more()
    ray.shutdown()


def more():
    executor = RayExecutor(num_hosts=1, num_workers_per_host=2, use_gpu=True)
    executor.start()
    said("gpus", results=executor.run(os.getenv, ["CUDA_VISIBLE_DEVICES"]))
    said("next", results=executor.run(engine_digits.train, kwargs={"epochs": 1}))
    interrupt(1)
    failure("interrupted run", lambda: executor.run(time.sleep, [100]), KeyboardInterrupt)
    interrupt(0.3)
    failure("interrupted start", executor.start, KeyboardInterrupt)
    executor.start()
    executor.run_remote(time.sleep, [100])
    executor._failed = False  # a script that has looked at the refs itself
    interrupt(1)
    failure("interrupted shutdown", executor.shutdown, KeyboardInterrupt)
    said("actors", alive=sum(each["State"] == "ALIVE" for each in ray._private.state.actors().values()))
    trained()


if __name__ == "__main__":
    main()
