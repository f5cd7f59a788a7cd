"""Which programs check what on a machine with GPUs, and what came of each: the parts that check.py speaks of.

Each part runs programs of its own, with a limit of time, and notes a verdict of its claims (verdict.py). A part that
this machine cannot do says why.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

import torch
from verdict import FAILED, MEASURED, PASS, Verdicts

PARTS = ("one", "staged", "shared", "several", "pairs", "death", "sanitizer")
LIMIT_S = float(os.environ.get("LIMIT_S", 420))  # of a program
GRACE_S = 40  # for its end; the launcher gives its ranks 30
LAUNCH = "import sys; from hvdlite.launcher.cli import main; sys.exit(main())"
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
WORKED = "NCCL has added up over ranks that share a GPU"  # from there on nothing is a refusal
REFUSED = re.compile(r"use the same GPU|could not (?:begin a communicator|connect the ranks): invalid usage")


class Machine:
    """What is run on this one, and what came of it."""

    def __init__(self, program):
        self.program, self.verdicts = program, Verdicts()
        self.said = []  # by the program that ran last
        self.one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}

    def ran(self, claim, what, line, **environ):
        """Runs a command, passes on what it prints, and returns that; None if it failed, which the claim then has."""
        print(f"-- {what}", flush=True)
        self.said = []
        program = subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
            start_new_session=True,
        )
        hears = threading.Thread(target=self._hear, args=(program.stdout, self.said), daemon=True)
        hears.start()
        late = self._ended(program, hears)
        if program.returncode == 0 and not late:
            return "".join(self.said)
        why = f"{what}: not done in {LIMIT_S} s" if late else f"{what}: exit code {program.returncode}"
        print(why, end="\n" if claim is None else "  FAILED\n", flush=True)
        if claim is not None:
            self.verdicts.note(claim, FAILED, why)
        return None

    def _hear(self, output, said):
        for one in output:
            print(one, end="", flush=True)
            said.append(one)
            self.verdicts.heard(one)

    def _ended(self, program, hears):
        """Waits for the program and those that it has started and that write where it does. Whether they were late, and
        had to be ended: the launcher ends its ranks when it is asked to, a hung one has to be killed."""
        late = False
        try:
            with suppress(subprocess.TimeoutExpired):
                program.wait(LIMIT_S)
                hears.join(GRACE_S)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if program.poll() is None or hears.is_alive():
                    late = True
                    with suppress(ProcessLookupError):
                        os.killpg(program.pid, number)
                    hears.join(GRACE_S)
                    with suppress(subprocess.TimeoutExpired):
                        program.wait(1)
        return late

    def ranks(self, claim, size, *more, **environ):
        """A job of so many ranks, all parts of `as_rank`."""
        line = [sys.executable, "-c", LAUNCH, "-np", str(size), sys.executable, self.program, "rank", *more]
        return self.ran(claim, f"{size} ranks {' '.join(environ)}", line, **environ)

    def one(self):
        """Its figures come from it."""
        self.ranks("dtypes", 1, "figures", **self.one_gpu)

    def staged(self):
        """By way of the CPU, also where there are more GPUs."""
        for size in (2, 4):
            self.ranks(f"staged{size}", size, **self.one_gpu)

    def shared(self):
        """That NCCL refuses it is no failure of ours. Whatever else goes wrong is one."""
        self._sharing(("shared",))

    def _sharing(self, claims, *more):
        """Two ranks on one GPU, joined by NCCL; they tell of these claims."""
        version = torch.cuda.nccl.version()
        why = f"NCCL {'.'.join(map(str, version))} does not" if version < (2, 30) else None
        if why is None and self.ranks(None, 2, *more, **self.one_gpu, **{SHARING: "1"}) is None:
            said = "".join(self.said)
            if REFUSED.search(said) and WORKED not in said:
                why = "NCCL refused it, see above"
            else:
                self._failed(claims, "2 ranks on one GPU by NCCL, see above")
        if why is not None:
            self.verdicts.why_not.update(dict.fromkeys(claims, why))

    def _failed(self, claims, text):
        """A program that was to tell of these has failed: with what it has not told of, or at its end with the last."""
        for claim in [one for one in claims if one not in self.verdicts.found] or claims[-1:]:
            self.verdicts.note(claim, FAILED, text)

    def pairs(self):
        """The figures of two ranks: each on a GPU of its own, and both on one."""
        if torch.cuda.device_count() == 1:
            self.verdicts.why_not.update(dict.fromkeys(MEASURED["several"], "there is one GPU"))
        elif self.ranks(None, 2, "pair") is None:
            self._failed(MEASURED["several"], "2 ranks on two GPUs, see above")
        self._sharing(MEASURED["shared"], "pair")

    def several(self):
        """By NCCL, if there are so many: two ranks, and the greatest power of two, for a third has no exact average."""
        count = torch.cuda.device_count()
        if count == 1:
            self.verdicts.why_not["several"] = "there is one GPU"
        for size in sorted({2, 1 << (count.bit_length() - 1)}) if count > 1 else ():
            self.ranks("several", size)

    def death(self):
        """By NCCL, where each of the two has a GPU of its own; else as ranks go that share one. The job fails: one of
        its ranks dies."""
        self.verdicts.why_not["abort"] = "the two ranks had no communicator of NCCL"
        program = os.path.join(os.path.dirname(self.program), "death.py")
        with tempfile.TemporaryDirectory() as folder:
            died = os.path.join(folder, "died")
            line = [sys.executable, "-c", LAUNCH, "-np", "2", "--failure-grace", "20", sys.executable, program, died]
            self.ran(None, "2 ranks, one of which dies, and with it the job", line)
        if "death" not in self.verdicts.found:
            self.verdicts.note("death", FAILED, "rank 0 did not say when it heard, see above")

    def sanitizer(self):
        """Of memory errors; PyTorch's and NCCL's questions that a driver answers with an error are none. Races are not
        looked for: there are no kernels of our own."""
        line = [sys.executable, self.program, "rank"]
        if self._sanitized("sanitizer", "1 rank", line, **self.one_gpu) is not None:
            self.verdicts.note("sanitizer", PASS, "one rank's checks")

    def _sanitized(self, claim, what, line, **environ):
        """What a command says under compute-sanitizer; None: it could not be had, or has failed, or found something. A
        tool that has not got hold of its program ends well, too: only its summary tells that it has looked."""
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if tool is None:
            self.verdicts.why_not[claim] = "compute-sanitizer is not installed"
            return None
        words = [tool, "--error-exitcode", "9", "--target-processes", "all", "--report-api-errors", "no"]
        words += ["--launch-timeout", "300", "--require-cuda-init", "no"]  # a launcher has no need of CUDA
        said = self.ran(claim, f"compute-sanitizer, {what}", [*words, *line], **environ)
        if said is None:
            return None
        found = re.findall(r"ERROR SUMMARY: (\d+) error", said)
        if found and not any(map(int, found)):
            return said
        why = f"compute-sanitizer, {what}: " + ("errors, see above" if found else "it has not looked, see above")
        self.verdicts.note(claim, FAILED, why)
        return None
