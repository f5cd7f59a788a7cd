"""Defects of Horovod that its users know, as regressions here: the numbers B1 to B16 of the list they are kept in.

Most are tested where they belong: B1 test_config (malformed values), B6 test_bad_input (who said what), B7 also in
test_torch_elastic, B11 test_launcher_hosts, B13 test_launcher_run (the secret), B16 test_torch_state. Here is the rest.
"""

import re
import sys

import numpy as np
import pytest
from ranks import Job, as_ranks

import hvdlite as hvd
from hvdlite.errors import HorovodInternalError, HvdMismatchError

BLOCKED = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("distutils", "setuptools", "pkg_resources", "_distutils_hack", "six", "yaml"):
            raise ModuleNotFoundError(f"{name} is not there on every supported Python", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in ("distutils", "setuptools", "_distutils_hack")]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
import hvdlite.launcher
found = [module.name for module in pkgutil.iter_modules(hvdlite.launcher.__path__)]
for name in found:
    if name != "__main__":
        importlib.import_module(f"hvdlite.launcher.{name}")
print(len(found))
"""


def said(program, size, code, *flags):
    """What a program on several ranks prints; it ends with `code`."""
    with Job(size, [sys.executable, "-c", program], *flags) as job:
        assert job.wait(90) == code, job.text()
        return job.text()


def test_b2_the_launcher_imports_nothing_that_a_python_may_lack():
    assert int(re.findall(r"^(\d+)$", said(BLOCKED, 1, 0), re.MULTILINE)[0]) > 10


def test_b7_what_ranks_disagree_about_is_no_lost_rank():
    assert not issubclass(HvdMismatchError, HorovodInternalError)
    assert issubclass(HvdMismatchError, ValueError)


NEVER_MEETS = """
import os, sys, hvdlite.torch as hvd
if os.environ["HVDLITE_RANK"] == "1":
    sys.stdin.read()
    import signal; signal.pause()
try:
    hvd.init()
except hvd.HvdInitError as error:
    print("raised", error, flush=True)
    sys.exit(7)
"""


def test_b8_a_failed_start_is_an_exception_that_names_who_is_missing():
    text = said(NEVER_MEETS, 2, 1, "--start-timeout", "3")
    assert re.search(r"raised .*rank 1 did not call init within 3", text), text
    assert "terminate called" not in text and "Aborted" not in text


RAISES = """
import sys, torch, hvdlite.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(100):
    try:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if step == 3 and hvd.rank() == 1:
            raise ValueError("boom")
        optimizer.step()
    except hvd.HorovodInternalError as error:
        print("seen", type(error).__name__, error.rank, error, flush=True)
        raise
"""


def test_b9_the_first_error_is_the_cause_on_all_ranks():
    pytest.importorskip("torch")
    text = said(RAISES, 3, 1)
    seen = re.findall(r"seen HvdPeerLostError 1 .*rank 1 raised ValueError: boom \(<string>:\d+\)", text)
    assert len(seen) == 2, text


@as_ranks(2)
def test_b14_several_barriers_at_once_do_not_meet_each_other():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(hvd.barrier) for _ in range(20)]:
            future.result(30)
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
