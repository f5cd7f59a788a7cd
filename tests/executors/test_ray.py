"""Do jobs run on real Ray, and does a driver hear what went wrong? Two workers on this machine.

One driver makes all cases (on_ray.py), since a cluster takes 5 s to start.
"""

import re
import subprocess
import sys
from pathlib import Path

import overlays
import pytest
from engines import RETURNED, cases
from ranks import everything

import hvdlite.ray


@pytest.fixture(scope="module")
def found():
    return cases("on_ray.py", overlays.library("ray"), RAY_AUTH_MODE="disabled")


def test_digits(found):
    one, two = found["digits"]["results"]
    assert one["bits"] == two["bits"] and one["accuracy"] >= 0.97 and one["pid"] != two["pid"]
    again = found["again"]["results"]  # on the same ranks, after one had raised
    assert again[0]["bits"] == again[1]["bits"] and {each["pid"] for each in again} == {one["pid"], two["pid"]}
    assert found["after leaving"]["results"][0]["bits"] == again[0]["bits"]  # on some ranks only


def test_an_exception_is_shown_once_with_its_rank(found):
    said = found["raises"]
    assert said["kind"] == "HvdRunError" and said["rank"] == 1
    assert re.match(r"rank 1 \(pid \d+ on \S+\) raised ValueError: boom", said["text"]), said["text"]
    assert said["text"].count("Traceback") == 1 and "in train\n" in said["text"] and "PeerLost" not in said["text"]


def test_a_rank_that_returns_is_named_to_those_that_wait(found):
    for case, words in RETURNED.items():
        assert re.search(words, found[case]["text"]) and found[case]["seconds"] < 10, found[case]
    assert found["others work on"]["results"] == [True, True]


def test_a_lost_worker_is_named(found):
    said = found["dies"]
    pid = found["digits"]["results"][1]["pid"]
    assert said["rank"] == 1 and said["text"].startswith(f"rank 1 (pid {pid} on "), said["text"]
    assert "is lost: its worker of Ray has died" in said["text"] and said["text"].endswith(". [HVD405]")
    assert "a worker was lost; call start() [HVD406]" in found["lost"]["text"]


def test_executables_and_refs(found):
    assert (found["execute"]["results"], found["execute"]["one"]) == ([7, 7], 9)
    assert found["remote"]["results"] == ["yes", "yes"] and found["variables"]["results"] == [None, None]


@pytest.mark.parametrize("case", everything("gpus"))
def test_ranks_of_a_host_see_all_gpus(found, case):
    assert found[case]["results"] == ["0,1", "0,1"]
    assert {each["bits"] for each in found["next"]["results"]} == {found["again"]["results"][0]["bits"]}


def test_what_cannot_be_is_said_at_once(found):
    assert "start() has not been called; call start() [HVD406]" in found["not started"]["text"]
    assert found["unpicklable"]["kind"] == "TypeError" and "HVD245" in found["unpicklable"]["text"]
    said = found["too many"]
    assert "no room for 4 workers: 4 CPU are asked for, the cluster has 3" in said["text"] and said["seconds"] < 30
    assert "no room for 2 workers on 2 of 1 nodes: " in found["too many hosts"]["text"]


@pytest.mark.parametrize("case", everything("run", "start", "shutdown"))
def test_an_interrupt_leaves_no_worker(found, case):
    assert found[f"interrupted {case}"]["kind"] == "KeyboardInterrupt", found["out"]
    assert found["actors"]["alive"] == 0


@pytest.mark.parametrize("case", everything("trainer"))
def test_ray_train(found, case):
    bits = set(
        re.findall(r'"bits": "(\w+)"', "\n".join(line for line in found["out"].splitlines() if "TrainWorker" in line))
    )
    assert bits == {found["digits"]["results"][0]["bits"]}, found["out"]
    error = found[case]["text"]
    assert "[Rank 1 Error Snippet]" in error and "ValueError: boom" in error and error.count("Traceback") == 1, error


@pytest.mark.parametrize("way", everything("", "--train"))
def test_the_example(way):
    environ = overlays.with_path(overlays.library("ray"), RAY_AUTH_MODE="disabled")
    words = [sys.executable, str(Path(__file__).parents[2] / "examples" / "23_ray.py"), *way.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environ)
    assert done.returncode == 0, done.stderr
    if not way:
        one, two = map(float, re.search(r"accuracy by rank: \[(.*), (.*)\]", done.stdout).groups())
        assert one == two > 0.95, done.stderr


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2, "num_hosts": 1}, {"num_workers": 0}, {"num_hosts": "2"}])
def test_arguments(arguments):
    with pytest.raises(ValueError, match="HVD244"):
        hvdlite.ray.RayExecutor(**arguments)
    with pytest.raises(hvdlite.HvdNotYetError, match="elastic"):
        hvdlite.ray.RayExecutor(min_workers=2)


def test_without_ray():
    body = "from hvdlite.ray import RayExecutor\nRayExecutor(num_workers=2)"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert "hvdlite.ray needs the package ray: pip install 'hvdlite[ray]' [HVD807]" in done.stderr, done.stderr
