"""A forgotten shard, and what one rank loads or changes later, on each backend of Keras: keras_rounds.py."""

import sys
from importlib.util import find_spec

import pytest
from launching import launch
from ranks import HERE, everything

ENVIRONS = {
    "tensorflow": {},
    "torch": {"KERAS_BACKEND": "torch"},
    "tf_keras": {"TF_USE_LEGACY_KERAS": "1"},
}


@pytest.mark.parametrize("needs", ["tensorflow", "torch", *everything("tf_keras")])
def test_ranks_are_told(needs):
    if find_spec(needs) is None or find_spec("tensorflow") is None:
        pytest.skip(f"{needs} is not installed")
    code, out, err = launch("-np", 2, sys.executable, "-u", HERE / "keras_rounds.py", **ENVIRONS[needs])
    assert code == 0 and out.count("all told") == 2, out + err
