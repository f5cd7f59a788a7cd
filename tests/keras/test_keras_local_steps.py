"""Keras's DiLoCoCallback and LocalSGDCallback, on each backend: keras_local_steps.py."""

import sys
from importlib.util import find_spec

import pytest
from launching import launch
from ranks import HERE, as_ranks, needs

needs("keras", "tensorflow")

PATIENCE_S = 240.0


@as_ranks(2)
def test_ranks_take_steps_of_their_own_on_tensorflow():
    from keras_local_steps import program

    program()


def test_they_do_so_on_torch():
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    code, out, err = launch("-np", 2, sys.executable, "-u", HERE / "keras_local_steps.py", KERAS_BACKEND="torch")
    assert code == 0 and out.count("all local") == 2, out + err
