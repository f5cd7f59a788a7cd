"""The collectives on TensorFlow's tensors, eager, inside tf.function, and a mixture of both."""

from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks, everything

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]


def both(mode, function):
    """The function as this rank runs it: with "mixed", rank 0 eagerly and the others in a graph."""
    import tensorflow as tf

    import hvdlite as hvd

    return tf.function(function) if mode == "graph" or (mode == "mixed" and hvd.rank() > 0) else function


@pytest.mark.parametrize("mode", ["mixed", *everything("eager", "graph")])
@as_ranks(3, deadline=240)
def test_every_collective_of_every_dtype(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) // 2
    for name in DTYPES:
        dtype = getattr(tf if hasattr(tf, name) else tf.dtypes.experimental, name)
        mine = tf.cast(tf.fill([2 * size, 3], float(rank + 1)), dtype)

        def every(x, name=name):
            return (
                hvd.allreduce(x, op=hvd.Sum, name=f"sum.{name}"),
                hvd.allreduce(x, op=hvd.Max, name=f"max.{name}"),
                hvd.allgather(x[: 2 * rank], name=f"gather.{name}"),
                hvd.broadcast(x, size - 1, name=f"broadcast.{name}"),
                hvd.reducescatter(x, op=hvd.Sum, name=f"scatter.{name}"),
                hvd.alltoall(x, name=f"exchange.{name}"),
                *hvd.grouped_allreduce([x, x[0]], op=hvd.Sum, name=f"group.{name}"),
                *hvd.grouped_allgather([x[:1], x[: rank + 1]], name=f"gathers.{name}"),
                *hvd.grouped_reducescatter([x, x], op=hvd.Sum, name=f"scatters.{name}"),
            )

        gathered = [r + 1 for r in range(size) for _ in range(2 * r)]
        wanted = [
            np.full((2 * size, 3), total), np.full((2 * size, 3), size), np.repeat(gathered, 3).reshape(-1, 3),
            np.full((2 * size, 3), size), np.full((2, 3), total),
            np.repeat([r + 1 for r in range(size) for _ in range(2)], 3).reshape(-1, 3),
            np.full((2 * size, 3), total), np.full(3, total),
            np.repeat(range(1, size + 1), 3).reshape(-1, 3),
            np.repeat([r + 1 for r in range(size) for _ in range(r + 1)], 3).reshape(-1, 3),
            np.full((2, 3), total), np.full((2, 3), total),
        ]  # fmt: skip
        got = both(mode, every)(mine)
        for index, (result, expected) in enumerate(zip(got, wanted)):
            assert result.dtype == dtype
            np.testing.assert_array_equal(tf.cast(result, tf.float64), expected, err_msg=f"{name} {index}")


def weights(shape, rank):
    """What rank `rank` multiplies its result with."""
    return np.random.RandomState(rank).standard_normal(shape)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@as_ranks(2, deadline=240)
def test_gradients_are_those_that_one_process_would_compute(mode):
    """Each rank's loss is the sum of weights times result; the exact gradient, scaled as Horovod scales it."""
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank, size = hvd.rank(), hvd.size()
    w = [weights((4, 3), r) for r in range(size)]
    mean = sum(w) / size
    rows = 1 + 2 * rank  # 1 and 3 rows make the 4 of an allgather
    start = [0, 1][rank]
    cases = {
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), 4, sum(w) * 2),
        "average": (lambda x: hvd.allreduce(x), 4, mean),
        "grouped": (lambda x: hvd.grouped_allreduce([x, x[:1]], op=hvd.Sum)[0], 4, sum(w)),
        "allgather": (lambda x: hvd.allgather(x), rows, mean[start : start + rows]),
        "grouped_allgather": (lambda x: hvd.grouped_allgather([x])[0], rows, mean[start : start + rows]),
        "broadcast": (lambda x: hvd.broadcast(x, 1), 4, mean * rank),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), 8, np.concatenate(w) * size),
        "grouped_scatter": (lambda x: hvd.grouped_reducescatter([x])[0], 8, np.concatenate(w)),
        "alltoall": (
            lambda x: hvd.alltoall(x),
            4,
            np.concatenate([w[r][2 * rank : 2 * rank + 2] for r in range(size)]),
        ),
        "splits": (lambda x: hvd.alltoall(x, [2, 2])[0], 5, None),
    }
    for name, (function, height, wanted) in cases.items():

        def gradient(x, weight, function=function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) * weight)
            return tape.gradient(loss, x)

        got = both(mode, gradient)(tf.constant(weights((height, 3), 9), tf.float64), tf.constant(w[rank]))
        if wanted is None:  # the fifth row went to nobody
            wanted = np.concatenate([w[r][2 * rank : 2 * rank + 2] for r in range(size)] + [np.zeros((1, 3))])
        np.testing.assert_allclose(got, wanted, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@as_ranks(2, deadline=240)
def test_what_has_no_gradient_says_so(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def gradient(reduce):
        def of(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = reduce(x)
            return tape.gradient(y, x)

        return both(mode, of)(tf.constant([1.0, 2.0]))

    for op, name in ((hvd.Max, "max"), (hvd.Min, "min"), (hvd.Product, "product"), (hvd.Adasum, "adasum")):
        says = f"allreduce with op {name} has no gradient: use hvd.Average or hvd.Sum, or tf.stop_gradient"
        with pytest.raises(NotImplementedError, match=says):
            gradient(lambda x, op=op: hvd.allreduce(x, op=op))
        with pytest.raises(NotImplementedError, match=says):
            gradient(lambda x, op=op: hvd.grouped_allreduce([x, 2 * x], op=op))
        untouched = gradient(lambda x, op=op: tf.stop_gradient(hvd.allreduce(x, op=op)) * x)
        assert untouched.shape == [2]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@as_ranks(2, deadline=240)
def test_what_is_no_tensor_is_refused_by_name_with_the_remedy(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    refused = [
        (tf.ragged.constant([[1.0, 2.0], [3.0]]), r"not \S+RaggedTensor: gather its flat_values"),
        (tf.sparse.from_dense([[1.0, 0.0]]), r"not \S+SparseTensor: give tf\.sparse\.to_dense"),
        ([[1.0, 2.0], [3.0]], r"not builtins\.list of which TensorFlow makes none \("),
        (None, r"not builtins\.NoneType \[HVD201\]"),
    ]
    calls = {
        "allreduce": lambda of: hvd.allreduce(of, name="n", compression=hvd.Compression.fp16),
        "allgather": lambda of: hvd.allgather(of, name="n"),
        "broadcast": lambda of: hvd.broadcast(of, 0, name="n"),
        "alltoall": lambda of: hvd.alltoall(of, name="n"),
        "reducescatter": lambda of: hvd.reducescatter(of, name="n"),
        "grouped_allreduce": lambda of: hvd.grouped_allreduce([tf.ones(2), of], name="n"),
        "gather": lambda of: hvd.gather(of, 0, name="n"),
        "send": lambda of: hvd.send(of, 1 - hvd.rank(), name="n"),
        "recv": lambda of: hvd.recv(of, 1 - hvd.rank(), name="n"),
    }
    for given, says in refused:
        for kind, call in calls.items():
            with pytest.raises(TypeError, match=rf"rank {hvd.rank()}, tensor '{kind}\.n': expected a tensor, {says}"):
                both(mode, lambda call=call, given=given: call(given))()
    np.testing.assert_array_equal(both(mode, lambda: hvd.allreduce([1.0, 2.0], op=hvd.Sum))(), [2, 4])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@as_ranks(2, deadline=240)
def test_indexed_slices_are_gathered(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    rows = tf.IndexedSlices(tf.fill([rank + 1, 2], rank + 1.0), tf.range(rank + 1), dense_shape=tf.constant([5, 2]))

    def reduced(op):
        found = hvd.allreduce(rows, op=op, compression=hvd.Compression.bf16)
        return found.values, found.indices, tf.convert_to_tensor(found)

    values, indices, dense = both(mode, reduced)(hvd.Sum)
    np.testing.assert_array_equal(values, [[1, 1], [2, 2], [2, 2]])
    np.testing.assert_array_equal(indices, [0, 0, 1])
    np.testing.assert_array_equal(dense[:3], [[3, 3], [2, 2], [0, 0]])
    np.testing.assert_array_equal(both(mode, reduced)(hvd.Average)[0], [[0.5, 0.5], [1, 1], [1, 1]])
    refused = [({"op": hvd.Adasum}, "sparse_as_dense"), ({"op": hvd.Max}, "max is not supported")]
    refused += [({"op": hvd.Sum, factor: 2.0}, "not supported") for factor in ("prescale_factor", "postscale_factor")]
    for terms, text in refused:
        for kind in (NotImplementedError, ValueError, hvd.HvdArgumentError):  # the first is Horovod's
            with pytest.raises(kind, match=f"{text}.*HVD207"):
                hvd.allreduce(rows, **terms)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@as_ranks(2, deadline=240)
def test_roots_and_pairs(graph):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()

    def step(x, rows):
        with tf.GradientTape() as tape:
            tape.watch([x, rows])
            total = hvd.reduce(x, 1, op=hvd.Sum, name="total")
            here = hvd.gather(rows, 0)
            parts = hvd.scatter(rows * 10.0, 1, splits=[2, 1])
            loss = tf.reduce_sum(total * 3.0) + tf.reduce_sum(here * 5.0) + tf.reduce_sum(parts)
        return total, here, parts, *tape.gradient(loss, [x, rows])

    total, here, parts, of_x, of_rows = (tf.function(step) if graph else step)(
        tf.fill([2, 2], rank + 1.0), tf.fill([rank + 2, 1], rank + 1.0)
    )
    assert total.shape == ((2, 2) if rank == 1 else (0,)) and np.all(total == 3)
    np.testing.assert_array_equal(np.ravel(here), [1, 1, 2, 2, 2] if rank == 0 else [])
    np.testing.assert_array_equal(np.ravel(parts), [20, 20] if rank == 0 else [20])
    assert np.all(of_x == 3)
    np.testing.assert_array_equal(np.ravel(of_rows), [5, 5] if rank == 0 else [15, 15, 15])

    def there_and_back(x):
        if rank == 0:
            hvd.send(x, 1)
            return hvd.recv(tf.zeros(2), 1, name="back")
        found = hvd.recv(x, 0)
        hvd.send(found * 2, 0, name="back")
        return found

    for number in range(3):
        mine = tf.constant([1.5, 2.5 + number]) if rank == 0 else tf.zeros(2)
        found = (tf.function(there_and_back) if graph else there_and_back)(mine)
        np.testing.assert_array_equal(found, np.array([1.5, 2.5 + number]) * (2 - rank))
    with pytest.raises(ValueError, match="itself"):
        (tf.function if graph else lambda f: f)(lambda: hvd.send(tf.ones(1), rank))()
