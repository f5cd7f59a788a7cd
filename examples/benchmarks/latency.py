"""How long one small allreduce takes from Python: hvdlite.torch.allreduce_ of 4 KB, beside Gloo in the same run.

    hvdlite-run -np 2 python examples/benchmarks/latency.py

Calls follow each other without pause and each is timed alone; the two libraries take turns in blocks, so that a change
of the machine's state hits both. What counts is the slower rank's median.
"""

import argparse
import time

import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from measure import report, spread


def block(calls: int, reduce, tensor: torch.Tensor) -> "list[float]":
    """Microseconds of each call."""
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        reduce(tensor)
        times.append((time.perf_counter_ns() - started) / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Latency of small allreduces from Python.")
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=500, help="calls in a block")
    parser.add_argument("--blocks", type=int, default=6)
    args = parser.parse_args()
    hvd.init()
    dist.init_process_group("gloo", init_method="env://", rank=hvd.rank(), world_size=hvd.size())
    tensor = torch.zeros(args.bytes // 4)
    runs = {
        "hvdlite": lambda t: hvd.allreduce_(t, name="small", op=hvd.Sum),
        "gloo": dist.all_reduce,
    }
    times: dict = {name: [] for name in runs}
    for number in range(args.blocks + 1):
        for name, reduce in runs.items():
            hvd.barrier()
            taken = block(args.calls if name == "hvdlite" else max(10, args.calls // 10), reduce, tensor)
            if number:  # the first block warms up
                times[name] += taken
    slower = {name: max(hvd.allgather_object(values), key=lambda v: spread(v)[1]) for name, values in times.items()}
    if hvd.rank() == 0:
        ours = report(f"allreduce_ of {args.bytes} B from Python", "us", slower["hvdlite"], 60)
        peer = report(f"  the same by Gloo (torch.distributed, {torch.__version__})", "us", slower["gloo"])
        print(f"hvdlite takes {ours:.1f} us, Gloo {peer:.1f} us: {peer / ours:.1f} times as long")
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
