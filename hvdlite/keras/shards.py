"""Shards: what a rank keeps of a sharded optimizer of Keras 3, and the step on it.

A *piece* is a variable of one dimension: what this rank owns of a trainable variable. An optimizer of the original's
class and config, `inner`, steps on the pieces and has the state for them. It shares the learning rate and the count of
steps with the outer one. A step reduces the gradients, bucket by bucket, to the owners; copies the weights into the
pieces (a callback or a file may have changed them); steps `inner`; and gathers the pieces into the weights of all.

Buckets are filled up with zeros, so that each piece begins at a multiple of ALIGNED elements. Zeros travel with the
gradients only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import HvdError
from ..lifecycle.init import incarnations
from ..ops.arguments import compress
from ..training.consistency import require_equal
from ..training.shard_layout import Bucket, Item, Piece, lay_out
from . import backend
from .backend import keras
from .naming import everywhere
from .shard_state import ALIGNED, array, built, follow, take, variable_of

_BUCKET_BYTES = 25 << 20
_NONE = -1  # the number of what fills a bucket


class Shards:
    """The pieces of one rank, and the optimizer that steps on them."""

    def __init__(self, optimizer: Any, reduces: Any, loaded: list[Any] | None) -> None:
        self._owner, self._reduces, self.process_set = weakref.ref(optimizer), reduces, reduces.process_set
        self.prefix, self.ranks, self.me = reduces.prefix, self.process_set.size(), self.process_set.rank()
        self._incarnation, self._loaded = incarnations(), loaded
        self.buckets: list[Bucket] = []
        self.sizes: list[int] = []  # elements of each variable
        self.pieces: dict[int, tuple[Piece, Any]] = {}  # by the number of the variable, which is in one bucket
        self.inner: Any = None
        self.states: dict[int, list[Any]] = {}
        self.whole: tuple[int, Any] | None = None  # the step after which it was gathered, and a plain optimizer
        reduces.exchange = self.reduced

    @property
    def optimizer(self) -> Any:
        """The optimizer that users have."""
        return self._owner()

    def begin(self, owners: list[Any] | None, count: int) -> None:
        """Checks the variables of a step, as Keras does; before the first one the layout is made."""
        optimizer = self.optimizer
        if self._incarnation != incarnations():
            raise HvdError(
                "a sharded optimizer belongs to the ranks it was wrapped on, and hvd.init() was called again since: "
                "load a saved state into a new optimizer, and wrap that [HVD200]"
            )
        if not optimizer.built:
            if owners is None:
                raise ValueError("optimizer.build(variables) comes first, since no step has brought variables [HVD200]")
            optimizer.build(owners)
        known = optimizer._trainable_variables
        optimizer._check_variables_are_known(owners or ())
        if count not in (0, len(known if owners is None else owners)):
            raise ValueError(f"{count} gradients were given for {len(owners or known)} variables [HVD200]")
        if self.inner is None:
            with backend.outside_graph():
                self._lay_out(known)

    def _lay_out(self, variables: list[Any]) -> None:
        dtypes = [keras.backend.standardize_dtype(each.dtype) for each in variables]
        mine = [(everywhere(each), [int(n) for n in each.shape], dtype) for each, dtype in zip(variables, dtypes)]
        caller = "DistributedOptimizer(shard=True)"
        require_equal(caller, mine, self.process_set, lambda found: f"{found[:3]}", "Build the same model")
        if any(getattr(each, "overwrite_with_gradient", False) for each in variables):
            raise ValueError("shard=True does not support variables that float8 training overwrites [HVD200]")
        first = self.process_set.ranks[0]
        for number, each in enumerate(variables):
            name = f"{self.prefix}.start.{number}"
            value = keras.ops.convert_to_tensor(each)
            each.assign(backend.ops().broadcast(value, first, name=name, process_set=self.process_set))
        self.sizes = [int(np.prod(shape)) for _, shape, _ in mine]
        items = [
            Item(number, -(-self.sizes[number] // ALIGNED) * ALIGNED, dtype, array(variables[number]).itemsize)
            for number, (_, _, dtype) in enumerate(mine)
        ]
        self.buckets = [self._filled(bucket) for bucket in lay_out(items, _BUCKET_BYTES, None)]
        for bucket in self.buckets:
            for piece in self.pieces_of(bucket):
                value = array(variables[piece.number]).reshape(-1)[piece.begin : piece.end]
                made = variable_of(value, f"{everywhere(variables[piece.number])}_{piece.number}", bucket.kind)
                self.pieces[piece.number] = piece, made
        self.inner = built(self.optimizer, [made for _, made in self.pieces.values()])
        self.states = dict(zip(self.pieces, self.inner.states))
        inner, owner = self.inner.optimizer, self.optimizer
        inner.__dict__["_iterations"] = owner._iterations
        decays = {inner._var_key(made): variables[number] for number, (_, made) in self.pieces.items()}
        inner.__dict__["_use_weight_decay"] = lambda made: owner._use_weight_decay(decays[inner._var_key(made)])
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            take(self, loaded)

    def _filled(self, bucket: Bucket) -> Bucket:
        more = -bucket.total % (ALIGNED * self.ranks)
        return bucket._replace(numbers=[*bucket.numbers, _NONE], counts=[*bucket.counts, more])

    def pieces_of(self, bucket: Bucket) -> list[Piece]:
        """What this rank owns of it, without the elements that fill it."""
        found = [each for each in bucket.pieces(self.me, self.ranks) if each.number != _NONE]
        ended = [each._replace(end=min(each.end, self.sizes[each.number])) for each in found]
        return [each for each in ended if each.begin < each.end]

    def take(self, values: list[Any]) -> None:
        """A whole state, now or when there are shares."""
        if self.inner is None:
            self._loaded = values
        else:
            take(self, values)

    def saved(self) -> Any:
        """A plain optimizer with the whole state. ValueError if it was not gathered after the last step."""
        now = int(self.optimizer.iterations)
        if self.whole is None or self.whole[0] != now or self.whole[1] is None:
            why = "this rank has only its share of the state"
            if self.whole is not None:
                why = "only rank 0 has the whole state" if self.whole[1] is None else (
                    f"the whole state was gathered after step {self.whole[0]}, and this is step {now}"
                )  # fmt: skip
            raise ValueError(
                f"a sharded optimizer cannot be saved: {why}. Call optimizer.gather_state() on all ranks, then save on "
                "rank 0 [HVD200]"
            )
        return self.whole[1]

    def _numbers(self, owners: Sequence[Any]) -> list[int]:
        return [self.optimizer._get_variable_index(each) for each in owners]

    def _of(self, numbers: Iterable[int]) -> list[tuple[int, Bucket]]:
        """The buckets that travel: those of variables that have a gradient, which are the same on all ranks."""
        given = set(numbers)
        return [(index, bucket) for index, bucket in enumerate(self.buckets) if given.intersection(bucket.numbers)]

    def reduced(self, prefix: str, gradients: Sequence[Any], owners: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """This rank's share of each average, None where a gradient is; and what tells that they are there."""
        ops, reduces, numbers = keras.ops, self._reduces, self._numbers(owners)
        given = {number: self._dense(each, number) for number, each in zip(numbers, gradients) if each is not None}
        travel = self._of(given)
        flats = []
        for _, bucket in travel:
            parts = []
            for number, count in zip(bucket.numbers, bucket.counts):
                if number in given:
                    parts.append(ops.cast(ops.reshape(given[number], (-1,)), bucket.kind))
                    count -= self.sizes[number]
                if count:
                    parts.append(ops.zeros((count,), bucket.kind))
            flats.append(_joined(parts, bucket.kind))
        small = [compress(reduces.compression, each) for each in flats]
        shares, rows = backend.collectives(
            "reducescatter", [each for each, _ in small], [f"{prefix}.share.{index}" for index, _ in travel],
            self.process_set, op=reduces.op, prescale=1.0 / reduces.predivide, postscale=reduces.predivide,
        )  # fmt: skip
        mine = {}
        for (_, bucket), share, (_, ctx) in zip(travel, shares, small):
            share = reduces.compression.decompress(share, ctx)
            for piece in self.pieces_of(bucket):
                mine[piece.number] = ops.reshape(share[piece.offset : piece.stop], (piece.end - piece.begin,))
        nothing = ops.zeros((0,))
        return [mine.get(number, nothing) if number in given else None for number in numbers], rows

    def _dense(self, gradient: Any, number: int) -> Any:
        gradient = self._reduces.made_dense(gradient)
        if type(gradient).__name__ == "IndexedSlices":
            raise ValueError(
                f"shard=True: the gradient of {everywhere(self.optimizer._trainable_variables[number])!r} is sparse: "
                "use sparse_as_dense=True [HVD200]"
            )
        return gradient

    def step(self, shares: Sequence[Any], owners: Sequence[Any]) -> None:
        """Step on the pieces, and give all ranks what they have become."""
        ops, optimizer, inner = keras.ops, self.optimizer, self.inner.optimizer
        shares, owners = optimizer._filter_empty_gradients(shares, owners)
        given = dict(zip(self._numbers(owners), shares))
        travel, variables = self._of(given), optimizer._trainable_variables
        mine = [self.pieces[number] for _, bucket in travel for number in bucket.numbers if number in self.pieces]
        for piece, made in mine:
            flat = ops.reshape(ops.convert_to_tensor(variables[piece.number]), (-1,))
            made.assign(flat[piece.begin : piece.end])
        follow(inner, optimizer)
        inner.__dict__["_learning_rate"] = optimizer._learning_rate
        stepped = [(given[piece.number], made) for piece, made in mine if piece.number in given]
        if stepped:
            inner.apply(*zip(*stepped))
        else:
            optimizer._iterations.assign_add(1)
        values = [
            _joined([ops.reshape(self.pieces[n][1], (-1,)) for n in bucket.numbers if n in self.pieces], bucket.kind)
            for _, bucket in travel
        ]
        names = [f"{self.prefix}.weights.{index}" for index, _ in travel]
        wholes, _ = backend.collectives("allgather", values, names, self.process_set)
        for (_, bucket), whole in zip(travel, wholes):
            at = 0
            for number in bucket.numbers[:-1]:
                variable, count = variables[number], self.sizes[number]
                if number in given:
                    variable.assign(ops.reshape(whole[at : at + count], variable.shape))
                    if getattr(variable, "constraint", None) is not None:
                        variable.assign(variable.constraint(variable))
                at += count


def _joined(parts: list[Any], dtype: Any) -> Any:
    if len(parts) == 1:
        return parts[0]
    return keras.ops.concatenate(parts) if parts else keras.ops.zeros((0,), dtype)
