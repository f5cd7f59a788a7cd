"""Bootstrap: this process joins the other ranks, and all agree on what must be the same.

`meet` connects to the launcher's store (or the one rank 0 keeps: standalone_store.py), joins, and exchanges one small
record per rank: versions, options marked `agreed`, its host, and the host numbers that it was given. `disagreement` is
the pure part: from all records it makes one sentence that names the option, the ranks and the values, the same on every
rank (placement.py: where ranks are).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import _core, config
from ..errors import HvdInitError, HvdOptionError
from ..errors.codes import coded
from ..errors.rank_ranges import as_runs
from .discovery import BY_HAND, OWN, Place

if TYPE_CHECKING:
    from ..transport.mesh import JobLinks, Rows
    from . import store_client
    from .placement import HostLayout

_NO_ROUTE = "hvdlite: votes cross over MPI, polled, because no stream joins all ranks (HVDLITE_VOTES=mpi: at once): {}"
_UNKEPT = ("Slurm", "torchrun", BY_HAND)  # launchers without a store for their ranks


class Met:
    """For `init`, as its comm: the rendezvous of a caller's ranks. rendezvous: an address and a port that all hosts
    have a route to, if that is known."""

    def __init__(self, place: Place, store: store_client.Rendezvous | None, rendezvous: tuple[str, int] | None) -> None:
        self.place, self.store, self.rendezvous = place, store, rendezvous

    def taken(self, values: dict[str, Any]) -> tuple[Place, store_client.Rendezvous | None]:
        """What `init` goes on with. Raises HvdInitError."""
        settle_secret(values, self.place)
        if self.rendezvous is not None:
            values["store_addr"], values["store_port"] = self.rendezvous
        return self.place, self.store


def refusal(place: Place) -> str | None:
    """Why a job of this shape cannot be run by this version, or None."""
    if place.size == 1:
        return None
    if place.source in ("MPI", *_UNKEPT, OWN):
        return None
    return (
        f"rank {place.rank} of {place.size} was found under {place.source}, which hvdlite cannot start under yet. "
        f"Start the job with: hvdlite-run -np {place.size} python ..."
    )


def settle_secret(values: dict[str, Any], place: Place | None) -> None:
    """Reads HVDLITE_SECRET_FILE where no HVDLITE_SECRET_KEY is given. Raises HvdInitError."""
    if values["secret_file"] is None:
        return
    from ..security import job_secret  # late: few need it

    try:
        values["secret_key"] = job_secret.settled(values)
    except job_secret.SecretError as error:
        named = "" if place is None else f"rank {place.rank}: "
        raise HvdInitError(f"{named}HVDLITE_SECRET_FILE cannot be used: {error} [HVD117]") from None


def meet(
    place: Place,
    settings: config.Settings,
    version: str,
    wire: int,
    process_sets: Sequence[Sequence[int]] = (),
    store: store_client.Rendezvous | None = None,
) -> tuple[store_client.Rendezvous, HostLayout]:
    """The joined store (`store`, or else the launcher's) and the host layout of all ranks.

    process_sets: the ranks of the static sets.

    Raises HvdInitError or HvdPeerLostError; nothing stays open then.
    """
    import json  # here, because a rank that is alone needs neither JSON nor sockets
    import socket

    from ..transport import host_id
    from . import placement

    values = settings.values
    by_hand = values["store_addr"] is not None and values["job_id"] is None  # hvdlite-run sets the job's number
    if store is None and (place.source in _UNKEPT or by_hand):
        from . import standalone_store

        values.update(standalone_store.found(place, config.environ(), values))
    store = store or _joined(place, values, version, wire)
    try:
        alike: dict[str, Any] = {"version": version, "wire": wire, "options": settings.agreed()}
        alike["process_sets"] = [list(ranks) for ranks in process_sets]
        claims = placement.claims(place, values["host_id"] or host_id(), socket.gethostname())
        mine = f"{json.dumps(alike)}\n{json.dumps(claims)}"
        records = records_of(store.allgather(mine.encode()))
        complaint = disagreement(records) or _core.named(values["plane"], values["algo"])
        if complaint is not None:
            store.bye()  # all ranks raise the same error and leave: none counts as lost
            raise HvdInitError(coded("HVD104", complaint))
        return store, placement.layout_of(records)
    except BaseException:
        store.close()
        raise


def records_of(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    """The records of all ranks. Equal parts are parsed once and shared: each of 500 ranks reads 500 records."""
    import json

    halves = [part.partition(b"\n") for part in parts]
    try:
        known = {alike: json.loads(alike) for alike in {alike for alike, _, _ in halves}}
        claims = json.loads(b"[" + b",".join(claim for _, _, claim in halves) + b"]")
        if len(claims) != len(parts):
            raise ValueError
        return [{**known[alike], **claim} for (alike, _, _), claim in zip(halves, claims)]
    except (ValueError, TypeError):
        raise HvdInitError("a rank sent an invalid record: install the same hvdlite on all hosts [HVD104]") from None


def _joined(place: Place, values: Mapping[str, Any], version: str, wire: int) -> store_client.Rendezvous:
    """The launcher's store, joined."""
    from . import store_client

    absent = [f"HVDLITE_{name.upper()}" for name in ("store_addr", "store_port", "secret_key") if values[name] is None]
    if absent:
        raise HvdInitError(
            f"rank {place.rank} of {place.size} has no address of the rendezvous ({', '.join(absent)} not set): "
            f"start the job with hvdlite-run -np {place.size} python ..., or set HVDLITE_STORE_ADDR to the host of "
            "rank 0 on all ranks [HVD103]"
        )
    return store_client.connect(
        values["store_addr"],
        values["store_port"],
        values["secret_key"],
        rank=place.rank,
        size=place.size,
        version=version,
        wire=wire,
        timeout=values["start_timeout"],
    )


def completed(place: Place, found: HostLayout | None) -> Place:
    """The rank assignment, with the numbers that no launcher has set. found: the host layout; None for a single
    rank."""
    if None not in place[:6]:
        return place
    if found is None:
        return place._replace(local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    from . import placement

    return placement.completed(place, found)


def link(
    place: Place, settings: config.Settings, store: store_client.Rendezvous, layout: HostLayout
) -> tuple[JobLinks, Rows] | tuple[None, None]:
    """Ways to make streams between ranks, as long as the job runs, and those of all ranks; None for a job over MPI
    whose hosts no stream joins. All ranks call it. Raises as `meet` does."""
    from ..transport import mesh

    values = settings.values
    rendezvous = None if values["store_addr"] is None else (values["store_addr"], values["store_port"])
    if place.source == "MPI":  # no store to be reached: what counts is the way to another host
        away = [name for name, host in zip(layout.host_name, layout.host_of) if host != layout.host_of[place.rank]]
        rendezvous = _named(away[0].partition("#")[0]) if away else None
    elif rendezvous and values["job_id"] is None and layout.hosts > 1 and _at_home(rendezvous, place.rank):
        rendezvous = None  # the store is on this host, which cannot know by which address others reach it
    secret, number = values["secret_key"] or store.secret, values["job_id"] or store.job
    common = (rendezvous, secret, number, store.epoch, place.rank, store.allgather, layout.host_of)
    votes = _vote_transport(place, values, layout)
    if votes == "mpi":
        return None, None
    if votes == "auto":
        found = mesh.find_links(*common, values["start_timeout"], values["wire_auth"])
        if not isinstance(found, str):
            return found
        if place.rank == 0:
            print(coded("HVD115", _NO_ROUTE.format(found)), file=sys.stderr, flush=True)
        return None, None
    timeout = values["start_timeout"]
    if values["member"] is not None:
        timeout /= 2  # the ends of a cut link report it before the other ranks' timeout
    links = mesh.open_links(*common, timeout, values["wire_auth"])
    try:
        return links, links.rows("set 0", range(place.size), store.check)
    except BaseException:
        links.close()
        raise


def _vote_transport(place: Place, values: Mapping[str, Any], layout: HostLayout) -> str:
    """tcp, mpi, or auto for what is found out. Raises HvdInitError for votes over an MPI that is not there."""
    votes = values["votes"]
    if votes not in ("auto", "tcp", "mpi"):
        raise HvdOptionError(f"HVDLITE_VOTES={votes!r}: must be auto, tcp or mpi [HVD801]")
    if votes == "mpi" and place.source != "MPI":
        raise HvdInitError(
            f"rank {place.rank}: HVDLITE_VOTES=mpi needs a job under MPI, but this job was found under "
            f"{place.source}: start it with mpirun or mpiexec, or unset HVDLITE_VOTES [HVD124]"
        )
    if place.source != "MPI" or layout.hosts == 1 or (votes == "auto" and values["plane"] in ("hier", "p2p")):
        return "tcp"
    return str(votes)


def _at_home(rendezvous: tuple[str, int], rank: int) -> bool:
    """Whether the route to the rendezvous never leaves this host. Raises HvdInitError."""
    from ..transport import address

    return address.End(address.towards(rendezvous, rank)[1][0], 0).is_loopback


def _named(host: str) -> tuple[str, int] | None:
    """An address to find the route to another host with; None where its name has none: then any route may do."""
    import socket

    try:
        socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    return host, 9


def disagreement(records: list[dict[str, Any]]) -> str | None:
    """What the ranks' records, in rank order, do not agree on, in one sentence; None if they agree."""
    for name, shown in (("version", "the version of hvdlite"), ("wire", "the version of the wire")):
        text = _split(records, [record.get(name) for record in records])
        if text is not None:
            return f"{shown} differs: {text}. Install the same hvdlite for all ranks."
    text = _split(records, [record.get("process_sets") for record in records])
    if text is not None:
        return f"the process sets given to init() differ: {text}. Give the same sets in the same order on all ranks."
    different = {id(record["options"]): record["options"] for record in records}.values()
    names = sorted({name for options in different for name in options}) if len(different) > 1 else []
    for name in names:
        text = _split(records, [record["options"].get(name) for record in records])
        if text is not None:
            variable = config.option_of(name).variable
            return f"the option {name} ({variable}) differs: {text}. It must be the same on all ranks."
    from . import placement

    return placement.misplaced(records)


def _split(records: list[dict[str, Any]], values: list[Any]) -> str | None:
    if all(value is values[0] for value in values):
        return None
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(repr(value), []).append(rank)
    if len(ranks_of) < 2:
        return None
    return ", ".join(f"{_ranks(ranks)} {value}" for value, ranks in ranks_of.items())


def _ranks(ranks: list[int]) -> str:
    """`rank 3 has`, `ranks 0-2, 5 have`."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {as_runs(ranks)} have"
