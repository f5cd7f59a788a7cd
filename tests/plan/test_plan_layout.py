"""Is the layout of a pipeline the shortest of all, and does its text help where there is none?

Small cases are played in every shape and cut. Then the way of a user: profiles of a model at several numbers of rows,
their file, and the table of layouts by number of ranks.
"""

import json
import random
from itertools import combinations

import pytest
import torch

from hvdlite import plan
from hvdlite.parallel import schedule
from hvdlite.plan import PlanError, cli, layers, layout_for
from hvdlite.plan.pipeline import makespan


def block(ms=1.0, weights=100.0, activation=10.0, stash=0.0):
    return plan.Layer("block", ms, 2 * ms, activation, weights, stash)


MODEL = "import torch\ndef model():\n    return [lambda: torch.nn.Linear(8, 8)] * 2, torch.ones(8, 8)\n"
ROW = {"name": "a", "forward_ms": 1, "backward_ms": 2, "activation": 3, "weights": 4}
ONE, FEW = {4: [block()] * 2}, ([torch.nn.ReLU()], torch.ones(2, 2))


def steps(profiles, ranks, batch, beta):
    """ms of every layout in every cut, played without the search."""
    n = len(next(iter(profiles.values())))
    for pp, dp, rows in ((p, d, b) for p in range(1, n + 1) for d in range(1, ranks // p + 1) for b in profiles):
        for ends in combinations(range(1, n), pp - 1) if batch % (dp * rows) == 0 else ():
            orders = [schedule.one_f_one_b(s, pp, batch // dp // rows) for s in range(pp)]
            cuts = [profiles[rows][i:j] for i, j in zip((0, *ends), (*ends, n))]
            f, b = ([sum(getattr(x, name) for x in cut) for cut in cuts] for name in ("forward_ms", "backward_ms"))
            sums = [2 * (dp - 1) / dp * sum(layer.weights for layer in cut) * beta for cut in cuts]
            yield makespan(orders, f, b, [cut[-1].activation * beta for cut in cuts[:-1]], sums).end


def test_no_layout_is_shorter():
    draw, shortest = random.Random(1), 0
    for case in range(60):
        n, ranks, batch, beta = draw.randint(2, 5), draw.randint(1, 5), draw.choice([8, 12, 24]), draw.choice([0, 1e-5])
        costs = [(draw.uniform(0.5, 3), draw.uniform(0, 2e3), draw.uniform(0, 2e4)) for _ in range(n)]
        profiles = {b: [block(f * (b + 0.3), w, b * a) for f, a, w in costs] for b in (1, 2, 4)}
        found, least = layout_for(profiles, ranks, batch, beta), min(steps(profiles, ranks, batch, beta))
        assert least * (1 - 1e-9) <= found.ms <= least * 1.05, case
        assert found.dp * found.micro_batches * found.rows == batch and found.ranks <= ranks
        assert sum(found.balance) == n and len(found.balance) == found.pp
        shortest += found.ms <= least * (1 + 1e-9)
    assert shortest >= 58


def test_equal_steps_take_the_fewest_ranks():
    assert layout_for({4: [block(), block()]}, 2, 4)[:5] == (1, 1, 4, 1, (2,))  # one micro-batch: no stage overlaps
    assert layout_for({4: [block()]}, 7, 12).describe() == "1 stage x 3 copies, 1 micro-batch of 4 rows, layers 1"
    assert layout_for({1: [block()], 2: [block(2)]}, 6, 2, beta=1e3)[:4] == (1, 1, 2, 1)  # the fewest micro-batches


def test_the_least_memory_is_named_and_fits():
    draw = random.Random(2)
    for _ in range(20):
        costs, ranks = [(draw.randint(1, 300), draw.randint(0, 500)) for _ in range(5)], draw.randint(1, 5)
        profiles = {b: [block(1.0, w, 10, b * s) for w, s in costs] for b in (2, 4)}
        with pytest.raises(PlanError, match=r"24 rows fits into 3 bytes of memory.*a rank \[HVD005\]") as error:
            layout_for(profiles, ranks, 24, memory=3)
        least = int(str(error.value).split("minimum is ")[1].split()[0])
        assert layout_for(profiles, ranks, 24, memory=least).ranks <= ranks
        with pytest.raises(PlanError, match=f"the minimum is {least} bytes"):
            layout_for(profiles, ranks, 24, memory=least - 1)


@pytest.mark.parametrize("why, call", [
    ("at most 3 ranks for 2 layers and a batch of 9 rows keeps.*are of 4 rows", lambda: layout_for(ONE, 3, 9)),
    ("up to 4096 micro-batches", lambda: layout_for({1: [block()]}, 1, 4097)),
    ("pp=3 x dp=1 on at most 8 ranks for 2 layers", lambda: layout_for(ONE, 8, 8, shape=(3, 1))),
    ("the same layers.*1 at 2 rows, 2 at 4 rows", lambda: layout_for({**ONE, 2: [block()]}, 1, 8)),
    ("0 ranks", lambda: layout_for(ONE, 0, 8)),
    ("True rows of a batch", lambda: layout_for(ONE, 1, True)),
    ("rows .. must be", lambda: plan.profiles(*FEW, [])),
    ("the sample has 2 rows, but a profile is of 4", lambda: plan.profiles(*FEW, [4, 1])),
])  # fmt: skip
def test_what_has_no_layout(why, call):
    with pytest.raises(ValueError, match=rf"{why}.*\[HVD00[58]\]"):
        call()


def test_profiles_files_and_commands(tmp_path, monkeypatch, capsys):
    def program(words, code=0):
        assert cli.main(words.split()) == code
        return "".join(capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout_model.py").write_text(MODEL)
    assert "ms a row" in program("profile layout_model:model --rows 2,8,2 -o p.json")
    found = layers.read_profiles("p.json")
    assert {r: [each.activation for each in own] for r, own in found.items()} == {2: [64, 64], 8: [256, 256]}
    layers.write_profiles("again.json", found)
    assert layers.read_profiles("again.json") == found
    lines = [line.split() for line in program("morph p.json --batch 16 --ranks 1-3 --memory 1GB").splitlines()]
    assert [line[0] for line in lines] == ["ranks", "1", "2", "3"]
    assert lines[1][1:5] == ["1", "x", "1", "0"] and lines[1][-1] == "2"  # stages, copies, spare ranks; layers
    assert "the minimum is" in program("morph p.json --batch 16 --ranks 3 --memory 10", 2)
    for wrong in ("2-1", "0", "1-1025", "x", "1 --batch 0", "1 --rate 1gb/s"):
        assert "[HVD008]" in program(f"morph p.json --batch 16 --ranks {wrong}", 2)


@pytest.mark.parametrize("profiles, why", [
    (None, "not a file of profiles: it has one profile only; `hvdlite-plan profile --rows"),
    ([ROW], "profiles must be an object of 1 to"),
    ({"02": [ROW]}, "profile '02': the rows must be a whole number"),
    ({"2": [{**ROW, "weights": -1}]}, "profile 2: layer 'a': weights is -1"),
    ({"2": [ROW], "4": [ROW, ROW]}, "profile 4 is not of the same layers as profile 2"),
])  # fmt: skip
def test_bad_files_of_profiles(tmp_path, profiles, why):
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"format": layers.PROFILES if profiles else layers.FORMAT, "profiles": profiles}))
    with pytest.raises(PlanError, match=rf"f.json: .*{why}.*\[HVD005\]"):
        layers.read_profiles(path)
