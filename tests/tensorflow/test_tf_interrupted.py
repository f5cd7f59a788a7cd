"""A signal handler raises while an eager collective of TensorFlow waits for another rank. As test_interrupted."""

import pytest
from ranks import as_ranks, needs
from test_interrupted import COUNT, ERRORS, EVERY, after_ms, interrupted

needs("tensorflow")

PATIENCE_S = 120.0
FORMS = {
    "allreduce": (lambda hvd, tensor, name: hvd.allreduce(tensor, op=hvd.Sum, name=name), 101),
    "broadcast": (lambda hvd, tensor, name: hvd.broadcast(tensor, 0, name=name), 1),
    "allgather": (lambda hvd, tensor, name: hvd.allgather(tensor, name=name), 100),
}


@pytest.mark.parametrize("form", FORMS)
@as_ranks(2, deadline=600)
def test_a_signal_in_any_millisecond_leaves_no_tensor_without_an_owner(form):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    start, due = FORMS[form]

    def call(value, name):
        return start(hvd, tf.fill([COUNT], tf.constant(value, tf.float32)), name).numpy()

    call(1.0, "warm")  # the first call of a process takes long
    for number in range(0, 58, min(2 * EVERY - 1, 14)):
        error = ERRORS[number % len(ERRORS)]("mine")
        assert interrupted(call, due, 1, f"in.{form}", after_ms(number), error)
