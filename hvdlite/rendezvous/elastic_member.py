"""A process of an elastic job at the rendezvous: what it sends, and what it receives while it waits.

Its number, from the launcher; and the number of its last commit, which says whether it has state, and how new. Rank 0
also holds a connection on which the launcher announces ranks that wait to join and ranks that are to leave. Rank 0
reads it when the training function commits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import _core, config
from ..errors import HvdInitError
from . import discovery

if TYPE_CHECKING:
    from . import store_client  # else late: what it loads takes its time, and most jobs are not elastic

commit = -1  # the number of this process's last commit, the same on all ranks; -1: it has no state yet
entered = False
calls = 0  # of training functions, in this process
_returned: bool | None = False  # the training function, and the launcher knows; None: it has raised
_news: list[store_client.News] = []
_values: dict[str, Any] = {}


def is_elastic() -> bool:
    """Whether this process has joined an elastic job."""
    return bool(_values)


def joined(values: Mapping[str, Any], version: str, wire: int) -> tuple[discovery.Place, store_client.Store]:
    """Waits until the next epoch opens; this rank's assignment in it. Raises HvdRemoved, HvdInitError."""
    from . import store_client

    forget_news()
    store = store_client.connect_as(
        values["store_addr"],
        values["store_port"],
        values["secret_key"],
        member=values["member"],
        commit=commit,
        version=version,
        wire=wire,
        timeout=values["start_timeout"],
    )
    _values.clear()
    _values.update(values)
    place = discovery.Place(store.rank, store.size, store.local_rank, store.local_size, None, None, discovery.OWN)
    return place, store


def wait_preparing(values: Mapping[str, Any]) -> bool:
    """Whether this process is a newcomer that has not joined yet. It prepares while the other ranks go on, and
    joins when its training function begins. Until then its rank assignment is a guess (hvd.rank() is not 0)."""
    global entered
    if values["expected_place"] is None or entered:
        return False
    _values.clear()
    _values.update(values)
    rank, size, local_rank, local_size, cross_rank, cross_size = map(int, values["expected_place"].split(","))
    _core.prepare((rank, size, local_rank, local_size, cross_rank, cross_size))
    return True


def enter() -> bool:
    """The training function begins. Whether this process was preparing."""
    global entered
    entered = True
    was = bool(_core.preparing)
    _core.prepare(None)
    return was


def update_environment(place: discovery.Place) -> None:
    """Updates the variables from which scripts read their rank assignment."""
    numbers = {
        "RANK": place.rank,
        "SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank,
        "CROSS_SIZE": place.cross_size,
    }
    torchruns = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    torchruns["LOCAL_WORLD_SIZE"] = place.local_size
    ours = {
        prefix + name: number for prefix in (config.PREFIX, config.ALIAS_PREFIX) for name, number in numbers.items()
    }
    config.put({name: str(number) for name, number in {**torchruns, **ours}.items()})


def news() -> dict[str, int]:
    """Of rank 0: how many ranks wait to join ("come") and how many are to leave ("go"). The first call reports to the
    launcher that training has begun."""
    if not _values:
        return {}
    if not _news:
        _news.append(_watching(False))
    return _news[0].latest()


def trains(returned: bool | None) -> None:
    """Reports to the launcher whether the training function has returned on this rank: the end of its process has
    another meaning then. None: it has raised, and the script may catch that and end well."""
    global _returned
    if _values and returned != _returned:
        _returned = returned
        with contextlib.suppress(HvdInitError, OSError, ValueError):  # without a launcher no report is needed
            _watching(returned).close()


def _watching(returned: bool | None) -> store_client.News:
    from . import store_client

    address, port, secret = (_values[name] for name in ("store_addr", "store_port", "secret_key"))
    return store_client.News(address, port, secret, _values["member"], _values["start_timeout"], returned)


def forget_news() -> None:
    """The ranks change."""
    while _news:
        _news.pop().close()
