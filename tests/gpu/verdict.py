"""What has been shown on this machine, what has been missed, and what did not run: a line for each claim of issue 5.

Programs that check something say so in lines of one form (`tell`); who has started them reads those lines while it
passes them on (`Verdicts.heard`). A claim of which no line came did not run, whatever else went well: `summary` says so
in as many words, and never calls it a pass.
"""

import importlib
import os
import re
import shutil
import sys
import sysconfig

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
PERMITTED = (
    "shared",
    "small2",
    "step2",
    "smallshared",
    "stepshared",
    "several",
    "abort",
)  # the library or the machine may refuse these
FAILED, MISSED, PASS, NOT_RUN = "FAILED", "MISSED", "PASS", "DID NOT RUN"


def tell(claim, holds, text):
    """Says for the parent, and for whoever looks on, that a claim holds or is missed."""
    assert claim in CLAIMS, claim
    print(f"{PASS if holds else MISSED} [{claim}] {text}", flush=True)


def tell_most(claim, what, value, limit, unit):
    """The same of a figure that has a limit."""
    tell(claim, value <= limit, f"{what}: {value:.3f} {unit}, at most {limit:.3f}")


class Verdicts:
    """One for each claim, the worst that was heard."""

    def __init__(self):
        self.found = {}  # claim: (verdict, text)
        self.why_not = {}  # claim: why it did not run

    def heard(self, line):
        """A line that a program has printed."""
        match = FORM.search(line)
        if match and match.group(2) in CLAIMS:
            self.note(match.group(2), match.group(1), match.group(3).strip())

    def note(self, claim, verdict, text):
        """What is known of a claim; worse than before it stays worse."""
        order = (PASS, MISSED, FAILED)
        before = self.found.get(claim, (PASS, ""))
        if claim not in self.found or order.index(verdict) > order.index(before[0]):
            self.found[claim] = verdict, text

    def summary(self, known=()):
        """Lines for people, in the order of the issue. known: claims whose lines are left out."""
        lines = []
        for claim, text in CLAIMS.items():
            if claim in known:
                continue
            verdict, figure = self.found.get(claim, (NOT_RUN, self.why_not.get(claim, "")))
            lines.append(f"{verdict:11} {text}" + (f" ({figure})" if figure else ""))
        return lines

    def code(self, judges):
        """0: what ran holds. 1: something has failed, or missed its figure where that is judged. 4: judged, nothing of
        that, but parts that this machine need not refuse did not run."""
        verdicts = {verdict for verdict, _ in self.found.values()}
        if FAILED in verdicts or (judges and MISSED in verdicts):
            return 1
        lacking = [claim for claim in CLAIMS if claim not in self.found and claim not in PERMITTED]
        return 4 if judges and lacking else 0


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
        nothing = Verdicts()
        nothing.why_not = dict.fromkeys(CLAIMS, reason)
        print(*nothing.summary(), f"skipped: {reason}", sep="\n")
        sys.exit(77)
