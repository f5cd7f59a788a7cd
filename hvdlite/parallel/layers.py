"""Layers divided over ranks by columns, by rows or by the vocabulary; the model stays the same.

A ColumnLinear followed by a RowLinear is a perceptron, or the attention between them, with one allreduce in forward and
one in backward. Initial weights are those of the whole layer: every rank makes it from the current seed and keeps its
part, so a model does not depend on how many ranks it is cut over. For that moment a rank has the memory of the whole.

A parameter that is cut has the attribute `cut`, the dimension along which it is; parts are in the order of the ranks.
One that is replicated has none, and the same gradient on all ranks. Where the sequence is cut between layers
(Korthikanti et al., 2022), SequenceParallel and the layers' `sequence=` see to that: what works on a part of the
sequence has a part of the gradient, and copy_to adds the parts.

Names are for messages: a layer without one makes unnamed collectives, which ranks match by their order. That is right
here: all ranks of a group run the same layers in the same order, forward and backward. Names from a counter would not
be, where ranks have made other layers before.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional

import hvdlite.torch as hvd

from ..torch.graph_break import keep_off_graph
from .tensor import Group, copy_to, from_sequence, gather_from, part_of, reduce_from, to_sequence


class ColumnLinear(nn.Module):
    """``torch.nn.Linear`` whose outputs are cut over the ranks of a group.

    The input (..., inside) is replicated; the output is this rank's part, (..., outside / n). Followed by a
    ``RowLinear`` it makes one allreduce in forward and one in backward (Megatron-LM, Shoeybi et al., 2019). It calls
    ``copy_to`` itself, so give it a replicated tensor (``gather_from`` makes one), or the cut one with ``sequence=``.
    Each rank makes the whole initial weight from the current seed and keeps its part.

    Args:
        inside (int): the number of inputs.
        outside (int): the number of outputs, a multiple of n * unit.
        group (ProcessSet): the ranks.
        bias (bool): add a bias. Default: True.
        gather (bool): return all outputs on all ranks. Default: False.
        unit (int): the number of outputs that stay together, such as those of an attention head. A layer for queries,
            keys and values then orders them by head, with unit = 3 * head size. Default: 1.
        name (str, optional): of its collectives. None: they are matched by their order.
        device (optional): as in ``torch.nn.Linear``.
        dtype (optional): as in ``torch.nn.Linear``.
        sequence (int, optional): the dimension along which the input is cut. The layer gathers it (``from_sequence``).
            None: the input is replicated.

    Raises:
        ValueError: the outputs cannot be divided evenly. In forward, the gradients would be added twice.

    Example:
        >>> from hvdlite import parallel
        >>> layer = parallel.ColumnLinear(2, 4, hvd.global_process_set)
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
        >>> layer = parallel.ColumnLinear(2, 4, hvd.global_process_set, sequence=1)
        >>> layer(torch.ones(1, 3, 2)).shape  # 3 places of a sequence of 6
        torch.Size([1, 6, 2])
    """

    bias: torch.Tensor | None

    def __init__(
        self, inside: int, outside: int, group: Group, bias: bool = True, gather: bool = False, unit: int = 1,
        name: str | None = None, device: Any = None, dtype: Any = None, sequence: int | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.gather, self.name, self.sequence = group, gather, name, sequence
        self._mine = _slice(f"ColumnLinear({inside}, {outside})", outside, unit, group)
        self._keep(nn.Linear(inside, outside, bias, device, dtype))

    def _keep(self, whole: nn.Linear) -> None:
        self.weight = _cut(whole.weight, 0, self._mine)
        self.register_parameter("bias", None if whole.bias is None else _cut(whole.bias, 0, self._mine))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x A + b for this rank's columns of A; with `gather` those of all ranks."""
        group, name, dim = self.group, self.name, self.sequence
        x = copy_to(x, group, name) if dim is None else from_sequence(x, dim, group, name)
        y = functional.linear(x, self.weight, self.bias)
        return gather_from(y, -1, self.group, self.name and self.name + ".gather") if self.gather else y


class RowLinear(nn.Module):
    """``torch.nn.Linear`` whose inputs are cut over the ranks of a group.

    The input is this rank's part, (..., inside / n). The output (..., outside) is replicated, or cut along
    ``sequence``. The layer calls ``reduce_from`` or ``to_sequence`` itself.

    Args:
        inside (int): the number of inputs of the whole layer, a multiple of n * unit.
        outside (int): the number of outputs.
        group (ProcessSet): the ranks.
        bias (bool): add a bias, once, after the sum. Default: True.
        unit (int): the number of inputs that stay together, as in the ``ColumnLinear`` before. Default: 1.
        name (str, optional): of its collectives. None: they are matched by their order.
        device (optional): as in ``torch.nn.Linear``.
        dtype (optional): as in ``torch.nn.Linear``.
        sequence (int, optional): the dimension along which the output is cut (``to_sequence``), a multiple of n. None:
            the output is replicated.

    Raises:
        ValueError: the inputs cannot be divided evenly. In forward, ``sequence`` cannot be.

    Example:
        >>> from hvdlite import parallel
        >>> layer = parallel.RowLinear(4, 3, hvd.global_process_set)
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 3])
        >>> layer = parallel.RowLinear(4, 3, hvd.global_process_set, sequence=1)
        >>> layer(torch.ones(1, 6, 2)).shape  # 3 places of a sequence of 6
        torch.Size([1, 3, 3])
    """

    bias: torch.Tensor | None

    def __init__(
        self, inside: int, outside: int, group: Group, bias: bool = True, unit: int = 1, name: str | None = None,
        device: Any = None, dtype: Any = None, sequence: int | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.name, self.sequence = group, name, sequence
        self._mine = _slice(f"RowLinear({inside}, {outside})", inside, unit, group)
        self._keep(nn.Linear(inside, outside, bias, device, dtype))

    def _keep(self, whole: nn.Linear) -> None:
        self.weight = _cut(whole.weight, 1, self._mine)
        self.register_parameter("bias", whole.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of x A for their rows of A, and b once, after it."""
        y = _summed(functional.linear(x, self.weight), self.sequence, self.group, self.name)
        if self.bias is None:
            return y
        named = self.name and self.name + ".bias"
        return y + (self.bias if self.sequence is None else copy_to(self.bias, self.group, named))


class VocabEmbedding(nn.Module):
    """``torch.nn.Embedding`` whose rows are cut over the ranks of a group.

    Ids (...) become (..., width), both replicated, or the output cut along ``sequence``. The number of words need not
    be a multiple of n. ``forward`` raises ``ValueError`` for an id that does not exist. On a GPU it does not check,
    because that would wait for the device; such an id gets zeros.

    Args:
        words (int): the number of rows of the whole table.
        width (int): the length of a row.
        group (ProcessSet): the ranks.
        name (str, optional): of its collectives. None: they are matched by their order.
        device (optional): as in ``torch.nn.Embedding``.
        dtype (optional): as in ``torch.nn.Embedding``.
        sequence (int, optional): the dimension along which the output is cut, a multiple of n. None: it is replicated.

    Raises:
        ValueError: there are fewer words than ranks.

    Example:
        >>> from hvdlite import parallel
        >>> table = parallel.VocabEmbedding(5, 3, hvd.global_process_set)
        >>> table(torch.tensor([0, 4])).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, words: int, width: int, group: Group, name: str | None = None, device: Any = None, dtype: Any = None,
        sequence: int | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.group, self.name, self.sequence = words, group, name, sequence
        self.first, self.last = _words(words, group)
        whole = nn.Embedding(words, width, device=device, dtype=dtype)
        self.weight = _cut(whole.weight, 0, slice(self.first, self.last))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids."""
        _check_ids("VocabEmbedding", ids, self.words)
        foreign = (ids < self.first) | (ids >= self.last)
        rows = functional.embedding((ids - self.first).masked_fill(foreign, 0), self.weight)
        return _summed(rows.masked_fill(foreign.unsqueeze(-1), 0), self.sequence, self.group, self.name)


class SequenceParallel(nn.Module):
    """A module with whole weights, such as ``torch.nn.LayerNorm``, that works on a sequence cut over a group.

    Each rank's part of the sequence gives a part of the gradients of its weights. This wrapper adds the parts in
    backward, so that copies stay alike. Parameters and buffers keep the names that they have in ``module``, and the
    wrapper takes its place in ``modules()``. Frozen parameters need no communication.

    Args:
        module (torch.nn.Module): has the same weights on all ranks, none of them cut.
        group (ProcessSet): the ranks over which the sequence is cut.
        name (str, optional): of its collectives. None: they are matched by their order.

    Raises:
        ValueError: a parameter is cut, as in ``ColumnLinear``.

    Example:
        >>> from hvdlite import parallel
        >>> tp = hvd.global_process_set
        >>> norm = parallel.SequenceParallel(torch.nn.LayerNorm(4), tp)
        >>> up = parallel.ColumnLinear(4, 8, tp, sequence=1)
        >>> down = parallel.RowLinear(8, 4, tp, sequence=1)
        >>> x = parallel.split_to(torch.ones(2, 6, 4), 1, tp)  # (batch, sequence, width)
        >>> x = x + down(torch.nn.functional.gelu(up(norm(x))))
        >>> x.shape, parallel.gather_from(x, 1, tp).shape
        (torch.Size([2, 3, 4]), torch.Size([2, 6, 4]))
    """

    _module: nn.Module

    def __init__(self, module: nn.Module, group: Group, name: str | None = None) -> None:
        super().__init__()
        for known, p in module.named_parameters():
            if hasattr(p, "cut"):
                raise ValueError(
                    f"SequenceParallel on rank {hvd.rank()}: {known!r} of {type(module).__name__} is cut, so its "
                    "gradient is complete: wrap norms and other modules with whole weights one by one [HVD038]"
                )
        self.group, self.name = group, name
        # Not a child, which would put "module." before its names in checkpoints: the two share what they hold.
        object.__setattr__(self, "_module", module)
        for held in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            object.__setattr__(self, held, getattr(module, held))
        self.training = module.training

    def train(self, mode: bool = True) -> SequenceParallel:
        """As in ``torch.nn.Module``."""
        self._module.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **rest: Any) -> Any:
        """The module's result for this rank's part of the sequence."""
        # By a call and not by hooks on the parameters: a pipeline puts other versions of the weights in their place.
        named = self._module.named_parameters()
        weights = {known: copy_to(p, self.group, self.name and f"{self.name}.{known}") for known, p in named}
        return functional_call(self._module, weights, args, rest)

    def extra_repr(self) -> str:
        """As in ``torch.nn.Module``."""
        return f"{type(self._module).__name__}({self._module.extra_repr()})"


def vocab_cross_entropy(
    scores: torch.Tensor, target: torch.Tensor, words: int, group: Group, ignore_index: int = -100,
    name: str | None = None
) -> torch.Tensor:  # fmt: skip
    """Return the mean cross entropy of scores whose words are cut over the ranks of a group.

    It is torch's cross entropy of the whole scores, but classes are the last dimension, and 16-bit scores give a
    float32 loss. Ranks exchange three numbers for each class of ``target``.

    Args:
        scores (torch.Tensor): shape (..., this rank's part of the words).
        target (torch.Tensor): classes, integers of shape (...), the same on all ranks.
        words (int): the number of words of all ranks.
        group (ProcessSet): the ranks.
        ignore_index (int): a class that does not count. Default: -100.
        name (str, optional): of its collectives. None: they are matched by their order.

    Returns:
        torch.Tensor: a scalar, the same on all ranks.

    Raises:
        ValueError: the shapes do not fit, or a class does not exist (not checked on a GPU).

    Example:
        >>> from hvdlite import parallel
        >>> loss = parallel.vocab_cross_entropy(torch.zeros(1, 2), torch.tensor([3]), 4, hvd.global_process_set)
        >>> round(float(loss.exp()), 3)
        4.0
    """
    first, last = _words(words, group)
    if target.shape != scores.shape[:-1] or target.is_floating_point():
        raise ValueError(
            f"vocab_cross_entropy: scores {list(scores.shape)} need integer classes of shape "
            f"{list(scores.shape[:-1])}, not {target.dtype} {list(target.shape)} [HVD017]"
        )
    if scores.shape[-1] != last - first:
        raise ValueError(
            f"vocab_cross_entropy: scores cover {scores.shape[-1]} words, but this rank's part of {words} words has "
            f"{last - first} [HVD017]"
        )
    counts = target != ignore_index
    if target.device.type == "cpu":
        _check_ids("vocab_cross_entropy", target[counts], words)
    return _VocabCrossEntropy.apply(scores, target, counts, first, group, name)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, target: torch.Tensor, counts: torch.Tensor, first: int, group: Any, name: Any
    ) -> torch.Tensor:
        def over_ranks(x: torch.Tensor, op: Any, what: str) -> torch.Tensor:
            called = None if name is None else f"{name}.{what}"
            return x if group.size() == 1 else hvd.allreduce(x, op=op, name=called, process_set=group)

        x = scores.to(torch.promote_types(scores.dtype, torch.float32))
        x = x - over_ranks(x.amax(-1), hvd.Max, "max").unsqueeze(-1)
        mine = counts & (target >= first) & (target < first + x.shape[-1])
        at = (target - first).masked_fill(~mine, 0).long().unsqueeze(-1)
        picked = x.gather(-1, at).squeeze(-1).masked_fill(~mine, 0)
        exponents = x.exp_()
        target_scores, total = over_ranks(torch.stack([picked, exponents.sum(-1)]), hvd.Sum, "sums")
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), at, mine, counts)
        ctx.dtype = scores.dtype
        return (total.log() - target_scores).masked_fill(~counts, 0).sum() / counts.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        softmax, at, mine, counts = ctx.saved_tensors
        scale = (counts * (gradient / counts.sum())).unsqueeze(-1)
        of_scores = (softmax * scale).scatter_add_(-1, at, -scale.masked_fill(~mine.unsqueeze(-1), 0))
        return of_scores.to(ctx.dtype), None, None, None, None, None


def parallelize(model: nn.Module, patterns: Mapping[str, str], group: Group) -> nn.Module:
    """Cut ``torch.nn.Linear`` layers of a model over the ranks of a group, in place, and return the model.

    All ranks of the group must have the same weights; each keeps its part. Make optimizers afterwards. The code between
    a column and a row layer must work on a part, such as fewer heads. A layer that gives all queries, then all keys,
    then all values is cut wrong; see ``unit`` of ``ColumnLinear``.

    Args:
        model (torch.nn.Module): the model.
        patterns (dict): shell patterns of dotted layer names, each with ``"column"`` or ``"row"``. The first that fits
            a layer decides.
        group (ProcessSet): the ranks.

    Returns:
        torch.nn.Module: ``model``.

    Raises:
        ValueError: a pattern fits no layer, or one that cannot be cut. Nothing is changed then.

    Example:
        >>> from hvdlite import parallel
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
        >>> _ = parallel.parallelize(model, {"0": "column", "1": "row"}, hvd.global_process_set)
        >>> model[0].weight.shape, model[1].weight.shape
        (torch.Size([2, 2]), torch.Size([2, 2]))
    """
    named = [(name, layer) for name, layer in model.named_modules(remove_duplicate=False) if name]
    owners: dict[Any, set[nn.Module]] = {}
    for layer in model.modules():
        for weight in layer.parameters(recurse=False):
            owners.setdefault(weight, set()).add(layer)
    made: dict[nn.Module, nn.Module] = {}
    for pattern, kind in patterns.items():
        found = [(name, layer) for name, layer in named if fnmatchcase(name, pattern)]
        whole = ", ".join(name for name, layer in named if type(layer) is nn.Linear) or "none"
        if not found or kind not in _KINDS:
            wrong = f"{kind!r} is neither 'column' nor 'row'" if found else "it matches no layer"
            raise ValueError(f"parallelize: {pattern!r}: {wrong}. The model's linear layers are: {whole} [HVD019]")
        for name, layer in found:
            above = model.get_submodule(name.rpartition(".")[0])
            if isinstance(above, nn.TransformerEncoderLayer):
                raise ValueError(
                    f"parallelize: {pattern!r} matches {name!r} of a TransformerEncoderLayer, which reads the full "
                    "weights itself in evaluation: write its layers as separate modules [HVD019]"
                )
            if type(layer) is not nn.Linear or any(len(owners[weight]) > 1 for weight in layer.parameters()):
                shared = "it shares a parameter with another layer"
                wrong = shared if type(layer) is nn.Linear else "it is not an nn.Linear"
                raise ValueError(
                    f"parallelize: {pattern!r} matches {name!r}, a {type(layer).__name__}, which cannot be split: "
                    f"{wrong}. The model's linear layers are: {whole} [HVD019]"
                )
            made[layer] = made.get(layer) or _KINDS[kind](
                layer.in_features, layer.out_features, group, layer.bias is not None, name=name, device="meta"
            )
    for layer, cut in made.items():
        cut._keep(layer)  # type: ignore[operator]
    for name, layer in named:
        if layer in made:
            above, _, own = name.rpartition(".")
            setattr(model.get_submodule(above), own, made[layer])
    return model


_KINDS: dict[str, Any] = {"column": ColumnLinear, "row": RowLinear}


def _summed(x: torch.Tensor, dim: int | None, group: Group, name: str | None) -> torch.Tensor:
    return reduce_from(x, group, name) if dim is None else to_sequence(x, dim, group, name)


def _slice(what: str, n: int, unit: int, group: Group) -> slice:
    if n % (unit * group.size()):
        parts = f"{n} parts" if unit == 1 else f"{n / unit:g} parts of {unit}"
        raise ValueError(f"{what}: {parts} cannot be divided evenly over {group.size()} ranks [HVD016]")
    return slice(*part_of(n, group))


def _words(words: int, group: Group) -> tuple[int, int]:
    if words < group.size():
        raise ValueError(f"a vocabulary of {words} words cannot be divided over {group.size()} ranks [HVD016]")
    return part_of(words, group)


def _cut(whole: torch.Tensor, dim: int, mine: slice) -> nn.Parameter:
    """This rank's part, in memory of its own, so that the whole can go."""
    part = whole.detach().narrow(dim, mine.start, mine.stop - mine.start)
    made = nn.Parameter(part.clone(memory_format=torch.contiguous_format), whole.requires_grad)
    made.cut = dim  # type: ignore[attr-defined]
    return made


def _check_ids(what: str, ids: torch.Tensor, words: int) -> None:
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < words:
        raise ValueError(
            f"{what}: ids from {int(ids.min())} to {int(ids.max())}, but the table has {words} rows [HVD017]"
        )


keep_off_graph(vocab_cross_entropy, _check_ids)  # they communicate, or look at values
