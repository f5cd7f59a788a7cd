"""Autotune beside a search: what counts as a step, the file of trials, the lines it says; options and flags; no ranks.

What it does to real ranks is in test_autotune_ranks.py.
"""

import argparse
import csv

import pytest

from hvdlite import _core, autotune, config
from hvdlite.autotune import trials as files
from hvdlite.autotune.search import STEPS_MAX
from hvdlite.autotune.trials import Trials
from hvdlite.autotune.tuner import OTHERS, Tuner
from hvdlite.errors import HvdOptionError, HvdPeerLostError

DEFAULT = 128 << 20
HOROVODS = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
HOROVODS += "tensor_fusion_threshold,score"


class Machine:
    """Steps take as long as the setting in force says; `settings` are those that were in force, step by step."""

    def __init__(self, milliseconds, asked=(3, 1, 45), filename=None):
        self.milliseconds, self.now, self.force, self.settings = milliseconds, 0.0, DEFAULT, []
        self.tuner = Tuner(DEFAULT, asked, self.propose, Trials(filename), lambda: self.now)

    def propose(self, fusion_bytes):
        assert fusion_bytes != self.force, "proposed what is in force"
        self.force = fusion_bytes

    def train(self, steps=10**6, source=None):
        """Steps until the verdict, at most `steps`; how many there were."""
        for done in range(steps):
            if not self.tuner.searching:
                return done
            self.now += self.milliseconds.get(self.force, 100) / 1000
            self.settings.append(self.force)
            self.tuner.step(source)
        return steps


class Source:
    """Stands for an optimizer."""


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def nothing_begun():
    files._started.clear()
    yield
    autotune.end()


def test_the_default_is_measured_first_and_a_better_setting_is_in_force_at_the_end(capsys):
    machine = Machine({2 << 20: 80})
    assert machine.train() <= STEPS_MAX
    assert machine.settings[:4] == [DEFAULT] * 4 and set(machine.settings) == {DEFAULT, *OTHERS}
    assert machine.force == 2 << 20
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdlite: autotune: chose 2 MB: 20.0 % shorter steps than with the default of 128 MB")


@pytest.mark.parametrize(
    ("milliseconds", "says"),
    [
        (dict.fromkeys(OTHERS, 120), "kept the default of 128 MB: no other setting had a shorter step"),
        ({8 << 20: 99.5}, "kept the default of 128 MB: 8 MB did not gain enough (+0.5 % in 15 pairs, noise 0.0 %)"),
    ],
)
def test_the_default_is_in_force_again_where_nothing_is_better(milliseconds, says, capsys):
    machine = Machine(milliseconds)
    machine.train()
    assert machine.force == DEFAULT and says in capsys.readouterr().err


@pytest.mark.parametrize("asked", [(3, 10, 20), (3, 1, 45), (0, 1, 16), (1000, 1000, 1000), (0, 3, 16)])
def test_it_is_over_within_fifty_steps_whatever_is_asked(asked, capsys):
    machine = Machine({8 << 20: 90}, asked)
    assert machine.train() <= STEPS_MAX and machine.force == 8 << 20
    cut = (asked[0] + asked[2]) * asked[1] >= STEPS_MAX
    assert ("steps; to end within 50 it takes " in capsys.readouterr().err) == cut


def test_each_trial_is_a_row_at_once_and_the_last_is_the_verdict(tmp_path):
    path = tmp_path / "trials.csv"
    machine = Machine({2 << 20: 80}, filename=str(path))
    assert path.read_text().splitlines() == [HOROVODS + ",trial,step,step_ms,chosen"]
    for steps in range(1, 20):
        machine.train(1)
        assert len(rows_of(path)) == max(0, steps - 4)  # one that starts the clock, three to warm up
    machine.train()
    *trials, last = rows_of(path)
    assert [row["trial"] for row in trials] == [str(number) for number in range(1, 46)]
    assert [int(row["step"]) for row in trials] == list(range(5, 50))
    assert {row["chosen"] for row in trials} == {"0"}
    assert {row["tensor_fusion_threshold"] for row in trials} == {"128", "32", "8", "2", "0.5"}
    for row in trials:
        assert float(row["step_ms"]) == (80 if row["tensor_fusion_threshold"] == "2" else 100)
    assert last == {
        "hierarchical_allreduce": "0", "hierarchical_allgather": "0", "torus_allreduce": "0", "cache_enabled": "1",
        "cycle_time_ms": "0", "tensor_fusion_threshold": "2", "score": "12.5", "trial": "45", "step": "49",
        "step_ms": "80.0000", "chosen": "1",
    }  # fmt: skip
    assert float(last["score"]) == max(float(row["score"]) for row in trials)


def test_a_file_of_an_earlier_job_is_replaced_and_one_of_this_process_goes_on(tmp_path):
    path = tmp_path / "trials.csv"
    path.write_text("of yesterday\n")
    for incarnations in (1, 2):
        trials = Trials(str(path))
        trials.add(DEFAULT, 1, 10.0)
        trials.close()
        assert len(rows_of(path)) == incarnations and path.read_text().count("score") == 1


def test_an_optimizer_that_steps_no_more_gives_way_to_one_that_does():
    machine, old, new = Machine({}), Source(), Source()
    machine.train(3, old)
    machine.train(50, new)
    assert machine.tuner.steps == 3
    machine.train(2, new)
    assert machine.tuner.steps == 5
    machine.tuner.restart()
    machine.train(4, old)  # a new search takes who comes first
    assert machine.tuner.steps == 9


def test_a_disk_that_is_full_ends_the_file_and_not_the_training(capsys):
    machine = Machine({2 << 20: 80}, filename="/dev/full")
    machine.train()
    assert machine.force == 2 << 20
    assert capsys.readouterr().err.count("cannot write /dev/full any more: No space left on device") == 1


def job(monkeypatch, rank=0, size=2, tune=lambda fusion_bytes: None, **environ):
    """This process as a rank whose environment is `environ`, as far as autotune sees it."""
    monkeypatch.setattr(_core, "tune", tune, raising=False)
    settings = config.read({"HVDLITE_AUTOTUNE": "1", **environ})
    autotune.check(settings, rank)
    autotune.begin(settings, rank, size)


def test_ranks_other_than_0_neither_measure_nor_write(monkeypatch, tmp_path, capsys):
    job(monkeypatch, rank=1, HVDLITE_AUTOTUNE_LOG=str(tmp_path / "no such folder" / "trials.csv"))
    autotune.reopen()
    autotune.step()
    assert not autotune.watching and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("size", "environ", "says"),
    [
        (2, {"HOROVOD_FUSION_THRESHOLD": "1000"}, "HOROVOD_FUSION_THRESHOLD is given and stays"),
        (2, {"HVDLITE_FUSION_THRESHOLD": str(DEFAULT)}, "HVDLITE_FUSION_THRESHOLD is given and stays"),
        (1, {}, "there is only one rank"),
    ],
)
def test_where_there_is_nothing_to_tune_one_line_says_so(size, environ, says, monkeypatch, tmp_path, capsys):
    path = tmp_path / "trials.csv"
    job(monkeypatch, size=size, HOROVOD_AUTOTUNE_LOG=str(path), **environ)
    for _ in range(60):
        autotune.step()
    assert not autotune.watching and rows_of(path) == []
    autotune.end()
    assert capsys.readouterr().err == f"hvdlite: autotune: nothing to tune: {says}\n"


def test_a_job_without_steps_says_what_counts_as_one(monkeypatch, capsys):
    job(monkeypatch)
    autotune.end()
    assert "it has seen no steps: hvd.DistributedOptimizer counts its own" in capsys.readouterr().err
    job(monkeypatch)
    autotune.step()
    autotune.end()
    assert "no verdict after 1 steps" in capsys.readouterr().err


def test_off_is_off_until_it_is_reopened(monkeypatch, tmp_path, capsys):
    path = tmp_path / "trials.csv"
    with pytest.raises(ValueError, match=r"not been initialized; use hvd.init\(\)"):
        autotune.reopen()
    job(monkeypatch, HVDLITE_AUTOTUNE="0", HVDLITE_AUTOTUNE_LOG=str(path))
    autotune.step()
    assert not autotune.watching and not path.exists()
    assert "HVDLITE_AUTOTUNE_LOG waits for HVDLITE_AUTOTUNE=1" in capsys.readouterr().err
    autotune.reopen()
    for _ in range(6):
        autotune.step()
    assert autotune.watching and len(rows_of(path)) == 2


def test_a_job_that_has_failed_ends_the_search_in_silence(monkeypatch):
    def lost(fusion_bytes):
        raise HvdPeerLostError("rank 1 is lost")

    job(monkeypatch, tune=lost)
    for _ in range(10):
        autotune.step()
    assert not autotune.watching


def test_the_flags_of_horovod_become_variables():
    parser = argparse.ArgumentParser()
    config.add_flags(parser)

    def variables(*words):
        return config.variables_of(vars(parser.parse_args(words)))

    assert variables("--autotune") == {"HVDLITE_AUTOTUNE": "1"}
    assert variables("--autotune", "--no-autotune") == {"HVDLITE_AUTOTUNE": "0"}
    assert variables("--autotune-log-file", "trials.csv") == {"HVDLITE_AUTOTUNE_LOG": "trials.csv"}
    assert variables("--autotune-bayes-opt-max-samples", "20") == {"HVDLITE_AUTOTUNE_MAX_SAMPLES": "20"}
    for flag, value in (("warmup-samples", "-2"), ("steps-per-sample", "0"), ("bayes-opt-max-samples", "4")):
        with pytest.raises(HvdOptionError, match=f"--autotune-{flag}"):
            variables(f"--autotune-{flag}", value)


def test_the_noise_of_horovods_model_is_told_to_be_measured():
    (note,) = config.read({"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.8", "HOROVOD_AUTOTUNE": "1"}).notes
    assert "honoured HOROVOD_AUTOTUNE;" in note
    assert "ignored HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE (the noise is measured)" in note
