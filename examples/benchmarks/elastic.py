"""How long does training stand still when a rank is killed, and when a new one joins? Beside it, torchrun's restart.

    python examples/benchmarks/elastic.py                     # 20 kills in each of three jobs, ten minutes
    python examples/benchmarks/elastic.py --kills 5 --only shm p2p

Four ranks train a small model, with a commit every ten steps. One of them, drawn by chance, is killed: what counts is
the time from there until all three others have made a step without it. Then a new process comes, which takes --ready
seconds to get ready, the import of torch included: what counts is the longest time between two steps of one of the
others, the last without it and the first with it.

torchrun ends all processes when one is lost and starts them again (--max-restarts). Its job does the same training with
DistributedDataParallel over Gloo, saves a checkpoint where the other commits and begins with the last one: what counts
is the time from the kill until all four have made a step. What was done since the commit is done again in both.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

BEGAN = time.time()
RANKS, COMMIT, PAUSE_S, PATIENCE_S = 4, 10, 0.01, 120.0
WIDTH = 512
JOBS = ("shm", "p2p", "torchrun")


def stepped(model, optimizer) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    time.sleep(PAUSE_S)


def be_elastic(steps, ready: float) -> None:
    """A rank of hvdlite-run --min-np."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    time.sleep(max(0.0, ready - (time.time() - BEGAN)))

    @hvd.elastic.run
    def train(state) -> None:
        while True:
            stepped(model, optimizer)
            print(f"{time.time():.6f} {hvd.size()}", file=steps)
            state.step += 1
            if state.step % COMMIT == 0:
                state.commit()

    train(state)


def be_restarted(steps, folder: Path) -> None:
    """A rank of torchrun."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    step, kept = 0, folder / "checkpoint"
    if kept.exists():
        saved = torch.load(kept)
        step = saved["step"]
        model.load_state_dict(saved["model"])
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        stepped(model, optimizer)
        print(f"{time.time():.6f} {dist.get_world_size()}", file=steps)
        step += 1
        if step % COMMIT == 0 and dist.get_rank() == 0:
            torch.save({"step": step, "model": model.module.state_dict()}, folder / "part")
            os.replace(folder / "part", kept)


class Job:
    """A job of this program, whose ranks write a line for each step."""

    def __init__(self, folder: Path, kind: str, ready: float, kills: int) -> None:
        self._folder = folder
        program = [str(Path(__file__)), "--as-rank", kind, "--folder", str(folder), "--ready", str(ready)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if kind == "torchrun":
            words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            words += [f"--max-restarts={kills}", *program]
            environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else Gloo reads addresses of ranks that have ended
        else:
            words = ["-m", "hvdlite.launcher", "-np", str(RANKS), "--min-np", str(RANKS - 1)]
            words += ["--blacklist-cooldown-range", "0", "0", sys.executable, *program]
            environ["HVDLITE_PLANE"] = kind
        self._said = open(folder / "said", "w+")
        self._process = subprocess.Popen([sys.executable, *words], env=environ, stdout=self._said, stderr=self._said)

    def steps(self, pid: int) -> "list[tuple[float, int]]":
        """(time, ranks) of each step of a process."""
        lines = (self._folder / f"{pid}.steps").read_text().rpartition("\n")[0].splitlines()
        return [(float(at), int(size)) for at, size in map(str.split, lines)]

    def first(self, pids: "list[int]", after: float, size: int) -> "list[float]":
        """Waits until each of these has made a step of so many ranks after that time: the times of the first ones."""
        while True:
            found = [next((at for at, ranks in self.steps(pid) if at > after and ranks == size), 0.0) for pid in pids]
            if all(found):
                return found
            self._wait(after)

    def training(self) -> "list[int]":
        """Waits until all ranks train: their processes."""
        now = time.time()
        while True:
            pids = [int(path.stem) for path in self._folder.glob("*.steps")]
            last = {pid: self.steps(pid)[-1:] for pid in pids}
            pids = [pid for pid, steps in last.items() if steps and steps[0][0] > now and steps[0][1] == RANKS]
            if len(pids) == RANKS:
                return pids
            self._wait(now)

    def _wait(self, since: float) -> None:
        if time.time() > since + PATIENCE_S or self._process.poll() is not None:
            self._said.seek(0)
            raise SystemExit(f"the job does not go on:\n{self._said.read()}")
        time.sleep(0.01)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._said.close()


def measure(kind: str, ready: float, kills: int) -> "tuple[list[float], list[float]]":
    """Seconds without a step after each kill, and at each join."""
    after_kill, at_join = [], []
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), kind, ready, kills) as job:
        for _ in range(kills):
            pids = job.training()
            lost = random.choice(pids)
            others = [pid for pid in pids if pid != lost]
            killed = time.time()
            os.kill(lost, signal.SIGKILL)
            if kind == "torchrun":
                after_kill.append(max(job.first(restarted(job, pids), killed, RANKS)) - killed)
                continue
            after_kill.append(max(job.first(others, killed, RANKS - 1)) - killed)
            joined = job.first(others, killed, RANKS)
            before = [max(at for at, _ in job.steps(pid) if at < first) for pid, first in zip(others, joined)]
            at_join.append(max(first - last for first, last in zip(joined, before)))
    return after_kill, at_join


def restarted(job: Job, before: "list[int]") -> "list[int]":
    """The processes that train in place of those."""
    while set(pids := job.training()) & set(before):
        pass
    return pids


def line(work: str, kind: str, values: "list[float]") -> str:
    return f"{work:58} {kind:9} {statistics.median(values):8.3f} {max(values):8.3f} {len(values):4}"


def main() -> None:
    parser = argparse.ArgumentParser(description="How long training stands still when ranks go and come.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ready", type=float, default=5.0, help="seconds that a new process takes")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--quick", action="store_true", help="one kill: shows only that it works")
    parser.add_argument("--as-rank", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        with open(args.folder / f"{os.getpid()}.steps", "w", buffering=1) as steps:
            if args.as_rank == "torchrun":
                be_restarted(steps, args.folder)
            else:
                be_elastic(steps, args.ready * ("HVDLITE_EXPECTED_PLACE" in os.environ))
        return
    if args.quick:
        args.kills, args.ready = 1, 0.0
    print(f"hvdlite {version('hvdlite')}, torch {version('torch')}, Python {sys.version.split()[0]}", end=", ")
    print(f"{len(os.sched_getaffinity(0))} processors; {RANKS} ranks, seconds")
    print(f"{'':58} {'':9} {'median':>8} {'worst':>8} {'of':>4}")
    for kind in args.only:
        after_kill, at_join = measure(kind, args.ready, args.kills)
        if kind == "torchrun":
            print(line("from the kill of a rank to the next step of all", kind, after_kill), flush=True)
            continue
        print(line("from the kill of a rank to the first step of the others", kind, after_kill), flush=True)
        print(line(f"between two steps, where one joins (ready in {args.ready:g} s)", kind, at_join), flush=True)


if __name__ == "__main__":
    main()
