"""Pages parallel.md, pipelines.md, pipeline-checkpoints.md: their program runs and draws the pictures, byte for byte.

Their blocks are one program for four ranks, in the order of the pages. It imports the block of tensor-parallel.md that
begins with `# model.py`. Only the number of steps is cut. The tables of copies and makespans are compared with the
schedules.
"""

import re
import sys
from pathlib import Path

from launching import launch

from hvdlite.parallel import schedule, weights

DOCS = Path(__file__).resolve().parents[2] / "docs/guides"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*pages):
    return [block for page in pages for block in BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))]


def test_the_program_runs_and_draws_the_pictures(tmp_path):
    (model,) = [block for block in blocks("tensor-parallel.md") if block.startswith("# model.py")]
    program = "\n".join(blocks("parallel.md", "pipelines.md", "pipeline-checkpoints.md"))
    assert program.count("range(100)") == 1
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "gpt.py").write_text(
        f"import os; os.chdir({str(tmp_path)!r})\n" + program.replace("range(100)", "range(2)")
    )
    code, out, err = launch("-np", "4", sys.executable, str(tmp_path / "gpt.py"))
    assert code == 0 and "step 0: loss" in out, out + err
    for name in ("1f1b", "gpipe"):
        assert (tmp_path / f"parallel-{name}.svg").read_bytes() == (DOCS / f"parallel-{name}.svg").read_bytes()


def test_the_tables_of_schedules_and_updates():
    p, f, b = 4, 1, 2
    for name, m, makespan, stash in (
        ("gpipe", 1, p * (f + b), [1] * p),
        ("gpipe", 8, (8 + p - 1) * (f + b), [8] * p),
        ("1f1b", 8, (8 + p - 1) * (f + b), [4, 3, 2, 1]),
        ("1f1b", 2, (2 + p - 1) * (f + b), [2, 2, 2, 1]),
    ):
        found = schedule.check([schedule.PLANS[name](s, p, m, 1) for s in range(p)], f, b)
        assert (found.makespan, found.stash) == (makespan, stash)
    for update, m, copies in (
        ("stash", 1, [4, 3, 2, 1]), ("stash", 8, [2, 2, 2, 1]), ("vertical", 1, [4] * p), ("2bw", 8, [2] * p)
    ):  # fmt: skip
        lists = [schedule.continuous(s, p, m, 9) for s in range(p)]
        places = [weights.StagePosition(s, p, m, 0.0) for s in range(p)]
        assert [weights.POLICIES[update].copies(*each) for each in zip(places, lists)] == copies, update
    assert schedule.check([schedule.continuous(s, p, 8, 9) for s in range(p)], f, b).stash == [4, 3, 2, 1]
    parts = [schedule.check([schedule.continuous(s, p, 8, n) for s in range(p)], f, b).makespan for n in (8, 9)]
    assert parts[1] - parts[0] == 8 * (f + b)
