"""How does any torch optimizer become one whose gradients are averaged over all ranks, while backward still runs?

`DistributedOptimizer` returns an object of a new class, made of this file's methods and the class of the optimizer it
is given: isinstance, LR schedulers and GradScaler see the original. It takes over state and parameter groups, not
copies. A hook on each parameter fires when backward has accumulated its gradient; the gradient book says whether it is
due; if so, its allreduce starts in place, and backward goes on. `step` waits for all of them (`synchronize`), then
does what the original does. With one rank there are no hooks.

What users should know:
  - Every rank sends every trainable parameter once per step. Where backward did not reach one on this rank, zeros are
    sent and its gradient becomes the average of the others; where it was reached on no rank, the gradient becomes zero,
    not None, so weight decay and momentum act on it. Frozen parameters (requires_grad=False) are left alone.
  - Gradients are averaged once: `synchronize` before clipping, then `step`, with or without `skip_synchronize`.
  - GradScaler needs nothing special: whoever asks for `param_groups` after backward (unscale_ does) gets them with
    gradients already averaged, so all ranks find the same infinities and skip the same steps.
  - A second backward of gradients that are under way would race with the network, so it is an error that says what to
    do; if the gradient tensor was replaced (zero_grad to None), the first result is dropped instead.
  - `step(closure)` averages after every call of the closure.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _core
from ..errors import HvdError
from ..ops import Average, Handle, Sum, op_of
from ..optimizer import GradientBook
from .ops import plain

_used_names: dict[str, int] = {}  # how many optimizers have a parameter of that name: two models may share names


class _Exchange:
    """What a distributed optimizer holds besides the original: names, hooks, and gradients under way."""

    def __init__(self, op: int, prescale: float, postscale: float, passes_per_step: int) -> None:
        self.op, self.prescale, self.postscale = op, prescale, postscale
        self.book = GradientBook(passes_per_step)
        self.parameters: list[torch.Tensor] = []
        self.names: list[str] = []
        self.unhooked: list[int] = []  # frozen when they were added
        self.in_flight: dict[int, tuple[torch.Tensor, Handle]] = {}
        self.hooks: list[Any] = []
        self.synchronized = False  # since the last backward
        self.skipping = False

    def add(self, parameter: torch.Tensor, name: str) -> None:
        self.parameters.append(parameter)
        self.names.append(name)
        self.unhooked.append(self.book.add())
        self.hook_all()

    def hook_all(self) -> None:
        """Hook what requires grad by now."""
        waiting, self.unhooked = self.unhooked, []
        for number in waiting:
            if self.parameters[number].requires_grad:
                self.hooks.append(_on_gradient(self.parameters[number], weakref.ref(self), number))
            else:
                self.unhooked.append(number)

    def gradient_ready(self, number: int) -> None:
        """Backward has accumulated this gradient."""
        self.synchronized = False
        if self.book.is_sent(number):
            self.withdraw(number)
        if self.book.passed(number):
            self.send(number)

    def withdraw(self, number: int) -> None:
        """Drop the result of what was sent, as its gradient was replaced. HvdError if it was not."""
        gradient, handle = self.in_flight[number]
        if self.parameters[number].grad is gradient:
            raise HvdError(
                f"the gradient of {self.names[number]!r} was computed more than backward_passes_per_step="
                f"{self.book.passes_per_step} times before step(): it is being averaged already. Call step() or "
                "synchronize() between backward passes, or raise backward_passes_per_step to accumulate."
            )
        handle.wait()
        del self.in_flight[number]
        self.book.recall(number)

    def send(self, number: int) -> None:
        """Start averaging a gradient in place; zeros where there is none."""
        parameter = self.parameters[number]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise ValueError(
                f"the gradient of {self.names[number]!r} is sparse, which is not supported yet: make the embedding "
                "with sparse=False"
            )
        handle = plain.allreduce_async_(
            parameter.grad, name=self.names[number], op=self.op, prescale_factor=self.prescale,
            postscale_factor=self.postscale,
        )  # fmt: skip
        self.in_flight[number] = (parameter.grad, handle)
        self.book.sent(number)

    def finish(self) -> None:
        """Send the rest and wait for all; raises the first failure after all have ended."""
        self.hook_all()
        for number in self.book.unsent():
            if self.parameters[number].requires_grad or self.parameters[number].grad is not None:
                self.send(number)
        failure: Exception | None = None
        for _, handle in self.in_flight.values():
            try:
                handle.wait()
            except Exception as error:
                failure = failure or error
        self.in_flight.clear()
        self.book.reset()
        self.synchronized = True
        if failure is not None:
            raise failure


def _on_gradient(parameter: torch.Tensor, exchange: weakref.ref[_Exchange], number: int) -> Any:
    """Call gradient_ready when the parameter's gradient is accumulated, as long as the optimizer lives."""

    def ready(*_: Any) -> None:
        alive = exchange()
        if alive is not None:
            alive.gradient_ready(number)

    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        return parameter.register_post_accumulate_grad_hook(ready)
    node: Any = parameter.expand_as(parameter).grad_fn  # torch < 2.1
    node = node.next_functions[0][0]  # accumulates the gradient, as long as it is kept
    return node, node.register_hook(ready)


class _Distributed:
    """The methods that the new class puts before those of the optimizer's own class."""

    _hvd: _Exchange | None = None  # None: one rank, nothing to exchange

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. After backward their gradients are averaged first: see GradScaler above."""
        if self._hvd is not None and self._hvd.in_flight and not self._hvd.skipping and self._hvd.book.whole():
            self._hvd.finish()
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def synchronize(self) -> None:
        """Wait until all gradients are averaged, sending those that backward did not reach.

        Raises HvdMismatchError, HvdPeerLostError as `hvd.synchronize` does.
        """
        if self._hvd is not None:
            self._hvd.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within, step() does not synchronize: for use after synchronize(), when gradients were clipped or unscaled."""
        if self._hvd is None:
            yield
            return
        self._hvd.skipping = True
        try:
            yield
        finally:
            self._hvd.skipping = False

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The original's step, on averaged gradients. Returns what it returns."""
        exchange = self._hvd
        if closure is None:
            if exchange is not None and not exchange.skipping and not exchange.synchronized:
                exchange.finish()
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        else:
            if exchange is not None and exchange.in_flight:
                exchange.finish()
            result = super().step(self._averaging(closure), *args, **kwargs)  # type: ignore[misc]
        if exchange is not None:
            exchange.synchronized = False
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the original's step runs torch's step hooks, not this one too

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return averaged

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The original's zero_grad (set_to_none=...). Gradients under way are waited for and dropped."""
        if self._hvd is not None:
            if self._hvd.in_flight:
                self._hvd.finish()
            self._hvd.book.reset()
            self._hvd.synchronized = False
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The original's load_state_dict; backward passes are counted anew."""
        if self._hvd is not None:
            if self._hvd.in_flight:
                self._hvd.finish()
            self._hvd.book.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The original's add_param_group; the new parameters are averaged, too, under numbered names."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._hvd is not None:
            last = len(self.param_groups) - 1
            added = [(parameter, f"noname.{last}.{i}") for i, parameter in enumerate(self.param_groups[last]["params"])]
            suffix = _suffix_for([name for _, name in added])
            for parameter, name in added:
                self._hvd.add(parameter, name + suffix)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes after which gradients are averaged, from now on. ValueError below 1."""
        if self._hvd is not None:
            self._hvd.book.passes_per_step = passes


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    op: int = Average,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """An optimizer of the same class whose step() uses gradients averaged over all ranks.

    `named_parameters` (usually model.named_parameters()) name the tensors; all ranks must give the same names.
    `op` is Average or another op of allreduce. Gradients of `backward_passes_per_step` passes are summed before they
    travel. `gradient_predivide_factor` f, with Average only: each gradient is divided by f before the sum and by size/f
    after, which keeps fp16 sums in range. Raises ValueError for names that are missing or not unique and for
    arguments that do not go together, HvdNotInitializedError before init().
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    size, op = _core.size(), op_of(None, op)
    prescale, postscale = 1.0, 1.0
    if gradient_predivide_factor != 1.0:
        if op != Average:
            raise ValueError("gradient_predivide_factor needs op=hvd.Average")
        op, prescale, postscale = Sum, 1.0 / gradient_predivide_factor, gradient_predivide_factor / size
    GradientBook(backward_passes_per_step)  # its check, for one rank as well
    names = _names_of(optimizer, named_parameters)

    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (_Distributed, base), {"__module__": base.__module__}))
    wrapped.__dict__.update(optimizer.__dict__)
    if hasattr(wrapped.__dict__.pop("step", None), "_wrapped_by_lr_sched"):
        _tell_scheduler(optimizer, wrapped)
    if size > 1:
        exchange = _Exchange(op, prescale, postscale, backward_passes_per_step)
        for parameter, name in names:
            exchange.add(parameter, name)
        wrapped._hvd = exchange
        weakref.finalize(wrapped, _unhook, exchange.hooks)
    return wrapped


def _tell_scheduler(original: torch.optim.Optimizer, wrapped: Any) -> None:
    """A scheduler made before wrapping watches the original for step(), to warn of a wrong order: let it see ours."""
    original._opt_called = True  # type: ignore[attr-defined]
    wrapped._hvd_original = original  # the scheduler itself holds it as well; the groups are shared


def _unhook(hooks: list[Any]) -> None:
    for hook in hooks:
        (hook[1] if isinstance(hook, tuple) else hook).remove()


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[torch.Tensor, str]]:
    """Every parameter of the optimizer with its name on the wire, in order. ValueError as Horovod raises it."""
    groups = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        named = [(f"noname.{g}.{i}", p) for g, group in enumerate(groups) for i, p in enumerate(group)]
    else:
        named = list(named_parameters)
    if any(not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually model.named_parameters()"
        )
    counts: dict[str, int] = {}
    for name, _ in named:
        counts[name] = counts.get(name, 0) + 1
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"names in named_parameters must be unique; these are not: {', '.join(twice)}")
    name_of = {id(parameter): name for name, parameter in named}
    missing = [f"{g}.{i}" for g, group in enumerate(groups) for i, p in enumerate(group) if id(p) not in name_of]
    if missing:
        raise ValueError(
            "named_parameters does not name all parameters of the optimizer; missing (group.index): "
            + ", ".join(missing)
        )
    suffix = _suffix_for(counts)
    return [(parameter, name_of[id(parameter)] + suffix) for group in groups for parameter in group]


def _suffix_for(names: Iterable[str]) -> str:
    """What makes these names unlike those of earlier optimizers; the same on all ranks if they build in one order."""
    names = list(names)
    earlier = max((_used_names.get(name, 0) for name in names), default=0)
    for name in names:
        _used_names[name] = earlier + 1
    return f"#{earlier + 1}" if earlier else ""
