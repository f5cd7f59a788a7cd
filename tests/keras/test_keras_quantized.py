"""Optimizers of Keras with compression=Compression.int8 and int4, on each backend: keras_quantized.py."""

import sys
from importlib.util import find_spec

import pytest
from launching import launch
from ranks import HERE, as_ranks, needs

needs("keras", "tensorflow")

PATIENCE_S = 240.0


@as_ranks(4)
def test_optimizers_round_between_hosts_and_make_up_for_it():
    from keras_quantized import hvd, program

    program(hvd.size() // 2)


def test_optimizers_round_on_pytorch():
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    code, out, err = launch("-np", 2, sys.executable, "-u", HERE / "keras_quantized.py", KERAS_BACKEND="torch")
    assert code == 0 and out.count("all rounded") == 2, out + err
