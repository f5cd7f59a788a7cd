"""Which programs check what on a machine with GPUs, and what came of each: a line for each claim of issue 5.

Programs that check something say so in lines of one form (`tell`); who has started them reads those lines while it
passes them on (`Machine.heard`). A claim of which no line came did not run, whatever else went well: `summary` says so
in as many words, and never calls it a pass. Each part (check.py speaks of them) runs programs of its own, with a limit
of time; one that this machine cannot do says why.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

FORM = re.compile(r"\b(PASS|MISSED) \[(\w+)\] (.*)")
CLAIMS = {
    "dtypes": "NCCL at np=1: every op and dtype beside NumPy, every kind",
    "staged2": "2 ranks on one GPU by way of the CPU",
    "staged4": "4 ranks on one GPU by way of the CPU",
    "shared": "2 ranks on one GPU by NCCL 2.30 or newer, if it permits that",
    "small": "a 4 KB allreduce: at most 10 us over NCCL's own call",
    "step": "a step of 162 gradients: not slower than DistributedDataParallel with NCCL",
    "overlap": "a step of 100 M parameters: at most 1.05 times its computation",
    "small2": "2 ranks on two GPUs, a 4 KB allreduce: at most 10 us over NCCL's own call",
    "step2": "2 ranks on two GPUs, a step of 162 gradients: not slower than DistributedDataParallel",
    "smallshared": "2 ranks on one GPU by NCCL, a 4 KB allreduce: at most 10 us over NCCL's own call",
    "stepshared": "2 ranks on one GPU by NCCL, a step of 162 gradients: not slower than DistributedDataParallel",
    "sanitizer": "compute-sanitizer is clean",
    "several": "NCCL on several GPUs",
    "death": "a rank dies: the other one has its error and its device within 1 s",
    "abort": "the same where the two are joined by NCCL: their communicator is aborted",
}
MEASURED = {  # where ranks are whose small allreduces and whose steps are timed, and which claims that is
    "one": ("small", "step"),
    "several": ("small2", "step2"),
    "shared": ("smallshared", "stepshared"),
}
REFUSABLE = ("shared", "several", "abort", *MEASURED["several"], *MEASURED["shared"])  # by the library or the machine
FAILED, MISSED, PASS, NOT_RUN = "FAILED", "MISSED", "PASS", "DID NOT RUN"
PARTS = ("one", "staged", "shared", "several", "pairs", "death", "sanitizer")
LIMIT_S = float(os.environ.get("LIMIT_S", 420))  # of a program
GRACE_S = 40  # for its end; the launcher gives its ranks 30
HERE = Path(__file__).resolve().parent
LAUNCH = "import sys; from hvdlite.launcher.cli import main; sys.exit(main())"
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
WORKED = "NCCL has added up over ranks that share a GPU"  # from there on nothing is a refusal
REFUSED = re.compile(r"use the same GPU|could not (?:begin a communicator|connect the ranks): invalid usage")


def tell(claim, holds, text):
    """Says for the parent, and for whoever looks on, that a claim holds or is missed."""
    assert claim in CLAIMS, claim
    print(f"{PASS if holds else MISSED} [{claim}] {text}", flush=True)


def tell_most(claim, what, value, limit, unit):
    """The same of a figure that has a limit."""
    tell(claim, value <= limit, f"{what}: {value:.3f} {unit}, at most {limit:.3f}")


def launched(size, *words):
    """The command of a job."""
    return [sys.executable, "-c", LAUNCH, "-np", str(size), *words]


def jobs(count, version):
    """The parts that are jobs of check.py: (part, its claims, ranks, a word for them, environment, why not). count: of
    GPUs; version: NCCL's."""
    first = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    both, most = {**first, SHARING: "1"}, 1 << (count.bit_length() - 1)  # a power of two: a third has no exact average
    lone = "there is one GPU" if count == 1 else ""
    old = f"NCCL {'.'.join(map(str, version))} does not" if version < (2, 30) else ""
    yield "one", (*MEASURED["one"], "overlap", "dtypes"), 1, "figures", first, ""
    yield "staged", ("staged2",), 2, "", first, ""
    yield "staged", ("staged4",), 4, "", first, ""
    yield "shared", ("shared",), 2, "", both, old
    for size in sorted({2, most}):
        yield "several", ("several",), size, "", {}, lone
    yield "pairs", MEASURED["several"], 2, "pair", {}, lone
    yield "pairs", MEASURED["shared"], 2, "pair", both, old


class Machine:
    """What is run on this one, and what came of it: for each claim the worst that was heard."""

    def __init__(self):
        self.found = {}  # claim: (verdict, text)
        self.why_not = {}  # claim: why it did not run
        self.said = ""  # by the program that ran last

    def heard(self, line):
        """A line that a program has printed."""
        match = FORM.search(line)
        if match and match.group(2) in CLAIMS:
            self.note(match.group(2), match.group(1), match.group(3).strip())

    def note(self, claim, verdict, text):
        """What is known of a claim; worse than before it stays worse."""
        order = (PASS, MISSED, FAILED)
        if claim not in self.found or order.index(verdict) > order.index(self.found[claim][0]):
            self.found[claim] = verdict, text

    def summary(self):
        """Lines for people, in the order of the issue."""
        for claim, text in CLAIMS.items():
            verdict, figure = self.found.get(claim, (NOT_RUN, self.why_not.get(claim, "")))
            yield f"{verdict:11} {text}" + (f" ({figure})" if figure else "")

    def code(self, judges):
        """0: what ran holds. 1: something has failed, or missed its figure where that is judged. 4: judged, nothing of
        that, but parts that this machine need not refuse did not run."""
        verdicts = {verdict for verdict, _ in self.found.values()}
        if FAILED in verdicts or (judges and MISSED in verdicts):
            return 1
        return 4 if judges and set(CLAIMS) - set(self.found) - set(REFUSABLE) else 0

    def ran(self, what, line, **environ):
        """Runs a command, and passes on what it prints. Why it failed; "": it did not. What is late has to be ended:
        the launcher ends its ranks when it is asked to, a hung one is killed."""
        print(f"-- {what}", flush=True)
        self.said, line = "", ["timeout", "-k", str(GRACE_S), f"{LIMIT_S:g}", *line]
        more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": {**os.environ, **environ}}
        with subprocess.Popen(line, text=True, **more) as program:
            for one in program.stdout:
                print(one, end="", flush=True)
                self.said += one
                self.heard(one)
        code = program.wait()
        why = f"{what}: " + (f"not done in {LIMIT_S:g} s" if code == 124 else f"exit code {code}") if code else ""
        print(why, end="\n" * bool(why), flush=True)
        return why

    def job(self, claims, size, word, environ, why_not):
        """Ranks that tell of these claims. That NCCL lets no two share a GPU is no failure of ours; whatever else goes
        wrong is one, of what they have not told of, or at their end of the last."""
        why = ""
        if not why_not:
            line = launched(size, sys.executable, str(HERE / "check.py"), "rank", word)
            why = self.ran(f"{size} ranks {' '.join(environ)}", line, **environ)
        if why and SHARING in environ and REFUSED.search(self.said) and WORKED not in self.said:
            why, why_not = "", "NCCL refused it, see above"
        if why_not:
            self.why_not.update(dict.fromkeys(claims, why_not))
        for claim in ([one for one in claims if one not in self.found] or claims[-1:]) if why else ():
            self.note(claim, FAILED, why)

    def death(self):
        """By NCCL, where each of the two has a GPU of its own; else as ranks go that share one. The job fails: one of
        its ranks dies."""
        self.why_not["abort"] = "the two ranks had no communicator of NCCL"
        with tempfile.TemporaryDirectory() as folder:
            words = ["--failure-grace", "20", sys.executable, str(HERE / "death.py"), os.path.join(folder, "died")]
            self.ran("2 ranks, one of which dies, and with it the job", launched(2, *words))
        if "death" not in self.found:
            self.note("death", FAILED, "rank 0 did not say when it heard, see above")

    def sanitizer(self):
        """Of memory errors; PyTorch's and NCCL's questions that a driver answers with an error are none. Races are not
        looked for: there are no kernels of our own. A tool that has not got hold of its program ends well, too: only
        its summary tells that it has looked."""
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if tool is None:
            self.why_not["sanitizer"] = "compute-sanitizer is not installed"
            return
        words = [tool, "--error-exitcode", "9", "--target-processes", "all", "--report-api-errors", "no"]
        words += ["--launch-timeout", "300", "--require-cuda-init", "no"]  # a launcher has no need of CUDA
        _, _, _, _, first, _ = next(jobs(1, (0,)))
        why = self.ran("compute-sanitizer, 1 rank", [*words, sys.executable, str(HERE / "check.py"), "rank"], **first)
        errors = re.findall(r"ERROR SUMMARY: (\d+) error", self.said)
        if not why and (not errors or any(map(int, errors))):
            why = "errors, see above" if errors else "it has not looked, see above"
        self.note("sanitizer", FAILED if why else PASS, why or "one rank's checks")


def why_nothing_runs():
    """Why no part can run on this machine; None: they can."""
    for needed in ("torch", "numpy", "cffi", "_cffi_backend", "pycparser"):
        try:
            importlib.import_module(needed)
        except ImportError as error:
            return f"{needed} cannot be imported ({error}): PYTHONPATH may name a folder that has it"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return f"{sysconfig.get_path('include')} has no Python.h (Debian and Ubuntu: apt-get install python3-dev)"
    compiler = os.environ.get("CC", "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler {compiler} (CC names another)"
    return None if sys.modules["torch"].cuda.is_available() else "PyTorch sees no GPU here"


if __name__ == "__main__":
    reason = why_nothing_runs()
    if reason is not None:
        nothing = Machine()
        nothing.why_not = dict.fromkeys(CLAIMS, reason)
        print(*nothing.summary(), f"skipped: {reason}", sep="\n")
        sys.exit(77)
