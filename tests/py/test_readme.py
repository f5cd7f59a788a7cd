"""The README shows real error texts and commands that exist: each is produced here and looked up there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN = Path(sys.executable).with_name("hvdlite-run")

MISMATCH = """
import numpy as np, hvdlite as hvd
hvd.init()
hvd.allreduce(np.ones(4 + hvd.rank()), name="layer1.weight")
"""
DEATH = """
import os, signal, sys, time, numpy as np, hvdlite as hvd
hvd.init()
hvd.allreduce(np.ones(4), name="warm")
if hvd.rank() == 0:
    open(sys.argv[1], "w").close()  # it has its sum
else:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(np.ones(4), name="layer1.weight")
"""


def launched(program, *words):
    """Lines of a two-rank program that fails, without the launcher's prefixes and with the pid of the README."""
    command = [str(RUN), "-np", "2", sys.executable, "-c", program, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode != 0
    text = re.sub(r"^\[\d\]<\w+>:(hvdlite\.errors\.)?", "", done.stdout, flags=re.MULTILINE)
    return re.sub(r"pid \d+", "pid 4154", text).replace("<string>", "train.py").splitlines()


def test_the_mismatch_of_the_readme_is_real():
    lines = [line for line in launched(MISMATCH) if line.startswith("HvdMismatchError")]
    assert lines and all(line in README for line in lines), lines


def test_the_lost_peer_of_the_readme_is_real(tmp_path):
    lines = [
        line
        for line in launched(DEATH, str(tmp_path / "warm"))
        if "HvdPeerLostError: " in line or line.startswith("hvdlite-run: rank")
    ]
    assert len(lines) >= 2 and all(line in README for line in lines), lines


def test_the_flags_of_the_readme_exist():
    text = subprocess.run([str(RUN), "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    shown = set(re.findall(r"hvdlite-run.* (--?[a-z][\w-]+)", README)) - {"-np"}
    assert shown and all(flag in text for flag in shown | {"-np"}), shown
