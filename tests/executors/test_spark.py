"""Do jobs run on real Spark, and does a driver hear what went wrong? One driver (on_spark.py) makes all cases."""

import inspect
import re

import pytest
import sparks
from engines import RETURNED, cases
from ranks import everything

import hvdlite.spark

HOROVODS = (
    "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose nics "
    "prefix_output_with_timestamp executable"
)


@pytest.fixture(scope="module")
def found():
    folders, settings = sparks.found()
    return cases("on_spark.py", *folders, KERAS_BACKEND="torch", **settings)


def test_run_takes_what_horovods_does():
    assert list(inspect.signature(hvdlite.spark.run).parameters) == HOROVODS.split()


def test_horovods_names_are_ours(found):
    assert found["as horovod"]["same"] == [True] * 3


def test_digits(found):
    one, two = found["digits"]["results"]
    assert one["bits"] == two["bits"] and one["accuracy"] >= 0.97 and one["pid"] != two["pid"]
    again = [found[name] for name in ("next", "after it", "after that", "at last")]
    assert len({each["bits"] for said in again for each in said["results"]}) == 1
    assert found["env"]["results"] == ["yes", "yes"] and found["variables"]["left"] == [False, False]
    results = found["next"]["results"]  # in workers that are there: what init() takes once both ranks call it
    assert max(each["ready"] for each in results) - max(each["began"] for each in results) < 0.2


def test_an_exception_is_shown_once_with_its_rank(found):
    said = found["raises"]
    assert said["kind"] == "HvdRunError" and said["rank"] == 1
    assert re.match(r"rank 1 \(pid \d+ on \S+\) raised ValueError: boom", said["text"]), said["text"]
    assert said["text"].count("Traceback") == 1 and "PeerLost" not in said["text"]


def test_an_exception_before_init_ends_the_others_wait(found):
    said = found["before init"]
    assert said["rank"] == 1 and "ValueError: before" in said["text"] and said["seconds"] < 30


def test_a_rank_that_returns_is_named_to_those_that_wait(found):
    for case, words in RETURNED.items():
        assert re.search(words, found[case]["text"]) and found[case]["seconds"] < 10, found[case]


def test_a_killed_worker_is_named(found):
    said = found["dies"]
    assert said["rank"] == 1, said
    assert re.match(r"rank 1 \(pid \d+ on \S+\) is lost: Python worker exited .*\[HVD405\]$", said["text"]), said
    assert said["at"] - float(re.search(r"killed at (\S+)", found["out"])[1]) < 10


def test_what_cannot_start_is_refused_at_once(found):
    for name, words in (
        ("no room", "num_proc=5: the cluster runs at most 2 tasks at a time [HVD404]"),
        ("unsendable", "cannot be sent to ranks"),
        ("stopped", "needs a SparkContext in this process: make a SparkSession first [HVD406]"),
    ):
        assert words in found[name]["text"] and found[name]["seconds"] < 5, found[name]


def test_ctrl_c_leaves_nothing(found):
    assert found["interrupted"]["kind"] == "KeyboardInterrupt" and found["left"]["pids"] == []


def test_ranks_read_the_same_number_of_rows(found):
    assert found["parted"]["by_size"] == {
        "1": [[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]],
        "2": [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]],
        "3": [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]],
    }


@pytest.mark.parametrize("example", everything("example"))
def test_the_example_learns_digits_both_ways(found, example):
    (accuracy, weights), other = found[example]["ranks"]
    assert accuracy >= 0.97 and other == [accuracy, weights] and found[example]["estimator"] >= 0.97


@pytest.mark.parametrize("kind", everything("torch", "keras"))
def test_an_estimator_as_a_stage_of_a_pipeline(found, kind):
    said = found[kind]
    assert said["error"] < 0.05 and said["rows"] == 400 and said["left"] == ["checkpoint"]
    assert "not one length [HVD240]" in found[f"{kind}, uneven"]["text"]
    assert found[f"{kind}, no column"]["text"] == "no column ab is among a, b, y.0 [HVD240]"
    assert found[f"{kind}, nulls"]["text"].startswith("column held has nulls")
    if kind == "torch":
        assert list(said["history"][-1]) == ["epoch", "loss", "off", "val_loss", "val_off"]
    else:
        assert set(said["history"]) == {"loss", "val_loss"}
