"""What do training steps, single calls and compilation cost with hvdlite in JAX, beside JAX's own collectives?

    python examples/benchmarks/jax_steps.py peer       # a training step, beside jax.distributed over Gloo
    python examples/benchmarks/jax_steps.py call       # 4 KB inside jit: hvdlite, a callback of Python, Gloo, no call
    python examples/benchmarks/jax_steps.py compile    # trees of many leaves, with the collective and without

Two ranks, one thread of XLA's each. In each round hvdlite's ranks and Gloo's are launched once, one after the other, so
that no idle thread of one disturbs the other. A figure is the median over rounds of rank 0's median, with the least and
the greatest. `compile` counts CPU seconds of tracing, lowering and XLA on one rank, and milliseconds of a run on two.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, reduce
from importlib import import_module
from time import perf_counter, process_time
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from measure import MARK, report, spread, timed_us
from programs import run_quietly

WIDTHS = {"50 thousand": 128, "1 million": 576, "10 million": 1824}  # of three square layers: parameters
ROWS, TOLERANCE = 32, 1e-3  # rows of a rank; how far losses may differ, relative
STEPS = {"full": (300, 100, 20), "tiny": (2,)}  # of each width
CALLS, LEAVES = {"full": 2000, "tiny": 2}, {"full": (640, 1280, 2560), "tiny": (8,)}
PLUS_ONE: Callable = partial(jax.tree.map, lambda x: x + 1)
optax: Any = import_module("optax") if "peer" in sys.argv else None


def step_of(optimizer: Any, mean: Callable = lambda loss: loss) -> tuple[Any, Callable]:
    """An optimizer and a training step with it. mean: of a loss over all ranks."""

    def loss_of(params: Any, rows: Any) -> Any:
        x = reduce(lambda x, layer: jnp.tanh(x @ layer[0] + layer[1]), params, rows)
        return jnp.mean((x - jnp.sin(3 * rows[:, ::-1])) ** 2)

    def step(params: Any, state: Any, rows: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, rows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean(loss)

    return optimizer, step


def of_hvdlite(part: str) -> tuple[int, Callable, dict[str, Any]]:
    """This rank, what makes an array of its rows, and programs by column: (optimizer, step), or a function of 4 KB."""
    hvd, in_numpy = import_module("hvdlite.jax"), import_module("hvdlite")
    hvd.init()
    outside = partial(jax.pure_callback, lambda x: in_numpy.allreduce(np.asarray(x), op=hvd.Sum, name="callback"))
    programs: dict[str, Any] = {"hvdlite": lambda x: hvd.allreduce(PLUS_ONE(x), op=hvd.Sum, name="x")}
    programs.update({"no call": PLUS_ONE, "pure_callback": lambda x: outside(x, PLUS_ONE(x))})
    if part == "peer":
        averaging = hvd.DistributedGradientTransformation(optax.sgd(0.1))
        step = step_of(averaging, lambda loss: hvd.allreduce(loss, name="loss"))
        programs = {"hvdlite": step, "no communication": step_of(optax.sgd(0.1))}
    return hvd.rank(), jnp.asarray, programs


def of_gloo(part: str, at: str, rank: str) -> tuple[int, Callable, dict[str, Any]]:
    """The same of a process of jax.distributed. jit averages by itself, as rows are divided; shard_map is told to."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(at, 2, int(rank))
    mesh, cut, whole = Mesh(jax.devices(), ("ranks",)), PartitionSpec("ranks"), PartitionSpec()
    new = hasattr(jax, "shard_map")
    shard_map = jax.shard_map if new else import_module("jax.experimental.shard_map").shard_map
    mapped = partial(shard_map, mesh=mesh, out_specs=whole, **{"check_vma" if new else "check_rep": False})
    programs: dict[str, Any] = {"Gloo, psum": mapped(lambda x: jax.lax.psum(PLUS_ONE(x), "ranks"), in_specs=cut)}
    if part == "peer":
        mean = partial(jax.lax.pmean, axis_name="ranks")
        means, step = step_of(optax.chain(optax.stateless(lambda grads, _: mean(grads)), optax.sgd(0.1)), mean)
        mapped_step = means, mapped(step, in_specs=(whole, whole, cut))
        programs = {"Gloo, shard_map": mapped_step, "Gloo, jit": step_of(optax.sgd(0.1))}
    return int(rank), lambda rows: jax.make_array_from_process_local_data(NamedSharding(mesh, cut), rows), programs


def awaited(run: Callable, x: Any, count: int) -> list[float]:
    """Microseconds of each run, whose result is awaited."""
    return [timed_us(lambda: jax.block_until_ready(run(x))) for _ in range(count + 50)][50:]


def peer(patience: str, rank: int, array: Callable, programs: dict[str, Any]) -> Iterator[tuple[str, str, list[float]]]:
    """Milliseconds of a step whose results are awaited, and the last loss."""
    for (size, width), count in zip(WIDTHS.items(), STEPS[patience]):
        for column, (optimizer, step) in programs.items():
            chance, compiled = np.random.default_rng(1), jax.jit(step, donate_argnums=0)
            rows = array(chance.normal(0, 1, (2, ROWS, width)).astype("float32")[rank])
            params = [(jnp.float32(chance.normal(0, width**-0.5, (width, width))), jnp.zeros(width)) for _ in range(3)]
            done, taken = (params, optimizer.init(params)), []
            for _ in range(count + 5):
                begun = perf_counter()
                done = jax.block_until_ready(compiled(*done[:2], rows))
                taken.append(1e3 * (perf_counter() - begun))
            yield f"step, {size} parameters, ms", column, taken[5:]
            if column != "no communication":
                yield f"loss, {size} parameters", column, [float(done[2])]


def call(patience: str, _: int, array: Callable, programs: dict[str, Any]) -> Iterator[tuple[str, str, list[float]]]:
    """Microseconds of a run whose result is awaited."""
    for column, program in programs.items():
        yield "4 KB in jit, us", column, awaited(jax.jit(program), array(np.ones(1024, "float32")), CALLS[patience])


def compilation(patience: str, _: int, array: Callable, programs: dict[str, Any]) -> Iterator:
    """CPU seconds until a program is compiled, on one rank; microseconds of a run with leaves of 1 KB, on two."""
    jax.jit(programs["hvdlite"]).lower([array(1.0)]).compile()  # loads what a first call loads
    for leaves in LEAVES[patience]:
        for column in ("hvdlite", "no call"):
            tree, begun = [jnp.ones(256)] * leaves, process_time()
            run = jax.jit(programs[column]).lower(tree).compile()
            if import_module("hvdlite").size() == 1:
                yield f"{leaves} leaves, compile, s", column, [process_time() - begun]
            else:
                yield f"{leaves} leaves, run, us", column, awaited(run, tree, 30)


def launch(who: str) -> Iterator[dict]:
    """The results of one launch. who: gloo, or how many ranks of hvdlite."""
    me = [sys.executable, __file__, *sys.argv[1:], "--as"]
    if who != "gloo":
        printed = run_quietly([sys.executable, "-m", "hvdlite.launcher", "-np", who, *me, "hvdlite"])
    else:
        with socket.create_server(("127.0.0.1", 0)) as held:
            me += ["gloo", f"127.0.0.1:{held.getsockname()[1]}"]
        with subprocess.Popen([*me, "1"], stdout=subprocess.DEVNULL):  # it ends when process 0 does
            printed = run_quietly([*me, "0"])
    return (json.loads(line.partition(MARK)[2]) for line in printed.splitlines() if MARK in line)


def main() -> None:
    parts: dict[str, Callable] = {"peer": peer, "call": call, "compile": compilation}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=parts)
    parser.add_argument("--patience", choices=STEPS, default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as", dest="rank", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        made = (of_gloo if asked.rank[0] == "gloo" else of_hvdlite)(asked.part, *asked.rank[1:])
        for work, column, values in parts[asked.part](asked.patience, *made):
            report(work, column, "", values) if made[0] == 0 else None
        return
    found: dict[str, dict[str, list[float]]] = {}
    for who in ("1", "2") * asked.rounds if asked.part == "compile" else ("2", "gloo") * asked.rounds:
        for each in launch(who):
            found.setdefault(each["work"], {}).setdefault(each["column"], []).append(each["median"])
    for work, columns in found.items():
        name, usual = next((name, spread(values)[1]) for name, values in columns.items())
        for column, values in columns.items():
            low, median, high = spread(values)
            print(f"{work:32} {column:17}{median:9.4g} ({low:.4g} to {high:.4g}), {name} / this {usual / median:.3f}")
            if work.startswith("loss") and abs(usual / median - 1) > TOLERANCE:
                sys.exit(f"{work}: hvdlite's and Gloo's differ")


if __name__ == "__main__":
    main()
