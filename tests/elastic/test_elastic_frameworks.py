"""Elastic scripts as they are written for Horovod run unchanged: a rank is killed, the others go on, another one comes,
takes part, and all end with the values that nobody's death has changed. PyTorch, TensorFlow, Keras.
"""

import json
import os
import re
import signal
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest
from elastic_jobs import AT_ONCE
from ranks import HERE, Job, everything

SECONDS = 120.0


def until(job, found):
    """Waits until `found` of what was printed is true, and returns it."""
    end = time.monotonic() + SECONDS
    while not (result := found(job.text())):
        assert time.monotonic() < end and job.process.poll() is None, job.text()
        time.sleep(0.02)
    return result


def trains(text):
    """(rank, size, pid) of each line."""
    return [tuple(map(int, each)) for each in re.findall(r"trains: rank (\d) of (\d), pid (\d+)\.", text)]


def ends(name, folder, framework, **environ):
    """What each rank of the script prints at its end, and all that was printed."""
    script, last = HERE / f"horovod_elastic_{name}.py", folder / "last"
    assert "hvdlite" not in re.sub(r'""".*?"""', "", script.read_text(), flags=re.DOTALL)
    command = [sys.executable, str(script), str(last)]
    flags = ("--as-horovod", "--min-np", "2", *AT_ONCE)
    with Job(3, command, *flags, framework=framework, PYTHONWARNINGS="always", **environ) as job:
        first = until(job, lambda text: len(found := trains(text)) == 3 and found)
        (victim,) = [pid for rank, _, pid in first if rank == 1]
        os.kill(victim, signal.SIGKILL)
        known = {pid for *_, pid in first}
        until(job, lambda text: [1 for _, size, pid in trains(text) if size == 3 and pid not in known])
        last.touch()
        assert job.wait(SECONDS) == 0, job.text()
        last_life = job.text().rpartition("hvdlite-run: epoch ")[2]  # the newcomer compares with the others in it
        assert framework == "torch" or "all 3 ranks computed the same gradients" in last_life, job.text()
        assert "HVD302" not in last_life, job.text()
    found = [json.loads(path.read_text()) for path in folder.glob("last.*")]
    assert len(found) == 3 and found == [found[0]] * 3, found
    return found[0]


def replayed(inputs, sizes):
    """The weights after these steps (batch, number of ranks): all ranks take the same samples."""
    weights = speed = np.zeros(3)
    for batch, size in sizes:
        data = inputs[batch]
        slope = 2 * data.T @ (data @ weights - data.sum(1)) / len(data)
        speed = 0.5 * speed - 0.0001 * size * slope
        weights = weights + speed
    return weights


def test_pytorch(tmp_path):
    found = ends("torch", tmp_path, "torch")
    assert found["once"] and found["loss"] < 1e-2 and found["lr"] == pytest.approx(0.03)


needs_tensorflow = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")


@needs_tensorflow
def test_tensorflow(tmp_path):
    found = ends("tf", tmp_path, "tensorflow")
    inputs = np.random.RandomState(1).randn(4, 16, 3)
    assert found["weights"] == pytest.approx(replayed(inputs, found["sizes"]), abs=1e-5)
    assert [batch for batch, _ in found["sizes"]] == list(range(4)) * found["epoch"]


@needs_tensorflow
@pytest.mark.parametrize("legacy", everything("0", "1"))
def test_keras(tmp_path, legacy):
    if legacy == "1" and find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    found = ends("keras", tmp_path, "tensorflow", TF_USE_LEGACY_KERAS=legacy)
    inputs = np.random.RandomState(1).randn(64, 3).reshape(16, 4, 3)
    assert found["weights"] == pytest.approx(replayed(inputs, found["sizes"]), abs=1e-5)
