"""Test files that are written for Horovod on TensorFlow and Keras pass unchanged."""

import re
import sys
from importlib.util import find_spec

import pytest
from ranks import HERE, Job, everything

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)


@pytest.mark.parametrize(
    "keras, files",
    [("3", ["horovod_keras"]), *everything(("3", ["horovod_tf_ops", "horovod_tf_rest"]), ("2", ["horovod_keras"]))],
)
def test_files_of_tests_for_horovod_pass_on_every_rank(keras, files):
    if keras == "2" and find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    paths = [HERE / f"{file}.py" for file in files]
    assert all("hvdlite" not in re.sub(r'""".*?"""', "", each.read_text(), flags=re.DOTALL) for each in paths)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-x",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "--disable-warnings",
        *map(str, paths),
    ]
    with Job(2, command, "--as-horovod", framework="tensorflow", TF_USE_LEGACY_KERAS=str(int(keras == "2"))) as job:
        code = job.wait(900)
        assert code == 0, job.text()
        assert len(re.findall(r"=+ \d+ passed", job.text())) == 2, job.text()
