"""Digests of values for comparison between ranks: of their bits, or of their pickle.

Arrays, buffers and other frameworks' tensors are read here; an adapter gives the bits of its own (`Bits`). Numbers and
texts show what they are. Any other object is pickled, in a form that has nothing of its process in it: no order of a
set, no address, and not whether two equal texts are one.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..errors.codes import code_of

GIVE = "Pass its content (numbers, texts, arrays, and dicts, lists and sets of them), or leave it out."
_PARTS, _BITS = 3, 21  # of a number; 2^21 ranks can add up the squares of as many bits
_PLAIN = (type(None), bool, int, float, complex, str)  # they show what they are, to the last bit


class Bits(NamedTuple):
    """What is compared of a tensor: its form, such as ([2, 3], "float32"), and the bytes of its memory, in pieces."""

    shape: tuple[int, ...]
    dtype: str
    blocks: Sequence[Any]


def unaddressed(text: str) -> str:
    return re.sub("0x[0-9a-fA-F]+", "0x", text)


def refusal(name: str, why: str) -> ValueError:
    return ValueError(f"check_consistency: {name!r} cannot be compared: {why}. {GIVE} [HVD237]")


def digest(blocks: Iterable[Any]) -> bytes:
    """16 bytes of what the blocks hold together."""
    sums = hashlib.blake2b(digest_size=16)
    for block in blocks:
        sums.update(block)
    return sums.digest()


def number_of(what: object) -> int:
    """63 bits, the same for what shows alike; not 0."""
    return int.from_bytes(digest([repr(what).encode()])[:8], "little") >> 1 | 1


def summands(number: int) -> list[int]:
    """What a rank adds to a sum that shows whether all have the same number, of 63 bits at most: `are_equal` reads it.
    Ranks that have joined add zeros, and do not count."""
    parts = [number >> _BITS * i & ((1 << _BITS) - 1) for i in range(_PARTS)]
    return [1, *parts, *(part * part for part in parts)]


def are_equal(sums: Sequence[int]) -> bool:
    """Whether all `summands` in this sum are of one number: n numbers are equal if n times the sum of their squares is
    the square of their sum."""
    count, *rest = sums
    return all(count * squares == total * total for total, squares in zip(rest[:_PARTS], rest[_PARTS:]))


def digested(name: str, value: Any, bits_of: Callable[[Any], Bits | None]) -> tuple[str, bytes, str]:
    """How the form of a value shows, its digest, and of what is compared by its pickle type and digest of how it shows;
    else "". What is no tensor has no form: it may be of another type elsewhere. ValueError, naming the value, for what
    cannot be compared; whatever an object raises.
    """
    reader = _Reader(bits_of, name)
    if type(value) in _PLAIN:
        return "", digest([repr(value).encode()]), ""
    bits = reader.bits(value)
    if bits is not None:
        return f" {list(bits.shape)} {bits.dtype}", digest(bits.blocks), ""
    objects = isinstance(value, np.ndarray)
    form = f" {list(value.shape)} {value.dtype}" if objects else ""
    shown = digest([unaddressed(repr(value.tolist() if objects else value)).encode("utf-8", "surrogatepass")]).hex()
    return form, reader.digest_of(value), f"{type(value).__qualname__} {shown}"


def _blocks(array: Any) -> list[bytes]:
    """The bytes of an array, but for those that mean nothing: between fields, and in a long double."""
    if isinstance(array, np.ma.MaskedArray):
        return _blocks(np.ma.getdata(array)) + _blocks(np.ma.getmaskarray(array))
    if array.dtype.names is not None:
        return [block for name in array.dtype.names for block in _blocks(array[name])]
    as_shown = array.dtype.hasobject or array.dtype.char in "gG"  # objects: the texts of a tensor
    return [repr(array.tolist()).encode() if as_shown else array.tobytes()]


class _Reader(NamedTuple):
    """Reads one leaf. bits_of: of this adapter's tensors; name: what errors call the leaf."""

    bits_of: Callable[[Any], Bits | None]
    name: str

    def bits(self, value: Any) -> Bits | None:
        """Of an array, a tensor of any framework, or bytes; None of anything else, and of an array of objects."""
        if isinstance(value, (np.ndarray, np.generic)):
            return None if value.dtype.hasobject else Bits(value.shape, str(value.dtype), _blocks(value))
        found = self.bits_of(value)
        if found is not None or type(value) in _PLAIN or isinstance(value, type):
            return found
        if hasattr(value, "__dlpack__") or (hasattr(value, "assign") and hasattr(value, "dtype")):
            try:  # a tensor or variable of another framework, of which nothing is known here
                value = np.asarray(value.detach() if hasattr(value, "detach") else value)  # PyTorch lends no parameter
            except Exception as error:
                why = f"NumPy cannot read this {type(value).__name__}: {unaddressed(str(error))}"
                raise refusal(self.name, f"{why}; hvdlite's check_consistency for its framework can") from error
            return Bits(value.shape, str(value.dtype), _blocks(value))
        try:
            view = memoryview(value)
        except (TypeError, BufferError):
            return None
        form = f"{type(value).__name__} {view.format}"  # O: addresses
        return None if "O" in view.format else Bits(view.shape or (), form, [view.tobytes()])

    def digest_of(self, value: Any) -> bytes:
        """Of an object, by its pickle. ValueError for what cannot be pickled."""
        try:
            try:
                return self.pickled(value, True)
            except ValueError:  # it contains itself, perhaps
                return self.pickled(value, False)
        except Exception as error:
            if code_of(str(error)):
                raise
            why = unaddressed(f"{type(error).__name__}: {error}")
            raise refusal(self.name, f"this {type(value).__name__} cannot be pickled ({why})") from error

    def pickled(self, value: Any, fast: bool) -> bytes:
        """The digest of the pickle."""
        file = io.BytesIO()
        pickler = _Pickler(file, 4)
        pickler.reader, pickler.fast = self, fast
        pickler.dump(value)
        return digest([file.getbuffer()])


class _Pickler(pickle.Pickler):
    """Pickles what is the same in the same way in every process; it is never loaded.

    A set is replaced by its sorted digests; of arrays and tensors, their bits; of a function, a class or a
    module, its name alone. fast: without notes of what came before, so that it does not matter whether two equal texts
    are one; what contains itself can only be pickled with them.
    """

    reader: _Reader

    def persistent_id(self, obj: Any) -> str | None:
        if type(obj) in _PLAIN or type(obj) in (dict, list, tuple):
            return None
        if isinstance(obj, (set, frozenset)):
            return f"{type(obj).__qualname__} {sorted(self.reader.pickled(each, self.fast) for each in obj)}"
        if isinstance(obj, (FunctionType, type, ModuleType)):
            return f"{getattr(obj, '__module__', '')}.{getattr(obj, '__qualname__', obj.__name__)}"
        if isinstance(obj, np.ndarray) and obj.dtype.hasobject:
            return f"{list(obj.shape)} {obj.dtype} {self.reader.pickled(obj.tolist(), self.fast)!r}"
        bits = self.reader.bits(obj)
        return None if bits is None else f"{list(bits.shape)} {bits.dtype} {digest(bits.blocks)!r}"
