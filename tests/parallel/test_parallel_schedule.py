"""Schedules on paper: makespan, stash, copies of the weights, delay, what check() refuses, and the two drawings.

Nothing here needs ranks or torch; each number is one that a formula or a count by hand gives.
"""

import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest

from hvdlite.parallel import drawing
from hvdlite.parallel.schedule import PLANS, check, continuous, copies, delay, gpipe, interleaved, one_f_one_b


def lists(name, stages, micro_batches, batches=1):
    return [PLANS[name](stage, stages, micro_batches, batches) for stage in range(stages)]


@pytest.mark.parametrize(
    "name, micro_batches, makespan, stash",
    [
        ("gpipe", 8, 33, [8, 8, 8, 8]),
        ("1f1b", 8, 33, [4, 3, 2, 1]),
        ("continuous", 8, 33, [4, 3, 2, 1]),
        ("gpipe", 1, 12, [1, 1, 1, 1]),
        ("1f1b", 2, 15, [2, 2, 2, 1]),
    ],
)
def test_makespan_and_stash(name, micro_batches, makespan, stash):
    found = check(lists(name, 4, micro_batches), micro_batches=micro_batches)
    assert (found.makespan, found.stash) == (makespan, stash)
    assert found.busy == pytest.approx(3 * micro_batches / makespan)


def test_a_list_is_what_the_papers_draw():
    as_text = " ".join(f"{what}{k}" for what, k in one_f_one_b(2, 4, 4))
    assert as_text == "F0 F1 B0 F2 B1 F3 B2 B3 U0"
    assert [k for what, k in continuous(0, 4, 2, 3) if what == "U"] == [0, 1, 2]
    for name in PLANS.keys() - {"interleaved"}:
        for actions in lists(name, 4, 3, 5):
            assert [k for what, k in actions if what == "B"] == list(range(15))


def test_interleaved_is_idle_for_less_time():
    as_text = " ".join(
        f"{what}{unit // 2}{'ab'[unit % 2] if what != 'U' else ''}" for what, unit in interleaved(1, 2, 2)
    )
    assert as_text == "F0a F1a F0b B0b F1b B1b B0a B1a U0"
    for p in range(1, 6):
        for m in range(p, 4 * p, p):
            for v in range(1, 5):
                many = [interleaved(s, p, m, 2, v) for s in range(p)]
                for actions in many:
                    for c in range(v):
                        assert [k // v for what, k in actions if what == "B" and k % v == c] == list(range(2 * m))
                one = [actions[: len(actions) // 2] for actions in many]
                found = check(one, micro_batches=m, together=True, chunks=v)
                assert found.makespan == pytest.approx(3 * m + 3 * (p - 1) / v)
                check(many, micro_batches=m, together=True, chunks=v)


def test_costs_by_stage_and_a_pipeline_that_does_not_empty():
    many = lists("continuous", 4, 2, 20)
    assert check(many).makespan == 3 * 40 + 9 < check(lists("1f1b", 4, 2, 20)).makespan
    found = check(lists("gpipe", 2, 2), forward=[1, 5], backward=[2, 10], micro_batches=2)
    assert found.makespan == 1 + 5 + 5 + 10 + 10 + 2
    assert found.spans[1][0] == ("F", 0, 1, 6)
    assert found.spans[0][-1] == ("U", 0, 33, 33)


@pytest.mark.parametrize("stage", range(4))
def test_copies_of_the_weights_and_delay(stage):
    one = continuous(stage, 4, 1, 12)
    assert copies(one, lambda k, done: done) == 4 - stage
    assert copies(one, lambda k, done: max(0, k - 3)) == 4
    for m in (4, 8):
        assert copies(continuous(stage, 4, m, 6), lambda k, done, m=m: max(k // m - 1, 0)) == 2
        assert copies(one_f_one_b(stage, 4, m, 6), lambda k, done: done) == 1
    for m in (1, 2, 3, 8):
        assert delay(continuous(stage, 4, m, 12)) == Fraction(3 - stage, m)
        assert delay(one_f_one_b(stage, 4, m, 12)) == delay(gpipe(stage, 4, m)) == 0


def test_a_deadlock_names_where_each_stage_waits():
    ahead = [("F", k) for k in range(8)] + [("B", k) for k in range(8)]
    behind = [a for k in range(4) for a in (("F", k), ("B", k))] + [("F", 4 + k) for k in range(4)] + ahead[12:]
    four = [("F", k) for k in range(4)] + [a for k in range(4) for a in (("B", k), ("F", 4 + k))] + ahead[12:]
    with pytest.raises(ValueError) as caught:
        check([four, ahead])
    assert str(caught.value) == (
        "the schedules of the stages do not match: stage 0 waits at its action 4, ('B', 0); "
        "stage 1 waits at its action 4, ('F', 4) [HVD012]"
    )
    assert check([ahead, behind]).stash == [8, 4]


@pytest.mark.parametrize(
    "actions, words",
    [
        ("F0 F1 B0 U0", "leaves out ('B', 1)"),
        ("F0 F1 B0 B1", "leaves out ('U', 0)"),
        ("F0 F1 B0 B1 U0 F2 B2", "leaves out ('U', 1), ('B', 3), ('F', 3)"),
        ("F0 F1 B0 B1 B1 U0", "repeats ('B', 1)"),
        ("F0 F1 B0 B1 U0 U1", "adds ('U', 1)"),
        ("F0 F1 B0 B1 X0", "('X', 0) as its action 4"),
        ("F0 F1 B0 U0 B1", "('U', 0) as its action 3"),
        ("F0 F1 F2 F3 B0 B1 B2 U0 B3 U1", "('U', 0) as its action 7"),
        ("B0 F0 F1 B1 U0", "waits at its action 0, ('B', 0)"),
    ],
)
def test_lists_that_are_wrong(actions, words):
    with pytest.raises(ValueError, match="HVD012") as caught:
        check([[(a[0], int(a[1:])) for a in actions.split()]], micro_batches=2)
    assert words in str(caught.value)


def test_drawings():
    drawn = lists("1f1b", 2, 2)
    found = check(drawn)
    assert drawing.text(drawn, found, ["stash 2", "stash 1"]).splitlines() == [
        "stage 0  F0 F1 .  .  B0--- .  B1---|",
        "stage 1  .  F0 B0--- F1 B1---|.  .",
        "makespan 9, busy 67%",
        "stage 0: stash 2",
        "stage 1: stash 1",
    ]
    drawn = lists("continuous", 4, 2, 6)
    root = ET.fromstring(drawing.svg(drawn, check(drawn), "a <title> & more", ["stash & weights"] * 4))
    cells = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(cells) == sorted(f"{w}{k}" if w != "U" else f"update {k}" for row in drawn for w, k in row)
