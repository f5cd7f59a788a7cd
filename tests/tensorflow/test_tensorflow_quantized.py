"""TensorFlow's tensors in 8 and 4 bits between pretended hosts: single calls and tapes, eagerly and in graphs."""

import numpy as np
import pytest
from pretended_hosts import pretend
from ranks import as_ranks, needs

needs("keras", "tensorflow")

PATIENCE_S = 240.0


def raises(call, *says):
    with pytest.raises(Exception) as caught:
        call()
    assert all(each in str(caught.value) for each in says), str(caught.value)


def close(got, exact, bits):
    """Two roundings, of values of up to 5 and of their average."""
    return np.abs(np.asarray(got, "float32") - exact).max() <= (5 / 127 if bits == 8 else 5 / 7)


@pytest.mark.parametrize("per_host", [1, 2])
@as_ranks(4)
def test_calls_and_tapes_round_alike_in_both_modes_and_say_what_they_cannot(per_host):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    pretend(4)
    int8, int4, rank = hvd.Compression.int8, hvd.Compression.int4, hvd.rank()
    x = tf.constant(np.random.default_rng(rank).standard_normal((100, 64)), tf.float32)
    exact = hvd.allreduce(x).numpy()

    def gradients(mode, of, scale=x, **terms):
        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32) * scale) for each in of[:-1]])
            return hvd.DistributedGradientTape(tape, **terms).gradient(loss, of)

        return mode(step)

    def alike(*arrays):
        return len(set(hvd.allgather_object(b"".join(np.asarray(each).tobytes() for each in arrays)))) == 1

    half, whole, unused = tf.Variable(tf.zeros(x.shape, tf.float16)), tf.Variable(tf.zeros(x.shape)), tf.Variable(1.0)
    small = tf.Variable(tf.zeros(64))
    for mode in (lambda function: function, tf.function):  # on one host nothing is rounded
        assert np.array_equal(mode(lambda: hvd.allreduce(x, compression=int4))(), exact)
        assert np.array_equal(gradients(mode, [whole, unused], compression=int4)()[0], exact)
    pretend(per_host)
    pair = hvd.add_process_set([1, 3])
    of_pair = hvd.allreduce(x, process_set=pair).numpy() if pair.included() else x
    for mode in (lambda function: function, tf.function):
        for bits, int_ in ((8, int8), (4, int4)):
            group = [tf.cast(x, tf.bfloat16), x[0, 0], x]
            found = mode(lambda g=group, c=int_: hvd.grouped_allreduce(g, compression=c))()
            found.append(mode(lambda c=int_: hvd.allreduce(x, compression=c))())
            assert [(each.dtype, each.shape) for each in found] == [(e.dtype, e.shape) for e in [*group, x]]
            assert all(close(found[i], exact, bits) for i in (0, 2, 3)) and alike(*found)
        slices = tf.IndexedSlices(x[:2], tf.constant([0, 1]), tf.constant([100, 64]))
        sparse = mode(lambda s=slices: hvd.allreduce(s, op=hvd.Sum, compression=int4))()
        assert np.array_equal(sparse.values, hvd.allgather(x[:2]))
        for terms, says in (
            ({"op": hvd.Max}, ["needs op=hvd.Average or hvd.Sum"]),
            ({"compression": int8(feedback=True)}, ["keeps a residual for each name"]),
            ({"compression": int4 if rank < per_host else int8, "name": "differ"}, ["ranks disagree", "differ"]),
        ):
            if "name" in terms and rank % per_host == 0:
                says += ["said int4", "said int8"]
            raises(mode(lambda t=terms: hvd.allreduce(x, **{"compression": int8, **t})), *says)
        few = int8(bucket_mb=0.01, least_bytes=12800)  # each is a bucket, and one is too small
        found = gradients(mode, [half, whole, small, unused], compression=few, gradient_predivide_factor=2.0)()
        assert found[0].dtype == tf.float16 and found[3] is None and alike(*found[:3])
        assert close(found[0], exact, 8) and close(found[1], exact, 8) and not np.array_equal(found[1], exact)
        np.testing.assert_allclose(found[2], exact.sum(0), rtol=1e-4, atol=1e-4)
        found = gradients(mode, [whole, unused], compression=int8, process_set=pair)()
        assert close(found[0], of_pair, 8) and np.array_equal(found[0], of_pair) != pair.included()
    mean, step = 0, gradients(mode, [tf.Variable(tf.zeros(x.shape)), unused], compression=int8)
    for _ in range(50):
        mean = mean + step()[0].numpy() / 50
    assert np.linalg.norm(mean - exact) < 1e-3 * np.linalg.norm(exact)
    raises(gradients(mode, [whole, unused], compression=int8 if rank else int4), "int4 (25 MiB)", "int8 (25 MiB)")
    raises(lambda: hvd.DistributedGradientTape(tf.GradientTape(), compression=int8, op=hvd.Max), "needs op=hvd.Av")
    for call in (lambda: hvd.allreduce(x, compression=int8), gradients(lambda f: f, [whole, unused])):
        raises(tf.function(call, jit_compile=True), "cannot be compiled by XLA yet", "jit_compile=False")
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allreduce(x, compression=int8)
    raises(lambda: tape.gradient(y, x), "Compression.int8 has no gradient")
