"""The examples with TensorFlow and Keras learn, as programs under the launcher."""

import re
from importlib.util import find_spec

import pytest
from ranks import everything
from test_examples import accuracies, run

if find_spec("tensorflow") is None or find_spec("sklearn") is None:
    pytest.skip("TensorFlow or scikit-learn is not installed", allow_module_level=True)


@pytest.mark.parametrize(("precision", "backend"), [("mixed_float16", "tensorflow"), *everything(("float32", "torch"))])
def test_keras_fits_digits(monkeypatch, precision, backend):
    if backend == "torch":
        pytest.importorskip("torch")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, output = run(2, "08_keras_digits.py", "--precision", precision, "--epochs", 6)
    assert code == 0, output
    assert accuracies(output)[-1] >= 90, output


def test_a_loop_of_ones_own():
    code, output = run(2, "09_tensorflow_tape.py", "--epochs", 6)
    assert code == 0, output
    assert accuracies(output)[-1] >= 90, output


def test_embeddings_learn_and_are_the_same_everywhere():
    code, output = run(2, "10_embeddings.py")
    assert code == 0, output
    assert accuracies(output)[-1] >= 98 and "the same bits: True" in output, output


def test_one_model_in_each_style_has_the_same_bits():
    code, output = run(2, "27_three_styles.py", "--framework", "keras")
    assert code == 0 and output.count("on all ranks: True") == 4, output
    assert len(set(re.findall(r": (\w{12}),", output))) == 1, output


def test_the_benchmark_works():
    pytest.importorskip("torch")
    code, output = run(2, "benchmarks/tensorflow_ops.py", "--patience", "tiny")
    assert code == 0, output
    assert output.count("RESULT") == 4, output
