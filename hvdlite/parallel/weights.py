"""Weight versions of a pipeline: the update policy says which weights a forward and a backward use.

    forward(k)   -> the parameters for micro-batch k as a dict, or None: the module's own
    backward(k)  a context in which the backward of k runs (PipeMare has other weights there than in the forward)
    collect(k)   after the backward of k: its gradients are added to those since the last update
    update(step) one more version; `step(factor)` runs the optimizer with learning rates times factor

A policy with numbers of its own also says what of them a checkpoint keeps: state() and load(state).

A version is a dict of leaf tensors that lie in the parameters' own memory, for torch.func.functional_call. An update is
in place unless a micro-batch in flight, or a later forward, wants the old version; then the parameters move to new
memory first, and the old memory stays with the old version (copy on write). So there are as many copies as versions
in use, and none with a flush.

Leaves come from `.data` and not from `.detach()`: they need a version counter of their own, or autograd takes the
optimizer's step, which goes to new memory, for a change of what it has saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ..errors.user_warning import warn
from .schedule import Action, copies

Leaves = dict[str, torch.Tensor]
Step = Callable[[float], None]


class StagePosition(NamedTuple):
    """Where in the pipeline a policy works. tau: updates between the forward and the backward of a micro-batch here, on
    average, read from the stage's list of actions."""

    stage: int
    stages: int
    per_update: int
    tau: float


class Policy:
    """The base of all: one version, which forward and backward see as it is."""

    flushes = False  # whether the pipeline is empty at each update

    def __init__(self, module: torch.nn.Module, place: StagePosition) -> None:
        self.module, self.params, self.place = module, dict(module.named_parameters()), place
        self._sums: dict[str, torch.Tensor] = {}
        self.version = 0  # updates made
        self.peak = 1  # versions that lay in memory at once

    def forward(self, k: int) -> Leaves | None:
        """What micro-batch k computes with; None: the module's own parameters, whose gradients autograd adds."""
        return None

    def backward(self, k: int) -> AbstractContextManager[Any]:
        """The context in which the backward of k runs."""
        return contextlib.nullcontext()

    def collect(self, k: int) -> None:
        """The backward of k is over."""

    def gradients(self) -> None:
        """Those since the last update become the parameters' .grad. Before, a zero_grad() of the user's would lose
        them. A parameter that is frozen by now has none."""
        for name, grad in self._sums.items():
            if self.params[name].requires_grad:
                self.params[name].grad = grad
        self._sums.clear()

    def update(self, step: Step) -> None:
        """One more version."""
        step(1.0)
        self.version += 1

    def restart(self, k: int) -> None:
        """The pipeline is empty, and k comes next."""

    def state(self) -> dict[str, Any]:
        """What the next updates read beside the parameters, while nothing is in flight: plain values that are the same
        on all stages, and dictionaries of one tensor or value for each parameter's name."""
        return {"version": self.version}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. A parameter that was elsewhere may be missing in a dictionary."""
        self.version = state["version"]

    @staticmethod
    def copies(place: StagePosition, actions: list[Action]) -> int:
        """How many versions will lie in memory at once when this list runs; for drawings."""
        return 1

    def _leaves(self) -> Leaves:
        found = {name: p.data.requires_grad_(p.requires_grad) for name, p in self.params.items()}
        for name, p in self.params.items():
            if getattr(p, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"parameter {name!r} has a hook after the accumulation of its gradient, which an update other than "
                    "'flush' does not call: use register_hook [HVD011]"
                )
            for hook in (p._backward_hooks or {}).values() if p.requires_grad else ():
                found[name].register_hook(hook)
        return found

    def _add(self, leaves: Leaves) -> None:
        """The leaves' gradients, in the order of micro-batches, as one process that accumulates adds them."""
        for name, leaf in leaves.items():
            grad, leaf.grad = leaf.grad, None
            if grad is not None:
                self._sums[name] = self._sums[name].add_(grad) if name in self._sums else grad


class Flush(Policy):
    """The pipeline is empty before each update: w(n+1) = w(n) - lr g(w(n)), as in one process that accumulates."""

    flushes = True


class Stash(Policy):
    """Weight stashing: forward with the newest weights, backward with the same (PipeDream, SOSP'19, section 3.3)."""

    def __init__(self, module: torch.nn.Module, place: StagePosition) -> None:
        super().__init__(module, place)
        self.versions: dict[int, Leaves] = {0: self._leaves()}
        self._users = {0: 0}  # micro-batches in flight, by version
        self._of: dict[int, int] = {}  # the version that micro-batch k has seen
        self._since = (0, 0)  # a micro-batch, and the version that it saw, when the pipeline was empty

    def restart(self, k: int) -> None:
        self._since = k, self.version
        self._drop()

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.versions, self._users = {self.version: self._leaves()}, {self.version: 0}

    def forward(self, k: int) -> Leaves:
        if not self._of:  # parameters may have been loaded, moved or replaced since
            self.params = dict(self.module.named_parameters())
            self.versions[self.version] = self._leaves()
        version = self._seen_by(k)
        self._of[k] = version
        self._users[version] += 1
        return self.versions[version]

    def collect(self, k: int) -> None:
        version = self._of.pop(k)
        self._add(self.versions[version])
        self._users[version] -= 1
        self._drop()

    def update(self, step: Step) -> None:
        if self._users[self.version] or self._keeps():
            for p in self.params.values():
                p.data = p.data.clone()
        super().update(step)
        self.versions[self.version], self._users[self.version] = self._leaves(), 0
        self._drop()
        self.peak = max(self.peak, len(self.versions))

    def _drop(self) -> None:
        for version in [v for v, users in self._users.items() if not users and not self._wanted(v)]:
            del self.versions[version], self._users[version]

    def _seen_by(self, k: int) -> int:
        return self.version

    def _wanted(self, version: int) -> bool:
        """Whether a later forward may still ask for it."""
        return version == self.version

    def _keeps(self) -> bool:
        """Whether a later forward may ask for the newest version once there is a newer one."""
        return False

    @staticmethod
    def copies(place: StagePosition, actions: list[Action]) -> int:
        return copies(actions, lambda k, done: done)


class Vertical(Stash):
    """Stashing with vertical sync: on every stage k sees the version that it saw on the first one (PipeDream, 3.3)."""

    def _seen_by(self, k: int) -> int:
        first, version = self._since
        return version + max(0, k - first - self.place.stages + 1) // self.place.per_update

    def _wanted(self, version: int) -> bool:
        return version >= self.version + self.place.stage // -self.place.per_update

    def _keeps(self) -> bool:
        return self.place.stage > 0

    @staticmethod
    def copies(place: StagePosition, actions: list[Action]) -> int:
        return copies(actions, lambda k, done: max(0, k - place.stages + 1) // place.per_update)


class TwoVersions(Stash):
    """2BW: w(n+1) = w(n) - lr g(w(n-1)) on every stage, with two copies at most (Narayanan et al., ICML'21, section
    3.1). After `drain` it starts anew: the next mini-batch sees the newest version. ValueError for fewer micro-batches
    in an update than stages: a stage would need a version not yet made."""

    def __init__(self, module: torch.nn.Module, place: StagePosition) -> None:
        if place.per_update < place.stages:
            raise ValueError(
                f"2bw needs at least as many micro-batches for each update as stages, but {place.per_update} < "
                f"{place.stages}: choose more micro-batches [HVD011]"
            )
        super().__init__(module, place)

    def _seen_by(self, k: int) -> int:
        first, version = self._since
        return version + max((k - first) // self.place.per_update - 1, 0)

    def _wanted(self, version: int) -> bool:
        return version >= max(self.version - 1, self._since[1])

    def _keeps(self) -> bool:
        return True

    @staticmethod
    def copies(place: StagePosition, actions: list[Action]) -> int:
        return copies(actions, lambda k, done: max(k // place.per_update - 1, 0))


class PipeMare(Policy):
    """One version in memory: forward with the newest, backward with w - tau d, near to what the forward saw, where d
    follows the mean step: d <- gamma d + (1 - gamma) (w_new - w_old), gamma = decay ** (1 / tau) (Yang et al.,
    arXiv 1910.05124, section 3, T2). In update n of the first `anneal` the learning rate is divided by
    max(tau, 1) ** (1 - n / anneal) (T1). The paper's first steps without delay (T3) are those of another Pipeline with
    schedule="1f1b" on the same stage.

    While the pipeline fills, a micro-batch is less than tau updates old: then it is corrected by its true age.
    """

    def __init__(
        self, module: torch.nn.Module, place: StagePosition, decay: float = 0.1353352832366127, anneal: int = 0,
        correct: bool = True
    ) -> None:  # fmt: skip
        super().__init__(module, place)
        self.gamma = decay ** (1 / place.tau) if place.tau else 0.0
        self.anneal, self.correct = anneal, correct and place.tau > 0
        self._drift = {name: torch.zeros_like(p) for name, p in self.params.items()} if self.correct else {}
        self._of: dict[int, tuple[int, Leaves]] = {}

    def forward(self, k: int) -> Leaves:
        if not self._of:  # parameters may have been replaced since
            self.params = dict(self.module.named_parameters())
            if self.correct:
                self._drift = {name: self._drift.get(name, torch.zeros_like(p)) for name, p in self.params.items()}
        leaves = self._leaves()  # new ones each time: autocast keeps the cast of a leaf that it knows
        self._of[k] = self.version, leaves
        return leaves

    @contextlib.contextmanager
    def backward(self, k: int) -> Any:
        age = self.version - self._of[k][0]
        tau = self.place.tau if age >= int(self.place.tau) else age
        if not self.correct or not tau:
            yield
            return
        kept = {name: p.data.clone() for name, p in self.params.items()}
        for name, drift in self._drift.items():  # into the memory that the graph has saved; .data: no version moves
            self.params[name].data.copy_(kept[name] - tau * drift)
        try:
            yield
        finally:
            for name, p in self.params.items():
                p.data.copy_(kept[name])

    def collect(self, k: int) -> None:
        self._add(self._of.pop(k)[1])

    def update(self, step: Step) -> None:
        old = {name: p.data.clone() for name, p in self.params.items()} if self.correct else {}
        share = min(self.version / self.anneal, 1.0) if self.anneal else 1.0
        super().update(lambda _: step(max(self.place.tau, 1.0) ** (share - 1.0)))
        for name, before in old.items():
            self._drift[name].mul_(self.gamma).add_(self.params[name].data - before, alpha=1 - self.gamma)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "drift": self._drift}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        new = [name for name in self._drift if name not in state["drift"]]
        if new:  # of a stage without a delay
            warn(f"the checkpoint has no mean step of {new[0]!r}, as PipeMare needs it here: it begins at 0 [HVD018]")
        for name, drift in self._drift.items():
            drift.copy_(state["drift"].get(name, torch.zeros_like(drift)))


POLICIES: dict[str, Callable[..., Policy]] = {
    "flush": Flush, "stash": Stash, "vertical": Vertical, "2bw": TwoVersions, "pipemare": PipeMare,
}  # fmt: skip
