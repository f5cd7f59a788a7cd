"""Does the example of hvdlite.ps learn what was planted, on ranks that could not hold the table, and go on from a save?

It runs as a program; what is compared is what it prints.
"""

import re

import pytest
from ranks import everything
from test_examples import run

pytest.importorskip("zmq")
SMALL = ("--rows", 6000, "--dim", 8, "--batch", 256)


def clicks(servers, *words):
    code, output = run(2, "18_click_through.py", *words, flags=("--servers", servers))
    assert code == 0 and "dense layers equal on all ranks" in output, output
    return output, [float(each) for each in re.findall(r"step \d+ loss (\S+)", output)]


def held_out(output):
    ((loss, area),) = re.findall(r"held out: loss (\S+) AUC (\S+)", output)
    return float(loss), float(area)


@pytest.mark.parametrize("words", [(), *everything(("--staleness", "none"), ("--staleness", 3, "--replicas", 2))])
def test_clicks_are_learnt_and_a_save_is_loaded_by_other_servers(words, tmp_path):
    output, losses = clicks(2, *SMALL, "--steps", 150, "--save", tmp_path / "clicks", *words)
    assert losses[-1] < 0.8 * losses[0] and held_out(output)[1] > 0.85, output
    again, _ = clicks(3, *SMALL, "--steps", 0, "--load", tmp_path / "clicks", *words)
    assert held_out(again) == held_out(output), output + again


def test_ranks_train_a_table_that_none_of_them_could_hold():
    words = ("--rows", 2_000_000, "--dim", 64, "--batch", 128, "--limit-mb", 300, "--steps", 20)
    output, _ = clicks(2, *words)
    assert all(f"rank {rank} cannot hold the table: 1,024 MB do not fit in 300 MB" in output for rank in (0, 1)), output
    ((moved, dense),) = re.findall(r"moves (\S+) bytes; the gradient of a dense table has (\S+) ", output)
    assert int(moved.replace(",", "")) < 0.02 * int(dense.replace(",", "")), output
