"""Everything at once: sets that overlap, several threads on every rank, names in any order, barriers side by side.

Each operation has a number; from it every rank knows who takes part, what each gives and what must come out. So all
results are exact, and an operation that met another's would show.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from ranks import as_ranks

import hvdlite as hvd

OPERATIONS, THREADS = 1000, 4


def given(rank, number, rows):
    return (np.arange(rows * 2) % 13 + rank * 100 + number).reshape(rows, 2)


def allreduce(number, rows, some, ranks):
    result = hvd.allreduce(given(hvd.rank(), number, rows), name=f"n{number}", op=hvd.Sum, process_set=some)
    return result, sum(given(r, number, rows) for r in ranks)


def group(number, rows, some, ranks):
    mine = [given(hvd.rank(), number, rows), given(hvd.rank(), number, 3)]
    both = hvd.grouped_allreduce(mine, name=f"n{number}", op=hvd.Max, process_set=some)
    return np.concatenate(both), np.concatenate([given(ranks[-1], number, rows), given(ranks[-1], number, 3)])


def allgather(number, rows, some, ranks):
    result = hvd.allgather(given(hvd.rank(), number, rows + hvd.rank()), f"n{number}", some)
    return result, np.concatenate([given(r, number, rows + r) for r in ranks])


def broadcast(number, rows, some, ranks):
    root = ranks[number % len(ranks)]
    return hvd.broadcast(given(hvd.rank(), number, rows), root, f"n{number}", some), given(root, number, rows)


def alltoall(number, rows, some, ranks):
    splits = [number % 3] * len(ranks)
    result, _ = hvd.alltoall(given(hvd.rank(), number, 2 * len(ranks)), splits, f"n{number}", some)
    own, each = some.rank(), number % 3
    return result, np.concatenate([given(r, number, 2 * len(ranks))[own * each : own * each + each] for r in ranks])


def reducescatter(number, rows, some, ranks):
    result = hvd.reducescatter(given(hvd.rank(), number, rows), f"n{number}", op=hvd.Min, process_set=some)
    each, more = divmod(rows, len(ranks))
    start = some.rank() * each + min(some.rank(), more)
    return result, given(ranks[0], number, rows)[start : start + each + (some.rank() < more)]


def to_root(number, rows, some, ranks):
    root = ranks[-1]
    result = hvd.gather(given(hvd.rank(), number, rows), root, f"n{number}", some)
    everyone = np.concatenate([given(r, number, rows) for r in ranks])
    back = hvd.scatter(result if hvd.rank() == root else None, root, None, f"n{number}", some)
    total = hvd.reduce(back, root, hvd.Sum, f"n{number}", process_set=some)
    if hvd.rank() == root:
        assert np.array_equal(result, everyone) and np.array_equal(total, sum(given(r, number, rows) for r in ranks))
    return back, given(hvd.rank(), number, rows)


def point_to_point(number, rows, some, ranks):
    mine = given(hvd.rank(), number, rows)
    if hvd.rank() == ranks[0]:
        hvd.send(mine, ranks[-1], f"n{number}", some)
    elif hvd.rank() == ranks[-1]:
        return hvd.recv(mine.copy(), ranks[0], f"n{number}", some), given(ranks[0], number, rows)
    return mine, mine


KINDS = [allreduce, allreduce, group, allgather, broadcast, alltoall, reducescatter, to_root, point_to_point]


@as_ranks(8, deadline=120)
def test_a_thousand_random_operations_on_three_overlapping_sets_from_several_threads():
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1, 2, 3, 4], [2, 3, 6, 7], [0, 3, 5, 7])]
    choose = random.Random(7)
    plan = [(choose.choice(KINDS), choose.choice(sets), choose.choice((1, 5, 64, 700))) for _ in range(OPERATIONS)]
    mine = [(number, *entry) for number, entry in enumerate(plan) if entry[1].included()]

    def work(thread):
        """Threads take what is theirs in order; which thread has an operation is the same on all ranks."""
        for number, kind, some, rows in mine:
            if number % THREADS == thread:
                result, expected = kind(number, rows, some, some.ranks)
                assert np.array_equal(result, expected), (kind.__name__, number, some)
        return thread

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, range(THREADS))) == list(range(THREADS))
    hvd.barrier()
    for each in sets:
        hvd.remove_process_set(each)


@as_ranks(2, 4)
def test_named_operations_from_several_threads_in_another_order_on_every_rank():
    """Every thread keeps all of its operations in flight, or it would be the order that deadlocks, in any system."""
    names = [f"t{i}" for i in range(120)]

    def work(thread):
        own = names[thread::THREADS]
        random.Random(hvd.rank() * THREADS + thread).shuffle(own)
        handles = [
            (name, hvd.allreduce_async(np.full(int(name[1:]) + 1, hvd.rank() + 1.0), name=name, op=hvd.Sum))
            for name in own
        ]
        random.Random(thread - hvd.rank()).shuffle(handles)
        for name, handle in handles:
            result = hvd.synchronize(handle)
            assert result.shape == (int(name[1:]) + 1,) and (result == sum(range(hvd.size() + 1))).all()

    for _ in range(3):
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))


@as_ranks(2, 3)
def test_several_barriers_may_be_open_at_once():
    some = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set

    def work(thread):
        for _ in range(50):
            hvd.barrier()
            if some.included():
                hvd.barrier(some)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
    hvd.remove_process_set(some)
