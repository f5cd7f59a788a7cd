"""What does a step on 26 tables take, as in DLRM, beside a step on one table with offsets?

    hvdlite-run -np 2 --servers 1 python examples/benchmarks/many_tables.py     # half a minute

Tables of 100 to 1,000,000 rows of 16 numbers, with Adagrad on one server. Each rank looks up a batch of ids by Zipf's
law in each table, by the layers for PyTorch, and pushes gradients. `group` is a TableGroup, `alone` 26 tables with a
layer each. All take turns in the same ranks. A figure is the median of all steps.
"""

import argparse
import statistics

import numpy as np
import torch

import hvdlite.torch as hvd
from measure import report, timed_us

TABLES, DIM = 26, 16
PATIENCE = {"full": (5, 40), "quick": (3, 15), "tiny": (1, 2)}  # turns, steps
SIZES = {f"c{k}": int(10 ** (2 + 4 * k / (TABLES - 1))) for k in range(TABLES)}


def steps_of() -> dict:
    """A step of each kind, by name."""
    rule, first = hvd.ps.Adagrad(0.05), hvd.ps.uniform(0.1, seed=1)
    one = hvd.ps.Table("one", sum(SIZES.values()), DIM, rule, init=first)
    group = hvd.ps.TableGroup("group", SIZES, DIM, rule, init=first)
    alone = [hvd.ps.Table(name, rows, DIM, rule, init=first) for name, rows in SIZES.items()]
    starts = torch.from_numpy(np.cumsum([0, *SIZES.values()])[:-1])
    of_one, of_group = hvd.ps.Embedding(one), hvd.ps.EmbeddingCollection(group)
    of_alone = [hvd.ps.Embedding(table) for table in alone]

    def step_one(ids: dict) -> None:
        of_one(torch.stack(list(ids.values()), 1) + starts).square().sum().backward()
        one.step()

    def step_group(ids: dict) -> None:
        sum(rows.square().sum() for rows in of_group(ids).values()).backward()
        group.step()

    def step_alone(ids: dict) -> None:
        sum(layer(each).square().sum() for layer, each in zip(of_alone, ids.values())).backward()
        hvd.ps.step(*alone)

    return {"one table": step_one, "group": step_group, "alone": step_alone}


def main() -> None:
    parser = argparse.ArgumentParser(description="A step on 26 tables, beside one on one table.")
    parser.add_argument("--patience", choices=tuple(PATIENCE), default="full")
    turns, count = PATIENCE[parser.parse_args().patience]
    torch.set_num_threads(1)
    hvd.init()
    hvd.ps.serve(1)
    kinds, random = steps_of(), np.random.default_rng(hvd.rank())
    for batch in (128, 2048):
        found: dict = {}
        for _ in range(turns):
            for kind, step in kinds.items():
                for _ in range(count):
                    ids = {n: torch.from_numpy((random.zipf(1.2, batch) - 1) % rows) for n, rows in SIZES.items()}
                    hvd.barrier()
                    found.setdefault(kind, []).append(timed_us(lambda step=step, ids=ids: step(ids)))
        one = statistics.median(found["one table"])
        for kind, each in found.items():
            if hvd.rank() == 0:
                print(f"{batch:5} ids {kind:10}{(mid := statistics.median(each)) / 1e3:8.2f} ms: {mid / one:.2f}")
                report(f"step of {batch} ids", kind, "us", each)
    hvd.shutdown()


if __name__ == "__main__":
    main()
