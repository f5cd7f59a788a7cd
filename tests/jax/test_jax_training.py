"""Training with JAX: bits, passes per step, frozen and late parameters, states that are saved, and lost ranks."""

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from elastic_jobs import AT_ONCE
from ranks import Job, as_ranks, everything, needs

needs("jax", "optax")


def problem(ranks):
    """(parameters, data of each rank, the gradient of the loss)."""
    import jax
    import jax.numpy as jnp

    key = jax.random.PRNGKey(0)
    params = {"w": jax.random.normal(key, (32, 16)), "b": jnp.zeros(16), "v": jax.random.normal(key, (16,))}
    data = [jax.random.normal(jax.random.fold_in(key, k), (24, 32)) for k in range(ranks)]
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - x[:, 0]) ** 2)  # noqa: E731
    return params, data, jax.jit(jax.grad(loss))


def same_bits(a, b):
    import jax

    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


@as_ranks(3, *everything(2, 4))
def test_bits_are_those_of_one_process_that_adds_in_the_order_of_ranks():
    import jax
    import optax

    import hvdlite.jax as hvd

    size = hvd.size()
    params, data, gradient = problem(size)
    inner = optax.sgd(0.05, momentum=0.9)
    averaging = hvd.DistributedGradientTransformation(inner)

    def stepped(optimizer):
        def step(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.jit(step)

    ours, alone = stepped(averaging), stepped(inner)
    a = b = params, inner.init(params)
    before = hvd.stats()["steps"]
    for _ in range(20):
        a = ours(gradient(a[0], data[hvd.rank()]), a[1], a[0])
        each = [gradient(b[0], x) for x in data]
        b = alone(jax.tree.map(lambda *g: sum(g[1:], g[0]) * np.float32(1 / size), *each), b[1], b[0])
    assert same_bits(a, b)
    assert hvd.stats()["steps"] == before + 20
    hvd.check_consistency(a)


@pytest.mark.parametrize("in_jit", [True, *everything(False)])
@as_ranks(2)
def test_passes_per_step_exchange_their_mean_and_a_broadcast_restarts_the_window(in_jit):
    import warnings

    import jax
    import jax.numpy as jnp
    import optax

    import hvdlite.jax as hvd
    from hvdlite.jax import native

    rank = hvd.rank()
    optimizer = hvd.DistributedGradientTransformation(optax.sgd(1.0), backward_passes_per_step=4)
    update = jax.jit(optimizer.update) if in_jit else optimizer.update
    params, state = {"w": jnp.zeros(2)}, optimizer.init({"w": jnp.zeros(2)})
    calls = native.library().hvd_jax_calls()
    for k in range(12):
        updates, state = update({"w": jnp.full(2, float(k + rank))}, state, params)
        assert updates["w"][0] == (0 if (k + 1) % 4 else -(k - 1.5 + 0.5)), k
    assert native.library().hvd_jax_calls() == calls + 3
    for _ in range(2):
        _, state = update({"w": jnp.full(2, 1.0 + rank)}, state, params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = hvd.broadcast_parameters(state)
    assert ["HVD243" in str(each.message) for each in caught] == [True]
    for k in range(4):  # a whole window, of which nothing came before
        updates, state = update({"w": jnp.full(2, 1.0)}, state, params)
        assert updates["w"][0] == (0 if k < 3 else -1)


@as_ranks(2)
def test_frozen_and_late_parameters():
    import jax
    import jax.numpy as jnp
    import optax

    import hvdlite.jax as hvd

    rank = hvd.rank()
    masked = optax.masked(optax.sgd(1.0), {"w": True, "frozen": False})
    optimizer = hvd.DistributedGradientTransformation(masked)
    params = {"w": jnp.zeros(2), "frozen": jnp.ones(2)}
    updates, _ = jax.jit(optimizer.update)({"w": jnp.ones(2) * rank, "frozen": None}, optimizer.init(params), params)
    assert updates["w"][0] == -0.5
    assert updates["frozen"] is None
    plain = hvd.DistributedGradientTransformation(optax.sgd(1.0))
    update = jax.jit(plain.update)
    for late in ({"w": jnp.zeros(2)}, {"w": jnp.zeros(2), "late": jnp.zeros(3)}):
        updates, _ = update(jax.tree.map(lambda x: x + 1.0 + rank, late), plain.init(late), late)
        assert [leaf[0] for leaf in jax.tree.leaves(updates)] == [-1.5] * len(late)


@as_ranks(2)
def test_a_state_outlives_donation_and_is_saved_and_loaded():
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank = hvd.rank()
    start = {"w": jnp.full(3, float(rank)), "key": jax.random.key(rank), "step": 0}
    unread = hvd.elastic.JaxState(params=start, counts=(jnp.int32(0),), epoch=0)
    state = hvd.elastic.JaxState(params=start, counts=(jnp.int32(rank),), epoch=rank)
    state.sync()
    hvd.check_consistency(state.params["w"])
    assert state.epoch == 0
    state.params["w"] = jax.jit(lambda x: x + 1, donate_argnums=0)(state.params["w"])
    state.restore()
    assert state.params["w"].tolist() == [0, 0, 0]
    assert (jax.random.key_data(state.params["key"]) == jax.random.key_data(jax.random.key(0))).all()
    state.params, state.epoch = {**state.params, "w": jnp.full(3, 5.0)}, 4
    state.save()
    kept = state.state_dict()
    state.params = {**state.params, "w": jnp.full(3, 6.0)}
    state.save()
    state.load_state_dict(kept)
    assert (state.params["w"].tolist(), state.epoch) == ([5, 5, 5], 4)
    unread.load_state_dict(kept)  # of a job that begins
    assert unread.params["w"].tolist() == [5, 5, 5]
    kept["trees"]["params"][2] = np.zeros(7, "float32")
    with pytest.raises(hvd.HvdStateError, match=r"params\['w'\]: float32\[7\] where this state has float32\[3\]"):
        state.load_state_dict(kept)
    other = hvd.elastic.JaxState(params={"w": jnp.zeros(3), **({"b": jnp.zeros(1)} if rank else {})})
    with pytest.raises(hvd.HvdMismatchError):
        other.sync()


ELASTIC = """
import json, os, sys, time
import jax, jax.numpy as jnp, optax
import hvdlite.jax as hvd
hvd.init()
folder = sys.argv[1]
inner = hvd.DistributedGradientTransformation(optax.sgd(0.5, momentum=0.5), backward_passes_per_step=2)

@jax.jit
def step(params, opt, x):
    grads = jax.grad(lambda p: jnp.sum((p["w"] - x) ** 2))(params)
    updates, opt = inner.update(grads, opt, params)
    rows = hvd.allgather(jnp.ones(1), name="rows")
    return optax.apply_updates(params, updates), opt, rows

step = jax.jit(step, donate_argnums=(0, 1))

@hvd.elastic.run
def train(state):
    print(f"trains: rank {hvd.rank()} of {hvd.size()}, pid {os.getpid()}.", flush=True)
    while not hvd.broadcast_object(os.path.exists(folder + "/last")):
        for _ in range(2):
            state.params, state.opt, rows = step(state.params, state.opt, jnp.arange(3.0))
        assert rows.shape == (hvd.size(),), rows.shape
        state.step += 2
        time.sleep(0.02)
        state.commit()

params = {"w": jnp.full(3, float(hvd.rank()))}
state = hvd.elastic.JaxState(params=params, opt=inner.init(params), step=0)
train(state)
hvd.check_consistency((state.params, state.opt))
json.dump([state.params["w"].tolist(), state.step, hvd.size()], open(f"{folder}/end{hvd.rank()}", "w"))
"""


def test_a_rank_is_lost_inside_jit_and_another_one_comes(tmp_path):
    def trains(text):
        return [tuple(map(int, each)) for each in re.findall(r"trains: rank (\d) of (\d), pid (\d+)\.", text)]

    def until(found):
        end = time.monotonic() + 120
        while not (result := found(trains(job.text()))):
            assert time.monotonic() < end, job.text()
            assert job.process.poll() is None, job.text()
            time.sleep(0.02)
        return result

    with Job(3, [sys.executable, "-c", ELASTIC, str(tmp_path)], "--min-np", "2", *AT_ONCE, framework="jax") as job:
        first = until(lambda found: len(found) == 3 and found)
        os.kill(next(pid for rank, _, pid in first if rank == 1), signal.SIGKILL)
        known = {pid for *_, pid in first}
        until(lambda found: [1 for _, size, pid in found if size == 3 and pid not in known])
        (tmp_path / "last").touch()
        assert job.wait(120) == 0, job.text()
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("end*"))]
    assert len(ends) == 3
    assert ends == [ends[0]] * 3
    weights, momentum, target = np.zeros(3, "float32"), np.zeros(3, "float32"), np.arange(3, dtype="float32")
    for _ in range(ends[0][1] // 2):
        momentum = 2 * (weights - target) + 0.5 * momentum
        weights = weights - 0.5 * momentum
    assert np.allclose(ends[0][0], weights, atol=1e-4)
