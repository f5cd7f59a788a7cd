"""Ranks that come and go in an allocation of a real Slurm, on two hosts: a rank is lost, then a node; and Slurm
queues the job of a job file again.
"""

import os
import sys
from pathlib import Path

import pytest
from hosts import needs_hosts

pytestmark = needs_hosts
JOB = Path(__file__).resolve().parents[2] / "examples" / "batch" / "slurm_elastic.sbatch"
ALLOCATED = ["salloc", "-Q", "-N2", "-n4", "--ntasks-per-node=2"]
RUN = [sys.executable, "-m", "hvdlite.launcher", "--blacklist-cooldown-range", "0", "0"]
LOSSES = """
import os, signal, time
import hvdlite as hvd
from hvdlite.elastic import ObjectState, run

hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, losses=0, sizes=[])

@run
def train(state):
    while state.losses < 2 or hvd.size() < 4:
        if state.sizes[-1:] != [hvd.size()]:
            state.sizes.append(hvd.size())
        full = hvd.size() == 4
        state.losses += full
        state.commit()
        if full and state.losses == 1 and hvd.rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if full and state.losses == 2 and hvd.rank() == 2:
            os.kill(os.getppid(), signal.SIGKILL)  # the agent of its node, and with it all that it has started
        hvd.allreduce(1.0)
        time.sleep(0.02)

train(state)
print("sizes", state.sizes, flush=True)
"""


@pytest.fixture
def quiet(tmp_path):
    return {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def test_the_others_go_on_where_a_rank_or_a_node_is_lost(slurm, quiet):
    code, said = slurm.run([*ALLOCATED, *RUN, "--min-np", "2", sys.executable, "-c", LOSSES], **quiet)
    assert code == 0 and said.count("sizes [4, ") == 4, said
    assert said.count("killed by SIGKILL; the others go on") == said.count("host nodeB is lost: ") == 1, said


TRAIN = """
import os, subprocess, time
import hvdlite as hvd
from hvdlite.elastic import ObjectState, run

hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)
state.save_to("state", seconds=3600)

@run
def train(state):
    if state.step:
        return print("goes on", flush=True)
    if hvd.rank() == 0:
        scancel = ["env", "--ignore-signal=USR1", "scancel", "--signal=USR1", "--batch", os.environ["SLURM_JOB_ID"]]
        subprocess.run(scancel, check=True)
    while True:
        state.step += 1
        time.sleep(0.02)
        state.commit()

train(state)
"""


def test_the_job_file_lets_slurm_start_the_job_again(slurm, quiet, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    words = ["--ntasks-per-node=2", "--time=5", "--output=said", str(JOB)]
    codes = [slurm.sbatch(words, PATH=path, **quiet) for _ in range(2)]  # the second one in place of the first
    said = (tmp_path / "said").read_text()
    assert codes == [None, 0] and said.count("<stdout>:goes on\n") == 4 and said.count("[HVD424]") == 1, said
    (tmp_path / "train.py").write_text(TRAIN.replace('"state"', '"/dev/null.none/state"'))
    assert slurm.sbatch(words, PATH=path, **quiet) == 138  # nothing to go on from: not again
