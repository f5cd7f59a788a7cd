"""Which ranks share a host, and what is said when the environment tells them otherwise; which links a set gets."""

import os
import threading

import pytest
from linking import JOB, SECRET, listener, together

from hvdlite.rendezvous import placement
from hvdlite.rendezvous.discovery import Place
from hvdlite.transport import mesh


def record(host, local_rank, local_size, cross_rank, cross_size, host_id=None):
    told = {"local_rank": local_rank, "local_size": local_size, "cross_rank": cross_rank, "cross_size": cross_size}
    return {**told, "host": host, "host_id": host_id or host}


RAGGED = [  # 2 + 1 + 3, as Horovod counts
    record("a", 0, 2, 0, 3),
    record("a", 1, 2, 0, 2),
    record("b", 0, 1, 1, 3),
    record("c", 0, 3, 2, 3),
    record("c", 1, 3, 1, 2),
    record("c", 2, 3, 0, 1),
]


def changed(rank, **changes):
    return [{**each, **(changes if number == rank else {})} for number, each in enumerate(RAGGED)]


def test_true_claims_are_accepted():
    assert placement.misplaced(RAGGED) is None
    assert placement.layout_of(RAGGED) == ([0, 0, 1, 2, 2, 2], ["a", "a", "b", "c", "c", "c"])


def test_launchers_that_number_hosts_are_accepted():
    numbered = [{**each, "cross_rank": "abc".index(each["host"]), "cross_size": 3} for each in RAGGED]
    assert placement.misplaced(numbered) is None


def test_what_a_launcher_does_not_tell_is_no_mistake_and_is_found():
    untold = [{**each, **dict.fromkeys(("local_rank", "local_size", "cross_rank", "cross_size"))} for each in RAGGED]
    assert placement.misplaced(untold) is None
    where = placement.layout_of(untold)
    for rank, each in enumerate(RAGGED):
        place = placement.completed(Place(rank, 6, None, None, None, None, "test"), where)
        assert {name: getattr(place, name) for name in place._fields[2:6]} == {
            name: each[name] for name in place._fields[2:6]
        }


def test_what_a_launcher_tells_is_kept():
    told = Place(5, 6, 1, 3, 2, 3, "test")
    assert placement.completed(told, placement.layout_of(RAGGED)) == told


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (changed(2, local_size=3),
         "rank 2 was told that 3 of 6 ranks are on its host, but 1 is on b (ranks 2); the others are on a (ranks 0-1)"),
        (changed(1, local_rank=0), "ranks 0-1 on a were all told that they are local rank 0"),
        (changed(3, cross_rank=1), "rank 2 on b and rank 3 on c were both told that they are local rank 0 of host 1"),
        (changed(4, cross_size=7), "rank 4 was told that 7 hosts have a local rank 1"),
        ([record("a", r, 4, 0, 1, host_id="ab"[r // 2]) for r in range(4)],
         "but 2 are on a#0 (ranks 0-1); the others are on a#1 (ranks 2-3)"),
    ],
)  # fmt: skip
def test_what_is_not_so_is_said_with_ranks_hosts_and_remedy(records, said):
    text = placement.misplaced(records)
    assert text is not None and said in text and "HVDLITE_" in text


def test_a_set_gets_the_descriptors_that_the_core_takes():
    host_of = [0, 0, 1]
    made = [listener(rank) for rank in range(3)]
    links = [mesh.JobLinks(each, [other.address for other in made], host_of, 30) for each in made]
    try:
        rows = together([lambda each=each: each.rows("set 0", [0, 1, 2]) for each in links])
        assert [[fd >= 0 for fd in row.votes] for row in rows] == [
            [False, False, True],
            [False, False, False],
            [True, False, False],
        ]
        for rank, row in enumerate(rows):
            assert [fd >= 0 for fd in row.tensors] == [other != rank for other in range(3)]
        pair = together([lambda each=each: each.rows("set 1", [0, 2]) for each in (links[0], links[2])])
        os.write(pair[0].tensors[1], b"over there")
        assert _read(pair[1].tensors[0], 10) == b"over there"
    finally:
        for each in links:
            each.close()
        for row in [*rows, *pair]:
            for fd in [*row.votes, *row.tensors]:
                if fd >= 0:
                    os.close(fd)


def _read(fd, count):
    os.set_blocking(fd, True)
    return os.read(fd, count)


def test_a_listener_is_closed_when_the_others_cannot_be_told():
    before = threading.active_count()

    def allgather(mine):
        raise RuntimeError("rank 1 was killed")

    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        mesh.open_links(("127.0.0.1", 1), SECRET, JOB, 0, 0, allgather, [0], 5)
    assert threading.active_count() == before
