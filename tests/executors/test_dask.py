"""Do jobs run on real Dask, and does a driver hear what went wrong? One driver (on_dask.py) makes all cases."""

import re
import subprocess
import sys
from pathlib import Path

import overlays
import pytest
from engines import RETURNED, cases
from ranks import everything


@pytest.fixture(scope="module")
def found():
    return cases("on_dask.py", overlays.library("dask"))


def test_digits(found):
    one, two = found["digits"]["results"]
    assert one["bits"] == two["bits"] and one["accuracy"] >= 0.97 and one["pid"] != two["pid"]
    again = {each["bits"] for name in ("again", "after", "next") for each in found[name]["results"]}
    assert len(again) == 1  # after an exception, an interrupt and a loss
    assert found["together"]["results"] == [[*again] * 2] * 3  # jobs that begin at once in the same workers


def test_an_exception_is_shown_once_with_its_rank(found):
    said = found["raises"]
    assert said["kind"] == "HvdRunError" and said["rank"] == 1
    assert re.match(r"rank 1 \(pid \d+ on \S+\) raised ValueError: boom", said["text"]), said["text"]
    assert said["text"].count("Traceback") == 1 and "PeerLost" not in said["text"]


def test_a_rank_that_returns_is_named_to_those_that_wait(found):
    for case, words in RETURNED.items():
        assert re.search(words, found[case]["text"]) and found[case]["seconds"] < 10, found[case]


def test_a_lost_worker_is_named(found):
    said = found["dies"]
    assert said["rank"] == 1, said
    assert re.fullmatch(r"rank 1 \(pid \d+ on \S+\) is lost: worker tcp://\S+ of Dask is gone \[HVD405\]", said["text"])


def test_variables_and_children(found):
    assert found["env"]["results"] == ["yes", "yes"]
    assert found["child"]["results"] == [[0, False, 0], [0, False, 1]]  # DataLoader workers are such children


def test_what_cannot_be_is_said_at_once(found):
    assert "3 ranks are asked for, and the cluster has 2 workers" in found["too many"]["text"]
    assert "this cluster has no worker tcp://nowhere:1" in found["unknown"]["text"]
    assert found["unpicklable"]["kind"] == "TypeError" and "HVD245" in found["unpicklable"]["text"]
    assert found["interrupted"]["kind"] == "KeyboardInterrupt"


@pytest.mark.parametrize("script", everything("24_dask.py"))
def test_the_example(script):
    folder = overlays.library("dask")
    words = [sys.executable, str(Path(__file__).parents[2] / "examples" / script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=overlays.with_path(folder))
    one, two = map(float, re.search(r"accuracy by rank: \[(.*), (.*)\]", done.stdout).groups())
    assert one == two > 0.95, done.stderr


def test_without_dask():
    done = subprocess.run(
        [sys.executable, "-c", "from hvdlite.dask import run\nrun(None, print)"], capture_output=True, text=True
    )
    assert "needs the package distributed: pip install 'hvdlite[dask]' [HVD807]" in done.stderr, done.stderr
