"""The examples with JAX learn, as programs under the launcher, and their ranks end with the same bits."""

import pytest
from ranks import everything, needs
from test_examples import accuracies, run

needs("jax", "optax", "sklearn")
EPOCHS = {"31_jax_digits.py": 6, "32_flax_mnist.py": 8}


@pytest.mark.parametrize("script", ["31_jax_digits.py", *everything("32_flax_mnist.py")])
def test_digits_are_learnt(script, monkeypatch):
    if "flax" in script:
        pytest.importorskip("flax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, output = run(2, script, "--epochs", EPOCHS[script])
    assert code == 0, output
    assert accuracies(output)[-1] > 95, output
