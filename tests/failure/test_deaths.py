"""A rank that dies, at any moment and in any way, is named by every other rank within a second; nothing is left.

The moments are random but seeded: 100 times with NumPy, 12 times with torch, from before init to well into the work.

A second of a machine that is theirs: what the kernel has counted that ranks and launcher were ready and others ran
(doomed.py) is added, and what the whole machine stood still. Neither grows while somebody waits for a clock that he
should not wait for, so such a wait is seen on a busy machine as on an idle one.
"""

import importlib.util
import json
import random
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks import Job, everything, gone

PROGRAM = str(Path(__file__).resolve().parents[1] / "support/doomed.py")
WAYS = {"SIGKILL": 137, "SIGSEGV": 139, "_exit": 3, "raise": 1}
LIMIT_S = 1.0


class Standstill:
    """How long did the whole machine stand still? That no rank could tell of, a virtual machine's host may do."""

    def __init__(self):
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        last = time.monotonic()
        while not self._over.wait(0.02):
            now = time.monotonic()
            self.seconds += now - last if now - last > 0.2 else 0
            last = now

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def read(folder, name):
    return json.loads((folder / name).read_text())


def kill_one(folder, size, seed, with_torch, latest):
    chosen = random.Random(seed)
    plan = {"victim": chosen.randrange(size), "how": chosen.choice(list(WAYS)), "torch": with_torch}
    plan["after"] = chosen.uniform(0, latest) if seed % 3 else chosen.uniform(0, 0.05)
    with Standstill() as still, Job(size, [sys.executable, PROGRAM, str(folder), json.dumps(plan)]) as job:
        code = job.wait(60)
        said = f"{plan}, exit code {code}\n{job.text()}"
    assert code == WAYS[plan["how"]], said
    pids = [read(folder, path.name)["pid"] for path in folder.glob("*.started")]
    assert len(pids) == size and not gone(pids), said
    died = read(folder, "victim.json")["time"]
    for rank in range(size):
        if rank == plan["victim"]:
            continue
        assert (folder / f"{rank}.json").exists(), f"rank {rank} saw no error. {said}"
        seen = read(folder, f"{rank}.json")
        assert seen["lost"] and seen["rank"] == plan["victim"], f"{seen}, {said}"
        assert f"rank {plan['victim']}" in seen["text"], f"{seen}, {said}"
        assert "boom" in seen["text"] or plan["how"] != "raise", f"{seen}, {said}"
        late, limit = seen["seen"] - died, LIMIT_S + still.seconds + seen["withheld"]
        assert late < limit, f"after {late:.2f} s (stood still: {still.seconds:.2f} s). {seen}, {said}"
        if (folder / f"{rank}.works").exists():
            assert f"rank {plan['victim']}" in seen["again"] and seen["again_s"] < limit, f"{seen}, {said}"
    return said


@pytest.mark.parametrize("seed", [*range(8), *everything(*range(8, 100))])
def test_a_dying_rank_is_named_by_all_others(tmp_path, seed):
    kill_one(tmp_path, 3, seed, False, 0.3)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("seed", [*range(2), *everything(*range(2, 12))])
def test_a_dying_rank_is_named_by_all_others_with_torch(tmp_path, seed):
    kill_one(tmp_path, 2, seed, True, 0.5)
