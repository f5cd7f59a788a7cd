"""The collectives on JAX's arrays, outside of jit and inside, with gradients, vmap, loops and checkpoint."""

import numpy as np
import pytest
from ranks import as_ranks, everything, needs

needs("jax", "optax")
DTYPES = ["float32", "bfloat16", "int32", *everything("float16", "float8_e4m3fn", "int8", "uint8", "uint16", "bool")]


def said(function):
    """The error of hvdlite that a call ends with, as its class and code."""
    import jax

    import hvdlite.jax as hvd

    try:
        with hvd.translate_errors():
            jax.block_until_ready(function())
    except Exception as error:
        return type(error).__name__, getattr(error, "code", None), str(error)
    return None


@pytest.mark.parametrize("dtype", DTYPES)
@as_ranks(3, *everything(2))
def test_every_collective_is_exact_in_jit_and_outside(dtype):
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    data = [np.arange(1, 7).reshape(6, 1) % 3 + i + 1 for i in range(size)]
    x, each = jnp.asarray(data[rank], dtype), 6 // size
    total = np.asarray(sum(jnp.asarray(part, dtype).astype("float32") for part in data))
    mine = slice(rank * each, (rank + 1) * each)
    rows = np.concatenate(data)
    cases = {
        "sum": (lambda v: hvd.allreduce({"a": v}, op=hvd.Sum, name="m")["a"], total),
        "max": (lambda v: hvd.allreduce(v, op=hvd.Max, name="m"), np.maximum.reduce(data)),
        "gather": (lambda v: hvd.allgather([v], name="g")[0], rows),
        "broadcast": (lambda v: hvd.broadcast(v, 1), data[1]),
        "scatter": (lambda v: hvd.reducescatter(v, op=hvd.Sum), total[mine]),
        "alltoall": (lambda v: hvd.alltoall(v), np.concatenate([part[mine] for part in data])),
    }
    for name, (function, expected) in cases.items():
        for way in (function, jax.jit(function)):
            got = way(x)
            assert got.dtype == x.dtype, name
            assert (np.asarray(got) == np.asarray(jnp.asarray(expected, dtype))).all(), (name, got)
    assert (x == jnp.asarray(data[rank], dtype)).all()


@as_ranks(2)
def test_gradients_are_those_of_the_sum_of_all_losses():
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    x, weights = jnp.arange(12.0) + rank, [k + 2.0 for k in range(size)]
    cases = {
        "average": (lambda v: hvd.allreduce(v), np.full(12, np.mean(weights))),
        "scaled": (lambda v: hvd.allreduce(v, op=hvd.Sum, prescale_factor=0.5), np.full(12, sum(weights) / 2)),
        "broadcast": (lambda v: hvd.broadcast(v, 0), np.full(12, sum(weights) if rank == 0 else 0)),
        "allgather": (lambda v: hvd.allgather(v), np.full(12, sum(weights))),
        "scatter": (lambda v: hvd.reducescatter(v), np.repeat(weights, 6) / size),
        "alltoall": (lambda v: hvd.alltoall(v), np.repeat(weights, 6)),
    }
    for name, (function, expected) in cases.items():
        gradient = jax.grad(lambda v, function=function: weights[rank] * function(v).sum())
        for way in (gradient, jax.jit(gradient)):
            assert np.allclose(way(x), expected), name
    with pytest.raises(NotImplementedError, match="HVD207"):
        jax.grad(lambda v: hvd.allreduce(v, op=hvd.Max).sum())(x)
    hvd.barrier()


@as_ranks(2)
def test_vmap_scan_checkpoint_and_donation():
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd
    from hvdlite.jax import native

    rank, size = hvd.rank(), hvd.size()
    x = jnp.arange(12.0).reshape(3, 4) + rank
    before = native.library().hvd_jax_calls()
    got = jax.jit(jax.vmap(lambda v: hvd.allreduce({"a": v, "b": v * 2}, op=hvd.Sum)))(x)
    assert np.allclose(got["b"], 2 * sum(np.arange(12.0).reshape(3, 4) + k for k in range(size)))
    assert native.library().hvd_jax_calls() == before + 1
    rows = jax.jit(jax.vmap(lambda v: hvd.allgather(v)))(x)
    assert rows.shape == (3, 8)
    assert np.allclose(rows[1], [4, 5, 6, 7, 5, 6, 7, 8])
    assert np.allclose(jax.jit(jax.vmap(jax.grad(lambda v: hvd.allreduce(v).sum())))(x), 1)

    def body(carry, _):
        carry = hvd.allreduce(carry, name="body") + 1
        return carry, None

    last, _ = jax.jit(lambda v: jax.lax.scan(body, v, None, length=50))(jnp.full(4, float(rank)))
    assert np.allclose(last, (size - 1) / 2 + 50)
    remade = jax.checkpoint(lambda v: (hvd.allreduce(v, name="remade") ** 2).sum())
    assert np.allclose(jax.jit(jax.grad(remade))(jnp.ones(3)), 2)

    in_place = jax.jit(lambda v: hvd.allreduce(v, op=hvd.Sum), donate_argnums=0)
    given = jax.block_until_ready(jnp.ones(1 << 16) * 1)
    address = given.unsafe_buffer_pointer()
    assert in_place(given).unsafe_buffer_pointer() == address


@as_ranks(2, *everything(3))
def test_calls_of_a_program_and_its_runs_stay_in_order():
    """Without data dependencies; ranks take other times."""
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    eye = jnp.eye(160)
    eight = jax.jit(lambda xs: [hvd.allreduce(x @ x, op=hvd.Sum)[0, 0] for x in xs])
    for i in range(10):
        got = eight([eye * float(rank + k + i) for k in range(8)])
    assert np.allclose(got, [sum((9 + k + r) ** 2 for r in range(size)) for k in range(8)])

    def slow(x, turns):
        return hvd.allreduce(jax.lax.fori_loop(0, turns, lambda _, v: v @ eye, x), op=hvd.Sum, name="run")[0, 0]

    program, random = jax.jit(slow), np.random.default_rng(rank)
    runs = [program(eye * (k + 1) * (rank + 1), int(random.integers(0, 12))) for k in range(30)]
    assert np.allclose(runs, [(k + 1) * size * (size + 1) / 2 for k in range(30)])


@as_ranks(2)
def test_calls_of_inner_functions_loops_and_gradients_stay_in_order():
    """XLA would run them in any order, which depends on shapes: the ranks have other ones here."""
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    mean_of = jax.jit(lambda x: hvd.allreduce(jnp.tanh(x @ x.T).mean()))
    slope = jax.jit(lambda w, x: hvd.allreduce(jax.grad(lambda v: ((x @ v) ** 2).mean())(w), name="slope"))
    step = jax.jit(lambda w, x: (slope(w, x), mean_of(x), mean_of(x + 1), hvd.allreduce(x.mean(), name="loss")))
    for turn in range(6):
        rows = [64, 664][(rank + turn) % 2]
        _, _, _, loss = step(jnp.ones(8), jnp.full((rows, 8), float(rank)))
        assert np.isclose(loss, (size - 1) / 2)
    twice = jax.jit(lambda a, b: (mean_of(a), mean_of(b)))
    zero, one = twice(jnp.zeros((2, 3)), jnp.full((2, 3), 50.0))
    assert np.allclose((zero, one), (0, 1), atol=1e-6)

    def body(carry, _):
        return hvd.allreduce(carry) + 1, None

    def scanned(x):
        return jax.lax.scan(body, x, None, length=4, unroll=2)[0].sum()

    both = jax.jit(jax.grad(lambda x: scanned(x) * 2 + jax.checkpoint(scanned)(x)))
    assert np.allclose(both(jnp.ones(3)), 3)
    assert np.allclose(jax.jit(jax.grad(jax.grad(lambda x: hvd.allreduce(x, op=hvd.Sum) ** 3)))(2.0), 96)


@as_ranks(2)
def test_large_trees_wide_arrays_keys_and_values_that_are_no_arrays():
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank, size = hvd.rank(), hvd.size()
    many = [np.full(3, float(rank + i), "float32") for i in range(1100)]
    for way in (hvd.allreduce, jax.jit(lambda tree: hvd.allreduce(tree))):
        assert all(got[0] == i + (size - 1) / 2 for i, got in enumerate(way(many)))
    wide = jnp.ones((1,) * 9 + (2,)) * rank
    odd = {"none": None, "number": 1.0, "empty": jnp.ones((0, 3)), "wide": wide}
    got = jax.jit(lambda tree: hvd.allreduce(tree, op=hvd.Sum))(odd)
    assert got["none"] is None
    assert got["number"] == size
    assert got["empty"].shape == (0, 3)
    assert float(got["wide"].max()) == 1
    tree = {"key": jax.random.PRNGKey(rank), "typed": jax.random.key(rank), "count": jnp.int32(rank)}
    for move in (lambda t: hvd.broadcast(t, 1), jax.jit(lambda t: hvd.broadcast(t, 1))):
        got = move(tree)
        assert (got["key"] == jax.random.PRNGKey(1)).all()
        assert (jax.random.key_data(got["typed"]) == jax.random.key_data(jax.random.key(1))).all()
    parts, rows = hvd.alltoall(jnp.arange(3) + 10 * rank, splits=[1, 2])
    assert parts.tolist() == ([0, 10] if rank == 0 else [1, 2, 11, 12])
    assert rows.tolist() == [rank + 1] * 2
    assert said(lambda: hvd.broadcast(np.array([1 << 40]), 0))[1] == "HVD202"
    for cast in (hvd.Compression.bf16, hvd.Compression.fp16):
        assert hvd.allreduce(jnp.float32(rank), compression=cast) == 0.5
