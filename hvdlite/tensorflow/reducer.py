"""Reducer of a list of gradients to their averages, for tape and optimizer.

Every gradient is a collective of its own, named by its variable, and all are started before the first is waited for.
They are started from the last variable to the first, since backward makes them in that order: in tf.function starts run
in the order of the program, so the last layer's gradient travels while those of the first are still computed.

`groups` makes gradients travel as one; results do not depend on it. Gradients that are None stay None: a variable must
have a gradient on all ranks or on none. Sparse ones are gathered, or made dense (`sparse_as_dense`). Whether all ranks
have the same list is checked before anything of it travels, in a graph while backward runs: see ../keras/list_check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from .. import metrics
from ..errors import HvdArgumentError
from ..keras.arguments import check_terms
from ..keras.list_check import SAME_GRADIENTS, Listed
from ..keras.naming import everywhere
from ..keras.quantized_lists import QuantizedLists
from ..ops import Average, Sum, Terms, op_of
from ..ops.arguments import NoneCompressor, Quantized, compress
from ..ops.wire import wire_compression
from ..process_sets.process_set import ProcessSet, global_process_set
from .compression import Compression
from .errors import as_tensorflow
from .initial_check import Rounds, data, start
from .ops import allreduce
from .ops.gradients import differentiable
from .ops.order import once_more
from .ops.quantized import of_list
from .ops.run import agree
from .strategy import Strategy


def key_of(variable: Any) -> Any:
    """By what a variable is recognized: Keras's variables and the tf.Variables inside them are one."""
    inner = getattr(variable, "value", None)
    return id(inner if isinstance(inner, tf.Variable) else variable)


def _name(prefix: str, index: int, count: int, variable: Any) -> str:
    return f"{prefix}.{index}of{count}.{everywhere(variable)}"


class Reducer:
    """Averages gradients by arguments that are given once. ValueError or TypeError for what cannot be or does not go
    together."""

    def __init__(
        self, prefix: str, compression: Any = NoneCompressor, sparse_as_dense: bool = False, op: int = Average,
        gradient_predivide_factor: float = 1.0, num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None, process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True
    ) -> None:  # fmt: skip
        check_terms(compression, gradient_predivide_factor, process_set)
        self.prefix, self.sparse_as_dense = prefix, bool(sparse_as_dense)
        self.op, self.process_set, self.scale_local = op_of(None, op), process_set, bool(scale_local_gradients)
        if gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average [HVD224]")
        self.predivide = float(gradient_predivide_factor)
        if groups is None and num_groups:
            groups = num_groups
        if groups is not None:
            lists = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
            if not lists and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 0):
                raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable. [HVD226]")
        self.groups = groups
        if self.op in (Average, Sum):
            compression = wire_compression(compression, Compression)
        rounds = isinstance(compression, Quantized)
        self.lists = QuantizedLists(compression, self.op, self.predivide, process_set) if rounds else None
        self.compression = NoneCompressor if rounds else compression  # of what is not rounded
        self.start: Rounds | None = None  # compares variables, of an optimizer of Keras
        self.data = data(process_set)  # compares gradients
        self.exchange: Any = None  # what reduces in the place of `_averages`: shares of a sharded optimizer
        self._local: dict[Any, Any] = {}  # the variables are held, so that their ids stay theirs

    def watch(self, state: Callable[[], list[Any]]) -> None:
        """What `state` returns is compared beside the variables, once a round is made."""
        self.start = start(self.process_set, state=state)

    def register_local(self, variable: Any) -> None:
        """Gradients of this variable stay this rank's, divided by the number of ranks where that is set."""
        self._local[key_of(variable)] = variable

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to average with."""
        return not self.process_set.included() or self.process_set.size() == 1

    def made_dense(self, gradient: Any) -> Any:
        """The gradient, dense if sparse ones shall become so."""
        return tf.convert_to_tensor(gradient) if self.sparse_as_dense and gradient is not None else gradient

    def _batches(self, indices: Sequence[int], variables: Sequence[Any]) -> list[list[int]]:
        """Which gradients travel as one: lists of indices, in the order of starting."""
        order = list(reversed(indices))
        if not self.groups:
            return [[index] for index in order]
        if isinstance(self.groups, int):
            count = min(self.groups, len(order))
            each, more = divmod(len(order), count) if count else (0, 0)
            starts = [i * each + min(i, more) for i in range(count + 1)]
            return [order[start:end] for start, end in zip(starts, starts[1:])]
        group_of = {key_of(variable): i for i, group in enumerate(self.groups) for variable in group}
        batches: dict[Any, list[int]] = {}
        for index in order:
            batches.setdefault(group_of.get(key_of(variables[index]), ("alone", index)), []).append(index)
        return list(batches.values())

    def __call__(self, gradients: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
        """The averages, None where a gradient is None."""
        found, owners = list(gradients), list(variables)
        if self.alone:
            self._stepped()
            return found
        self.refuse_sums(found)
        if isinstance(tf.distribute.get_strategy(), Strategy):
            raise as_tensorflow(
                HvdArgumentError(
                    f"{self.prefix}: hvd.Strategy sums gradients already: use either the strategy, or "
                    "DistributedOptimizer or DistributedGradientTape without a strategy [HVD224]"
                )
            )
        if self.lists is not None:
            found = [each if each is None or tf.is_tensor(each) else tf.convert_to_tensor(each) for each in found]
        prefix = once_more(self.prefix)
        before = self._agreed(prefix, found, owners)
        own = [(gradient, owner) for gradient, owner in zip(found, owners) if self._travels(gradient, owner)]
        travel = [owner for _, owner in own]
        if self.start is not None:
            with tf.control_dependencies(before):
                before += self.start(prefix, travel)
        with tf.control_dependencies(before):
            averages, done = (self.exchange or self._averages)(prefix, found, owners)
        self.data(prefix, travel, [gradient for gradient, _ in own], done)
        if self.op == Sum:
            for average, owner in zip(averages, owners):
                if self._travels(average, owner):
                    average._hvd_sum = True
        self._stepped()
        return averages

    def refuse_sums(self, gradients: Iterable[Any]) -> None:
        """HvdArgumentError for the sums of another reduction, such as a tape's, that would be summed once more."""
        if self.op == Sum and any(hasattr(gradient, "_hvd_sum") for gradient in gradients):
            raise HvdArgumentError(
                f"{self.prefix}: these gradients are sums over the ranks already: use either DistributedGradientTape "
                "or DistributedOptimizer, not both with op=hvd.Sum [HVD224]"
            )

    def _travels(self, gradient: Any, owner: Any) -> bool:
        return gradient is not None and key_of(owner) not in self._local

    def _stepped(self) -> None:
        """Eagerly this is a step; while a graph is made it is none: csrc/tensorflow/list_mismatch.c tells of those."""
        if tf.executing_eagerly():
            metrics.step(self)

    def _rounded(self, gradient: Any, owner: Any) -> str:
        """Whether this gradient travels in 8 or 4 bits, and how; empty: as it is. The same in both modes."""
        if self.lists is None or not self.lists.matters():
            return ""
        known = gradient.shape.is_fully_defined()
        shape = gradient.shape if known else tf.TensorShape(getattr(owner, "shape", None))
        return self.lists.mark(gradient.dtype.name, shape.num_elements())

    def _agreed(self, prefix: str, found: list[Any], owners: list[Any]) -> list[Any]:
        """Nothing of a list travels before all ranks are seen to have the same."""
        entries, count = [], 0
        for gradient, owner in zip(found, owners):
            local = key_of(owner) in self._local
            travels = self._travels(gradient, owner)
            count += travels
            sparse = isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense
            how = " sparse" if travels else " local" if local else " without gradient"
            if travels and not sparse:
                how = self._rounded(gradient, owner)
            entries.append(everywhere(owner) + how)
        listed = Listed(prefix, count, "gradients", entries, entries, SAME_GRADIENTS)
        nothing = all(entry.endswith(" local") for entry in entries)  # ever: another rank cannot wait for it
        return [] if nothing else agree(listed, self.process_set)

    def _averages(self, prefix: str, found: list[Any], owners: list[Any]) -> tuple[list[Any], list[Any]]:
        """The averages, and in a graph what is there once they are. No average itself will do for that: between those
        of one call and what depends on one is a node for all of them (tf.custom_gradient), which waits for backward's
        end."""
        dense: list[int] = []
        rounded: list[int] = []
        done: list[Any] = []
        for index, (gradient, owner) in enumerate(zip(found, owners)):
            if gradient is None:
                continue
            if key_of(owner) in self._local:
                found[index] = self._scaled(gradient)
            elif isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
                found[index] = allreduce(
                    gradient, op=self.op, compression=self.compression, process_set=self.process_set,
                    name=_name(prefix, index, len(found), owner),
                )  # fmt: skip
                done.append(found[index].values)
            else:
                (rounded if self._rounded(gradient, owner) else dense).append(index)
        if dense:
            done += self._reduce(prefix, found, owners, dense)
        if rounded:
            done += self._round(prefix, found, owners, rounded)
        return found, done

    def _round(self, prefix: str, found: list[Any], owners: list[Any], rounded: list[int]) -> list[Any]:
        """Replaces those at the places by what they are after rounding. After the others: it waits in its turn."""
        assert self.lists is not None
        terms = Terms(self.process_set, self.op, 1.0 / self.predivide, self.predivide)
        names = [_name(prefix, index, len(found), owners[index]) for index in rounded]
        given = [tf.convert_to_tensor(found[index]) for index in rounded]
        results, done = of_list(self.lists, prefix, given, [owners[index] for index in rounded], names, terms)
        for index, result in zip(rounded, results):
            found[index] = result
        return done

    def _scaled(self, gradient: Any) -> Any:
        """A local gradient as large as if it had been averaged."""
        if not self.scale_local:
            return gradient
        size = self.process_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(size, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)

    def _reduce(self, prefix: str, found: list[Any], owners: list[Any], dense: list[int]) -> list[Any]:
        """Replaces those at the places by their averages. Returns what is there once they are, in a graph."""
        terms = Terms(self.process_set, self.op, 1.0 / self.predivide, self.predivide)
        small: dict[int, tuple[Any, Any]] = {}
        for index in reversed(dense):
            small[index] = compress(self.compression, tf.convert_to_tensor(found[index]))
        batches = self._batches(dense, owners)
        if all(len(batch) == 1 for batch in batches):
            batches = [[batch[0] for batch in batches]]
        outcomes = []
        for batch in batches:
            names = [_name(prefix, index, len(found), owners[index]) for index in batch]
            grouped = bool(self.groups) and len(batch) > 1
            found_there = [small[index][0] for index in batch]
            outcomes.append(differentiable("allreduce", found_there, names, terms, grouped))
        for batch, outcome in zip(batches, outcomes):
            for index, result in zip(batch, outcome.results):
                found[index] = self.compression.decompress(result, small[index][1])
        return [each for outcome in outcomes for each in outcome.rows]
