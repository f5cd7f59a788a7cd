"""What does waiting for other ranks cost, and what does it give? BSP, SSP and ASP of hvd.ps; bytes of a step.

    hvdlite-run -np 4 python examples/benchmarks/staleness.py               # one minute and a half

`bytes`: what a rank sends and receives in a step that touches 1 % of a table's rows, beside an allreduce of the table's
dense gradient, which sends and receives 2 (n - 1) / n of its bytes each. `models`: the last rank is five times slower
than the others. Steps a second of all ranks at s = 0 (BSP), 1, 3 and None (ASP), by turns, and how far ahead of the
slowest rank the one of an answered pull was at most. `auc`: a factorisation machine learns made-up clicks, with three
seeds, at s = 0 and without waiting.
"""

import argparse
import statistics
import time

import numpy as np

import hvdlite as hvd
from hvdlite import ps
from measure import report

SERVERS, BATCH = 2, 256
PATIENCE = {"full": (5, 2.5, 400), "quick": (3, 1.0, 200), "tiny": (1, 0.1, 3)}  # turns, seconds, steps


def models(turns, seconds, _):
    """Steps a second of all ranks, the last of which is five times slower."""
    patience, steps, leads = 0.05 if hvd.rank() == hvd.size() - 1 else 0.01, {}, {}
    for at in range(turns):
        for staleness in (0, 1, 3, None):
            table = ps.Table(f"{at} {staleness}", 100_000, 16, ps.Sgd(0.1), staleness=staleness)
            ids, count = np.random.default_rng(hvd.rank()).integers(0, 100_000, BATCH), 0
            hvd.barrier()
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                got = table.pull(ids)
                time.sleep(patience)
                table.push_async(ids, got)
                table.step()
                count += 1
            table.leave()
            table.flush()
            counts = hvd.allgather_object(count / (time.perf_counter() - began))
            steps.setdefault(staleness, []).append(sum(counts))
            leads.setdefault(staleness, []).append(max(each["lead"] for each in table.stats()))
    if hvd.rank() == 0:
        for staleness, rates in steps.items():
            ratio = statistics.median(mine / its for mine, its in zip(rates, steps[0]))
            work = f"staleness {staleness}"
            print(
                f"{work:16} {statistics.median(rates):8.1f} steps/s, {ratio:5.2f} x s = 0,",
                f"greatest lead {max(leads[staleness])}",
            )
            report(work, "hvdlite", "steps/s of all", rates)
        print("ASP is to do at least 2.5 x the steps of s = 0")


def clicks(random, truth, count):
    """Ids of four fields by Zipf's law, and whether somebody clicks, as a machine of these rows says."""
    ids = np.minimum(random.zipf(1.3, (count, 4)) - 1, len(truth) // 4 - 1) * 4 + np.arange(4)
    return ids, (random.random(count) < 1 / (1 + np.exp(-machine(truth[ids])[0]))).astype(np.float32)


def machine(rows):
    """A factorisation machine's (scores, their gradients by the rows)."""
    weight, vectors = rows[..., :1], rows[..., 1:]
    total = vectors.sum(axis=1, keepdims=True)
    score = weight.sum((1, 2)) + ((total**2).sum((1, 2)) - (vectors**2).sum((1, 2))) / 2
    return score, np.concatenate([np.ones_like(weight), total - vectors], axis=-1)


def area(score, label):
    """Under the ROC curve: how often one that clicks stands above one that does not."""
    places = np.empty(len(score))
    places[np.argsort(score)] = np.arange(1, len(score) + 1)
    ones = label.sum()
    return float((places[label > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(label) - ones)))


def trained(seed, staleness, steps):
    """The AUC on clicks that no rank has seen."""
    random = np.random.default_rng((seed, 1000))
    truth = random.standard_normal((20_000, 9)).astype(np.float32) * 0.5
    seen, shown = np.random.default_rng((seed, hvd.rank())), clicks(random, truth, 40_000)
    first = ps.uniform(0.05, seed=seed)
    table = ps.Table(f"clicks {seed} {staleness}", *truth.shape, ps.Adagrad(0.1), staleness=staleness, init=first)
    for _ in range(steps):
        ids, label = clicks(seen, truth, BATCH)
        score, gradients = machine(table.pull(ids))
        off = 1 / (1 + np.exp(-score)) - label
        table.push_async(ids, (off[:, None, None] * gradients / np.sqrt(BATCH)).astype(np.float32))
        table.step()
    table.flush()
    hvd.barrier()
    return area(machine(table.pull(shown[0]))[0], shown[1])


def auc(_, __, steps):
    for seed in range(3):
        found = {staleness: trained(seed, staleness, steps) for staleness in (0, None)}
        if hvd.rank() == 0:
            apart = found[None] - found[0]
            print(f"seed {seed}: AUC {found[0]:.4f} at s = 0, {found[None]:.4f} of ASP, apart {apart:+.4f}")
            report(f"AUC, seed {seed}, of ASP - of s = 0", "hvdlite", "", [apart])
    if hvd.rank() == 0:
        print("they are to be at most 0.005 apart")


def bytes_of_a_step(_, __, ___):
    rows, dim, rank = 100_000, 64, hvd.rank()
    table = ps.Table("bytes", rows, dim, ps.Adagrad(0.1))
    ids = np.random.default_rng(rank).choice(rows, rows // 100, replace=False)
    before = ps.stats()["rank"]
    table.push(ids, table.pull(ids))
    table.step()
    after = ps.stats()["rank"]
    moved = sum(after[way] - before[way] for way in ("bytes_out", "bytes_in"))
    dense = 2 * 2 * (hvd.size() - 1) / hvd.size() * rows * dim * 4
    if rank == 0:
        share = f"{100 * moved / dense:.2f} %, which is to be below 2 %"
        print(f"a step: {moved / 1e3:.1f} KB; a dense allreduce: {dense / 1e3:.0f} KB: {share}")
        report("bytes of a step at 1 %", "hvdlite", "KB", [moved / 1e3])


def main() -> None:
    parts = {"bytes": bytes_of_a_step, "models": models, "auc": auc}
    parser = argparse.ArgumentParser(description="BSP, SSP and ASP: speed, quality, bytes.")
    parser.add_argument("--only", choices=tuple(parts))
    parser.add_argument("--patience", choices=tuple(PATIENCE), default="full")
    args = parser.parse_args()
    hvd.init()
    ps.serve(SERVERS)
    for name, part in parts.items():
        if args.only in (None, name):
            part(*PATIENCE[args.patience])


if __name__ == "__main__":
    main()
