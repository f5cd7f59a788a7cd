"""The search of autotune on made-up machines: noisy, pausing, drifting, flipping between two speeds.

A machine is a table of the true milliseconds of a step under each setting; setting 0 is the default.
"""

import random
from collections import Counter

import pytest

from hvdlite.autotune.search import PAIRS_MIN, SAMPLES_MIN, STEPS_MAX, budget, search, wins_needed

SEEDS = range(300)
NOISES = (0.0, 0.01, 0.05, 0.15)


def play(truth, noise=0.0, seed=0, samples=45, pauses=0.03, flips=0.05, drift=0.001):
    """(verdict, what was measured) of one search on one machine."""
    draw, state, measured = random.Random(seed), 1.0, []
    asked = search(list(truth), samples)
    setting = next(asked)
    while True:
        if draw.random() < flips:
            state = 1.3 if state == 1.0 else 1.0
        took = truth[setting] * state * (1 + drift * len(measured)) * (1 + noise * abs(draw.gauss(0, 1)))
        took *= draw.uniform(2, 10) if draw.random() < pauses else 1
        measured.append((setting, took))
        try:
            setting = asked.send(took)
        except StopIteration as end:
            return end.value, measured


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    "truth",
    [
        {0: 100, 1: 100, 2: 100, 3: 100, 4: 100},
        {0: 100, 1: 102, 2: 101, 3: 103, 4: 105},
        {0: 100, 1: 110, 2: 150, 3: 300, 4: 1000},
    ],
    ids=["equal", "a little worse", "much worse"],
)
def test_the_default_stays_where_nothing_is_better(truth, noise):
    chosen = Counter(play(truth, noise, seed)[0].chosen for seed in SEEDS)
    assert chosen[0] >= 0.98 * len(SEEDS), chosen
    if truth[1] > truth[0]:
        worse = sum(count for setting, count in chosen.items() if truth[setting] > 1.02 * truth[0])
        assert worse == 0, chosen


@pytest.mark.parametrize(("noise", "found"), [(0.0, 0.9), (0.01, 0.9), (0.05, 0.8)])
def test_a_setting_that_is_clearly_better_is_found(noise, found):
    truth = {0: 100, 1: 95, 2: 85, 3: 103, 4: 120}
    chosen = Counter(play(truth, noise, seed)[0].chosen for seed in SEEDS)
    assert chosen[2] >= found * len(SEEDS) and chosen[3] + chosen[4] == 0, chosen


def test_without_noise_a_gain_counts_above_one_in_a_hundred():
    still = {"pauses": 0, "flips": 0, "drift": 0}
    assert play({0: 100, 1: 98.5, 2: 99}, **still)[0].chosen == 1
    assert play({0: 100, 1: 99.5, 2: 100}, **still)[0].chosen == 0
    verdict, measured = play({0: 100, 1: 100, 2: 100}, **still)
    assert verdict.chosen == 0 and len(measured) < 45


def test_something_that_comes_every_few_steps_takes_no_side():
    """A script that logs or evaluates every 2nd to 6th step: longer steps, whatever the setting."""
    for period in range(2, 7):
        for phase in range(period):
            asked = search([0, 1, 2, 3, 4], 45)
            next(asked)
            with pytest.raises(StopIteration) as end:
                for step in range(100):
                    asked.send(100.0 + 50 * (step % period == phase))
            assert end.value.value.chosen == 0, (period, phase)


def test_what_was_seen_in_the_rounds_does_not_decide():
    """A setting that was lucky in the rounds and is no better afterwards is not chosen."""
    asked = search([0, 1, 2, 3, 4], 45)
    setting, count = next(asked), 0
    with pytest.raises(StopIteration) as end:
        while True:
            count += 1
            setting = asked.send(50.0 if setting == 3 and count <= 15 else 100.0)
    assert (end.value.value.chosen, end.value.value.rival) == (0, 3)


def test_the_same_times_give_the_same_verdict_and_the_same_order():
    truth = {0: 100, 1: 95, 2: 90, 3: 103, 4: 100}
    assert play(truth, 0.05, 7) == play(truth, 0.05, 7)


@pytest.mark.parametrize("samples", [*range(SAMPLES_MIN, 50), 200])
@pytest.mark.parametrize("settings", [2, 5, 9])
def test_samples_are_never_more_than_allowed_and_the_default_is_measured_as_often(samples, settings):
    truth = {setting: 100 - setting for setting in range(settings)}
    for truth[1] in (99, 50):
        verdict, measured = play(truth, samples=samples, pauses=0, flips=0)
        counts = Counter(setting for setting, _ in measured)
        assert len(measured) <= samples and counts[0] == max(counts.values()), counts
    assert verdict.chosen == 1


def test_too_little_to_tell_anything_is_refused():
    for settings, samples in ([0, 1], SAMPLES_MIN - 1), ([0], 45):
        with pytest.raises(ValueError):
            next(search(settings, samples))


def test_luck_wins_no_search():
    assert wins_needed(PAIRS_MIN - 1) > PAIRS_MIN - 1 and wins_needed(PAIRS_MIN) == PAIRS_MIN
    assert wins_needed(15) == 12 and all(wins_needed(n) > 0.6 * n for n in range(PAIRS_MIN, 40))


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((3, 1, 45), (3, 1, 45, False)),
        ((0, 1, 16), (0, 1, 16, False)),
        ((3, 10, 20), (3, 2, 20, True)),  # Horovod's defaults
        ((3, 2, 20), (3, 2, 20, False)),
        ((0, 1, 500), (0, 1, 49, True)),
        ((1000, 5, 500), (33, 1, 16, True)),
    ],
)
def test_a_budget_ends_within_fifty_steps(asked, given):
    assert budget(*asked) == given
    warmup, steps, samples, _ = budget(*asked)
    assert 1 + steps * (warmup + samples) <= STEPS_MAX and samples >= SAMPLES_MIN
