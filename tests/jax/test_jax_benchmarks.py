"""The benchmark of JAX runs, in a configuration whose figures mean nothing.

Nothing is timed here. It ends with an error if the losses of hvdlite and of Gloo differ.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import everything, needs

needs("jax", "optax")
PROGRAM = Path(__file__).resolve().parents[2] / "examples/benchmarks/jax_steps.py"
PARTS = {
    "peer": {"hvdlite", "no communication", "Gloo, shard_map", "Gloo, jit"},
    "call": {"hvdlite", "no call", "pure_callback", "Gloo, psum"},
    "compile": {"hvdlite", "no call"},
}


@pytest.mark.parametrize("part", ["compile", *everything("peer", "call")])
def test_a_part_measures_every_program(part):
    words = [sys.executable, PROGRAM, part, "--patience", "tiny", "--rounds", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^.{32} (.{17}) *\d\S* \(.* to .*\), hvdlite / this \d+\.\d+$", done.stdout, re.MULTILINE)
    assert {row.strip() for row in rows} == PARTS[part], done.stdout
