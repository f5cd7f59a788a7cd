"""hvdlite.spark on a real Spark in local mode: results by rank, failures named by rank, and nothing left of any job.

One session serves all cases (on_spark.py); each test looks at what a few of them have given.
"""

import inspect
import json
import os
import pathlib
import subprocess
import sys

import pytest
import ranks
import sparks

import hvdlite.spark

SECONDS = 240
HERE = pathlib.Path(__file__).resolve().parent
HOROVODS = (
    "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose nics "
    "prefix_output_with_timestamp executable"
)


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "hvd" in name}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of each case, by its name."""
    folder, before = tmp_path_factory.mktemp("spark"), shared_memory()
    words = [sys.executable, str(HERE / "on_spark.py"), str(folder), *ranks.everything("everything")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, env={**sparks.environ(), "KERAS_BACKEND": "torch"}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    print(done.stdout)
    assert shared_memory() <= before
    return {**json.loads((folder / "found.json").read_text()), "folder": folder}


def test_run_takes_what_horovods_does():
    assert list(inspect.signature(hvdlite.spark.run).parameters) == HOROVODS.split()


def test_ranks_of_one_stage(found):
    for name, total in (("first", 2.0), ("next", 4.0), ("after it", 2.0), ("after that", 2.0), ("at last", 2.0)):
        results = found[name]["results"]
        assert [(each["rank"], each["total"], each["local"]) for each in results] == [(0, total, 2), (1, total, 2)]
        assert not found[name]["left"]
    results = found["next"]["results"]  # in workers that are there: what init() takes once both ranks call it
    assert max(each["ready"] for each in results) - max(each["began"] for each in results) < 0.2


def test_digits_are_learned_with_the_same_bits(found):
    (accuracy, weights), other = found["digits"]["results"]
    assert accuracy >= 0.97 and other == [accuracy, weights]


def test_an_exception_is_named_by_rank_with_one_traceback(found):
    raised = found["raises"]
    assert (raised["kind"], raised["cause"], raised["rank"]) == ("HvdRunError", "ValueError", 1)
    assert raised["text"].startswith("rank 1 (pid ") and "raised ValueError: boom" in raised["text"]
    assert raised["text"].count("Traceback") == 1 and "PeerLost" not in raised["text"]


def test_an_exception_before_init_ends_the_others_wait(found):
    before = found["before"]
    assert (before["cause"], before["rank"]) == ("ValueError", 1) and before["ended"] - before["begun"] < 5


def test_a_killed_worker_is_named_by_rank_pid_and_host(found):
    died, folder = found["dies"], found["folder"] / "killed"
    pid = (folder / "1").read_text()
    assert (died["kind"], died["rank"]) == ("HvdRunError", 1)
    assert died["text"].startswith(f"rank 1 (pid {pid} on ") and died["text"].endswith("[HVD405]")
    assert died["ended"] - float((folder / "died").read_text()) < 2


def test_what_cannot_start_is_refused_at_once(found):
    for name, kind, words in (
        ("no room", "HvdRunError", "num_proc=5: the cluster runs 2 tasks at a time [HVD404]"),
        ("unsendable", "TypeError", "cannot be sent to ranks"),
        ("stopped", "HvdRunError", "needs a SparkContext in this process: make a SparkSession first [HVD406]"),
    ):
        assert found[name]["kind"] == kind and words in found[name]["text"]
        assert found[name]["ended"] - found[name]["begun"] < 1


def test_ctrl_c_leaves_nothing(found):
    assert found["interrupted"]["kind"] == "KeyboardInterrupt"
    pids = [int((found["folder"] / "interrupted" / rank).read_text()) for rank in "01"]
    assert not ranks.gone(pids, 0)


def test_ranks_read_the_same_number_of_rows(found):
    assert found["parted"] == {
        "1": [[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]],
        "2": [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]],
        "3": [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]],
    }


def test_an_estimator_learns_digits(found):
    assert found["estimator"] >= 0.97


@pytest.mark.parametrize("kind", ["torch", *ranks.everything("keras")])
def test_an_estimator_as_a_stage_of_a_pipeline(found, kind):
    fitted = found[kind]
    assert fitted["error"] < 0.05 and fitted["rows"] == 400
    assert fitted["left"] == ["checkpoint"]
    assert fitted["wrong"]["kind"] == "HvdRunError" and "not one length [HVD240]" in fitted["wrong"]["text"]
    if kind == "torch":
        assert list(fitted["history"][-1]) == ["epoch", "loss", "off", "val_loss", "val_off"]
    else:
        assert set(fitted["history"]) == {"loss", "val_loss"}
