"""Which rank holds which layers, which rank keeps copies for others, and what travels. Pure functions on numbers.

All copies of a stage hold its layers. Where that are fewer ranks or hosts than `copies`, more ranks keep the layers of
the last commit: on another host first, then spare ranks, which have nothing else to keep, then those that hold least.
So any copies - 1 ranks may be lost at once, and any copies - 1 hosts if there are so many. Copy i of stage s is rank
i * stages + s, as in Mesh(dp, pp).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def stages_of(balance: Sequence[int]) -> list[range]:
    """The layers of each stage."""
    ends = [sum(balance[: i + 1]) for i in range(len(balance))]
    return [range(end - length, end) for end, length in zip(ends, balance)]


def needed(balance: Sequence[int], dp: int, hosts: Sequence[int], copies: int) -> list[list[int]]:
    """The layers that each rank has to have: those of its stage, then those that it keeps.

    hosts: the number of each rank's host. Its length is the number of ranks; those beyond stages x dp are spare.
    """
    stages, pp = stages_of(balance), len(balance)
    found: list[list[int]] = [[*stages[rank % pp]] if rank < pp * dp else [] for rank in range(len(hosts))]
    for stage, layers in enumerate(stages):
        holders = list(range(stage, pp * dp, pp))
        at = {hosts[rank] for rank in holders}
        while len(holders) < min(copies, len(hosts)) or len(at) < min(copies, len({*hosts})):
            others = [rank for rank in range(len(hosts)) if rank not in holders]
            keeper = min(others, key=lambda rank: (hosts[rank] in at, len(found[rank]), (rank - stage) % len(hosts)))
            holders.append(keeper)
            at.add(hosts[keeper])
            found[keeper] += layers
    return found


def lost(held: Sequence[Iterable[int]], needs: Iterable[Iterable[int]]) -> list[int]:
    """The layers that a rank needs and no rank has. held, needs: by rank."""
    return sorted({layer for layers in needs for layer in layers}.difference(*held))


def moves(
    held: Sequence[Iterable[int]], needs: Sequence[Sequence[int]], sizes: Mapping[int, int], hosts: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(source, target, layer) of all layers that a rank needs and does not have; none is lost. Of several holders that
    of the same host sends, then the one that has sent least. sizes: bytes of each layer."""
    has = [set(layers) for layers in held]
    load, found = [0] * len(has), []
    for target, layers in enumerate(needs):
        for layer in (each for each in layers if each not in has[target]):
            holders = [rank for rank, those in enumerate(has) if layer in those]
            source = min(holders, key=lambda rank: (hosts[rank] != hosts[target], load[rank], rank))
            load[source] += sizes.get(layer, 1)
            found.append((source, target, layer))
    return found
