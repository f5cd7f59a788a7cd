"""TensorFlow's tensors in 8 and 4 bits between pretended hosts: calls, tapes and optimizers, eagerly and in graphs."""

import os

import numpy as np
import pytest
from pretended import hosts_of
from ranks import as_ranks, needs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
needs("keras", "tensorflow")

PATIENCE_S = 240.0
BOUND = {8: 0.5 / 127, 4: 0.5 / 7}  # of the greatest magnitude, for each rounding


def modes():
    import tensorflow as tf

    return [lambda function: function, tf.function]


def given(seed=0, shape=(100, 64)):
    import hvdlite as hvd

    return np.random.default_rng(10 * seed + hvd.rank()).standard_normal(shape).astype("float32")


def alike(*arrays):
    import hvdlite as hvd

    return len(set(hvd.allgather_object(b"".join(np.asarray(each).tobytes() for each in arrays)))) == 1


def close(got, exact, bits):
    """Two roundings, of values of up to 5 and of their average."""
    return np.abs(np.asarray(got, "float32") - exact).max() <= 2 * 5 * BOUND[bits]


def raises(call, *says):
    import tensorflow as tf

    with pytest.raises((ValueError, NotImplementedError, tf.errors.OpError)) as caught:
        call()
    assert all(each in str(caught.value) for each in says), str(caught.value)


@pytest.mark.parametrize("per_host", [1, 2])
@as_ranks(4)
def test_calls_round_alike_in_both_modes_and_say_what_they_cannot(per_host):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    with hosts_of(per_host):
        x = tf.constant(given())
        exact = hvd.allreduce(x).numpy()
        for bits, int_ in ((8, hvd.Compression.int8), (4, hvd.Compression.int4)):
            for mode in modes():
                one = mode(lambda int_=int_: hvd.allreduce(x, compression=int_))()
                narrow = tf.cast(x, tf.bfloat16)
                group = mode(lambda int_=int_: hvd.grouped_allreduce([narrow, x[0, 0], x], compression=int_))()
                assert [(each.dtype, each.shape) for each in group[:2]] == [(tf.bfloat16, x.shape), (tf.float32, ())]
                assert all(close(each, exact, bits) for each in (one, group[0], group[2])) and alike(one, *group[1:])
        for mode in modes():
            slices = tf.IndexedSlices(x[:2], tf.constant([0, 1]), tf.constant([100, 64]))
            sparse = mode(lambda: hvd.allreduce(slices, op=hvd.Sum, compression=hvd.Compression.int4))()  # noqa: B023
            assert np.array_equal(sparse.values, hvd.allgather(x[:2]))
            for says, terms in {
                "needs op=hvd.Average or hvd.Sum": {"op": hvd.Max},
                "keeps a residual for each name": {"compression": hvd.Compression.int8(feedback=True)},
            }.items():
                raises(mode(lambda t=terms: hvd.allreduce(x, **{"compression": hvd.Compression.int8, **t})), says)
            mine = hvd.Compression.int8 if hvd.rank() >= per_host else hvd.Compression.int4
            says = ("differ", "ranks disagree") if hvd.rank() % per_host else ("said int4", "said int8")
            raises(mode(lambda c=mine: hvd.allreduce(x, compression=c, name="differ")), *says)
        compiled = tf.function(lambda: hvd.allreduce(x, compression=hvd.Compression.int8), jit_compile=True)
        raises(compiled, "cannot be compiled by XLA yet", "jit_compile=False")
        raises(lambda: hvd.allreduce(tf.constant([1]), compression=hvd.Compression.int8), "takes float32", "not int32")
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, compression=hvd.Compression.int8)
        raises(lambda: tape.gradient(y, x), "Compression.int8 has no gradient")


def tape_of(variables, gradients, mode, **terms):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32) * g) for v, g in zip(variables, gradients)])
        return hvd.DistributedGradientTape(tape, **terms).gradient(loss, variables)

    return mode(step)


@pytest.mark.parametrize("per_host", [1, 2])
@as_ranks(4)
def test_tapes_round_what_is_large_and_make_up_for_it(per_host):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    small, large, half, unused = given(1, (5,)), given(2), given(3, (200, 64)), tf.Variable(1.0)
    with hosts_of(per_host):
        exact = [hvd.allreduce(each).numpy() for each in (small, large, half.astype("float16"))]
        for mode in modes():
            variables = [tf.Variable(tf.zeros(5)), tf.Variable(tf.zeros([100, 64]))]
            variables.append(tf.Variable(tf.zeros([200, 64], tf.float16)))
            int8 = hvd.Compression.int8(bucket_mb=0.01)  # two buckets
            step = tape_of(variables, [small, large, half], mode, compression=int8, gradient_predivide_factor=2.0)
            found = step()
            assert np.array_equal(found[0], exact[0]) and alike(*found) and found[2].dtype == tf.float16
            assert not np.array_equal(found[1], exact[1])
            assert close(found[1], exact[1], 8) and close(found[2], exact[2], 8)
            for bits, feedback, least, most in ((8, True, 0, 1e-3), (4, True, 0, 1e-2), (4, False, 5e-2, 1)):
                int_ = getattr(hvd.Compression, f"int{bits}")(feedback=feedback)
                fresh = [tf.Variable(tf.zeros([100, 64])), unused]
                step, total = tape_of(fresh[:1], [large], mode, compression=int_), 0
                for _ in range(50):
                    total = total + step()[0].numpy() / 50
                assert least <= np.linalg.norm(total - exact[1]) / np.linalg.norm(exact[1]) < most
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(fresh[0] * large)
            assert hvd.DistributedGradientTape(tape, compression=int_).gradient(loss, fresh)[1] is None
        for terms in ({"op": hvd.Adasum}, {"op": hvd.Max}):
            raises(lambda t=terms: hvd.DistributedGradientTape(tape, compression=int_, **t), "needs op=hvd.Average")
        mine = hvd.Compression.int8 if hvd.rank() else hvd.Compression.int4
        raises(tape_of(fresh[:1], [large], modes()[0], compression=mine), "int4 (25 MiB)", "int8 (25 MiB)")
        raises(tf.function(tape_of(fresh[:1], [large], modes()[0], compression=int_), jit_compile=True), "by XLA yet")
        pair = hvd.add_process_set([1, 3])
        found = tape_of(fresh[:1], [large], modes()[1], compression=hvd.Compression.int8, process_set=pair)()
        exact = hvd.allreduce(large, process_set=pair).numpy() if pair.included() else large
        assert close(found[0], exact, 8) and np.array_equal(found[0], exact) != pair.included()
        hvd.remove_process_set(pair)


@as_ranks(2)
def test_on_one_host_nothing_is_rounded():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    large = given()
    exact, variable = hvd.allreduce(large).numpy(), tf.Variable(tf.zeros([100, 64]))
    for mode in modes():
        assert np.array_equal(mode(lambda: hvd.allreduce(large, compression=hvd.Compression.int4))(), exact)
        assert np.array_equal(tape_of([variable], [large], mode, compression=hvd.Compression.int4)()[0], exact)
