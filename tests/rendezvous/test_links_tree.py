"""Votes cross from host to host along a tree that both halves of the project compute: one and the same, everywhere.

Python connects the streams (`links.job.tree`), the core uses them (`hvd_vote_peers`). If the two ever differed, a
leader would wait for a stream that nobody connects. So all layouts of a few ranks are compared, many of more
ranks than a host may have, and what a tree must be is asked of both.
"""

import itertools
import random

import pytest

from hvdlite._core.library import ffi, lib
from hvdlite.transport.mesh import tree

MOST = 128  # ranks of a set on several hosts, here
LIMIT = 1024  # of them that the core takes


def core_tree(host_of, me):
    """The core's answer, in its order."""
    peers = ffi.new("int[3]")
    count = lib.hvd_vote_peers(ffi.new("int[]", list(host_of)), len(host_of), me, peers)
    assert 0 <= count <= 3
    return list(peers)[:count]


def layouts(size):
    """Every way to put so many ranks on hosts; hosts are numbered as they appear."""
    for host_of in itertools.product(range(size), repeat=size):
        if all(host <= max(host_of[:place], default=-1) + 1 for place, host in enumerate(host_of)):
            yield host_of


def random_layout(source):
    size = source.randint(2, MOST)
    hosts = source.sample(range(1000), source.randint(1, size))
    return [source.choice(hosts) for _ in range(size)]


def check(host_of):
    near = [tree(host_of, me) for me in range(len(host_of))]
    assert [sorted(core_tree(host_of, me)) for me in range(len(host_of))] == [sorted(peers) for peers in near], host_of
    leaders = [list(host_of).index(host) for host in dict.fromkeys(host_of)]
    edges = {(me, peer) for me, peers in enumerate(near) for peer in peers}
    assert all((peer, me) in edges for me, peer in edges), "an edge that one end does not know"
    assert {me for me, _ in edges} <= set(leaders)
    assert len(edges) == 2 * (len(leaders) - 1)
    seen, new = set(), {leaders[0]}
    while new:
        seen |= new
        new = {peer for me, peer in edges if me in new} - seen
    assert seen == set(leaders), "a host that no vote reaches"


@pytest.mark.parametrize("size", range(1, 8))
def test_all_layouts_of_a_few_ranks(size):
    found = 0
    for host_of in layouts(size):
        check(host_of)
        found += 1
    assert found == {1: 1, 2: 2, 3: 5, 4: 15, 5: 52, 6: 203, 7: 877}[size]


def test_random_layouts_of_many_ranks():
    source = random.Random(20)
    for _ in range(300):
        check(random_layout(source))


@pytest.mark.parametrize("host_of", [range(MOST), [0] * MOST, [rank % 2 for rank in range(MOST)]], ids=str)
def test_layouts_at_the_limit(host_of):
    check(list(host_of))


def test_the_tree_is_flat():
    """One host for each rank: from any to any other over 2 log2 hosts at most."""
    far, new = {0: 0}, [0]
    while new:
        new = [(peer, far[me] + 1) for me in new for peer in tree(range(MOST), me) if peer not in far]
        far.update(new)
        new = [peer for peer, _ in new]
    assert len(far) == MOST and max(far.values()) == 7


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (LIMIT + 1, 0), (3, -1), (3, 3)])
def test_the_core_refuses_what_is_no_rank(size, rank):
    assert lib.hvd_vote_peers(ffi.new("int[]", [0] * (LIMIT + 1)), size, rank, ffi.new("int[3]")) == lib.HVD_EINVAL
