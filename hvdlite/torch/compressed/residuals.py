"""What compression has lost of each parameter's gradients on this rank, to be added to what it sends the next time.

Error feedback (J. Seide et al., 2014; S. P. Karimireddy et al., 2019). A residual belongs to a parameter and to a rank:
the sums of all ranks' gradients and residuals are what was given. So a residual is saved with the rank that it is of,
and loaded by that rank in a job of as many ranks. It is dropped when another job begins, as elastic training does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ... import _core
from ...errors.user_warning import warn
from ...lifecycle.init import incarnations

KEY = "hvdlite"  # of a state_dict
_COUNT = re.compile(r"#\d+$")


class Residuals:
    """By number of the parameter: float32 tensors in the CPU's memory, as long as the parameter."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._incarnation = incarnations()
        self._unit = 1.0  # what losses were multiplied by
        self._scale: Callable[[], float] | None = None

    def begin(self) -> None:
        """A round begins."""
        if self._incarnation != incarnations():
            self._incarnation = incarnations()
            self._kept.clear()
        if self._scale is not None:
            scale = self._scale()
            if scale != self._unit and scale > 0:
                for each in self._kept.values():
                    each.mul_(scale / self._unit)
                self._unit = scale

    def scaled_by(self, scale: Callable[[], float]) -> None:
        """Gradients are of a loss that a GradScaler multiplies by this."""
        if self._scale is None:
            self._scale, self._unit = scale, scale()

    def of(self, number: int, count: int) -> torch.Tensor:
        """That of a parameter of so many elements, zeros at first."""
        kept = self._kept.get(number)
        if kept is None or kept.numel() != count:
            kept = self._kept[number] = torch.zeros(count)
        return kept

    def put(self, number: int, residual: torch.Tensor) -> None:
        """Another one."""
        self._kept[number] = residual

    def bytes(self) -> int:
        """Memory that they take."""
        return sum(4 * each.numel() for each in self._kept.values())

    def numbers(self) -> list[int]:
        """Parameters that have one."""
        return sorted(self._kept)

    def state(self, setting: str, name_of: Callable[[int], str]) -> dict[str, Any]:
        """For a state_dict."""
        tensors = {name_of(number): each.clone() for number, each in self._kept.items()}
        place = {"rank": _core.rank(), "size": _core.size()}
        return {"compression": setting, **place, "loss_scale": self._unit, "residuals": tensors}

    def load(self, state: Any, setting: str, number_of: dict[str, tuple[int, int]]) -> bool:
        """What `state` has returned, with what is shared; residuals of another rank or job are dropped, with a warning.
        number_of: by name, the number and how many elements. Whether it is a state of this compression."""
        self._kept.clear()
        self._incarnation = incarnations()
        if state is None:
            return False
        why = _unlike(state, setting)
        if why is None:
            self._unit = float(state["loss_scale"])
            found = {name: each for name, each in state["residuals"].items() if bool(each.any())}
            other = _of_another(state, found) or _misfit(found, number_of)
            if other is None:
                for name, tensor in found.items():
                    self._kept[number_of[name][0]] = tensor.detach().to("cpu", torch.float32).reshape(-1).clone()
        if why or other:
            warn(
                f"hvdlite: rank {_core.rank()} does not load the residuals of compressed gradients, and begins with "
                f"zeros: {why or other}. Call optimizer.collect_residuals() before a checkpoint that one rank saves "
                "for all [HVD428]"
            )
        return why is None


def _unlike(state: Any, setting: str) -> str | None:
    """Why a state is none of this compression."""
    wanted = {"compression", "rank", "size", "loss_scale", "residuals", "shared"}
    parts = isinstance(state, dict) and set(state) == wanted
    if not parts or not isinstance(state["residuals"], dict) or not isinstance(state["shared"], dict):
        return "the state has no residuals in hvdlite's form"
    if not all(isinstance(each, torch.Tensor) for each in state["residuals"].values()):
        return "the state has no residuals in hvdlite's form"
    return None if state["compression"] == setting else f"they are of {state['compression']}, not of {setting}"


def _of_another(state: dict[str, Any], found: dict[str, torch.Tensor]) -> str | None:
    if found and state["size"] != _core.size():
        return f"they are of a job of {state['size']} ranks, not of {_core.size()}"
    return f"they are of rank {state['rank']}" if found and state["rank"] != _core.rank() else None


def _misfit(found: dict[str, torch.Tensor], number_of: dict[str, tuple[int, int]]) -> str | None:
    wrong = next((name for name, each in found.items() if number_of.get(name, (0, -1))[1] != each.numel()), None)
    return None if wrong is None else f"{wrong!r} is no parameter of that size here"


def saved_name(name: str) -> str:
    """Of a parameter, without the count of optimizers that its collectives have."""
    return _COUNT.sub("", name)


def without(state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict without what compression keeps."""
    return {key: value for key, value in state.items() if key != KEY} if KEY in state else state


def for_all(state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict without residuals, for other ranks or another job."""
    kept = state.get(KEY)
    return {**state, KEY: {**kept, "residuals": {}}} if isinstance(kept, dict) else state
