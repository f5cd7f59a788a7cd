"""Errors of compiled functions: they name rank and leaf, and are of the classes of eager collectives."""

import sys

import numpy as np
from ranks import Job, as_ranks, needs
from test_jax_collectives import said

needs("jax", "optax")


@as_ranks(2)
def test_ranks_disagree_and_the_job_goes_on():
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank = hvd.rank()
    shapes = said(lambda: jax.jit(lambda x: hvd.allreduce({"w": x}, name="bad"))(jnp.ones(3 + rank)))
    assert shapes[:2] == ("HvdMismatchError", "HVD350")
    assert "'allreduce.bad['w']'" in shapes[2]
    assert said(lambda: jax.jit(lambda x: hvd.allgather(x, name="rows"))(jnp.ones(3 + rank)))[1] == "HVD350"
    assert said(lambda: jax.jit(hvd.reducescatter)(jnp.ones(5)))[1] == "HVD268"
    assert said(lambda: jax.jit(hvd.allreduce)(jnp.ones(2, "complex64")))[1] == "HVD202"
    assert said(lambda: hvd.allreduce({"key": jax.random.PRNGKey(0)}))[1] == "HVD202"
    assert said(lambda: jax.jit(lambda x: hvd.alltoall(x, splits=[1, 1]))(jnp.ones(2)))[1] == "HVD268"
    assert said(lambda: jax.jit(lambda x: hvd.check_consistency(x))(jnp.ones(2)))[0] == "RuntimeError"
    assert "'x['name']' is not an array" in said(lambda: hvd.allreduce({"name": "net"}, name="x"))[2]
    other = {"a": jnp.ones(2), **({"b": jnp.ones(2)} if rank else {"c": None})}
    assert said(lambda: hvd.allreduce(other, name="tree"))[:2] == ("HvdMismatchError", "HVD301")
    assert said(lambda: hvd.allreduce({"a": jnp.ones(2), "b": True}, name="tree"))[1] == "HVD252"
    assert hvd.allreduce({"a": jnp.ones(2), "b": 1.0}, name="tree")["b"] == 1  # no name is in flight
    kinds = {"key": jax.random.key(0, impl=["threefry2x32", "rbg"][rank])}
    assert said(lambda: hvd.broadcast_parameters(kinds))[1] == "HVD301"
    assert said(lambda: hvd.check_consistency({"w": jnp.ones(3), "deep": [jnp.ones(2) * rank]}))[1] == "HVD302"
    mixed = (lambda x: hvd.allgather(x, name="mixed")) if rank else jax.jit(lambda x: hvd.allgather(x, name="mixed"))
    assert said(lambda: mixed(jnp.ones(2)))[1] == "HVD350"
    assert np.allclose(jax.jit(hvd.allreduce)(jnp.ones(2) * rank), 0.5)


@as_ranks(2)
def test_process_sets_joined_ranks_and_the_end_of_a_job():
    import jax
    import jax.numpy as jnp

    import hvdlite.jax as hvd

    rank = hvd.rank()
    for _ in range(2):
        alone = hvd.add_process_set([1])
        gather = jax.jit(lambda x, alone=alone: hvd.allgather(x, name="set", process_set=alone))
        if rank == 1:
            assert gather(jnp.ones(2)).tolist() == [1, 1]
        hvd.remove_process_set(alone)
    first = hvd.add_process_set([1])
    if rank == 1:
        assert said(lambda: gather(jnp.ones(2)))[1] == "HVD213"
    hvd.remove_process_set(first)
    total = jax.jit(lambda x: hvd.allreduce({"x": x}, op=hvd.Sum, name="joined")["x"])
    if rank == 0:
        assert total(jnp.ones(2)).tolist() == [1, 1]
    hvd.join()
    assert total(jnp.ones(2)).tolist() == [2, 2]
    hvd.shutdown()
    assert said(lambda: total(jnp.ones(2)))[:2] == ("HvdNotInitializedError", "HVD101")
    hvd.init()
    assert total(jnp.ones(2)).tolist() == [2, 2]


BEGIN = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
import hvdlite.jax as hvd
hvd.init()
total = jax.jit(lambda x: hvd.allreduce({"w": x}, name="total"))
jax.block_until_ready(total(jnp.ones(3)))
rank, last = hvd.rank(), hvd.rank() == hvd.size() - 1
def show(text):
    print(f"rank {rank}: {text}", flush=True)
"""


def job(size, script, *flags):
    return Job(size, [sys.executable, "-c", BEGIN + script], *flags)


def test_a_rank_is_killed_while_the_others_are_in_xla():
    script = """
if last:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with hvd.translate_errors():
        jax.block_until_ready(total(jnp.ones(3)))
except hvd.HvdPeerLostError as error:
    show(f"lost {error.rank} {error.code}")
"""
    with job(3, script) as ran:
        assert ran.wait(60) != 0
        assert "rank 0: lost 2" in ran.text()
        assert "rank 1: lost 2" in ran.text()


def test_an_interrupt_ends_a_compiled_function_that_waits():
    script = """
if rank == 0:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        jax.block_until_ready(total(jnp.ones(3)))
    except KeyboardInterrupt:
        show("interrupted")
else:
    hvd.barrier()
"""
    with job(2, script) as ran:
        assert ran.wait(60) != 0
        assert "rank 0: interrupted" in ran.text()
        assert "waited for 'allreduce.total['w']'" in ran.text()


def test_a_limit_of_time_names_the_rank_and_the_leaf():
    script = """
if rank == 0:
    try:
        with hvd.translate_errors():
            jax.block_until_ready(total(jnp.ones(3)))
    except hvd.HvdTimeoutError as error:
        show(error)
else:
    hvd.barrier()
"""
    with job(2, script, "--collective-timeout", "1") as ran:
        assert ran.wait(60) != 0
        assert "rank 0: " in ran.text()
        assert "'allreduce.total['w']'" in ran.text()
        assert "missing on rank 1" in ran.text()


def test_trees_that_differ_inside_jit_end_the_job_with_their_names():
    script = """
try:
    with hvd.translate_errors():
        tree = {"a": jnp.ones(3), **({"b": jnp.ones(2)} if rank else {})}
        jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x, name="t"))(tree))
except hvd.HvdMismatchError as error:
    show(error.code)
time.sleep(1)
"""
    with job(2, script) as ran:
        ran.wait(60)
        assert all(f"rank {rank}: HVD301" in ran.text() for rank in (0, 1)), ran.text()


def test_what_was_dispatched_last_meets_the_other_ranks_at_the_end():
    """Also where SIGINT is ignored, as in the background of a shell."""
    begin = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script = """
if rank == 0:
    time.sleep(0.7)
total(jnp.ones(3))
"""
    with Job(2, [sys.executable, "-c", begin + BEGIN + script]) as ran:
        assert ran.wait(60) == 0, ran.text()


def test_several_devices_are_refused():
    script = "show('never')"
    flag = "--xla_force_host_platform_device_count=2"
    with Job(1, [sys.executable, "-c", BEGIN + script], XLA_FLAGS=flag) as ran:
        assert ran.wait(60) != 0
        assert "HVD203" in ran.text()
        assert "never" not in ran.text()
