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
        self._unit = 1.0  # what a loss was multiplied by, of which they are
        self._scale: Callable[[], float] | None = None
        self._used = False  # since they were loaded

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
        if self._scale is None and self._used:
            self._unit = scale()  # they are what this backward pass has left
        self._scale = scale

    def of(self, number: int, count: int) -> torch.Tensor:
        """That of a parameter of so many elements, zeros at first."""
        self._used = True
        kept = self._kept.get(number)
        if kept is None or kept.numel() != count:
            kept = self._kept[number] = torch.zeros(count)
        return kept

    def put(self, number: int, residual: torch.Tensor) -> None:
        """Another one."""
        self._kept[number] = residual

    def state(self, setting: str, name_of: Callable[[int], str], shared: dict[str, Any]) -> dict[str, Any]:
        """For a state_dict: residuals of a loss that is not scaled, and what all ranks have in common."""
        residuals = {name_of(number): each / self._unit for number, each in self._kept.items()}
        place = {"rank": _core.rank(), "size": _core.size()}
        return {"compression": setting, **place, "residuals": residuals, "shared": shared}

    def load(
        self, state: Any, setting: str, number_of: dict[str, tuple[int, int]], fits: Callable[[dict[str, Any]], bool]
    ) -> bool:
        """What `state` has returned; residuals of another rank or job are dropped, with a warning. number_of: by name,
        the number and how many elements. fits: whether what is shared is. Whether it is a state of this compression."""
        self._kept.clear()
        self._incarnation, self._unit, self._used = incarnations(), 1.0, False
        if state is None:
            return False
        unlike = _unlike(state, setting, number_of, fits)
        found = {} if unlike else {name: each for name, each in state["residuals"].items() if bool(each.any())}
        why = unlike or _of_another(state, found)
        if why is None:
            for name, tensor in found.items():
                self._kept[number_of[name][0]] = tensor.detach().to("cpu", copy=True).reshape(-1)
        else:
            warn(
                f"hvdlite: rank {_core.rank()} does not load the residuals of compressed gradients, and begins with "
                f"zeros: {why}. Call optimizer.collect_residuals() before a checkpoint that one rank saves for all "
                "[HVD428]"
            )
        return unlike is None


def is_plain(tensor: Any) -> bool:
    """Whether a value from a file is a float32 tensor that has its memory."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and tensor.dtype == torch.float32


def _unlike(
    state: Any, setting: str, number_of: dict[str, tuple[int, int]], fits: Callable[[dict[str, Any]], bool]
) -> str | None:
    """Why a value is none of this compression's states. It may come from any file."""
    form = "the state has no residuals in hvdlite's form"
    if not isinstance(state, dict) or set(state) != {"compression", "rank", "size", "residuals", "shared"}:
        return form
    if type(state["compression"]) is not str or type(state["rank"]) is not int or type(state["size"]) is not int:
        return form
    if state["compression"] != setting:
        return f"they are of {state['compression']}, not of {setting}"
    if not isinstance(state["residuals"], dict) or not isinstance(state["shared"], dict):
        return form
    for name, each in state["residuals"].items():
        if not is_plain(each) or number_of.get(name, (0, -1))[1] != each.numel():
            return f"{name!r} has none of float32, or is no parameter of that size here"
        if not bool(each.isfinite().all()):
            return f"that of {name!r} is not finite"
    return None if fits(state["shared"]) else form


def _of_another(state: dict[str, Any], found: dict[str, torch.Tensor]) -> str | None:
    if found and state["size"] != _core.size():
        return f"they are of a job of {state['size']} ranks, not of {_core.size()}"
    return f"they are of rank {state['rank']}" if found and state["rank"] != _core.rank() else None


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
