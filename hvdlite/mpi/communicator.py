"""Ranks of an mpi4py communicator, for process sets that are given as one.

Each rank gives a communicator of its own: after a Split some ranks give one half and the others the other half, and one
that is in none gives COMM_NULL. So one call makes as many sets as there are different communicators, on all ranks; a
rank's ProcessSet then stands for the set that it is in. `word` is what a rank tells the others, `sets` what all of them
make of it, the same everywhere; no message goes over the communicator itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def word(comm: Any) -> list[Any]:
    """[this rank in MPI_COMM_WORLD, the members' ranks there, why it cannot be used or None], to be exchanged."""
    from . import enabled

    if not enabled():
        return [-1, [], "a process set of an MPI communicator needs a job over MPI: give a list of ranks"]
    from mpi4py import MPI

    if comm != MPI.COMM_NULL and comm.Is_inter():
        return [-1, [], "a process set cannot be an intercommunicator"]
    ranks: list[int] = []
    if comm != MPI.COMM_NULL:
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = [int(rank) for rank in MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world)]
        group.Free()
        world.Free()
    return [MPI.COMM_WORLD.Get_rank(), ranks, None]


def sets(words: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The different sets, in job ranks, from everyone's word in rank order. ValueError for what none can be made of."""
    for rank, (_, _, wrong) in enumerate(words):
        if wrong is not None:
            raise ValueError(f"rank {rank}: {wrong} [HVD109]")
    job_rank = {world_rank: rank for rank, (world_rank, _, _) in enumerate(words)}
    found: list[list[int]] = []
    for rank, (_, members, _) in enumerate(words):
        strangers = [each for each in members if each not in job_rank]
        if strangers:
            raise ValueError(
                f"rank {rank}: its communicator has rank {strangers[0]} of MPI_COMM_WORLD, which is not a rank of "
                "this job [HVD109]"
            )
        ranks = sorted(job_rank[each] for each in members)
        if ranks and ranks not in found:
            found.append(ranks)
    if not found:
        raise ValueError("every rank passed MPI.COMM_NULL: a process set needs at least one rank [HVD109]")
    return found


def own(found: Sequence[list[int]], rank: int) -> int:
    """Which of the sets is that of a rank: the first that it is in, else the first."""
    return next((index for index, ranks in enumerate(found) if rank in ranks), 0)
