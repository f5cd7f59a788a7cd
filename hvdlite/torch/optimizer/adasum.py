"""Adasum: the ranks combine not their gradients but the changes that their own steps would make.

Each rank steps with its local gradient, sends the difference that this made to its parameters through Adasum, and all
start over from the same point plus the combined difference. So the original's rule (momentum, Adam's division) comes
before the combination, and nothing travels in backward. Optimizer state (momenta) is each rank's own.

GradScaler decides by a rank's own gradients whether to skip a step; here they are never averaged. When it looks for
infinities, the ranks agree first whether any has found one, and then all find one.

A signal handler may raise while this rank waits for the others' changes, which take its own: the next zero_grad() or
step() waits for the rest, and weights are equal again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._compile import _disable_dynamo

from ... import autotune
from ...errors import OUTCOMES, is_outcome
from ...ops import Adasum, Max
from ...process_sets.process_set import ProcessSet
from ..ops import plain
from .initial_check import StartCheck, sum_of_bits
from .methods import Copyless, asked_by_grad_scaler
from .names import added_later


class Combination:
    """What the delta optimizer holds besides the original."""

    def __init__(self, pairs: list[tuple[torch.Tensor, str]], suffix: str, compression: Any, process_set: ProcessSet):
        self.pairs, self.suffix, self.compression, self.process_set = pairs, suffix, compression, process_set
        self._start = StartCheck(suffix, process_set)
        self._begun = self._compares = self._combines = False  # a step is made, ends with a comparison, is taken
        self._left: deque[Any] = deque()
        self._under_way: deque[Any] = deque()

    def check(self) -> None:
        """Before a step: whether the ranks compare what they have, when it is over. Once for each step that is made."""
        if not self._begun:
            self._begun = True
            self._compares = self._start.begin([parameter for parameter, _ in self.pairs])
            if self._start.looks_at_data():
                for parameter, name in self.pairs:
                    if parameter.grad is not None and parameter.grad.layout is torch.strided:
                        finite = bool(torch.isfinite(parameter.grad).all())
                        self._start.data.add(name, int(sum_of_bits(parameter.grad) or 0), finite)

    def combine(self, starts: list[torch.Tensor]) -> None:
        """Parameters become their start plus the Adasum of all ranks' changes. Raises the first failure."""
        self._combines = True
        self._left.extend(zip(self.pairs, starts))
        self.complete()

    def complete(self) -> None:
        """What an exception has left of a combination: the other ranks have made it, or wait for it."""
        while self._left:
            (parameter, name), start = self._left[0]
            packed, ctx = self.compression.compress(parameter.detach() - start)
            handle = plain.allreduce_async_(packed, name=name, op=Adasum, process_set=self.process_set)
            self._under_way.append((parameter, start, handle, ctx))
            self._left.popleft()
        failure: Exception | None = None
        while self._under_way:
            parameter, start, handle, ctx = self._under_way[0]
            try:
                parameter.copy_(start + self.compression.decompress(handle.wait(), ctx))
            except Exception as error:
                if not is_outcome(error):
                    raise
                parameter.copy_(start)  # as on the other ranks
                failure = failure or error
            self._under_way.popleft()
        if self._compares and self._combines:
            self._start.compare([parameter for parameter, _ in self.pairs], [name for _, name in self.pairs])
        self._begun = self._begun and not self._combines
        self._combines = False
        if failure is not None:
            raise failure

    def drop(self) -> None:
        """Parameters get other values: what is left is nobody's concern."""
        for _, _, handle, _ in self._under_way:
            with suppress(*OUTCOMES):
                handle.wait()
        self._left.clear()
        self._under_way.clear()

    def forget(self) -> None:
        """All ranks go back to a commit: the next step is a new one."""
        self.drop()
        self._begun = self._compares = self._combines = False

    def agree_on_infinities(self) -> None:
        """If a rank's gradients are not finite, let no rank's be."""
        gradients = [parameter.grad for parameter, _ in self.pairs if parameter.grad is not None]
        values = [g if g.layout is torch.strided else g.coalesce().values() for g in gradients]
        bad = any(not torch.isfinite(value).all() for value in values)
        flag = torch.tensor([float(bad)])
        plain.allreduce_(flag, name="optimizer.infinite" + self.suffix, op=Max, process_set=self.process_set)
        if flag.item() and not bad:
            parameter = self.pairs[0][0]
            parameter.grad = torch.full_like(parameter, float("inf"))


class Delta(Copyless):
    """The original's step is taken locally, and its effect combined."""

    _hvd_delta: Combination
    _hvd_passes = 1

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        if asked_by_grad_scaler():
            self._hvd_delta.agree_on_infinities()
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def backward_passes_per_step(self) -> int:
        """What the optimizer was made with. Gradients do not travel, so nothing depends on it."""
        return self._hvd_passes

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The original's step with local gradients; then parameters move by the Adasum of the ranks' changes."""
        with torch.no_grad():
            self._hvd_delta.complete()
            starts = [parameter.detach().clone() for parameter, _ in self._hvd_delta.pairs]
            self._hvd_delta.check()
        if closure is not None:
            args = (closure, *args)
        try:
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        except BaseException:  # all start from the same point the next time, too
            with torch.no_grad():
                for (parameter, _), start in zip(self._hvd_delta.pairs, starts):
                    parameter.copy_(start)
            raise
        with torch.no_grad():
            self._hvd_delta.combine(starts)
        if autotune.watching:
            autotune.step(self)
        return result

    step.hooked = True  # type: ignore[attr-defined]

    @_disable_dynamo
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The original's zero_grad, once a step that an exception has left is over."""
        with torch.no_grad():
            self._hvd_delta.complete()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The original's load_state_dict; a step that an exception has left is dropped."""
        self._hvd_delta.drop()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Nothing to wait for: step() combines."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """AssertionError, as in Horovod: every step of this optimizer combines."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer. [HVD224]")
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing travels in backward."""
        yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The original's add_param_group; the changes of the new parameters are combined, too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        last, delta = len(self.param_groups) - 1, self._hvd_delta
        delta.pairs += added_later(last, self.param_groups[last]["params"], delta.suffix)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Kept, and of no consequence here."""
        self._hvd_passes = passes

    def register_comm_hook(self, state: Any, hook: Any, bucket_cap_mb: float = 25.0) -> None:
        """ValueError: there are no gradients to be reduced."""
        raise ValueError(
            "op=hvd.Adasum combines the changes of parameters, not gradients: it takes no comm hook [HVD227]"
        )
