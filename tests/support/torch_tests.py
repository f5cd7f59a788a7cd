"""How do torch's own tests of torch.distributed end over a backend?

    python torch_tests.py hvdlite|gloo SIZE [REGEX]

They lie in torch's wheel (torch/testing/_internal/distributed/distributed_test.py) and need expecttest. torch starts
the ranks of each test anew, which takes seconds; here they are forked from a process that has imported everything.
Prints a line for each test as it ends: its name, passed, failed or skipped, and why.

Those that torch marks for other backends are run all the same: the mark is of the names of backends.
"""

import multiprocessing
import os
import re
import sys
import tempfile
import time
from multiprocessing.connection import wait
from types import SimpleNamespace

from launching import free_port

LIMIT_S, GRACE_S = 40.0, 3.0  # of a test; of its other ranks when one has failed
# Their bodies make the model only where the backend is called gloo or mpi. So for these it is.
BY_NAME = re.compile("test_accumulate_gradients_no_sync")


def kind_of(backend, size):
    """torch's tests as one class, whose ranks are not started by setUp."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="")  # torch's tests look for GPUs
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    import torch.testing._internal.distributed.distributed_test as own

    import hvdlite.torch.distributed  # noqa: F401

    class Forked(own.TestDistBackend, own.DistributedTest._DistTestBase):
        def setUp(self):
            pass

        tearDown = setUp

        def run_test(self, name, pipe):
            if BY_NAME.match(name):
                own.BACKEND = "gloo"
            super().run_test(name, pipe)

    own.torch.set_num_threads(1)
    # A barrier of torch's tests looks for files every 0.1 s, which is most of the time of a test.
    own.time = SimpleNamespace(time=time.time, sleep=lambda s: time.sleep(0.01 if s == 0.1 else s))
    return own, Forked


def rank_of(kind, name, rank, folder):
    """What the process of a rank does."""
    output = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    pipe = multiprocessing.Pipe()  # torch's thread looks at one end, and would see that nobody has the other one
    kind._run(rank, name, f"{folder}/store", pipe[1])


def ended(own, kind, name, size):
    """The outcome of one test and why."""
    own.initialize_temp_directories()
    own.Barrier.init()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=rank_of, args=(kind, name, rank, folder)) for rank in range(size)]
        until, left = time.monotonic() + LIMIT_S, {each.start() or each.sentinel: each for each in ranks}
        skips = {skip.exit_code: skip.message for skip in own.TEST_SKIPS.values()}
        while left and (done := wait(list(left), until - time.monotonic())):
            for each in map(left.pop, done):
                each.join()
                if each.exitcode and each.exitcode not in skips:
                    until = min(until, time.monotonic() + GRACE_S)
        for each in left.values():
            each.kill()
            each.join()
        said = "".join(open(f"{folder}/{rank}", errors="replace").read() for rank in range(size))
    own.cleanup_temp_dir()
    codes = {each.exitcode for each in ranks} - {0}
    if codes <= set(skips):
        return "skipped" if codes else "passed", "; ".join(map(skips.get, codes))
    errors = re.findall(r"^(?:\[rank\d+\]:.*?\] )?(\w[\w.]*(?:Error|Exception): .*)", said, re.MULTILINE)
    return "failed", next((each for each in errors if "barrier timeout" not in each), f"exit codes {codes}")


if __name__ == "__main__":
    backend, size, pattern = sys.argv[1], int(sys.argv[2]), re.compile((*sys.argv, "")[3])
    try:
        own, kind = kind_of(backend, size)
    except ImportError as error:  # expecttest, or a torch without its tests
        sys.exit(print(f"no tests: {error}"))
    for name in filter(pattern.search, dir(kind)):
        if name.startswith("test_"):
            print(name, *ended(own, kind, name, size), flush=True)
