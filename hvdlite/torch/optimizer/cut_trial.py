"""Trial of an optimizer: whether its tensors may be cut anywhere, only between tensors, or not at all.

Three steps on a tensor and on its pieces, by optimizers that are twins of the one in question: the same class, the same
options of the group, no state. Where values and state have equal bits, the tensor may be cut anywhere, and the entries
of the state that have its shape are cut with it. Else three steps on two tensors, by one optimizer and by one for each:
equal bits mean that whole tensors may have different owners. Else the step on one tensor depends on the others (a norm
over all, LBFGS), and the optimizer cannot be sharded.

The gradients range over seven orders of magnitude, and the cuts fall beside the widths of vector instructions: a fused
Adam rounds the tail of a tensor differently from the rest, which the trial must find.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_SHAPE = (43, 24)
_CUTS = ((1, 6, 37, 64, 515), (17, 512))
_SHAPES_APART = ((12, 8), (5, 7))
_STEPS = 3


class Verdict(NamedTuple):
    """anywhere, keys: the state's entries that are cut with a tensor. refused: why it cannot be sharded, else empty."""

    anywhere: bool
    keys: frozenset[str]
    refused: str


def is_cut(key: str, value: torch.Tensor, shape: torch.Size, verdict: Verdict | None) -> bool:
    """Whether an entry of the state has one number for each element. shape: of what it is the state of.

    verdict: None if the parameter is whole. The trial knows the entries that the options made then; an option that was
    set later may make more.
    """
    if verdict is not None and verdict.anywhere:
        return key in verdict.keys or (value.dim() > 0 and value.shape == shape)
    return value.numel() > 1 and value.shape == shape


def twin(optimizer: Any, base: type, groups: Sequence[list[torch.Tensor]]) -> Any:
    """An optimizer of this class with the same options, other tensors, no state and no hooks."""
    made: Any = object.__new__(base)
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # of a scheduler
    hooks = [key for key, value in made.__dict__.items() if isinstance(value, OrderedDict) and "hooks" in key]
    made.__dict__.update((key, OrderedDict()) for key in hooks)
    made.state = defaultdict(dict)
    made.__dict__["param_groups"] = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": list(tensors)}
        for group, tensors in zip(optimizer.__dict__["param_groups"], groups)
    ]
    return made


def judge(optimizer: Any, base: type) -> Verdict:
    """What the trial finds, of each group and each kind of parameter in it."""
    anywhere, keys = True, set[str]()
    for index, group in enumerate(optimizer.__dict__["param_groups"]):
        for dtype, device in sorted({(each.dtype, each.device) for each in group["params"]}, key=str):
            trial = _Trial(optimizer, base, index, dtype, device)
            try:
                found = trial.cut()
            except Exception:  # one that takes matrices only, such as Muon
                found = None
            if found is not None:
                keys |= found
                continue
            anywhere = False
            try:
                apart = trial.apart()
            except Exception as error:
                return Verdict(False, frozenset(), f"a trial step failed ({type(error).__name__}: {error})")
            if not apart:
                return Verdict(False, frozenset(), "its step on one tensor depends on the others")
    return Verdict(anywhere, frozenset(keys if anywhere else ()), "")


def flags_of(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each group that choose how a step is computed."""
    return [
        {key: value for key, value in group.items() if isinstance(value, (bool, str, type(None)))}
        for group in optimizer.__dict__["param_groups"]
    ]


def depends_on_calls(optimizer: Any, base: type) -> bool:
    """Whether a step changes what is not a tensor's own, so that two steps on halves are not one on both."""
    group = optimizer.__dict__["param_groups"][0]
    kind = next(iter(group["params"]))
    made = _Trial(optimizer, base, 0, kind.dtype, kind.device)._stepped(
        [kind.new_ones(3)], lambda _: [kind.new_ones(3)]
    )

    def numbers(of: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in of.items() if isinstance(value, (int, float, str))}

    return numbers(made.param_groups[0]) != numbers(group) or numbers(made.__dict__) != numbers(optimizer.__dict__)


class _Trial(NamedTuple):
    optimizer: Any
    base: type
    group: int
    dtype: torch.dtype
    device: torch.device

    def _values(self, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 3, shape, generator=generator)
        return value.to(self.device, self.dtype)

    def _stepped(self, tensors: list[torch.Tensor], gradients: Callable[[int], list[torch.Tensor]]) -> Any:
        """A twin that has taken its steps on these."""
        groups = [tensors if at == self.group else [] for at in range(len(self.optimizer.__dict__["param_groups"]))]
        made = twin(self.optimizer, self.base, groups)
        for step in range(_STEPS):
            for tensor, gradient in zip(tensors, gradients(step)):
                tensor.grad = gradient.clone()
            with torch.no_grad():
                made.step()
        return made

    def cut(self) -> set[str] | None:
        """The entries of the state that are cut with a tensor. None: pieces do not become what the whole does."""
        keys: set[str] = set()
        for cuts in _CUTS:
            whole = self._values(1, _SHAPE)
            ends = [0, *cuts, whole.numel()]

            def cut(tensor: torch.Tensor, ends: list[int] = ends) -> list[torch.Tensor]:
                return [tensor.view(-1)[begin:end] for begin, end in zip(ends, ends[1:])]

            pieces = cut(whole.clone())
            one = self._stepped([whole], lambda step: [self._values(2 + step, _SHAPE)])
            many = self._stepped(pieces, lambda step, cut=cut: cut(self._values(2 + step, _SHAPE)))  # type: ignore[misc]
            if not _same(whole.view(-1), torch.cat(pieces)):
                return None
            for key, value in one.state[whole].items():
                parts = [many.state[piece].get(key) for piece in pieces]
                if isinstance(value, torch.Tensor) and value.shape == whole.shape:
                    if not _same(value.reshape(-1), torch.cat([part.reshape(-1) for part in parts])):
                        return None
                    keys.add(key)
                elif not all(_equal(value, part) for part in parts):
                    return None
        return keys

    def apart(self) -> bool:
        """Whether two tensors become the same by one optimizer and by one for each."""

        def gradients(step: int) -> list[torch.Tensor]:
            return [self._values(20 + step + 10 * at, shape) for at, shape in enumerate(_SHAPES_APART)]

        both = [self._values(5 + at, shape) for at, shape in enumerate(_SHAPES_APART)]
        each = [tensor.clone() for tensor in both]
        self._stepped(both, gradients)
        for at, tensor in enumerate(each):
            self._stepped([tensor], lambda step, at=at: [gradients(step)[at]])  # type: ignore[misc]
        return all(map(_same, both, each))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and _same(a.reshape(-1), b.reshape(-1))
    return type(a) is type(b) and bool(a == b)
