"""Arguments of a collective: reduce op, scales, root, splits, process set. One value, checked once, for all.

The public forms take Horovod's arguments and make a `Terms` of them; what submits, and what computes a gradient later,
reads it. Root ranks stay global here, as users name them; the rank inside a set is looked up at submission.

A compressor belongs here too: it changes what travels. `Compressor` has two static functions, `compress(tensor)`, which
returns a tensor and whatever `decompress` needs, and `decompress(tensor, ctx)`. Users may write their own. `Quantized`
is none of these: its values cannot be added as they travel (quantized_sum.py).
"""

from __future__ import annotations

import math
from abc import ABCMeta
from typing import Any, NamedTuple

from .. import _core
from ..process_sets.process_set import ProcessSet, global_process_set


class Op(int):
    """A reduce op: the core's number of it, whose repr is the name that users write, such as ``hvd.Average``."""

    def __repr__(self) -> str:
        return f"hvd.{(_core.op_name(int(self)) or str(self)).capitalize()}"

    __str__ = int.__repr__


Average: int = Op(_core.OPS["average"])
Sum: int = Op(_core.OPS["sum"])
Adasum: int = Op(_core.OPS.get("adasum", 2))
Min: int = Op(_core.OPS["min"])
Max: int = Op(_core.OPS["max"])
Product: int = Op(_core.OPS["product"])


class Terms(NamedTuple):
    """Of one call, or of all members of a group."""

    process_set: ProcessSet = global_process_set
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    priority: int = 0
    root_rank: int = 0  # global
    splits: Any = None  # as the caller gave them
    exact: bool = False  # the gradient: the exact one, not Horovod's
    tracked: bool = False  # scatter: the root wants a gradient, which all must help to compute
    timeout: Any = None  # of a call that waits; see `handle.synchronize`


def op_of(average: bool | None, op: int | None) -> int:
    """The reduction that Horovod's two arguments ask for. ValueError if both are given or the core has no such op."""
    if average is not None:
        if op is not None:
            raise ValueError("average and op must not both be given: op replaces average [HVD206]")
        return Average if average else Sum
    if op is None:
        return Average
    if isinstance(op, bool) or not hasattr(op, "__index__") or _core.op_name(int(op)) is None:
        known = "hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product"
        raise ValueError(f"op={op!r} is not supported: use {known} [HVD206]")
    return int(op)


def reduction(
    average: bool | None, op: int | None, prescale: float, postscale: float, process_set: ProcessSet,
    timeout: Any = None
) -> Terms:  # fmt: skip
    """The terms of a reduction. ValueError as op_of, TypeError for factors that are no numbers; both for a timeout."""
    return Terms(process_set, op_of(average, op), float(prescale), float(postscale), timeout=_core.seconds_of(timeout))


def full_name(kind: str, name: str | None) -> str | None:
    """`allreduce.grad` of `grad`; None of None. TypeError for what is no text."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__} [HVD204]")
    return kind + name


class _Named(ABCMeta):
    """The class of compressors: hvdlite's own show as ``Compression.fp16``. A user's may be an ABC as well."""

    def __repr__(cls) -> str:
        ours = cls.__name__.endswith("Compressor") and cls.__module__.startswith("hvdlite.")
        name = cls.__name__.removesuffix("Compressor").lower() if ours else ""
        return f"Compression.{name}" if name else super().__repr__()


class Compressor(metaclass=_Named):
    """Base class of compressors, which change the form in which a tensor travels.

    Subclass it to write your own and pass the class, without an instance, as ``compression=``. The core adds up the
    compressed tensors of all ranks. They must therefore have the same shape and dtype on every rank, and their sum must
    be meaningful.

    Example:
        >>> class Halved(hvd.Compressor):
        ...     @staticmethod
        ...     def compress(tensor):
        ...         return tensor / 2, None
        ...     @staticmethod
        ...     def decompress(tensor, ctx):
        ...         return tensor * 2
        >>> hvd.allreduce(np.array([1.0]), compression=Halved).tolist()
        [1.0]
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor that travels.

        Args:
            tensor (array): what the caller gave.

        Returns:
            (array, object): the tensor that travels, of the same shape and dtype on all ranks, and what ``decompress``
            needs.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return what the caller gets.

        Args:
            tensor (array): the result of the collective.
            ctx (object): the second value of ``compress``.

        Returns:
            array: the result in the form of the caller's tensor.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are.

    Example:
        >>> hvd.Compression.none
        Compression.none
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor


class Quantized:
    """Compression of float tensors to 8 or 4 bits between hosts: ``hvd.Compression.int8`` and ``hvd.Compression.int4``.

    Blocks of 256 elements share a float32 scale, which makes 3.94 or 7.76 times fewer bytes than float32. The sum is
    made of the rounded values of each rank and rounded once more. All ranks get the same bits. A block with NaN or an
    infinity becomes NaN on all ranks. Inside a host, tensors travel as they are. Call it to change an option.

    Args:
        feedback (bool, optional): keep what rounding has lost on this rank, and add it to what is sent the next time.
            Default: True for optimizers, False for single calls, where it needs a ``name``.
        least_bytes (int): gradients of fewer bytes travel as they are. Single calls always compress. Default: 16384.
        bucket_mb (float): most MiB of gradients that travel together. Default: 25.

    Returns:
        Quantized: the same compression with other options.

    Raises:
        ValueError: for an invalid value.

    Example:
        >>> hvd.Compression.int8, hvd.Compression.int4(feedback=False).feedback
        (Compression.int8, False)
    """

    def __init__(
        self, bits: int, feedback: bool | None = None, least_bytes: int = 16384, bucket_mb: float = 25.0
    ) -> None:  # fmt: skip
        if bits not in (4, 8):
            raise ValueError(f"compression in {bits!r} bits is not supported: use 8 or 4 [HVD208]")
        if isinstance(least_bytes, bool) or not isinstance(least_bytes, int) or least_bytes < 0:
            raise ValueError(f"compression: least_bytes={least_bytes!r} must be a whole number of at least 0 [HVD208]")
        if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb < math.inf:
            raise ValueError(f"compression: bucket_mb={bucket_mb!r} must be a number above 0 [HVD208]")
        self.bits, self.feedback, self.least_bytes, self.bucket_mb = bits, feedback, least_bytes, float(bucket_mb)

    def __call__(
        self, feedback: bool | None = None, least_bytes: int | None = None, bucket_mb: float | None = None
    ) -> Quantized:
        """Return a copy with other options."""
        return Quantized(
            self.bits,
            self.feedback if feedback is None else bool(feedback),
            self.least_bytes if least_bytes is None else least_bytes,
            self.bucket_mb if bucket_mb is None else bucket_mb,
        )

    def __repr__(self) -> str:
        return f"Compression.int{self.bits}"

    def __reduce__(self) -> Any:
        """Copies have the options, and begin with nothing kept."""
        return Quantized, (self.bits, self.feedback, self.least_bytes, self.bucket_mb)

    def refuse(self, op: int) -> None:
        """ValueError for an op whose result rounded values would not be."""
        if op not in (Average, Sum):
            raise ValueError(
                f"compression={self!r} needs op=hvd.Average or hvd.Sum: the {_core.op_name(op)} of rounded values is "
                "not the rounded result [HVD208]"
            )


def compress(compression: Any, tensor: Any) -> tuple[Any, Any]:
    """`compression.compress(tensor)`. TypeError if it is no compressor."""
    function = getattr(compression, "compress", None)
    if function is None or not hasattr(compression, "decompress"):
        raise TypeError(
            f"compression must be hvd.Compression.none, .fp16, .bf16 or a class with compress and decompress, "
            f"not {compression!r} [HVD208]"
        )
    small, ctx = function(tensor)
    return small, ctx
