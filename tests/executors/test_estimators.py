"""Do estimators on Spark compute what they should, and refuse what they cannot?

on_estimators.py makes all cases, without a session; how they fit and transform in a real one asks test_spark.py.
"""

import pytest
import sparks
from engines import cases
from ranks import everything


@pytest.fixture(scope="module")
def found():
    folders, settings = sparks.found()
    return cases("on_estimators.py", *folders, KERAS_BACKEND="torch", **settings)


def test_a_label_has_the_shape_of_its_output(found):
    assert found["regression"]["weights"] == pytest.approx([2, -1], abs=0.05) and found["regression"]["off"] < 0.05
    assert found["regression"]["rows"] == [[]] and found["classes"]["rows"] == [[2]]
    assert found["classes"]["loss"] < 0.5


def test_a_column_may_be_feature_and_label(found):
    losses = found["autoencoder"]["losses"]
    assert losses[-1] < losses[0] / 5


@pytest.mark.parametrize(
    "name, words",
    [
        ("loss", "loss has 3 entries, for 2 label_cols"),
        ("loss_weights", "loss_weights has 1 entries, for 2 label_cols"),
        ("input_shapes", "input_shapes has 2 entries, for 1 feature_cols"),
        ("validation", "validation=0: must be a share"),
        ("metrics", "metrics: 2 functions must have as many names"),
        ("outputs", "the model has 1 outputs, for the labels y, ab"),
        ("more outputs", "the model has 2 outputs, for the labels y"),
        ("predicts two", "the model has 2 outputs, for the labels y"),
        *everything(("keras, outputs", "the model has 1 outputs, for the labels y, ab")),
        ("null", "column ab: "),
        ("env", "env: 'A': 3: names and values must be str"),
    ],
)
def test_what_does_not_go_together_is_refused(found, name, words):
    assert found[name]["text"].startswith(words) and "[HVD24" in found[name]["text"], found[name]


@pytest.mark.parametrize("name", ["a b", "a#b", "a%20b", "\u00fcml\u00e4ut", "a?b"])
def test_a_store_may_have_any_name(found, name):
    assert found[name]["read"] == ["kept", [1]] and found[name]["left"] == ["checkpoint"]


@pytest.mark.parametrize("case", everything("keras"))
def test_keras_takes_classes_and_losses_of_a_script(found, case):
    assert found[case]["weights"] == pytest.approx([2, -1], abs=0.05) and found[case]["rows"] == [[]]
    assert found[case]["layer"]
