"""Comparison of replicas bit by bit, behind every adapter's `check_consistency`.

Weights should stay the same, since all ranks start from the root's and make the same steps; when one seeds, clips,
freezes or loads by itself they drift apart, and only the result shows it. Compared are bits, by digests: 16 bytes
a rank while all is well. Only where those differ do keys, shapes and digests of all leaves travel, to say which is the
first and on which ranks. So 0.0 and -0.0 differ, and two NaNs are the same if their bits are.

digest.py defines what is compared of a value. Objects whose pickles are equal are the same; of unequal ones with the
same text nothing is known, and the error reports that. Every rank gets the same difference, in the same words; also of
a rank that cannot compare its values. The exchange is named after the call: if a rank is in another call, the stall
report names it, and its messages there do not answer this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import HvdMismatchError
from ..errors.codes import code_of, coded
from ..ops.objects import allgather_object
from ..process_sets.process_set import ProcessSet
from .digest import Bits, digest, digested, refusal, unaddressed

CALLER = "check_consistency"
DRIFTED = "Start all ranks from one state with hvd.broadcast_state; change it on all alike."


class Leaf(NamedTuple):
    """Something to compare. `key`: what it is matched by on the other ranks; `name`: what errors call it."""

    key: str
    name: str
    value: Any


class _Entry(NamedTuple):
    """What a rank sends of a leaf; the last three as `digested` has them."""

    key: str
    name: str
    form: str
    digest: bytes
    shown: str


def leaves_of(part: Any, path: str, key: str | None = None) -> list[Leaf]:
    """Every leaf of a nested structure of dicts, lists and tuples, named by its path, in its order.

    key: what the structure itself is matched by, if not `path`. Leaves' keys distinguish what paths do not: "a.b" and b
    of a, 1 and "1". ValueError for what contains itself.
    """
    leaves: list[Leaf] = []
    around: set[int] = set()  # the containers that a leaf lies in, by id
    left = [(Leaf(repr(path) if key is None else key, path, part), False)]
    while left:  # no recursion, which ends at a thousand levels
        (key, path, part), done = left.pop()
        if done:
            around.remove(id(part))
        elif not isinstance(part, (Mapping, list, tuple)):
            leaves.append(Leaf(key, path, part))
        elif id(part) in around:
            raise refusal(path, f"it is the {type(part).__name__} that it lies in")
        else:
            around.add(id(part))
            left.append((Leaf("", "", part), True))
            inside = part.items() if isinstance(part, Mapping) else enumerate(part)
            steps = [Leaf(f"{key}[{step_of(step)}]", f"{path}.{step}", value) for step, value in inside]
            left.extend((leaf, False) for leaf in reversed(steps))
    return leaves


def step_of(key: Any) -> str:
    """How a dict's key stands in the key of a leaf: the same in every process, and 1 is not "1"."""
    if isinstance(key, (set, frozenset)):
        return f"{{{', '.join(sorted(map(step_of, key)))}}}"
    return repr(str(key)) if isinstance(key, str) else unaddressed(str(key))


def named_leaves(value: Any) -> list[Leaf]:
    """Leaves of a mapping, or of a list of values or of (name, value), which is what collectives of state take.

    ValueError for names that come twice, or for what is neither; values may be nested.
    """
    if isinstance(value, Mapping):
        named = list(value.items())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        named = [each if _is_named(each) else (str(i), each) for i, each in enumerate(value)]
    else:
        kind = type(value).__name__
        raise ValueError(f"check_consistency: expected a dict or a list of tensors, not {kind} [HVD237]")
    names = [str(name) for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"check_consistency: these names are not unique: {', '.join(twice)} [HVD237]")
    keys = [repr(str(name)) if isinstance(name, (str, int)) else step_of(name) for name, _ in named]
    return [leaf for name, key, each in zip(names, keys, named) for leaf in leaves_of(each[1], name, key)]


def _is_named(each: Any) -> bool:
    return isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)


def compare(
    found: Callable[[], Sequence[Leaf]],
    bits_of: Callable[[Any], Bits | None],
    process_set: ProcessSet,
    remedy: str = DRIFTED,
) -> None:
    """Returns when all ranks of the set have the same leaves with the same bits in the same order; else raises
    HvdMismatchError, the same on all ranks, naming the first leaf that differs and the ranks that differ from the first
    rank of the set. `bits_of`: of a tensor its Bits, None of what is none.

    found: this rank's leaves; dicts, lists and tuples among them are looked through. Whatever is raised while they are
    read the others receive, since they would wait for it: this rank raises it, they TypeError for a TypeError, else
    ValueError, with the rank's number. ValueError on all ranks for an object of which nothing can be known.
    """
    mine, wrong, refused = _compared(found, bits_of)
    total = digest([repr([(each.key, each.form, each.digest) for each in mine]).encode()])
    replies = allgather_object((total, refused), CALLER, process_set)
    if wrong is not None:
        raise wrong
    for rank, (_, theirs) in zip(process_set.ranks, replies):
        if theirs is not None and theirs[0]:
            raise TypeError(coded("HVD237", f"rank {rank}: {theirs[1]}"))
        if theirs is not None:
            raise ValueError(coded("HVD237", f"rank {rank}: {theirs[1]}"))
    if len({total for total, _ in replies}) > 1:
        _raise_difference(allgather_object(mine, f"{CALLER}.lists", process_set), process_set.ranks, remedy)


def _compared(
    found: Callable[[], Sequence[Leaf]], bits_of: Callable[[Any], Bits | None]
) -> tuple[list[_Entry], Exception | None, tuple[bool, str] | None]:
    """What is sent of each leaf; or what was raised instead, and what the other ranks get of it."""
    entries: list[_Entry] = []
    times: Counter[str] = Counter()
    name = ""
    try:
        for root in found():
            name = root.name
            for leaf in leaves_of(root.value, root.name, root.key):
                name = leaf.name
                times[leaf.key] += 1  # a dict may have two lambdas as keys, which nothing distinguishes
                key = leaf.key if times[leaf.key] == 1 else f"{leaf.key} ({times[leaf.key]})"
                entries.append(_Entry(key, name, *digested(leaf.name, leaf.value, bits_of)))
    except Exception as error:  # of any class: the others wait
        return [], error, (isinstance(error, TypeError), _words(error, name))
    return entries, None, None


def _words(error: Exception, name: str) -> str:
    """What is sent of an error, which may be a user's: a text with a code names its origin itself."""
    try:
        text = str(error)
    except Exception:
        text = "which has no text"
    where = f"{name!r} cannot be compared: " if name else ""
    return text if code_of(text) else f"{CALLER}: {where}{type(error).__name__}: {text}"


def _raise_difference(everyone: list[list[_Entry]], ranks: list[int], remedy: str) -> None:
    """What differs between the lists of all ranks, of which one at least is not as the others."""
    called = _called(everyone)
    lists = [sorted((each.key, each.form) for each in theirs) for theirs in everyone]
    if any(each != lists[0] for each in lists):
        shown = [[f"{called[key]}{form}" for key, form in each] for each in lists]
        text = differing_lists(CALLER, shown, ranks, _first_of, "Build the same model")
        raise mismatch("HVD301", text, lists, ranks)
    tables = [{each.key: each for each in theirs} for theirs in everyone]
    differing = [each.key for each in everyone[0] if len({table[each.key].digest for table in tables}) > 1]
    alike = [key for key in differing if len({table[key].shown for table in tables}) == 1 and tables[0][key].shown]
    if alike and alike == differing:
        kind = tables[0][alike[0]].shown.rpartition(" ")[0]
        why = f"the ranks' {kind} objects show alike but are pickled differently: they may be the same or not"
        raise refusal(called[alike[0]], why)
    if not differing:
        text = f"the ranks {ranks} have the same tensors in different orders. Build the same model."
        raise HvdMismatchError(coded("HVD302", f"{CALLER}: {text}"))
    clear = [key for key in differing if key not in alike]
    found = [table[clear[0]].digest for table in tables]
    others = [str(rank) for rank, theirs in zip(ranks, found) if theirs != found[0]]
    text = f"{called[clear[0]]!r} on rank{'s' * (len(others) > 1)} {', '.join(others)} is not what rank {ranks[0]} has."
    more = f" It is the first of {len(clear)} that differ." if len(clear) > 1 else ""
    raise mismatch("HVD302", f"{CALLER}: {text}{more} {remedy}", found, ranks)


def _called(everyone: list[list[_Entry]]) -> dict[str, str]:
    """What errors call each key: its name on the first rank that has it, but the key where two have one name."""
    names = {each.key: each.name for theirs in reversed(everyone) for each in theirs}
    times = Counter(names.values())
    return {key: name if times[name] == 1 else key for key, name in names.items()}


def _first_of(entries: Sequence[str]) -> str:
    return ", ".join(entries[:3]) + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")


def require_equal(
    caller: str, mine: list[Any], process_set: ProcessSet, shown: Callable[[list[Any]], str], advice: str
) -> None:
    """HvdMismatchError on all ranks unless these lists are equal; digests are compared first, so that equal lists cost
    16 bytes a rank. `shown`: entries in words."""
    if len(set(allgather_object(digest([repr(mine).encode()]), caller, process_set))) == 1:
        return
    everyone = allgather_object(mine, f"{caller}.lists", process_set)
    if any(theirs != everyone[0] for theirs in everyone):
        text = differing_lists(caller, everyone, process_set.ranks, shown, advice)
        raise mismatch("HVD301", text, everyone, process_set.ranks)


def mismatch(code: str, text: str, everyone: Sequence[Any], ranks: Sequence[int]) -> HvdMismatchError:
    """The error that names, as `ranks`, the ranks that differ from the first. everyone: by rank."""
    error = HvdMismatchError(coded(code, text))
    error.ranks = tuple(rank for rank, theirs in zip(ranks, everyone) if theirs != everyone[0])
    return error


def differing_lists(
    caller: str, everyone: list[list[Any]], ranks: list[int], shown: Callable[[list[Any]], str], advice: str
) -> str:
    """What the first list that is not the first rank's has, and lacks."""
    first = everyone[0]
    rank, theirs = next((rank, theirs) for rank, theirs in zip(ranks, everyone) if theirs != first)
    only_first = [entry for entry in first if entry not in theirs]
    only_theirs = [entry for entry in theirs if entry not in first]
    differences = [f"rank {ranks[0]} has {shown(only_first)}"] if only_first else []
    differences += [f"rank {rank} has {shown(only_theirs)}"] if only_theirs else []
    return f"{caller}: the ranks' parameters differ: {'; '.join(differences)}. {advice} on every rank."
