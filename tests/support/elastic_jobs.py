"""An elastic job under test: its processes, how they are killed, and whether it ends as if nothing had happened."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from elastic_training import Plan, replayed
from launching import Launch

HERE = Path(__file__).parent
PROGRAM = str(HERE / "elastic_training.py")
AT_ONCE = ("--blacklist-cooldown-range", "0", "0")  # a replacement comes without delay
SECONDS = 60.0


class ElasticJob(Launch):
    """`hvdlite-run *flags python elastic_training.py`, with a Plan of these fields."""

    def __init__(self, folder, *flags, plan=None, program=PROGRAM, **environ):
        self.folder, self.plan = folder, Plan(**(plan or {}))
        words = [sys.executable, program, str(folder), json.dumps(plan or {})]
        super().__init__(*flags, *words, merged=True, **environ)

    def steps(self, pid):
        """(time, step, rank, size) of what a process has done."""
        try:
            lines = (self.folder / f"{pid}.steps").read_text().splitlines()
        except FileNotFoundError:
            return []
        whole = (words for words in map(str.split, lines) if len(words) == 4)  # a victim may have written half a line
        return [(float(at), int(step), int(rank), int(size)) for at, step, rank, size in whole]

    def pids(self):
        return [int(path.stem) for path in self.folder.glob("*.steps")]

    def training(self):
        """{pid: rank} of those that have made a step and live."""
        found = {pid: self.steps(pid) for pid in self.pids()}
        return {pid: steps[-1][2] for pid, steps in found.items() if steps and self.is_alive(pid)}

    def until_training(self, count, step=0):
        """Waits until so many take part, of which the last step was above this one."""
        end = time.monotonic() + SECONDS
        while True:
            last = {pid: self.steps(pid)[-1] for pid in self.training()}
            newest = max((at for at, *_ in last.values()), default=0)
            size = next((size for at, _, _, size in last.values() if at == newest), 0)
            if size == count == len(last) and min(at[1] for at in last.values()) > step:
                return
            assert time.monotonic() < end and self.process.poll() is None, f"{count} did not train: {last}\n{self.out}"
            time.sleep(0.01)

    def newest(self):
        """The last step of all."""
        return max((self.steps(pid)[-1][1] for pid in self.training()), default=0)

    def kill(self, *ranks, number=signal.SIGKILL):
        """Of those that train; returns the pids."""
        of_rank = {rank: pid for pid, rank in self.training().items()}
        for rank in ranks:
            self.signal(of_rank[rank], number)
        return [of_rank[rank] for rank in ranks]

    def finish(self, code=0):
        """Waits for the end, which is that of a job where nothing happened; returns the sizes that there were."""
        assert self.wait(SECONDS) == code, self.out
        self.until_gone()
        ends = [json.loads(path.read_text()) for path in self.folder.glob("*.end")]
        assert ends and all(each == {**ends[0], "rank": each["rank"]} for each in ends), self.out
        weights, once = replayed(replace(self.plan, epochs=ends[0]["epochs"]), ends[0]["log"])
        assert weights == ends[0]["weights"] and once, self.out
        sizes = [size for _, _, size in ends[0]["log"]]
        return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] != size]

    def signal(self, pid, number):
        os.kill(pid, number)

    def is_alive(self, pid):
        return is_alive(pid)


def said(job):
    """The launcher's own lines, and the last ones of tracebacks."""
    shown = re.findall(r"^hvdlite-run: (.*)|^\[\d\]<stderr>:(\w[\w.]*Error: .*)", job.out, re.MULTILINE)
    return [re.sub(r"\.py:\d+", ".py:N", re.sub(r"pid \d+", "pid P", "".join(each))) for each in shown]


def is_alive(pid):
    """A process that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
