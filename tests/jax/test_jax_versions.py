"""One handler, compiled once, in older versions of JAX: the tests of collectives and errors."""

import sys

import overlays
import pytest
from ranks import Job, everything, needs

needs("jax")

SCRIPT = """
import jax
import hvdlite as hvd
import ranks  # after which tests can be imported
import test_jax_collectives, test_jax_errors
hvd.init()
assert jax.__version__ == {version!r}, jax.__version__
for module in (test_jax_collectives, test_jax_errors):
    for name, test in vars(module).items():
        if hasattr(test, "body"):
            test.body(*["float32"] * test.body.__code__.co_argcount)
            hvd.barrier()
print(f"rank {{hvd.rank()}} is done", flush=True)
"""


@pytest.mark.parametrize(("name", "version"), [("jax-oldest", "0.4.38"), *everything(("jax-older", "0.6.2"))])
def test_an_older_version_of_jax(name, version):
    code = f"import sys; sys.path.insert(0, {str(overlays.library(name))!r})" + SCRIPT.format(version=version)
    words = [sys.executable, "-c", code]
    with Job(2, words, cold=True) as job:
        assert job.wait(120) == 0, job.text()
        assert all(f"rank {rank} is done" in job.text() for rank in (0, 1)), job.text()
