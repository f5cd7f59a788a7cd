"""Test files that are written for Horovod on TensorFlow and Keras pass unchanged."""

import re
import sys
from importlib.util import find_spec

import pytest
from ranks import HERE, Job

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)


@pytest.mark.parametrize(
    "file, keras", [("horovod_tf_ops", "3"), ("horovod_tf_rest", "3"), ("horovod_keras", "3"), ("horovod_keras", "2")]
)
def test_a_test_file_for_horovod_passes_on_every_rank(file, keras):
    if keras == "2" and find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    path = HERE / f"{file}.py"
    assert "hvdlite" not in re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    command = [sys.executable, "-m", "pytest", "-v", "-x", "--noconftest", "-p", "no:cacheprovider", str(path)]
    with Job(2, command, "--as-horovod", framework="tensorflow", TF_USE_LEGACY_KERAS=str(int(keras == "2"))) as job:
        code = job.wait(900)
        assert code == 0, job.text()
        assert len(re.findall(r"=+ \d+ passed", job.text())) == 2, job.text()
