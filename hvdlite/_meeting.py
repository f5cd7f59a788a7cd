"""How does this process meet the other ranks, and do they agree on what must be the same?

`meet` connects to the launcher's store, joins, and exchanges one small record per rank: versions, options marked
`agreed`, how many ranks each host has. `disagreement` is the pure part: from all records it makes one sentence that
names the option, the ranks and the values, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from . import config
from .discovery import Place
from .errors import HvdInitError


class Meeting(Protocol):
    """Where ranks meet: a Store, or MPI's World."""

    job: int
    epoch: int
    secret: bytes
    failed: bool  # set before `bye`

    def allgather(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes in rank order. Blocks."""
        ...

    def fileno(self) -> int:
        """A connection to lend to the core, or -1."""
        ...

    def abort(self, culprit: int, code: int, text: str) -> None:
        """Tells the others why the job ends, if there is a way."""
        ...

    def bye(self) -> None:
        """Leaves cleanly."""
        ...

    def close(self) -> None:
        """Leaves without a word."""
        ...


def refusal(place: Place) -> str | None:
    """Why a job of this shape cannot be run by this version, or None."""
    if place.size == 1:
        return None
    if place.source not in ("HVDLITE_ variables", "MPI"):
        return (
            f"rank {place.rank} of {place.size} was found under {place.source}, which hvdlite cannot start under yet. "
            f"Start the job with: hvdlite-run -np {place.size} python ..."
        )
    if place.local_rank is None or place.local_size is None:
        return (
            f"rank {place.rank} of {place.size} does not know its place on its host: set HVDLITE_LOCAL_RANK and "
            "HVDLITE_LOCAL_SIZE, or start the job with hvdlite-run."
        )
    if place.cross_size != 1:
        return (
            f"rank {place.rank} of {place.size} is one of {place.local_size} on its host: jobs on several hosts are "
            "not supported yet."
        )
    return None


def meet(
    place: Place,
    settings: config.Settings,
    version: str,
    wire: int,
    process_sets: Sequence[Sequence[int]] = (),
    store: Meeting | None = None,
) -> tuple[Meeting, list[dict[str, Any]]]:
    """Where the ranks meet (`store`, or else the launcher's, joined) and every rank's record.

    process_sets: the ranks of the static sets.

    Raises HvdInitError or HvdPeerLostError; nothing stays open then.
    """
    import json  # here, because a rank that is alone needs neither JSON nor sockets

    store = store or _joined(place, settings, version, wire)
    try:
        mine = {"version": version, "wire": wire, "local_size": place.local_size, "options": settings.agreed()}
        mine["process_sets"] = [list(ranks) for ranks in process_sets]
        records = [json.loads(part) for part in store.allgather(json.dumps(mine).encode())]
        complaint = disagreement(records)
        if complaint is not None:
            store.bye()  # everyone says the same and leaves: nobody is lost
            raise HvdInitError(complaint)
        return store, records
    except BaseException:
        store.close()
        raise


def _joined(place: Place, settings: config.Settings, version: str, wire: int) -> Meeting:
    """The launcher's store, joined."""
    from . import _store

    values = settings.values
    absent = [f"HVDLITE_{name.upper()}" for name in ("store_addr", "store_port", "secret_key") if values[name] is None]
    if absent:
        raise HvdInitError(
            f"rank {place.rank} of {place.size} has nowhere to meet the others ({', '.join(absent)} not set): "
            f"start the job with: hvdlite-run -np {place.size} python ..."
        )
    return _store.connect(
        values["store_addr"],
        values["store_port"],
        values["secret_key"],
        rank=place.rank,
        size=place.size,
        version=version,
        wire=wire,
        timeout=values["start_timeout"],
    )


def disagreement(records: list[dict[str, Any]]) -> str | None:
    """What the ranks' records, in rank order, do not agree on, in one sentence; None if they agree."""
    for name, shown in (("version", "the version of hvdlite"), ("wire", "the version of the wire")):
        text = _split(records, [record.get(name) for record in records])
        if text is not None:
            return f"{shown} differs: {text}. Install the same hvdlite for all ranks."
    text = _split(records, [record.get("process_sets") for record in records])
    if text is not None:
        return f"the process sets given to init() differ: {text}. Give the same sets in the same order on all ranks."
    names = sorted({name for record in records for name in record["options"]})
    for name in names:
        text = _split(records, [record["options"].get(name) for record in records])
        if text is not None:
            variable = config.option_of(name).variable
            return f"the option {name} ({variable}) differs: {text}. It must be the same on all ranks."
    return None


def _split(records: list[dict[str, Any]], values: list[Any]) -> str | None:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(repr(value), []).append(rank)
    if len(ranks_of) < 2:
        return None
    return ", ".join(f"{_ranks(ranks)} {value}" for value, ranks in ranks_of.items())


def _ranks(ranks: list[int]) -> str:
    """`rank 3 has`, `ranks 0-2, 5 have`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text} has" if len(ranks) == 1 else f"ranks {text} have"
