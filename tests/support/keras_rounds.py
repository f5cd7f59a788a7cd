"""What two ranks are told of the rounds of an optimizer or a tape, and how windows of passes return to a commit. Run by
test_keras_rounds.py on each backend.
"""

import itertools
import os
import re
import warnings

import numpy as np

TORCH, LEGACY = os.environ.get("KERAS_BACKEND") == "torch", "TF_USE_LEGACY_KERAS" in os.environ
if TORCH:
    import keras

    import hvdlite.keras as hvd
else:
    import tensorflow as tf

    import hvdlite.tensorflow as tensors
    import hvdlite.tensorflow.keras as hvd
    from hvdlite.tensorflow import initial_check

    keras = tf.keras
hvd.init()
RANK, ONES = hvd.rank(), np.ones(3, "float32")


def told(form, graph, slope, change=lambda variable, optimizer: None, at=0, base=None, steps=10):
    """The warnings of all ranks while the gradient is slope(step); `change` is made on rank 1 before the step `at`."""
    variable = (tf.Variable if LEGACY else keras.Variable)(ONES)
    optimizer = (base or keras.optimizers.Adam)(0.01)
    passes = 2 if form == "passes" else 1
    if form != "tape":
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
    if hasattr(optimizer, "build"):
        optimizer.build([variable])
    if not TORCH:
        initial_check._of_tapes.clear()

    def step(slope):
        if "tape" in form:
            with tf.GradientTape() as tape:
                loss = slope * tf.reduce_sum(tf.convert_to_tensor(variable))
            given = variable if LEGACY else variable.value
            slope = tensors.DistributedGradientTape(tape).gradient(loss, given)[0]
        gradient = slope * (keras.ops.convert_to_tensor(ONES) if TORCH else tf.constant(ONES))
        optimizer.apply_gradients([(gradient, variable)])

    run = tf.function(step) if graph else step
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(steps):
            if number == at and RANK == 1:
                change(variable, optimizer)
            for _ in range(passes):
                run(slope(number) if TORCH else tf.constant(float(slope(number))))
    texts = [str(each.message) for each in found if "[HVD" in str(each.message)]
    return [text for of_rank in hvd.allgather_object(texts) for text in of_rank]


def state_of(optimizer):
    """The variables of three elements: the moments."""
    found = optimizer.variables
    return [each for each in (found() if callable(found) else found) if tuple(each.shape) == (3,)]


GRAPH = [False, *([] if TORCH else [True])]
FORMS = ["optimizer", *([] if TORCH else ["tape"])]
if os.environ.get("TESTS_EVERYTHING"):
    FORMS += ["passes", *([] if TORCH else ["tape and optimizer"])]
EQUAL = {  # what gives all ranks equal gradients in which steps; whether that is a warning
    "same": (lambda step: 1.0 + step, True),
    "zeros": (lambda step: 0.0, False),
    "first step": (lambda step: 1.0 + RANK * (step == 0), False),
    "second step": (lambda step: 1.0 + RANK * (step == 1), False),
    "own": (lambda step: 1.0 + RANK, False),
}
for form, graph, (name, (slope, warns)) in itertools.product(FORMS, GRAPH, EQUAL.items()):
    if graph and name in ("zeros", "first step"):
        continue
    said = told(form, graph, slope, steps=3)
    assert ["HVD241" in each for each in said] == [True] * (warns + (warns and form == "tape and optimizer")), (
        form, graph, name, said,
    )  # fmt: skip
os.environ["HVDLITE_CHECK_START"] = "off"
assert not told("optimizer", False, EQUAL["same"][0])
os.environ["HVDLITE_CHECK_START"] = "warn"

CHANGES = {  # on rank 1; what is said of it
    "weights": (lambda variable, _: variable.assign(5 * ONES), "variable '.*' on rank 1 .* train different models"),
    "moments": (lambda _, optimizer: state_of(optimizer)[-1].assign(ONES), r"optimizer's variable .* on rank 1"),
    "rate": (lambda _, optimizer: optimizer.learning_rate.assign(0.5), "optimizer's variable .*rate.* on rank 1"),
    "steps": (lambda _, optimizer: optimizer.iterations.assign(70), "optimizer's variable .*iter.* on rank 1"),
}
for (name, (change, text)), at in itertools.product(CHANGES.items(), [0, 4]):
    graph = at > 0 and not TORCH
    said = told("optimizer", graph, EQUAL["own"][0], change, at)
    assert len(said) == 1 and "HVD302" in said[0] and re.search(text if at == 0 else "on rank 1", said[0]), (
        name,
        at,
        graph,
        said,
    )
assert not told("optimizer", False, EQUAL["own"][0], lambda variable, _: variable.assign(variable * (1 + 1e-6)), 4)


def state_after(passes):
    """The weights after passes with these slopes; with None the state goes back to its last commit."""
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, None, False, "ones")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    state, (weight,) = hvd.elastic.KerasState(model, optimizer, step=0), model.trainable_variables
    for slope in passes:
        if slope is None:
            if TORCH:
                weight.value.grad = weight.value.detach().clone()
            state.restore()
            assert not TORCH or weight.value.grad is None
            continue
        optimizer.apply_gradients([(slope * keras.ops.ones((3, 1)) if TORCH else tf.fill((3, 1), slope), weight)])
        if slope < 4.0:
            state.commit()
    return model.get_weights()[0].tolist()


assert state_after([4.0, 1.0, 4.0, 2.0]) == state_after([4.0, None, 4.0, 1.0, 4.0, None, 4.0, 2.0])
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    within = state_after([1.0, 4.0, None, 4.0, 5.0]), state_after([4.0, 5.0] if LEGACY else [1.0, 4.0, 5.0])
assert within[0] == within[1] and sum("restarts: it was" in str(each.message) for each in found) == LEGACY, found
print("all told", flush=True)
