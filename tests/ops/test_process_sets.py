"""Process sets: their questions, static and dynamic, errors on every rank, equal names on overlapping sets, Mesh."""

import numpy as np
import pytest
from ranks import Job, as_ranks

import hvdlite as hvd
from hvdlite.process_sets import process_set

SIZES = (1, 2, 3, 4)


def refused(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


@as_ranks(*SIZES)
def test_the_global_set_is_always_there():
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.mpi_comm) == (0, None)
    assert (everyone.size(), everyone.rank(), everyone.included()) == (hvd.size(), hvd.rank(), True)
    assert everyone.ranks == list(range(hvd.size()))
    assert hvd.remove_process_set(everyone) is False
    assert process_set.process_set_by_id(0) is everyone and process_set.process_sets() == [everyone]


def live_and_die(ranks):
    some = hvd.ProcessSet(reversed(ranks))
    assert some.process_set_id is None and some.ranks == ranks
    refused(some.size, "not registered")
    assert hvd.add_process_set(some) is some
    assert some.process_set_id > 0 and some.size() == len(ranks) and some.included() == (hvd.rank() in ranks)
    assert process_set.process_set_by_id(some.process_set_id) is some
    ones = np.full(3, hvd.rank() + 1.0)
    if some.included():
        assert some.rank() == ranks.index(hvd.rank())
        assert (hvd.allreduce(ones, op=hvd.Sum, process_set=some) == sum(ranks) + len(ranks)).all()
    else:
        said = ("Process is not part of provided process set", f"Rank {hvd.rank()}", str(ranks))
        refused(some.rank, *said[:1])
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.allreduce_async_):
            refused(lambda call=call: call(ones, process_set=some), *said)
        refused(lambda: hvd.grouped_allreduce([ones], process_set=some), *said)
        refused(lambda: hvd.broadcast(ones, ranks[0], process_set=some), *said)
        refused(lambda: hvd.barrier(some), *said)
        refused(lambda: hvd.allgather_object(1, process_set=some), *said)
    assert hvd.remove_process_set(some) is True
    assert some.process_set_id is None and hvd.remove_process_set(some) is False
    refused(lambda: hvd.allreduce(ones, process_set=some), "not registered")


@as_ranks(2, 3, 4)
def test_a_set_is_added_asked_used_and_removed():
    for ranks in ([0], [hvd.size() - 1], list(range(hvd.size() - 1))):
        live_and_die(ranks)
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False  # never added


@as_ranks(2, 3)
def test_what_is_no_set_is_refused_on_every_rank():
    for wrong in ("01", 3, [0, 0], [], [-1], [0.5], [True], [None], None):
        refused(lambda wrong=wrong: hvd.ProcessSet(wrong))
        refused(lambda wrong=wrong: hvd.add_process_set(wrong))
    refused(lambda: hvd.add_process_set([0, hvd.size()]), str(hvd.size()))
    refused(lambda: hvd.add_process_set(range(hvd.size())), "already exists", "hvd.global_process_set")
    some = hvd.add_process_set([0])
    refused(lambda: hvd.add_process_set([0]), "A process set containing the same ranks already exists")
    refused(lambda: hvd.add_process_set(some), "registered already")
    refused(lambda: hvd.remove_process_set([0]), "ProcessSet", error=TypeError)
    refused(lambda: hvd.allreduce(1.0, process_set=[0]), "ProcessSet", error=TypeError)
    hvd.remove_process_set(some)
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()


@as_ranks(2, 3)
def test_ranks_that_name_different_sets_all_hear_of_it():
    def call():
        hvd.add_process_set([0 if hvd.rank() else 1])

    refused(call, "rank 0 calls add_process_set of ranks [1]", "rank 1", "[0]", error=hvd.HvdMismatchError)
    some = hvd.add_process_set([1])
    mixed = (lambda: hvd.remove_process_set(some)) if hvd.rank() else (lambda: hvd.add_process_set([0]))
    refused(mixed, "add_process_set", "remove_process_set", error=hvd.HvdMismatchError)
    assert hvd.remove_process_set(some)


@as_ranks(2, 3, 4)
def test_roots_are_global_ranks():
    last = hvd.size() - 1
    some = hvd.add_process_set([last]) if hvd.size() == 2 else hvd.add_process_set([1, last])
    if some.included():
        mine = np.full(2, float(hvd.rank()))
        assert (hvd.broadcast(mine, last, process_set=some) == last).all()
        assert hvd.broadcast_object(hvd.rank(), last, process_set=some) == last
        assert hvd.allgather_object(hvd.rank(), process_set=some) == some.ranks
        for call in (hvd.broadcast, hvd.reduce, hvd.gather, hvd.scatter):
            refused(lambda call=call: call(mine, 0, process_set=some), "Rank 0", str(some.ranks))
        refused(lambda: hvd.broadcast_object(1, 0, process_set=some), "Rank 0")
    hvd.remove_process_set(some)


@as_ranks(3, 4)
def test_equal_names_on_overlapping_sets_do_not_meet():
    first, second = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
    mine = [each for each in (first, second, hvd.global_process_set) if each.included()]
    for step in range(20):
        order = mine if (step + hvd.rank()) % 2 else mine[::-1]
        handles = [
            (each, hvd.allreduce_async(np.ones(50), name="same", op=hvd.Sum, process_set=each)) for each in order
        ]
        for each, handle in handles:
            assert (hvd.synchronize(handle) == each.size()).all()
        groups = [hvd.grouped_allreduce_async([np.ones(3)] * 2, op=hvd.Sum, process_set=each) for each in order]
        assert [hvd.synchronize(group)[1][0] for group in groups] == [each.size() for each in order]
    hvd.remove_process_set(first)
    hvd.remove_process_set(second)


@as_ranks(3, 4)
def test_calls_without_a_name_are_counted_anew_in_a_set_that_has_the_number_of_another():
    """Rank 1 was in the set before, rank 2 was not."""
    numbers = set()
    for members in ([0, 1], [1, 2]):
        some = hvd.add_process_set(members)
        numbers.add(some.process_set_id)
        if some.included():
            group = hvd.grouped_allreduce([np.ones(3)] * 2, op=hvd.Sum, process_set=some)
            assert [each[0] for each in group] == [2, 2]
            mine = np.full(3, hvd.rank())
            if hvd.rank() == members[0]:
                hvd.send(mine, members[1], process_set=some)
            else:
                assert (hvd.recv(mine, members[0], process_set=some) == members[0]).all()
        hvd.remove_process_set(some)
    assert len(numbers) == 1


@as_ranks(2, 3)
def test_sets_of_init_come_back_after_shutdown():
    hvd.shutdown()
    some = hvd.ProcessSet([1])
    hvd.init(process_sets=[some])
    assert some.size() == 1 and some.included() == (hvd.rank() == 1)
    hvd.init(process_sets=[some])  # nothing happens
    refused(lambda: hvd.init(process_sets=[hvd.ProcessSet([0])]), "hvd.add_process_set")
    hvd.shutdown()
    assert some.process_set_id is None and some.ranks == [1]
    refused(some.size, "not registered")
    hvd.init()
    assert some.process_set_id is not None and some.size() == 1
    hvd.shutdown()
    hvd.init(process_sets=[])
    assert some.process_set_id is None and process_set.process_sets() == [hvd.global_process_set]
    hvd.shutdown()
    for dynamic in ("dynamic", None):
        hvd.init(process_sets=dynamic)
        hvd.remove_process_set(hvd.add_process_set([0]))
        hvd.shutdown()
    for wrong in ([[0], [0]], "static", 5, [range(hvd_size())], [[99]]):
        refused(lambda wrong=wrong: hvd.init(process_sets=wrong))
        assert not hvd.is_initialized()
    refused(lambda: hvd.init([0]), "needs a job under MPI", error=NotImplementedError)
    refused(lambda: hvd.init(comm=object()), "needs a job under MPI", error=NotImplementedError)
    hvd.init(comm=list(range(hvd_size())))
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()


def hvd_size():
    """Of this job, also between shutdown and init."""
    from hvdlite import config
    from hvdlite.rendezvous import discovery

    return discovery.discover(config.environ()).size


DIFFERENT = """
import hvdlite as hvd, os
try:
    hvd.init(process_sets=[hvd.ProcessSet([int(os.environ["HVDLITE_RANK"])])])
except hvd.HvdInitError as error:
    print("refused:", error, flush=True)
"""


def test_static_sets_that_differ_are_an_error_of_init(tmp_path):
    import sys

    with Job(2, [sys.executable, "-c", DIFFERENT]) as job:
        assert job.wait(40) == 0
        assert job.text().count("refused: the process sets given to init() differ") == 2, job.text()


@as_ranks(4)
def test_a_mesh_names_its_axes():
    mesh = hvd.Mesh(dp=2, tp=-1)
    assert mesh.shape == {"dp": 2, "tp": 2} and repr(mesh) == "Mesh(dp=2, tp=2)"
    dp, tp = divmod(hvd.rank(), 2)
    assert (mesh.coordinate("dp"), mesh.coordinate("tp")) == (dp, tp)
    assert mesh.group("tp").ranks == [2 * dp, 2 * dp + 1] and mesh.group("dp").ranks == [tp, tp + 2]
    assert [each.ranks for each in mesh.sets("dp")] == [[0, 2], [1, 3]]
    assert mesh.rank_at(dp=0) == tp and mesh.rank_at(dp=1, tp=0) == 2
    assert hvd.allreduce(hvd.rank(), op=hvd.Sum, process_set=mesh.group("dp")) == 2 * tp + 2
    flat = hvd.Mesh(all=4, one=1)
    assert flat.group("all") is hvd.global_process_set and flat.group("one").ranks == [hvd.rank()]
    again = hvd.Mesh(pp=2, ep=2)
    assert again.group("ep") is mesh.group("tp")
    for axes in ({}, {"dp": 3}, {"dp": 2}, {"dp": 0, "tp": 4}, {"a": -1, "b": -1}, {"a": 3, "b": -1}, {"a": 4.0}):
        refused(lambda axes=axes: hvd.Mesh(**axes))
    refused(lambda: mesh.group("pp"), "dp, tp")
    refused(lambda: mesh.rank_at(dp=2), "outside")
    for each in {id(each): each for axis in ("dp", "tp") for each in mesh.sets(axis) + flat.sets("one")}.values():
        hvd.remove_process_set(each)
    assert process_set.process_sets() == [hvd.global_process_set]


@as_ranks(4)
def test_a_mesh_may_have_some_of_the_ranks():
    mesh = hvd.Mesh(ranks=[0, 2, 3], dp=3, pp=-1)
    assert mesh.process_set.ranks == [0, 2, 3] and mesh.included() == (hvd.rank() != 1)
    assert [each.ranks for each in mesh.sets("dp")] == [[0, 2, 3]] and mesh.rank_at(dp=1, pp=0) == 2
    if mesh.included():
        assert mesh.coordinate("dp") == [0, 2, 3].index(hvd.rank()) and mesh.rank_at(dp=2) == 3
        assert hvd.allreduce(hvd.rank(), op=hvd.Sum, process_set=mesh.group("dp")) == 5
        outer = mesh.some("dp", [0, 2])
        assert outer is mesh.some("dp", [2, 0]) and (outer is None) == (hvd.rank() == 2)
        assert outer is None or hvd.allreduce(hvd.rank(), op=hvd.Sum, process_set=outer) == 3
    else:
        for call in (lambda: mesh.group("dp"), lambda: mesh.coordinate("dp"), lambda: mesh.pairs("dp"), mesh.rank_at):
            refused(call, "rank 1 has no place")
    for wrong in ([1, 0, 2], [0, 0, 1], [2, 3, 4], [-1, 0, 1], []):
        refused(lambda wrong=wrong: hvd.Mesh(ranks=wrong, dp=3), "ascending order")
    refused(lambda: hvd.Mesh(ranks=[0, 1], dp=4), "2 ranks")


@as_ranks(1, 2, 3, 4, 6)
def test_a_mesh_has_pairs_of_neighbours():
    for axes in ({"pp": -1, "tp": 1}, {"dp": 2, "pp": -1}, {"pp": -1, "tp": 2}, {"pp": -1, "tp": 3}):
        if hvd.size() % axes.get("dp", axes.get("tp")):
            continue
        mesh = hvd.Mesh(**axes)
        line, place, pairs = mesh.group("pp").ranks, mesh.coordinate("pp"), mesh.pairs("pp")
        assert [pair.ranks for pair in pairs] == [[a, b] for a, b in zip(line, line[1:])]
        assert all(a is b for a, b in zip(pairs, mesh.pairs("pp")))
        assert len(line) != 2 or pairs == [mesh.group("pp")]
        for other in (place + 1, place - 1):
            if 0 <= other < len(line):
                pair, got = pairs[min(place, other)], np.zeros(3)
                sent = hvd.send_async(np.full(3, 1.0 + hvd.rank()), line[other], process_set=pair)
                assert (hvd.recv(got, line[other], process_set=pair) == 1 + line[other]).all()
                hvd.synchronize(sent)
        for pair in (pair for pair in pairs if hvd.rank() not in pair.ranks):
            refused(lambda pair=pair: hvd.barrier(pair), "not registered")
        refused(lambda mesh=mesh: mesh.pairs("ep"), "pp")


@as_ranks(2)
def test_a_set_can_be_sent():
    got = hvd.broadcast_object(hvd.global_process_set)
    assert got is hvd.global_process_set
