"""Registry of generators: each has a name, and `make` calls it and proves its table.

    @plan.algorithm("mine", kinds=("allreduce",))
    def mine(draft, pieces=1):
        '''One line that hvdlite-plan list shows.'''

hvdlite's own stand in generators/, one file each. Other packages have an entry point in the group `hvdlite.plans`: a
module that uses `algorithm`. One that raises is a line, never an end.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from .draft import Draft
from .links import Links
from .proof import prove
from .table import KINDS, NAME_MAX, SIZE_MAX, PlanError, Table, from_json, named, plain

GROUP = "hvdlite.plans"
FILE_MAX = 64 << 20  # bytes: 2^20 moves of the longest numbers have 40 MB

Generator = Callable[..., None]


class _Algorithm(NamedTuple):
    kinds: tuple[str, ...]
    generator: Generator
    module: str  # "": of code that stands in none


_known: dict[str, _Algorithm] = {}


def algorithm(name: str, kinds: str | Sequence[str] = ("allreduce",)) -> Callable[[Generator], Generator]:
    """Decorate a generator of plans to register it under a name.

    Args:
        name (str): the name, not used by another plan.
        kinds (str or list of str): the kinds of collective that it makes. Default: ``("allreduce",)``.

    Returns:
        callable: a decorator of ``f(draft, **options)``, which calls ``move``, ``fold`` and ``next`` of the draft.

    Raises:
        PlanError: the name or a kind is not valid, or another plan has the name.

    Example:
        >>> from hvdlite import plan
        >>> @plan.algorithm("example of two", kinds="broadcast")
        ... def two(draft):
        ...     draft.move(0, 1, at=0, n=draft.chunks, how="copy")
        >>> plan.make("example of two", size=2, kind="broadcast").steps
        1
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not named(name, NAME_MAX):
        raise PlanError(f"plan {name!r:.80}: a name has at most {NAME_MAX} printable characters [HVD003]")
    if not kinds or not set(kinds) <= set(KINDS):
        raise PlanError(f"plan {name!r}: kinds {kinds!r:.80} must be from {', '.join(KINDS)} [HVD003]")

    def register(generator: Generator) -> Generator:
        here = getattr(generator, "__module__", None) or ""
        if name in _known:
            there = _known[name].module
            raise PlanError(f"plan {name!r} of {here}: {there} already has a plan of this name [HVD003]")
        _known[name] = _Algorithm(kinds, generator, here)
        return generator

    return register


def _own() -> None:
    package = import_module(".generators", __package__)
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")


def found_elsewhere() -> list[str]:
    """Registers the plans of other packages; a line for each package that could not be imported."""
    _own()
    every: Any = entry_points()  # Python 3.9 has no entry_points(group=...)
    points: Iterable[Any] = every.select(group=GROUP) if hasattr(every, "select") else every.get(GROUP, ())
    problems = []
    for point in points:
        try:
            point.load()
        except (Exception, SystemExit) as error:
            for name in [name for name, known in _known.items() if known.module and known.module not in sys.modules]:
                del _known[name]  # no half of a module
            problems.append(plain(f"plan {point.name} ({point.value}): {type(error).__name__}: {error}"))
    return problems


def names() -> dict[str, tuple[tuple[str, ...], str, str]]:
    """Of each plan its kinds, what it says of itself, and its package."""
    found_elsewhere()
    return {
        name: (
            known.kinds,
            plain(((known.generator.__doc__ or "").strip().splitlines() or [""])[0]),
            known.module.partition(".")[0],
        )
        for name, known in sorted(_known.items())
    }


def make(
    name: str,
    size: int,
    kind: str = "allreduce",
    root: int = 0,
    hosts: list[list[int]] | None = None,
    links: Links | None = None,
    **more: Any,
) -> Table:
    """Return the table of a plan, proved.

    Args:
        name (str): the name of the plan, such as ``"ring"``. ``hvdlite-plan list`` shows all.
        size (int): the number of ranks.
        kind (str): the kind of collective. Default: ``"allreduce"``.
        root (int): the root. Default: 0.
        hosts (list of lists of int, optional): the ranks of each host. None: those of ``links``.
        links (Links, optional): what joins the ranks, for generators that use it.
        more: options of the generator.

    Returns:
        Table: the plan.

    Raises:
        PlanError: there is no such plan, it does not make this kind, or its table is wrong.

    Example:
        >>> from hvdlite import plan
        >>> plan.make("ring", size=8).steps
        14
    """
    _own()
    if name not in _known:
        found_elsewhere()
    if name not in _known:
        raise PlanError(f"there is no plan {str(name)[:40]!r}; there are {', '.join(sorted(_known))} [HVD003]")
    kinds, generator, _ = _known[name]
    if kind not in kinds:
        raise PlanError(f"plan {name!r} is for {', '.join(kinds)}, not for {kind} [HVD003]")
    if not 1 <= size <= SIZE_MAX or not 0 <= root < size:
        raise PlanError(
            f"plan {name!r}: root {root} of {size} ranks is invalid; a plan is for 1 to {SIZE_MAX} ranks [HVD003]"
        )
    if links is not None and links.size != size:
        raise PlanError(f"plan {name!r} is for {size} ranks, but the links are for {links.size} [HVD004]")
    hosts = hosts or (links.hosts if links else None)
    if hosts and sorted(rank for each in hosts for rank in each) != list(range(size)):
        raise PlanError(f"plan {name!r}: hosts {plain(hosts, 80)} must list each of {size} ranks once [HVD004]")
    draft = Draft(name, kind, size, root, hosts, links)
    try:
        generator(draft, **more)
        table = draft.table()
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {plain(error, 200)}"
        raise PlanError(f"plan {name!r}: its generator raised {cause} [HVD003]") from error
    if (table.name, table.kind, table.size, table.root) != (name, kind, size, root):
        made = plain(f"{table.kind} on {table.size} ranks with the root {table.root}, {table.name!r}", 120)
        raise PlanError(f"plan {name!r}: its generator returned another plan than requested: {made} [HVD003]")
    prove(table)
    return table


def file(path: str) -> Table:
    """The table of a JSON file, proved. Raises PlanError, which names the file."""
    try:
        with open(path, "rb") as opened:
            text = opened.read(FILE_MAX + 1)
        if len(text) > FILE_MAX:
            raise PlanError(f"more than {FILE_MAX >> 20} MB, which no plan has [HVD002]")
        table = from_json(text.decode())
        prove(table)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error} [HVD002]") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return table
