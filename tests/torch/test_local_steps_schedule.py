"""Fragments take turns: each once in `sync_every` steps, in one order on all ranks, also where ranks are lost."""

import random

import pytest
from ranks import everything

from hvdlite.torch.local.schedule import Schedule, cut


class Rank:
    """What a rank does, without tensors. A turn is sent again where it was in flight when a rank was lost."""

    def __init__(self, *settings):
        self.schedule, self.sent, self.arrived = Schedule(*settings), [], []

    def step(self):
        for what, number in self.schedule.after_step():
            if what == "send":
                assert number not in self.schedule.in_flight
                self.schedule.sent(number)
                self.sent.append((self.schedule.step, number))
            else:
                self.schedule.has_arrived(number)
                self.arrived.append((self.schedule.step, number))


def draw(seed, fewest):
    """A generator of numbers; sync_every, fragments and delay; some ranks with these settings."""
    chance = random.Random(seed)
    fragments, period = chance.randint(1, 6), chance.randint(1, 8)
    settings = fragments * period, fragments, chance.randrange(period)
    return chance, settings, [Rank(*settings) for _ in range(chance.randint(fewest, 5))]


@pytest.mark.parametrize("trials", [300, *everything(10_000)])
def test_each_fragment_once_in_sync_every_steps_in_one_order(trials):
    for seed in range(trials):
        chance, (every, fragments, delay), ranks = draw(seed, fewest=1)
        for rank in chance.choices(ranks, k=4 * every * len(ranks)):
            rank.step()
        for rank in ranks:
            for step, number in rank.sent:
                assert step % every == number * every // fragments % every, seed
            assert rank.arrived == [(step + delay, n) for step, n in rank.sent if step + delay <= rank.schedule.step]
            longest = max((each.sent for each in ranks), key=len)
            assert rank.sent == longest[: len(rank.sent)]
            assert len(rank.sent) == rank.schedule.step * fragments // every


@pytest.mark.parametrize("trials", [300, *everything(10_000)])
def test_what_was_in_flight_when_a_rank_was_lost_is_sent_again(trials):
    for seed in range(trials):
        chance, settings, ranks = draw(seed, fewest=2)
        every, fragments, _ = settings
        for _ in range(chance.randint(1, 4)):
            for rank in chance.choices(ranks, k=chance.randint(1, 3 * every)):
                rank.step()
            ranks.pop(chance.randrange(len(ranks))) if len(ranks) > 1 else None
            state = ranks[0].schedule.state()
            arrived = list(state["arrived"])
            ranks += [Rank(*settings)]  # a newcomer
            for rank in ranks:
                rank.schedule.load(state)
                rank.sent, rank.arrived = [], []
            for _ in range(2 * every):
                for rank in ranks:
                    rank.step()
            for rank in ranks:
                assert (rank.sent, rank.arrived) == (ranks[0].sent, ranks[0].arrived)
                assert {n for _, n in rank.sent[: len(state["again"])]} == set(state["again"])
                assert all(rank.schedule.arrived[n] - arrived[n] >= 1 for n in range(fragments)), seed


def test_parts_are_of_nearly_equal_size_and_never_empty():
    assert cut([10] * 12, 4) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12)]
    assert cut([100, 1, 1, 1], 3) == [slice(0, 1), slice(1, 2), slice(2, 4)]
    for seed in range(500):
        chance = random.Random(seed)
        sizes = [chance.choice([0, 1, 10, 1000]) for _ in range(chance.randint(1, 12))]
        parts = cut(sizes, chance.randint(1, len(sizes)))
        assert [n for part in parts for n in range(len(sizes))[part]] == list(range(len(sizes)))
        assert all(part.start < part.stop for part in parts)
