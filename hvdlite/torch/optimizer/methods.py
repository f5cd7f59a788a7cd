"""The methods of a distributed optimizer: what a training loop calls, put before those of the optimizer's own class.

Each makes the exchange complete a round where that has not happened yet, then does what the original does. In the
plain loop backward has completed it already. With one rank (or outside of the process set) `_hvd` is None, and the
methods are the original's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import torch
from torch._compile import _disable_dynamo

from ... import autotune, metrics
from ...errors.user_warning import warn
from ...ops import Average, Sum
from ...training.gradient_tracker import GradientTracker
from ..compressed.residual_methods import ResidualMethods
from ..compressed.residuals import KEY, without
from ..ops import plain
from .averages import Combination
from .buckets import InBuckets
from .failed_backward import TORN, VOID, apart
from .reducer import Exchange
from .reproducible_norm import clip, euclidean, greatest, known_norm

_SLOW_STEP = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code. [HVD242]"
)


class Copyless:
    """A distributed optimizer is one of a kind: its hooks and names belong to this process and these parameters.

    Libraries read private attributes of Horovod's optimizer: whether it has anything left to wait for, or what a
    parameter is called in a timeline. Each answer is made anew when it is read, so changing it has no effect. With one
    rank nothing is ever in flight.
    """

    _hvd: Exchange | None = None
    _hvd_passes = 1
    _hvd_names: dict[torch.Tensor, str]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a DistributedOptimizer ({type(self).__name__}) cannot be copied or pickled, because its copy would "
            "have no hooks: save optimizer.state_dict(). For a copied model, create a new optimizer, load that "
            "state, and wrap it in hvd.DistributedOptimizer [HVD228]"
        )

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        wire = None if self._hvd is None else self._hvd.wire
        return dict(self._hvd_names if wire is None else zip(wire.parameters, wire.names))

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """Parameters whose gradients are reduced."""
        return {parameter for parameter in self._parameter_names if parameter.requires_grad}

    @property
    def _handles(self) -> dict[torch.Tensor, Any]:
        """What is in flight: (handle, None)."""
        if self._hvd is None:
            return {}
        return {self._hvd.wire.parameters[number]: (one, None) for number, one in self._hvd.in_flight.items()}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """Backward passes after which the gradient is reduced."""
        if self._hvd is None:
            return dict.fromkeys(self._requires_update, self._hvd_passes)
        return {parameter: self._hvd.tracker.left(number) for number, parameter in enumerate(self._hvd.wire.parameters)}


_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def _now() -> int:
    """0 where torch.compile has the whole step in one graph: a look at the clock, or at the core, would cut it."""
    return 0 if _compiling() else monotonic_ns()


class Distributed(ResidualMethods, Copyless):
    """Gradients are averaged before the original's step."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. GradScaler, which looks for infinities in them, finds averaged gradients always."""
        exchange: Any = self._hvd
        if exchange is not None and exchange.carrier.keeps and called_by_grad_scaler():
            exchange.carrier.scaled_by(sys._getframe(1).f_locals.get("self"))
        due = exchange is not None and (not exchange.tracker.complete or exchange.behind) and not exchange.skipping
        if due and called_by_grad_scaler():
            exchange.complete()
            exchange.behind = None  # it decides as on the other ranks whether there is a step
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are summed before they travel."""
        return self._hvd_passes if self._hvd is None else self._hvd.tracker.passes_per_step

    @property
    def wait_in_backward(self) -> bool:
        """Whether backward returns when gradients are averaged. False: synchronize() and step() wait instead, which
        leaves more time to overlap, and clipping needs synchronize(). Set it to the same on all ranks."""
        return self._hvd is None or self._hvd.wait_in_backward

    @wait_in_backward.setter
    def wait_in_backward(self, wait: bool) -> None:
        if self._hvd is not None:
            self._hvd.wait_later(not wait)

    @_disable_dynamo
    def synchronize(self) -> None:
        """Wait until all gradients are reduced, and send those that backward did not reach.

        In a plain loop backward has done so. If a rank may skip backward, call this before clipping.

        Raises:
            HvdMismatchError: if the ranks disagree about a gradient.
            HvdPeerLostError: if a rank dies or leaves the job.
        """
        if self._hvd is not None:
            self._hvd.complete()
            self._hvd.synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step`` not synchronize inside a ``with`` block.

        Use it after ``synchronize``, when gradients were clipped or unscaled.

        Yields:
            None: the block runs with no value.
        """
        if self._hvd is None:
            yield
            return
        self._hvd.skipping = True
        try:
            yield
        finally:
            self._hvd.skipping = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward accumulate gradients without sending them inside a ``with`` block.

        The next backward outside the block sends the sum. ``step`` always sends what is left.

        Yields:
            None: the block runs with no value.
        """
        if self._hvd is None:
            yield
            return
        tracker = self._hvd.tracker
        before, tracker.accumulating = tracker.accumulating, True
        try:
            yield
        finally:
            tracker.accumulating = before

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step on the reduced gradients, as the original does.

        A closure's gradients are reduced after each of its calls. For LBFGS the loss is reduced as well.

        Args:
            closure (callable, optional): as in the original.
            args: more positional arguments of the original.
            kwargs: more keyword arguments of the original.

        Returns:
            object: what the original returns.

        Raises:
            HvdMismatchError: if the ranks disagree about a gradient, or one of them ended its backward by an exception.
            HvdPeerLostError: if a rank dies or leaves the job.
        """
        exchange = self._hvd
        if exchange is None:
            if closure is not None:
                args = (closure, *args)
            begun = _now()
            result = super().step(*args, **kwargs)  # type: ignore[misc]
            if begun:
                metrics.step(self, 0 if closure is not None else monotonic_ns() - begun)
            return result
        took, within = 0, False
        try:
            unready = not exchange.tracker.complete or exchange.synchronized or exchange.behind
            if unready and self._rests(closure is not None):
                return None
            begun = _now()
            if closure is None:
                within = True
                result = super().step(*args, **kwargs)  # type: ignore[misc]
                took = monotonic_ns() - begun if begun else 0
            elif exchange.skipping:
                result = super().step(closure, *args, **kwargs)  # type: ignore[misc]
            else:
                result = super().step(self._averaging(closure), *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            exchange.left_behind(within)
            raise
        exchange.tracker.reset()
        exchange.behind = exchange.untaken = None
        if begun:
            metrics.step(self, took)
        if autotune.watching:
            autotune.step(self)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the original's step runs torch's step hooks, not this one too

    @_disable_dynamo
    def _rests(self, closure: bool) -> bool:
        """Before a step: completes the round. Whether there is no step, on any rank."""
        exchange: Any = self._hvd
        if exchange.behind is TORN or (exchange.behind is VOID and not closure):
            raise apart(exchange.behind)
        rests, exchange.resting = exchange.resting and not closure, False
        if rests:
            exchange.synchronized = False
        elif exchange.skipping or closure:
            if exchange.tracker.in_flight() or exchange.failed is not None:
                exchange.finish()
        elif not exchange.tracker.complete:
            exchange.finish()
        elif exchange.synchronized:
            warn(_SLOW_STEP)
        exchange.synchronized = False
        return bool(rests)

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        exchange: Any = self._hvd

        def averaged() -> Any:
            exchange.tracker.complete = False
            loss = closure()
            exchange.resting = False
            exchange.complete()
            return self._average_loss(loss) if isinstance(self, torch.optim.LBFGS) else loss

        return averaged

    def _average_loss(self, loss: Any) -> Any:
        wire: Any = self._hvd.wire  # type: ignore[union-attr]
        if wire.op not in (Average, Sum) or wire.shares is not None:
            return loss
        value = torch.as_tensor(loss).detach().clone()
        return plain.allreduce(value, name="optimizer.loss" + wire.suffix, op=wire.op, process_set=wire.process_set)

    @_disable_dynamo
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The original's zero_grad (set_to_none=...). What is in flight is waited for and dropped."""
        if self._hvd is not None:
            self._hvd.restart()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The original's load_state_dict; backward passes are counted anew."""
        if self._hvd is not None:
            self._hvd.restart(drop=True)
        super().load_state_dict(without(state_dict))  # type: ignore[misc]
        if self._hvd is not None and self._hvd.carrier.keeps:
            self._hvd.carrier.keep(state_dict.get(KEY))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The original's add_param_group; the new parameters are averaged, too, under numbered names."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._hvd is not None:
            last = len(self.param_groups) - 1
            for parameter, name in added_later(last, self.param_groups[last]["params"], self._hvd.wire.suffix):
                self._hvd.add(parameter, name)
            self._hvd.wire.start.ask()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the averaged gradients by their norm over the whole model.

        Its bits do not depend on the number of ranks, and not on ``shard``. With ``shard=True`` it replaces
        ``torch.nn.utils.clip_grad_norm_``.

        Args:
            max_norm (float): greatest norm; above it the gradients are scaled.
            norm_type (float): 2 or infinity. Default: 2.
            error_if_nonfinite (bool): True raises an error for a norm that is not finite. Default: False.

        Returns:
            torch.Tensor: the norm before, float32 without a dimension.

        Raises:
            ValueError: for another ``norm_type``.
            RuntimeError: for a norm that is not finite, if that is an error.
        """
        if self._hvd is not None:
            self._hvd.complete()
        found = [each.grad for group in self.__dict__["param_groups"] for each in group["params"]]
        gradients = [gradient for gradient in found if gradient is not None]
        if known_norm(norm_type) == 2.0:
            count = sum(each.numel() for group in self.__dict__["param_groups"] for each in group["params"])
            norm = euclidean(gradients, count, lambda top: top, lambda sums: sums)
        else:
            norm = greatest(gradients)
        return clip(gradients, norm, max_norm, error_if_nonfinite)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes after which gradients are reduced.

        Args:
            passes (int): at least 1; the same on all ranks.

        Raises:
            ValueError: below 1.
        """
        tracker = GradientTracker() if self._hvd is None else self._hvd.tracker
        tracker.passes_per_step = passes
        self._hvd_passes = passes

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any], bucket_cap_mb: float = 25.0) -> None:
        """Let a function reduce the gradients, as in DistributedDataParallel.

        The hook is called for the same buckets in the same order on every rank. What it returns is the gradient:
        averaging, scaling and compression are up to the hook. Sparse gradients do not pass it. Call it once per
        optimizer.

        Args:
            state (object): first argument of the hook.
            hook (callable): ``hook(state, bucket)`` gets a ``GradBucket`` and returns the reduced flat tensor, a
                ``torch.futures.Future`` of it, or the handle of an asynchronous collective.
            bucket_cap_mb (float): greatest size of a bucket in MiB; the first one is of at most 1 MiB. Default: 25.

        Raises:
            RuntimeError: in a second call.
            ValueError: if ``op`` or ``compression`` of the optimizer is not the default, and for a cap that is not
                positive.
            TypeError: if ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"register_comm_hook expects hook(state, bucket), not {type(hook).__name__} [HVD227]")
        if self._hvd is None:
            return
        if isinstance(self._hvd.carrier, InBuckets):
            raise RuntimeError("register_comm_hook can only be called once for an optimizer [HVD227]")
        compressed = self._hvd.carrier.compresses or not self._hvd.wire.uncompressed
        if compressed or self._hvd.wire.weights is not None:
            raise ValueError("a comm hook replaces op and compression: leave them at their defaults [HVD227]")
        self._hvd.restart()
        self._hvd.carrier = InBuckets(self._hvd, state, hook, bucket_cap_mb)


def called_by_grad_scaler() -> bool:
    """Whether the property is read by GradScaler: it looks for infinities, on which all ranks must agree."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"


def added_later(group: int, parameters: Sequence[torch.Tensor], suffix: str) -> list[tuple[torch.Tensor, str]]:
    """Names of a parameter group that comes after the optimizer was wrapped. suffix: of the optimizer; a rank may come
    to add the group after others have made more optimizers."""
    return [(parameter, f"noname.{group}.{i}#added{suffix}") for i, parameter in enumerate(parameters)]


class Delta(Copyless):
    """Adasum: the original's step is taken locally, and its effect combined.

    GradScaler decides by a rank's own gradients whether to skip a step; here they are never averaged. When it looks for
    infinities, the ranks agree first whether any has found one, and then all find one.

    A signal handler may raise while this rank waits for the others' changes, which take its own: the next zero_grad()
    or step() waits for the rest, and weights are equal again.
    """

    _hvd_delta: Combination

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        if called_by_grad_scaler():
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
