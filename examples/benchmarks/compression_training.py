"""What compressed gradients gain on a slow network: held-out loss over time, of each form and of DDP over Gloo.

    sudo python examples/benchmarks/compression_training.py                        # all, in five minutes
    sudo python examples/benchmarks/compression_training.py --only none --only int4 --rate 1gbit

The training is that of examples/26_compressed_gradients.py. The two hosts are namespaces of this machine
(tests/support/hosts.py, hence root and the extra `test`) behind token buckets. `ddp` is DistributedDataParallel, and
`ddp-power` the same with torch's powerSGD_hook of rank 4. Bytes are those of the first host's card, with headers.
Both they and the rate are of the steps after the first 25: `power` and its like do not compress the first ones.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests/support"), str(HERE.parent)]
PICTURE = ROOT / "docs/guides/compression-loss.svg"

import line_picture  # noqa: E402

from measure import MARK  # noqa: E402

FORMS = "none", "fp16", "int8", "int4", "power", "accordion", "ddp", "ddp-power"
GLOO_PORT, START_AFTER, WORST = 5004, 20, 3.5  # the greatest loss in the picture


def card_bytes() -> int:
    """Sent by this host so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def work(form: str, seconds: float) -> None:
    """A rank's part: trains; rank 0 reports."""
    import torch

    import hvdlite.torch as hvd

    example = importlib.import_module("26_compressed_gradients")
    known = ["--seconds", str(seconds), "--start-after", str(START_AFTER)]
    args = example.options().parse_args([*known, *(() if form.startswith("ddp") else ("--compression", form))])
    hvd.init()
    torch.set_num_threads(1)
    model = example.make_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if form.startswith("ddp"):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        torch.distributed.init_process_group("gloo", init_method="env://")
        # One bucket: the hook of a bucket waits in a thread of Gloo, and with two of them it hangs (pytorch #48478).
        model = torch.nn.parallel.DistributedDataParallel(model, **{"bucket_cap_mb": 32} if form == "ddp-power" else {})
        if form == "ddp-power":
            state = powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=START_AFTER)
            model.register_comm_hook(state, powersgd.powerSGD_hook)
    else:
        names = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, names, compression=example.compression(args))
    rows = example.train(model, optimizer, args, card_bytes)
    if hvd.rank() == 0:
        print(MARK + json.dumps(rows))
    hvd.shutdown()
    sys.stdout.flush()
    os._exit(0)  # as in libraries.py: a thread of torch's Gloo can outlive its group


def run(form: str, seconds: float, rate: str) -> "list[list[float]]":
    """What a job has reported: seconds, step, held-out loss, bytes."""
    from hosts import Hosts
    from hosts_job import HostsJob

    with Hosts(2) as hosts:
        for number in range(2):
            hosts.rate(number, rate)
        place = {"MASTER_ADDR": hosts.ip(0), "MASTER_PORT": str(GLOO_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        words = [str(Path(__file__).resolve()), "--worker", form, "--seconds", str(seconds)]
        with HostsJob(hosts, (1, 1), words, **place) as job:
            if any(job.wait(seconds + 120).values()):
                raise SystemExit(job.text())
            return json.loads(job.said(0).rsplit(MARK, 1)[1])


def loss_after(rows: "list[list[float]]", column: int, value: float) -> float:
    """On the line between the two rows around so many seconds (column 0) or steps (1)."""
    n = next((n for n, row in enumerate(rows) if row[column] >= value), len(rows) - 1) or 1
    part = (value - rows[n - 1][column]) / (rows[n][column] - rows[n - 1][column])
    return rows[n - 1][2] + (rows[n][2] - rows[n - 1][2]) * min(1.0, part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=FORMS, help="this form; may be given more than once")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, each form (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="the table has the loss after so many (%(default)s)")
    parser.add_argument("--rate", default="100mbit", help="of each host, as tc has it (%(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE, help="the picture (%(default)s)")
    parser.add_argument("--worker", choices=FORMS, help=argparse.SUPPRESS)
    if (asked := parser.parse_args()).worker:
        return work(asked.worker, asked.seconds)
    from hosts import missing

    if missing() is not None:
        raise SystemExit(missing())
    runs = {}
    head = "MB/step", "steps/s", f"loss after {asked.seconds:g} s", f"loss after {asked.steps} steps"
    print(f"{'':12}" + "".join(f"{each:>22}" for each in head))
    for form in asked.only or FORMS:
        rows = runs[form] = run(form, asked.seconds, asked.rate)
        first = next((row for row in rows[:-1] if row[1] > START_AFTER + 1), rows[0])
        seconds, step, _, sent = (end - begin for begin, end in zip(first, rows[-1]))
        losses = loss_after(rows, 0, asked.seconds), loss_after(rows, 1, asked.steps)
        cells = f"{sent / step / 1e6:.3f}", f"{step / seconds:.2f}", *(f"{each:.3f}" for each in losses)
        print(f"{form:12}" + "".join(f"{each:>22}" for each in cells), flush=True)
    title = f"A model of 2 million parameters on two hosts, {asked.rate.replace('mbit', ' Mbit/s')}"
    lines = {form: [(row[0], row[2]) for row in rows] for form, rows in runs.items()}
    below = "seconds of training; on the other axis, held-out loss"
    asked.output.write_text(line_picture.svg(lines, asked.seconds, WORST, title, below, "ddp"))


if __name__ == "__main__":
    main()
