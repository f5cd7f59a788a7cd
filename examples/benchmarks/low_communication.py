"""What do LocalSGD, DiLoCo and streaming DiLoCo cost in loss, and what do they save in bytes and in waiting?

    python examples/benchmarks/low_communication.py loss -o runs.jsonl          # two hours; goes on where it stopped
    python examples/benchmarks/low_communication.py loss -o runs.jsonl --seeds 0 --ranks 2 --sync-every 20 --steps 300
    python examples/benchmarks/low_communication.py picture runs.jsonl          # docs/guides/low-communication.svg
    sudo python examples/benchmarks/low_communication.py islands                # three minutes
    python examples/benchmarks/low_communication.py torchft                     # beside torchft's DiLoCo; six minutes

`loss` prints the held-out loss of each mode and its bytes beside those of sync. Each rank takes itself for a host
(tests/support/pretended_hosts.py), so int4 acts and all bytes cross counted links. local_training.py has the model, the
modes and what a rank does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))
WORKER, APART = HERE / "local_training.py", ROOT / "tests/support/pretended_hosts.py"
PICTURE = ROOT / "docs/guides/low-communication.svg"

import line_picture  # noqa: E402

from measure import MARK  # noqa: E402

MODES = ("sync", "local", "diloco", "streaming", "int4")
ISLANDS = ("sync", "diloco", "streaming")
KEY = ("mode", "ranks", "sync_every", "seed", "steps")
RUN_SECONDS = 1800


def told(path: Path) -> list[dict]:
    """The runs in a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def words_of(work: str, row: dict, **more: int) -> list[str]:
    """What a rank is started with, after the interpreter."""
    said = {**row, **more}
    flags = [word for name, value in said.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [str(WORKER), work, *flags]


def train_apart(row: dict, every: int, **environ: str) -> dict:
    """Run one training with each rank as a host; what rank 0 reports."""
    row = dict(row)
    command = [sys.executable, "-m", "hvdlite.launcher", "-np", str(row.pop("ranks")), sys.executable, str(APART), "1"]
    command += words_of("loss", row, every=every)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.rsplit(MARK, 1)[1].splitlines()[0])


def loss(args: argparse.Namespace) -> None:
    """All runs that are not in the file, then the table."""
    runs = told(args.output)
    done = {tuple(run[name] for name in KEY) for run in runs}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for ranks in args.ranks:
            for mode in args.only or MODES:
                for sync_every in args.sync_every if mode != "sync" else [1]:
                    row = dict(zip(KEY, (mode, ranks, sync_every, seed, args.steps)))
                    if tuple(row.values()) in done:
                        continue
                    run = {**row, **train_apart(row, args.record_every)}
                    with args.output.open("a") as file:
                        file.write(json.dumps(run) + "\n")
                    runs.append(run)
                    said = f"{run['loss']:.4f}, {run['bytes'] / 1e6:.3f} MB a rank, {run['seconds']:.0f} s"
                    print(f"  {mode}, {ranks} ranks, H {sync_every}, seed {seed}: {said}", file=sys.stderr, flush=True)
                    if not run["equal"]:
                        raise SystemExit(f"weights differ between ranks: {row}")
    print(table([run for run in runs if run["steps"] == args.steps]))


def table(runs: list[dict]) -> str:
    """Means over seeds: held-out loss, its spread, how far from sync's, and bytes beside sync's."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["ranks"], run["sync_every"], MODES.index(run["mode"])), []).append(run)
    columns = "ranks", "every", "mode", "seeds", "loss", "+-", "over sync", "bytes / sync", "fewer"
    lines = ["".join(f"{each:>13}" for each in columns)]
    for (ranks, sync_every, mode), same in sorted(groups.items()):
        losses = [run["loss"] for run in same]
        of_sync = groups.get((ranks, 1, 0), [])
        cells = [ranks, sync_every, MODES[mode], len(same), f"{statistics.mean(losses):.4f}"]
        cells.append(f"{statistics.pstdev(losses):.4f}")
        if of_sync:
            base, sent = (statistics.mean(run[name] for run in of_sync) for name in ("loss", "bytes"))
            share = statistics.mean(run["bytes"] for run in same) / sent
            cells += [f"{statistics.mean(losses) / base - 1:+.2%}", f"{share:.5f}", f"{1 / share:.1f}x"]
        lines.append("".join(f"{each:>13}" for each in cells))
    return "\n".join(lines)


def waited(run: dict, row: dict) -> float:
    """Share of the time in which the loop has waited for exchanges. Of sync it is what hvd.stats() calls exposed; of
    others what steps of the optimizer with an exchange took beyond those without one.
    """
    if row["mode"] == "sync":
        return run["exposed"] / run["seconds"]
    parts = 4 if row["mode"].startswith("streaming") else 1
    period = row["sync_every"] // parts
    delay = row["delay"] if parts > 1 else 0
    exchanges: list[float] = []
    others: list[float] = []
    for step, seconds in enumerate(run["times"], run["first"]):
        (exchanges if step % period in (0, delay) else others).append(seconds)
    usual = statistics.median(others)
    return sum(seconds - usual for seconds in exchanges) / run["seconds"]


def islands(args: argparse.Namespace) -> None:
    """Two hosts with a slow network between them, two ranks on each."""
    from hosts import Hosts, missing
    from hosts_job import HostsJob

    if missing() is not None:
        raise SystemExit(missing())
    columns = "mode", "samples/s", "over sync", "waiting", "wire busy", "MB/s sent"
    print("".join(f"{each:>16}" for each in columns))
    base = None
    for mode in args.only or ISLANDS:
        sync_every = 1 if mode == "sync" else args.sync_every
        row = {"mode": mode, "sync_every": sync_every, "delay": args.delay, "batch": args.batch}
        row["steps"] = args.steps if mode != "sync" else args.sync_steps
        with Hosts(2) as hosts:
            for number in range(2):
                hosts.rate(number, f"{args.mbit:g}mbit")
            hosts.delay(1, args.delay_ms)
            with HostsJob(hosts, (2, 2), words_of("islands", row)) as job:
                if any(job.wait(RUN_SECONDS).values()):
                    raise SystemExit(job.text())
                run = json.loads(job.said(0).rsplit(MARK, 1)[1].splitlines()[0])
        rate, sent = 4 * args.batch * row["steps"] / run["seconds"], run["bytes"] / run["seconds"]
        base = rate if mode == "sync" else base
        cells = f"{rate:.1f}", f"{rate / base:.1f}x" if base else "", f"{waited(run, row):.1%}"
        cells += f"{8e-6 * sent / args.mbit:.1%}", f"{sent / 1e6:.3f}"
        print(f"{mode:>16}" + "".join(f"{each:>16}" for each in cells), flush=True)


def beside_torchft(args: argparse.Namespace) -> None:
    """Final loss and steps a second of hvd.DiLoCo and torchft's, by turns."""
    os.environ.setdefault("RUST_LOG", "error")  # the lighthouse writes a line for each exchange
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        raise SystemExit("this part needs torchft: pip install torchft") from None
    columns = "every", "mode", "loss", "steps/s"
    print("".join(f"{each:>13}" for each in columns))
    for sync_every in args.sync_every:
        found: dict[str, list[dict]] = {"diloco": [], "torchft": []}
        for _ in range(args.rounds):
            for mode, runs in found.items():
                row = dict(zip(KEY, (mode, 2, sync_every, 0, args.steps)))
                lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
                port = lighthouse.address().rpartition(":")[2]
                runs.append(train_apart(row, args.steps + 1, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}"))
                lighthouse.shutdown()
        for mode, runs in found.items():
            rate = statistics.median(args.steps / run["seconds"] for run in runs)
            print("".join(f"{each:>13}" for each in (sync_every, mode, f"{runs[-1]['loss']:.4f}", f"{rate:.2f}")))


def picture(args: argparse.Namespace) -> None:
    """Held-out loss over the bytes that a rank has sent; means over seeds."""
    groups: dict[str, list[list]] = {}
    for run in told(args.runs):
        if run["ranks"] == args.ranks and run["sync_every"] in (1, args.sync_every):
            groups.setdefault(run["mode"], []).append(run["curve"])
    lines = {}
    for mode in sorted(groups, key=MODES.index):
        points = zip(*groups[mode])
        lines[mode] = [tuple(statistics.mean(each[n] for each in same) for n in (1, 2)) for same in points]
    if not lines:
        raise SystemExit(f"{args.runs} has no run of {args.ranks} ranks with an exchange every {args.sync_every} steps")
    lines = {mode: [(sent / 1e6, loss) for sent, loss in points] for mode, points in lines.items()}
    first, last = min(points[0][0] for points in lines.values()), max(points[-1][0] for points in lines.values())
    title = f"A character model on {args.ranks} ranks, an exchange every {args.sync_every} steps"
    below = "MB that a rank has sent; on the other axis, held-out loss"
    worst = max(points[0][1] for points in lines.values())
    args.output.write_text(line_picture.svg(lines, last, worst, title, below, "sync", begin=first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("loss", help="held-out loss and bytes of each mode")
    part.add_argument("-o", "--output", type=Path, default=ROOT / "tests/out/low_communication.jsonl")
    part.add_argument("--only", action="append", choices=MODES, help="this mode; may be given more than once")
    part.add_argument("--sync-every", type=int, nargs="+", default=[20, 100], help="steps between two exchanges")
    part.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    part.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    part.add_argument("--steps", type=int, default=2000)
    part.add_argument("--record-every", type=int, default=100, help="steps between two points of the picture")
    part.set_defaults(run=loss)
    part = parts.add_parser("picture", help="held-out loss over bytes, of the runs of `loss`")
    part.add_argument("runs", type=Path)
    part.add_argument("-o", "--output", type=Path, default=PICTURE, help="%(default)s")
    part.add_argument("--ranks", type=int, default=2)
    part.add_argument("--sync-every", type=int, default=20)
    part.set_defaults(run=picture)
    part = parts.add_parser("islands", help="samples a second and waiting on two hosts with a slow network")
    part.add_argument("--only", action="append", choices=(*ISLANDS, "local", "int4", "streaming-int4"))
    part.add_argument("--sync-every", type=int, default=100)
    part.add_argument("--delay", type=int, default=20, help="of streaming, in steps (%(default)s)")
    part.add_argument("--batch", type=int, default=8, help="rows of each rank, few as ranks share CPUs (%(default)s)")
    part.add_argument("--steps", type=int, default=600, help="of each mode but sync (%(default)s)")
    part.add_argument("--sync-steps", type=int, default=40, help="of sync (%(default)s)")
    part.add_argument("--mbit", type=float, default=20.0, help="Mbit/s of each host (%(default)s)")
    part.add_argument("--delay-ms", type=float, default=50.0, help="between the hosts, each way (%(default)s)")
    part.set_defaults(run=islands)
    part = parts.add_parser("torchft", help="beside torchft's DiLoCo")
    part.add_argument("--sync-every", type=int, nargs="+", default=[20, 100])
    part.add_argument("--steps", type=int, default=600, help="a multiple of --sync-every (%(default)s)")
    part.add_argument("--rounds", type=int, default=3)
    part.set_defaults(run=beside_torchft)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
