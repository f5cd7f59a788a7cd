"""What an allreduce costs between hosts: over TCP, beside a raw stream, Gloo and Open MPI, all in one run.

    sudo python examples/benchmarks/wire.py                     # all settings, sizes and slots
    sudo python examples/benchmarks/wire.py --settings 1gbit --slots 2,2 --patience quick

Hosts are namespaces of this machine (tests/support/hosts.py, hence root and the extra `test`): `loopback` is one host
whose ranks talk TCP, `1gbit` two hosts behind a token bucket, `1gbit+4ms` the same with a round trip of 4 ms. Each
library is a job of its own, and the jobs take turns, so that all see the machine in the same states. `of raw` is the
share of what one plain TCP stream carries between the same hosts, both ways at once, that an allreduce moves each way:
2 (n - 1) / n times its size, and with several ranks per host the ranks of a host together. Calls are timed in groups:
of two ranks that wait for each other in turns each call is short for the one and long for the other, and only their
mean says how many a second there are. `signed` is hvdlite with HVDLITE_WIRE_AUTH=1. Ranks without torch or mpicc leave
Gloo or Open MPI out.
"""

import argparse
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests/support"))

from measure import MARK, PATIENCE, report, size_text, spread  # noqa: E402

SIZES = (4 << 10, 256 << 10, 16 << 20)
GRADIENTS = [9408, 64, 64] + [4096, 64, 64, 36864, 64, 64, 16384, 256, 256] * 10  # elements, much as in ResNet-50
GRADIENTS += [2359296, 512, 512, 1048576, 2048, 2048] * 6 + [2048000, 1000]
BYTES = {**{size_text(size): size for size in SIZES}, "16 MB mean": 16 << 20, "gradients": 4 * sum(GRADIENTS)}
SETTINGS = {"loopback": (None, 0), "1gbit": ("1gbit", 0), "1gbit+4ms": ("1gbit", 2)}
SECONDS = {"full": 2.0, "quick": 0.5, "tiny": 0.02}
ROUNDS = {"full": 3, "quick": 2, "tiny": 1}
GROUP = 4  # calls timed together, as in wire_mpi.c
RAW_PORT, GLOO_PORT = 5001, 5002


def one_stream(rank: int, address: str, size: int) -> None:
    """Rank 0 and the last one send each other so many bytes at once; the last one tells how long it takes."""
    if rank == 0:
        with socket.create_server(("", RAW_PORT)) as server:
            peer = server.accept()[0]
    else:
        until = time.monotonic() + 20
        while True:
            try:
                peer = socket.create_connection((address, RAW_PORT), timeout=60)
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
    data, room, taken = bytes(size), memoryview(bytearray(1 << 20)), []
    with peer:
        for _ in range(9):
            began = time.perf_counter()
            sender = threading.Thread(target=peer.sendall, args=(data,))
            sender.start()
            left = size
            while left:
                left -= peer.recv_into(room[: min(left, len(room))])
            sender.join()
            taken.append((time.perf_counter() - began) * 1e6)
    if rank:
        report(size_text(size), "raw stream", "us", taken[1:])


def works(lib) -> "dict[str, Callable[[], None]]":
    """What is timed: sums of one tensor; of hvdlite also means, of one tensor and of the gradients of ResNet-50."""
    import torch

    tensors = {size_text(size): torch.zeros(size // 4) for size in SIZES}
    timed = {text: functools.partial(lib.reduce, tensor, f"wire.{text}") for text, tensor in tensors.items()}
    if lib.name == "hvdlite":
        each = [torch.zeros(count) for count in GRADIENTS]
        timed["16 MB mean"] = functools.partial(means, lib.calls, [tensors["16 MB"]])
        timed["gradients"] = functools.partial(means, lib.calls, each)
    return timed


def means(hvd, tensors) -> None:
    handles = [hvd.allreduce_async_(t, name=f"{len(tensors)}.{i}", op=hvd.Average) for i, t in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def work(library: str, seconds: float, address: str) -> None:
    """A rank's part: times allreduces of each size; the last rank reports."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if library == "raw":
        if rank in (0, size - 1):
            one_stream(rank, address, 16 << 20)
        return
    from libraries import library as made

    if library == "gloo":
        os.environ.update(GLOO_SOCKET_IFNAME="eth0", MASTER_ADDR=address, MASTER_PORT=str(GLOO_PORT))
        if address.startswith("127."):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    lib = made(library)
    for text, call in works(lib).items():
        for _ in range(3):
            call()
        lib.barrier()
        began = time.perf_counter()
        call()
        one = max(lib.gather(time.perf_counter() - began))
        taken = []
        for _ in range(int(min(1000, max(3, seconds / GROUP / max(one, 1e-5))))):
            began = time.perf_counter()
            for _ in range(GROUP):
                call()
            taken.append((time.perf_counter() - began) / GROUP * 1e6)
        if rank == size - 1:
            report(text, library, "us", taken)
    lib.barrier()
    lib.close()


def run_mpi(hosts, slots, seconds: float, program: str) -> str:
    """Open MPI's daemons are started by a script that enters the host instead of ssh; mpirun stands at the switch."""
    from hosts import NAMES

    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "enter"
        enter = 'nsenter -t {} -m -u -i -n -p -- sh -c "$*"'
        cases = "\n".join(f"{NAMES[n]}) shift; exec {enter.format(pid)} ;;" for n, pid in enumerate(hosts._inits))
        agent.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\nexit 1\n')
        agent.chmod(0o755)
        named = ",".join(f"{NAMES[n]}:{count}" for n, count in enumerate(slots) if count)
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(sum(slots)), "-H", named]
        words += ["--mca", "plm_rsh_agent", str(agent), "--mca", "btl", "tcp,self", "--bind-to", "none"]
        words += ["--mca", "btl_tcp_if_include", "lo" if len([s for s in slots if s]) == 1 else "eth0"]
        words += ["--mca", "oob_tcp_if_include", "10.77.0.0/24", "--mca", "mpi_yield_when_idle", "1"]
        words += [program, str(seconds), *map(str, SIZES)]
        at_switch = ["nsenter", "-t", str(hosts._switch), "-n", "--", *words]
        done = subprocess.run(at_switch, capture_output=True, text=True, timeout=180)
        if done.returncode:
            print(f"Open MPI is left out: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return done.stdout


def run(hosts, slots, library: str, patience: str, program: "str | None") -> "dict[str, list[dict]]":
    """The results of one job of one library, by size."""
    seconds = SECONDS[patience]
    if library == "openmpi":
        said = run_mpi(hosts, slots, seconds, program) if program else ""
    else:
        from hosts_job import HostsJob

        address = hosts.ip(0) if sum(map(bool, slots)) > 1 else "127.0.0.1"
        worker = "hvdlite" if library == "signed" else library
        words = [str(HERE / "wire.py"), "--worker", worker, "--seconds", str(seconds), "--address", address]
        plane = {} if sum(map(bool, slots)) > 1 else {"HVDLITE_PLANE": "p2p"}
        auth = {"HVDLITE_WIRE_AUTH": "1"} if library == "signed" else {}
        with HostsJob(hosts, slots, words, **plane, **auth) as job:
            codes = job.wait(300)
            if any(codes.values()):
                raise SystemExit(job.text())
            said = "\n".join(job.said(slot.rank) for slot in job.slots)
    found = [json.loads(line[len(MARK) :]) for line in said.splitlines() if line.startswith(MARK)]
    return {each["work"]: each for each in found}


def compiled(folder: str) -> "str | None":
    """wire_mpi.c as a program, where there are mpicc and mpirun."""
    if shutil.which("mpicc") is None or shutil.which("mpirun") is None:
        return None
    program = str(Path(folder) / "wire_mpi")
    done = subprocess.run(["mpicc", "-O2", "-o", program, str(HERE / "wire_mpi.c")], capture_output=True, text=True)
    if done.returncode:
        print(f"Open MPI is left out: {done.stderr.strip()[-200:]}", file=sys.stderr)
    return program if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", default=",".join(SETTINGS), help="of " + ", ".join(SETTINGS))
    parser.add_argument("--slots", action="append", help="ranks per host, as 1,1 (default: 1,1 and 2,2)")
    parser.add_argument("--libraries", default="raw,hvdlite,signed,gloo,openmpi")
    parser.add_argument("--patience", choices=PATIENCE, default="full")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.seconds, asked.address)
        return
    from hosts import Hosts, missing

    if missing() is not None:
        raise SystemExit(missing())
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        program = compiled(folder)
        for setting in asked.settings.split(","):
            rate, delay = SETTINGS[setting]
            hosts.delay(1, delay)
            hosts.rate(1, rate)
            for text in asked.slots or ["1,1", "2,2"]:
                slots = tuple(map(int, text.split(",")))
                slots = slots if setting != "loopback" else (sum(slots),)
                table(setting, slots, measured(hosts, slots, asked, program))


def measured(hosts, slots, asked, program: "str | None") -> "dict[tuple[str, str], list[float]]":
    """Microseconds by library and size, one figure per round; the libraries take turns."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS[asked.patience]):
        for library in asked.libraries.split(","):
            for size, result in run(hosts, slots, library, asked.patience, program).items():
                found.setdefault((library, size), []).append(result["median"])
    return found


def table(setting: str, slots, found: "dict[tuple[str, str], list[float]]") -> None:
    """Prints the medians over rounds."""
    raw = found.get(("raw", size_text(16 << 20)))
    stream = (16 << 20) / spread(raw)[1] if raw else None  # bytes per microsecond
    print(
        f"\n{setting}, ranks per host {slots}, raw stream {f'{stream * 8e-3:.2f} Gbit/s' if stream else 'not measured'}"
    )
    ranks = sum(slots)
    for (library, size), values in found.items():
        if library == "raw":
            continue
        low, median, high = spread(values)
        share = 2 * (ranks - 1) / ranks * BYTES[size] / median / stream if stream else 0
        print(f"  {size:>10} {library:8} {median:10.0f} us ({low:.0f} to {high:.0f})  {share:5.2f} of raw", flush=True)


if __name__ == "__main__":
    main()
