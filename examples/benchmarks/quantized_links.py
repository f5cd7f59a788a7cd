"""What int8 and int4 save on a slow link: an allreduce in each form, by turns in one job, beside Gloo and PowerSGD.

    sudo python examples/benchmarks/quantized_links.py                    # all settings
    sudo python examples/benchmarks/quantized_links.py --only "2 hosts, 1 Gbit/s" --rounds 9

Hosts are namespaces of this machine (tests/support/hosts.py, hence root and the extra `test`) behind token buckets. In
each round every form has one turn, and the figure of a turn is that of the slowest rank. Gloo is torch.distributed in
the same processes. `ddp` is a backward pass of DistributedDataParallel whose one parameter has as many bytes, and
`ddp powersgd` the same with torch's powerSGD_hook of rank 1, its default: far fewer bytes, and a far coarser gradient.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests/support"))

from measure import MARK, report  # noqa: E402

FORMS, PEERS = ("none", "fp16", "int8", "int4"), ("gloo", "ddp", "ddp powersgd")
GLOO_PORT = 5003
FAST_BARS, SHARED_BARS = {"int8": 0.40, "int4": 0.28}, {"int8": 1.02}


class Case(NamedTuple):
    """slots: ranks of each host; side: of the square of float32 that is reduced; bars: largest wanted ratios to it."""

    slots: "tuple[int, ...]"
    rate: "str | None"
    side: int
    bars: "dict[str, float]"
    rounds: int = 1  # times those asked for


CASES = {
    "2 hosts, 1 Gbit/s": Case((1, 1), "1gbit", 2048, FAST_BARS),
    "4 hosts, 1 Gbit/s": Case((1, 1, 1, 1), "1gbit", 2048, FAST_BARS),
    "2 hosts x 2 ranks, 1 Gbit/s": Case((2, 2), "1gbit", 2048, {}),
    "2 hosts, 100 Mbit/s": Case((1, 1), "100mbit", 1024, {}),
    "1 host x 2 ranks": Case((2,), None, 2048, SHARED_BARS, 8),
}


def peers(side: int) -> "dict":
    """Calls of torch.distributed that move as many bytes, by name."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(side, side))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    dist.init_process_group("gloo", init_method="env://")
    flat, x = torch.randn(2, side, side)
    plain, small = (torch.nn.parallel.DistributedDataParallel(Square()) for _ in range(2))
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    small.register_comm_hook(state, powersgd.powerSGD_hook)
    calls = lambda: dist.all_reduce(flat), lambda: plain(x).backward(), lambda: small(x).backward()
    return dict(zip(PEERS, calls))


def work(side: int, rounds: int) -> None:
    """A rank's part: times all forms by turns; rank 0 reports."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    tensor = torch.randn(side, side)
    forms = {name: getattr(hvd.Compression, name) for name in FORMS}
    calls = {name: partial(hvd.allreduce, tensor, name=name, compression=form) for name, form in forms.items()}
    try:
        calls.update(peers(side))
    except (ImportError, RuntimeError) as error:
        print(f"torch.distributed is left out: {error}", file=sys.stderr)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-4, rounds):  # the first ones meet, and PowerSGD begins after some steps
        for name, call in calls.items():
            hvd.barrier()
            began = time.perf_counter()
            call()
            slowest = max(hvd.allgather_object(time.perf_counter() - began))
            if turn >= 0:
                taken[name].append(slowest * 1e3)
    if hvd.rank() == 0:
        for name, values in taken.items():
            report(f"{side * side * 4 >> 20} MB", name, "ms", values)
    hvd.shutdown()
    sys.stdout.flush()
    os._exit(0)  # as in libraries.py: a thread of torch's Gloo can outlive its group


def run(hosts, case: Case, rounds: int) -> "dict[str, dict]":
    """The results of one job, by form."""
    from hosts_job import HostsJob

    for number in range(len(case.slots)):
        hosts.rate(number, case.rate)
    alone = len(case.slots) == 1
    address, card = ("127.0.0.1", "lo") if alone else (hosts.ip(0), "eth0")
    place = {"MASTER_ADDR": address, "MASTER_PORT": str(GLOO_PORT), "GLOO_SOCKET_IFNAME": card}
    words = [str(HERE / "quantized_links.py"), "--worker", str(case.side), "--rounds", str(rounds * case.rounds)]
    with HostsJob(hosts, case.slots, words, **place) as job:
        if any(job.wait(300).values()):
            raise SystemExit(job.text())
        said = job.said(0)
    found = [json.loads(line[len(MARK) :]) for line in said.splitlines() if line.startswith(MARK)]
    if len(found) < len(FORMS + PEERS):
        print(said, file=sys.stderr)
    return {each["column"]: each for each in found}


def table(title: str, case: Case, found: "dict[str, dict]") -> None:
    """Prints medians, and their ratios to float32's."""
    print(f"\n{title}, {found['none']['work']} of float32")
    for name, each in found.items():
        ratio, bar = each["median"] / found["none"]["median"], case.bars.get(name)
        verdict = "" if bar is None else f"  at most {bar:.2f} wanted: {'yes' if ratio <= bar else 'NO'}"
        print(f"  {name:13}{each['median']:9.1f} ms ({each['low']:.1f} to {each['high']:.1f}) {ratio:6.3f}x{verdict}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=CASES, help="this setting; may be given more than once")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each form (%(default)s)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    if (asked := parser.parse_args()).worker:
        return work(asked.worker, asked.rounds)
    from hosts import Hosts, missing

    if missing() is not None:
        raise SystemExit(missing())
    for title in asked.only or CASES:
        with Hosts(len(CASES[title].slots)) as hosts:
            table(title, CASES[title], run(hosts, CASES[title], asked.rounds))


if __name__ == "__main__":
    main()
