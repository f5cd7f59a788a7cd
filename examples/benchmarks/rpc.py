"""How long do a call of hvd.rpc and a pull of 16 rows take, beside torch.distributed.rpc?

    hvdlite-run -np 2 python examples/benchmarks/rpc.py     # half a minute

Rank 0 calls rank 1, one call after the other, and each is timed alone. `call of 32 B`: 32 bytes there and back. `16
rows`: a pull of 16 random rows of 64 numbers from a table on one server; torch's is an index_select in the other rank.
torch's TensorPipe chooses its way itself, and encrypts nothing.

All take turns in the same ranks. A figure is the median of the turns' medians, a ratio that of the ratios within turns.
"""

import argparse
import socket
import statistics

import numpy as np
import torch
from torch.distributed import rpc

import hvdlite as hvd
from hvdlite import ps
from measure import report, timed_us

ROWS, DIM, BATCH, WARM = 100_000, 64, 16, 20
PATIENCE = {"full": (9, 1000), "quick": (5, 300), "tiny": (1, 10)}  # turns, calls in each
WORKS = ("call of 32 B", "16 rows")


class Held:
    """What rank 1 holds for torch."""

    rows = torch.empty(0)


def same(value):
    return value


def fetched(ids):
    return Held.rows.index_select(0, ids)


def meet() -> None:
    """Starts torch's calls beside ours."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = hvd.broadcast_object(free.getsockname()[1])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"rank{hvd.rank()}", rank=hvd.rank(), world_size=2, rpc_backend_options=options)


def turns(table, count: int, calls: int) -> "dict[tuple[str, str], list[float]]":
    """Medians of the turns in microseconds, by work and by whom."""
    text, random, found = bytes(32), np.random.default_rng(0), {}
    ids = random.integers(0, ROWS, BATCH)
    of_torch = torch.from_numpy(ids)
    ways = {
        (WORKS[0], "hvdlite"): lambda: hvd.rpc.call(1, same, text),
        (WORKS[0], "torch"): lambda: rpc.rpc_sync("rank1", same, (text,)),
        (WORKS[1], "hvdlite"): lambda: table.pull(ids),
        (WORKS[1], "torch"): lambda: rpc.rpc_sync("rank1", fetched, (of_torch,)),
    }
    assert all(ways[WORKS[0], whom]() == text for whom in ("hvdlite", "torch"))
    assert all(ways[WORKS[1], whom]().shape == (BATCH, DIM) for whom in ("hvdlite", "torch"))
    for _ in range(count):
        for key, way in ways.items():
            for _ in range(WARM):
                way()
            found.setdefault(key, []).append(statistics.median(timed_us(way) for _ in range(calls)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Round trips of calls and of rows, beside torch.distributed.rpc.")
    parser.add_argument("--patience", choices=tuple(PATIENCE), default="full")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    if hvd.size() != 2:
        raise SystemExit("start two ranks: hvdlite-run -np 2")
    Held.rows = torch.rand(ROWS, DIM)
    hvd.rpc.start()
    ps.serve(1)
    table = ps.Table("rows", ROWS, DIM, ps.Adagrad(0.1), None, init=ps.uniform(0.01))
    meet()
    if hvd.rank() == 0:
        found = turns(table, *PATIENCE[args.patience])
        for work in WORKS:
            ours, theirs = found[work, "hvdlite"], found[work, "torch"]
            ratio = statistics.median(mine / its for mine, its in zip(ours, theirs))
            print(f"{work:14}{statistics.median(ours):8.0f} us, torch {statistics.median(theirs):8.0f} us: {ratio:.2f}")
        for (work, whom), medians in found.items():
            report(work, whom, "us", medians)
    rpc.shutdown()  # waits for both
    hvd.rpc.serve()
    hvd.shutdown()


if __name__ == "__main__":
    main()
