"""Lightning, Accelerate and transformers train over hvdlite: examples 19 to 21 and docs/guides/trainers.md.

One job of two ranks runs them all, one after the other, because imports take longest; the examples a second time over
Gloo, whose weights must be the same, bit by bit. The libraries are too large for the test extra: overlays.py has them.
"""

import csv
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launching import Launch
from overlays import library, with_path
from ranks import as_ranks, everything

import hvdlite as hvd

pytest.importorskip("torch")
pytest.importorskip("sklearn")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python[^\n]*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NAMES = ("19_lightning", "20_accelerate", "21_transformers")
SECONDS = 200

DRIVER = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
sys.path.append(sys.argv[1])
import hvdlite as hvd
from accelerate.state import AcceleratorState, PartialState
begun, models = DDP.__init__, []
def begin(self, module, *words, **named):
    models.append(module)
    begun(self, module, *words, **named)
DDP.__init__ = begin
hvd.init()
environ = dict(os.environ)
def weights(path, name):
    source = open(path).read().replace('"hvdlite"', f'"{name}"')
    exec(compile(source, path, "exec"), {"__name__": "__main__"})
    if dist.is_initialized():
        assert dist.get_backend() == name
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(environ)  # Lightning takes WORLD_SIZE away
    found = b"".join(each.detach().numpy().tobytes() for each in models[-1].parameters())
    assert len(set(hvd.allgather_object(found))) == 1, "ranks differ"
    return found
for path in sys.argv[2:5]:
    assert weights(path, "hvdlite") == weights(path, "gloo"), path
for path in sys.argv[5:]:
    weights(path, "hvdlite")
"""


@pytest.fixture(scope="module")
def libraries():
    """The environment that has them."""
    return with_path(library("trainers"), OMP_NUM_THREADS="1")


def sensible(points):
    """These points, of one rank of two, are numbers of steps."""
    assert points
    for point in points:
        numbers = {name.removeprefix("hvdlite/"): float(value) for name, value in point.items() if value != ""}
        assert 0 <= numbers["exposed_ms"] <= numbers["step_ms"] and numbers["last_rank"] in (0, 1)
        assert numbers["exposed_ms"] + numbers["compute_ms"] == pytest.approx(numbers["step_ms"], rel=0.01)
        assert numbers["late_ms"] >= 0 and numbers["ahead_ms"] >= 0
        assert numbers["last_late_ms"] >= numbers["late_ms"]


def points_of(folder):
    """In how many files Lightning's logger has written sensible numbers."""
    for log in (logs := list(folder.glob("**/metrics.csv"))):
        sensible([row for row in csv.DictReader(log.open()) if row["hvdlite/step_ms"]])
    return len(logs)


def test_examples_and_the_page(libraries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs = [ROOT / f"examples/{name}.py" for name in NAMES]
    for place, block in enumerate(BLOCKS):
        (tmp_path / f"block{place}.py").write_text(block)
        programs.append(tmp_path / f"block{place}.py")
    words = ("-np", 2, sys.executable, "-c", DRIVER, ROOT / "examples", *programs)
    with Launch(*words, merged=True, cold=True, **libraries) as job:
        assert job.wait(SECONDS) == 0, job.out
    shown = re.findall(r"test accuracy ([\d.]+)%", job.out)
    assert len(shown) == 4 and min(map(float, shown)) > 94 and shown[:2] == [shown[0]] * 2, job.out
    assert [float(loss) < 0.1 for loss in re.findall(r"stdout>:loss ([\d.]+)", job.out)] == [True] * 2, job.out
    printed = re.findall(r"\{[^}]*'hvdlite/step': [^}]*\}", job.out)
    assert len(printed) == 2 * (2 + 3) + 2 + 2
    sensible([dict(re.findall(r"'(hvdlite/\w+)': '?([\d.e+-]+)", each)) for each in printed])
    assert points_of(tmp_path) == 3  # the example twice, and the page


AFTER = """
    import os, hvdlite as hvd
    torch.distributed.destroy_process_group()
    try:
        hvd.init()
        os.write(1, f"size {hvd.size()}\\n".encode())
    except hvd.HvdInitError as error:
        os.write(1, f"{error}\\n".encode())
"""


@pytest.mark.parametrize("by", ["itself", *everything("torchrun")])
def test_lightning_without_hvdlite_run(by, libraries, tmp_path):
    """Started by itself a rank is told no RANK, and in the end not even WORLD_SIZE."""
    clean = {name: text for name, text in libraries.items() if not name.startswith("HVDLITE_")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = 'DDPStrategy(process_group_backend="hvdlite") makes the job. [HVD105]' if by == "itself" else "size 2"
    (tmp_path / "train.py").write_text(BLOCKS[0] + AFTER)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": SECONDS}
    words = [sys.executable, *torchrun * (by == "torchrun"), "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=clean, **how)
    assert done.returncode == 0 and done.stdout.count(said) == 2, done.stdout
    assert points_of(tmp_path) == 1


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_without_the_library_the_error_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"hvdlite.trainers.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install {name}.*hvdlite\[trainers\].*\[HVD807\]"):
        __import__(f"hvdlite.trainers.{name}")


@as_ranks(1, 2)
def test_points_are_of_the_steps_since_the_last_one_and_say_who_was_late():
    class Writer:
        def add_scalar(self, tag, value, step):
            points.setdefault(step, {})[tag] = value

    points, told = {}, []
    logger = hvd.StepLogger(Writer(), every=4)
    late = hvd.size() - 1
    for number in range(9):
        time.sleep(0.02 if hvd.rank() == late and number > 3 else 0)
        hvd.allreduce(np.ones(8), name="a")
        logger.step()
    assert list(points) == [4, 8] and points[8]["hvdlite/step_ms"] >= 20
    assert ("hvdlite/late_ms" in points[8]) == (hvd.size() > 1)
    if hvd.size() > 1:
        sensible(points.values())
        mine, other = ("late_ms", "ahead_ms") if hvd.rank() == late else ("ahead_ms", "late_ms")
        found = [points[8][f"hvdlite/{name}"] for name in (mine, other, "last_rank", "last_late_ms")]
        assert found[0] > 15 and found[1] < found[0] and found[2] == 1 and found[3] > 15, found
    logger = hvd.StepLogger(told.append if hvd.rank() == 0 else None, every=1)
    logger.step(7)
    assert [each["hvdlite/step"] for each in told] == [7] * (hvd.rank() == 0)
    for wrong in ({"log": 3}, {"every": 0}, {"every": True}):
        with pytest.raises((TypeError, ValueError), match=r"\[HVD242\]"):
            hvd.StepLogger(**wrong)
