"""A third of a minute of tests/tools/soak.py: random collectives with the right results, and nothing that grows.

That is too short for resident memory (1 MB in 10 minutes): buffers are still coming to their size. What malloc has
given out tells: one rank loses 1 kB with every collective, and is found; the others hold what they held. Descriptors
and threads are held to be equal.
"""

from collections import OrderedDict

import numpy as np
import soak
import soaking
from ranks import as_ranks

import hvdlite.numpy as hvd
from hvdlite.system import bounded_cache

MINUTES, ROUNDS, SEED = 0.35, 40, 4
WARM = 0.3  # of the time
RISE_KB, IN_S = 8 << 10, 30.0
A_ROUND = 1.0
LEAKY = 2
SETS, SETS_KB = 1000, 100  # 0.1 kB for each: less than the smallest thing that could be forgotten


def test_a_while_of_random_collectives_leaves_everything_as_it_was():
    code, said, seen = soak.soaked(MINUTES, 4, SEED, least=ROUNDS, leaky=LEAKY)
    assert code == 0 and sorted(seen) == [0, 1, 2, 3], said[-6000:]
    warm_s = WARM * max(one["at"] for one in seen[0])
    lines, wrong = soak.judged(seen, warm_s, RISE_KB, IN_S, A_ROUND)
    print("\n".join(lines))
    if seen[LEAKY][0]["heap"] is not None:
        assert any(line.startswith(f"rank {LEAKY}: heap grows by") for line in wrong), wrong
    wrong = [line for line in wrong if not line.startswith(f"rank {LEAKY}: ")]
    assert not wrong, "\n".join(wrong)


def test_what_grows_is_told():
    same = {"rounds": 9, "heap": None, "blocks": 7, "rss": 5000, "fds": 9, "threads": 3}
    rises = [{**same, "at": at, "rss": 5000 + 10 * at} for at in range(60)]
    opens = [{**same, "at": at, "rss": 5000 + at % 2, "fds": 9 + at // 50} for at in range(60)]
    stays = [{**same, "at": at} for at in range(60)]
    _, wrong = soak.judged({0: rises, 1: opens, 2: stays}, 10)
    assert wrong == ["rank 0: memory rises by 6000 kB in 600 s, 1024 allowed", "rank 1: fds went from 9 to 10"]


def test_all_that_is_told_of_what_is_held_is_its_steady_rise():
    """A table that doubles is no leak."""
    stairs = [(at, 500 + (600 if at > 7 else 0)) for at in range(20)]
    assert soak.steady(stairs) == 0 and soak.slope(stairs) > 10
    assert soak.steady([(at, high + 3 * at) for at, high in stairs]) == 3
    assert soak.steady([(9, 1.0)]) == 0


@as_ranks(2, deadline=120)
def test_a_thousand_process_sets_leave_nothing():
    ones = np.ones(100, "float32")

    def some(count):
        for number in range(count):
            small = hvd.add_process_set([number % 2])
            if small.included():
                assert hvd.allreduce(ones, name=f"in a set.{number % 50}", op=hvd.Sum, process_set=small)[0] == 1
            assert hvd.remove_process_set(small)
        return soaking.held()

    some(SETS // 10)
    before = some(SETS // 10)
    after = some(SETS)
    assert after["fds"] == before["fds"], (before, after)
    assert after["heap"] is None or after["heap"] < before["heap"] + SETS_KB, (before, after)
    assert after["blocks"] < before["blocks"] + SETS // 2, (before, after)


def test_what_is_kept_is_bounded_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(bounded_cache, "KEPT", 3)
    known = OrderedDict()
    for number in range(5):
        bounded_cache.remember(known, f"tensor {number}", number)
    bounded_cache.remember(known, "tensor 2", 22)
    assert list(known.items()) == [("tensor 2", 22), ("tensor 3", 3), ("tensor 4", 4)]
