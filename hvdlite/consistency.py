"""Have all ranks the same bits? The comparison behind every adapter's `check_consistency`.

Weights should stay the same, since all ranks start from the root's and make the same steps; when one seeds, clips,
freezes or loads by itself they drift apart, and nothing but the result says so. Compared are bits, by digests: 16 bytes
a rank while all is well. Only where those differ do keys, shapes and digests of all leaves travel, to say which is the
first and on which ranks. So 0.0 and -0.0 differ, and two NaNs are the same if their bits are.

An adapter says what lies in its tensors (`Bits`); whatever else stands in a model's or an optimizer's state (a number,
a text, None) is compared by how it shows. Every rank hears of the same difference, in the same words; also of a rank
that cannot compare what it was given. The exchange is named after the call, so a rank that is in another one is waited
for by name, and what it sends there is not taken for an answer here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._coded import coded
from .errors import HvdMismatchError
from .objects import allgather_object
from .process_set import ProcessSet

CALLER = "check_consistency"
DRIFTED = "Start all ranks from one state with hvd.broadcast_state; change it on all alike."


class Bits(NamedTuple):
    """What is compared of a tensor: its form, such as ([2, 3], "float32"), and the bytes of its memory, in pieces."""

    shape: tuple[int, ...]
    dtype: str
    blocks: Sequence[Any]


class Leaf(NamedTuple):
    """Something to compare. `key`: what it is matched by on the other ranks; `name`: what errors call it."""

    key: str
    name: str
    value: Any


def leaves_of(part: Any, path: str) -> list[Leaf]:
    """Every leaf of a nested structure of dicts, lists and tuples, named by its path."""
    if isinstance(part, Mapping):
        return [leaf for key, value in part.items() for leaf in leaves_of(value, f"{path}.{key}")]
    if isinstance(part, (list, tuple)):
        return [leaf for i, value in enumerate(part) for leaf in leaves_of(value, f"{path}.{i}")]
    return [Leaf(path, path, part)]


def named_leaves(given: Any) -> list[Leaf]:
    """Leaves of a mapping, or of a list of values or of (name, value), which is what collectives of state take.

    ValueError for names that come twice, or for what is neither; values may be nested.
    """
    if isinstance(given, Mapping):
        named = list(given.items())
    elif isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        named = [each if _is_named(each) else (str(i), each) for i, each in enumerate(given)]
    else:
        raise ValueError(
            f"check_consistency: expected a dict or a list of tensors, not {type(given).__name__} [HVD237]"
        )
    names = [str(name) for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"check_consistency: these names are not unique: {', '.join(twice)} [HVD237]")
    return [leaf for name, value in zip(names, named) for leaf in leaves_of(value[1], name)]


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

    found: this rank's leaves. What it refuses to compare, with ValueError or TypeError, the others hear of: they raise
    that, too, with the rank's number, since they would wait for it.
    """
    mine, wrong = _compared(found, bits_of)
    total = _digest([repr([(key, form, bits) for key, _, form, bits in mine]).encode()])
    refused = None if wrong is None else (isinstance(wrong, TypeError), str(wrong))
    said = allgather_object((total, refused), CALLER, process_set)
    if wrong is not None:
        raise wrong
    _raise_first(said, process_set.ranks)
    if len({total for total, _ in said}) == 1:
        return
    everyone = allgather_object(mine, f"{CALLER}.lists", process_set)
    ranks = process_set.ranks
    lists = [sorted((key, form) for key, _, form, _ in theirs) for theirs in everyone]
    if any(each != lists[0] for each in lists):
        called = {key: name for theirs in everyone for key, name, _, _ in theirs}
        shown = [[f"{called[key]}{form}" for key, form in each] for each in lists]
        raise HvdMismatchError(
            coded("HVD301", differing_lists(CALLER, shown, ranks, _first_of, "Build the same model"))
        )
    raise HvdMismatchError(coded("HVD302", _difference(everyone, ranks, remedy)))


def _compared(
    found: Callable[[], Sequence[Leaf]], bits_of: Callable[[Any], Bits | None]
) -> tuple[list[tuple[str, str, str, bytes]], ValueError | TypeError | None]:
    """(key, name, form, digest) of each leaf; or what is wrong with them."""
    try:
        return [(leaf.key, leaf.name, *_digested(leaf.value, bits_of)) for leaf in found()], None
    except (ValueError, TypeError) as error:
        return [], error


def _raise_first(said: Sequence[tuple[bytes, tuple[bool, str] | None]], ranks: Sequence[int]) -> None:
    """What the first rank that refuses has said."""
    for rank, (_, refused) in zip(ranks, said):
        if refused is not None:
            of_type, text = refused
            if of_type:
                raise TypeError(coded("HVD237", f"rank {rank}: {text}"))
            raise ValueError(coded("HVD237", f"rank {rank}: {text}"))


def _digest(blocks: Iterable[Any]) -> bytes:
    import hashlib  # not before it is needed: most programs never ask

    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.digest()


def _digested(value: Any, bits_of: Callable[[Any], Bits | None]) -> tuple[str, bytes]:
    """How a leaf's form shows, and its digest. What is no tensor has no form: it may be of another type elsewhere."""
    bits = bits_of(value)
    if bits is None:
        return "", _digest([repr(value).encode("utf-8", "surrogatepass")])
    return f" {list(bits.shape)} {bits.dtype}", _digest(bits.blocks)


def _difference(everyone: list[list[tuple[str, str, str, bytes]]], ranks: list[int], remedy: str) -> str:
    tables = [{key: bits for key, _, _, bits in theirs} for theirs in everyone]
    differing = [(key, name) for key, name, _, _ in everyone[0] if len({table[key] for table in tables}) > 1]
    if not differing:
        return f"check_consistency: the ranks {ranks} have the same tensors in different orders. Build the same model."
    key, name = differing[0]
    others = [str(rank) for rank, table in zip(ranks, tables) if table[key] != tables[0][key]]
    more = f" It is the first of {len(differing)} that differ." if len(differing) > 1 else ""
    return (
        f"check_consistency: {name!r} on rank{'s' * (len(others) > 1)} {', '.join(others)} is not what rank "
        f"{ranks[0]} has.{more} {remedy}"
    )


def _first_of(entries: Sequence[str]) -> str:
    return ", ".join(entries[:3]) + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")


def require_equal(
    caller: str, mine: list[Any], process_set: ProcessSet, shown: Callable[[list[Any]], str], advice: str
) -> None:
    """HvdMismatchError on all ranks unless these lists are equal; digests are compared first, so that equal lists cost
    16 bytes a rank. `shown`: entries in words."""
    if len(set(allgather_object(_digest([repr(mine).encode()]), caller, process_set))) == 1:
        return
    everyone = allgather_object(mine, f"{caller}.lists", process_set)
    if any(theirs != everyone[0] for theirs in everyone):
        raise HvdMismatchError(coded("HVD301", differing_lists(caller, everyone, process_set.ranks, shown, advice)))


def differing_lists(
    caller: str, everyone: list[list[Any]], ranks: list[int], shown: Callable[[list[Any]], str], advice: str
) -> str:
    """What the first list that is not the first rank's has, and lacks."""
    first = everyone[0]
    rank, theirs = next((rank, theirs) for rank, theirs in zip(ranks, everyone) if theirs != first)
    only_first = [entry for entry in first if entry not in theirs]
    only_theirs = [entry for entry in theirs if entry not in first]
    said = [f"rank {ranks[0]} has {shown(only_first)}"] if only_first else []
    said += [f"rank {rank} has {shown(only_theirs)}"] if only_theirs else []
    return f"{caller}: the ranks' parameters differ: {'; '.join(said)}. {advice} on every rank."
