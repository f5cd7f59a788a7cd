"""Autotune on real ranks: settings change everywhere in the same step, each trial is in the file, results are equal."""

import csv
import os
import signal
import sys
from pathlib import Path

import pytest
from launching import Launch

from hvdlite.autotune.search import STEPS_MAX

TRAIN = """
import os, sys, torch, hvdlite.torch as hvd
from hvdlite import _core
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
torch.manual_seed(hvd.rank())
used = []
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(4, 20)).square().sum().backward()
    used.append(_core.fusion_bytes())
    hvd.barrier()  # rank 0 proposes the next setting once both have looked
    optimizer.step()
hvd.check_consistency(model)
everyone = hvd.allgather_object(used)
assert everyone[0] == everyone[1], "the ranks used different settings"
if hvd.rank() == 0:
    print("used", *used)
    print("weights", sum(p.sum().item() for p in model.parameters()).hex())
"""

# A step is 20 ms longer on rank 0 unless buckets are of 2 MB; after a reopening, of 8 MB.
LOOP = """
import os, signal, time, numpy as np, hvdlite as hvd
from hvdlite import _core
hvd.init()
def train(best, steps):
    for step in range(steps):
        hvd.allreduce(np.ones(10), name="gradient")
        if hvd.rank() == 0 and _core.fusion_bytes() != best << 20:
            time.sleep(0.02)
        hvd.autotune.step()
    hvd.allreduce(np.ones(10), name="gradient")
    print(f"{_core.fusion_bytes() >> 20} MB after {steps} steps of {best} MB")
"""


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def launch(*words, **environ):
    """(exit code, stdout, stderr) of a job, of which nothing may be left."""
    with Launch(*words, **environ) as job:
        code = job.wait(120)  # torch may be slow to import
        assert not job.left(), "the launcher has ended before its ranks"
        return code, job.out, job.err


def trained(*flags, **environ):
    """(the settings that were used, the sum of the weights, what was said on stderr) of TRAIN."""
    code, out, err = launch("-np", 2, *flags, sys.executable, "-c", TRAIN, **environ)
    assert code == 0, out + err
    said = {line.split()[0]: line.split()[1:] for line in (text.partition(">:")[2] for text in out.splitlines())}
    return list(map(int, said["used"])), said["weights"], err


def test_an_optimizer_is_tuned_within_fifty_steps_and_learns_the_same(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "trials.csv"
    used, weights, err = trained("--autotune", "--autotune-log-file", path)
    *trials, last = rows_of(path)
    assert int(last["step"]) <= STEPS_MAX and last["chosen"] == "1" and len(trials) == int(last["trial"])
    in_file = [float(row["tensor_fusion_threshold"]) for row in trials]
    in_use = [bytes_ / (1 << 20) for bytes_ in used]
    first = int(trials[0]["step"]) - 1
    assert in_use[first : first + len(trials)] == in_file and set(in_use[:first]) == {128.0}
    assert set(in_use[int(last["step"]) :]) == {float(last["tensor_fusion_threshold"])}
    assert err.count("autotune: ") == 1 and ("kept the default of 128 MB" in err or "autotune: chose " in err)
    assert trained()[1] == weights


def test_a_setting_that_is_better_is_used_by_all_ranks_and_a_reopening_finds_another(tmp_path):
    path = tmp_path / "trials.csv"
    program = LOOP + "train(2, 55); hvd.autotune.reopen(); train(8, 55)"
    code, out, err = launch(
        "-np", 2, sys.executable, "-c", program, HOROVOD_AUTOTUNE="1", HOROVOD_AUTOTUNE_LOG=str(path)
    )
    assert code == 0, out + err
    assert out.count("2 MB after 55 steps of 2 MB") == 2 and out.count("8 MB after 55 steps of 8 MB") == 2, out + err
    assert err.count("autotune: chose 2 MB: ") == err.count("autotune: chose 8 MB: ") == 1
    rows = rows_of(path)
    verdicts = [row for row in rows if row["chosen"] == "1"]
    assert rows[-1] is verdicts[-1] and int(verdicts[0]["step"]) < int(verdicts[1]["step"])
    assert [int(row["trial"]) for row in rows if row["chosen"] == "0"] == list(range(1, len(rows) - 1))
    assert [row["tensor_fusion_threshold"] for row in verdicts] == ["2", "8"]
    assert path.read_text().count("score") == 1


def test_a_search_can_be_opened_where_none_was_asked_for():
    program = LOOP + "train(2, 5); hvd.autotune.reopen(); train(2, 55)"
    code, out, err = launch("-np", 2, sys.executable, "-c", program)
    assert code == 0 and out.count("128 MB after 5 steps") == out.count("2 MB after 55 steps") == 2, out + err


def test_a_job_that_is_killed_leaves_its_trials(tmp_path):
    path = tmp_path / "trials.csv"
    program = LOOP + "train(2, 20)\nif hvd.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)\nhvd.barrier()"
    code, _, err = launch("-np", 2, "--autotune", "--autotune-log-file", path, sys.executable, "-c", program)
    assert code == 128 + signal.SIGKILL, err
    assert len(rows_of(path)) == 20 - 4


def test_a_job_without_autotune_says_and_writes_nothing():
    code, _, err = launch(
        "-np", 2, "--no-autotune", sys.executable, "-c", LOOP + "train(128, 60)", HOROVOD_AUTOTUNE="1"
    )
    assert code == 0 and "autotune:" not in err


def test_horovods_flags_in_full_are_cut_to_fifty_steps_and_say_so(tmp_path):
    path = tmp_path / "trials.csv"
    flags = "--autotune --autotune-warmup-samples 3 --autotune-steps-per-sample 10 --autotune-bayes-opt-max-samples 20"
    flags += f" --autotune-gaussian-process-noise 0.8 --autotune-log-file {path}"
    code, out, err = launch("-np", 2, *flags.split(), sys.executable, "-c", LOOP + "train(8, 55)")
    assert code == 0 and out.count("8 MB after 55 steps") == 2, out + err
    assert err.count("3 warm-up samples and 20 samples of 10 steps would be 230 steps; to end within 50 it takes") == 1
    assert err.count("without effect: --autotune-gaussian-process-noise (the noise is measured)") == 1
    assert rows_of(path)[-1]["chosen"] == "1"


def test_a_threshold_that_is_given_stays():
    program = LOOP + "train(1, 60)"
    code, out, err = launch("-np", 2, "--autotune", "--fusion-threshold-mb", 3, sys.executable, "-c", program)
    assert code == 0 and out.count("3 MB after 60 steps") == 2, out + err
    assert err.count("autotune: nothing to tune: HVDLITE_FUSION_THRESHOLD is given and stays") == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_file_that_cannot_be_written_ends_the_job_at_init(ranks):
    filename = os.path.join(os.sep, "no", "such", "folder", "trials.csv")
    flags = ["--autotune", "--autotune-log-file", filename]
    code, out, err = launch("-np", ranks, *flags, sys.executable, "-c", "import hvdlite; hvdlite.init(); print('on')")
    assert code != 0 and "on" not in out
    assert f"HVDLITE_AUTOTUNE_LOG='{filename}' cannot be written by rank 0: No such file" in err


def test_the_benchmark_runs():
    pytest.importorskip("torch")
    program = Path(__file__).resolve().parents[2] / "examples/benchmarks/autotune.py"
    code, out, err = launch("-np", 2, sys.executable, program, "--rounds", 2, "--largest-kb", 8)
    assert code == 0 and out.count("RESULT {") == 6 and "chosen / default, round by round" in out, out + err
