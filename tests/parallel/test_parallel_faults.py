"""A stage that fails in the midst of a step is named by all other stages, with the reason; nothing hangs or is left.

The program of the ranks is stages.py: rank 1 of 4 goes wrong in the forward of micro-batch 5. That nothing is left in
/dev/shm is looked at for every module (conftest.py). Outputs without a gradient are in test_parallel_errors.py.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from launching import launch
from ranks import everything

PROGRAM = str(Path(__file__).resolve().parents[1] / "support/stages.py")
TENSOR = r"'send\.pipe\.\d-\d\.(shapes|f0|b0?)\.mb\d'"


def seen(folder, fault):
    """The launcher's exit code, and what ranks have seen."""
    code, out, err = launch("-np", "4", sys.executable, PROGRAM, str(folder), fault)
    found = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert {0, 2, 3} <= set(found), out + err
    assert all(each["again"].endswith("[HVD015]") for each in found.values()), found
    return code, found


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("raise", "ArithmeticError", "no such number"),
        *everything(
            (
                "grown",
                "ValueError",
                "pipe.1-2: the output of micro-batch 5 is float32 [2, 12] with gradient, but float32 ",
            ),
            ("word", "ValueError", "pipe.1-2: the output has a value of type set: return tensors, plain values, and"),
        ),
    ],
)
def test_what_a_stage_raises_is_said_on_all_others(fault, error, text, tmp_path):
    code, found = seen(tmp_path, fault)
    own = found.pop(1)
    assert code == 1 and own["error"] == error and text in own["text"]
    assert ("[HVD014]" in own["text"]) == (error == "ValueError")
    for rank, each in found.items():
        assert each["error"] == "HvdPeerLostError" and each["rank"] == 1, each
        assert re.match(rf"send of {TENSOR} on rank {rank} ", each["text"]), each
        assert f"rank 1 raised {error}: {text}" in each["text"], each


def test_a_stage_that_is_killed_is_named_at_once(tmp_path):
    code, found = seen(tmp_path, "kill")
    killed = float((tmp_path / "killed").read_text())
    assert code == 137 and set(found) == {0, 2, 3}
    for rank, each in found.items():
        assert each["error"] == "HvdPeerLostError" and each["rank"] == 1, each
        assert re.match(rf"send of {TENSOR} on rank {rank} .*rank 1 \(pid \d+\) is lost", each["text"]), each
        assert each["time"] - killed < 5, each  # a timeout= of the pipeline would be 30


def test_a_stage_that_does_not_come_is_named_with_stages_and_micro_batch(tmp_path):
    code, found = seen(tmp_path, "late")
    late = {rank: each["text"] for rank, each in found.items() if each["error"] == "HvdTimeoutError"}
    assert code == 1 and late and 1 not in late, found
    for rank, text in late.items():
        wait = rf"rank {rank} has waited its whole timeout of 2 s for tensor {TENSOR}: submitted by rank {rank}, "
        assert re.match(wait + r"missing on rank \d.*\[HVD502\]", text), text
    for each in found.values():
        first = re.search(r"rank (\d) raised HvdTimeoutError: rank \1 has waited", each["text"])
        assert each["error"] == "HvdTimeoutError" or (first and int(first[1]) == each["rank"]), each
