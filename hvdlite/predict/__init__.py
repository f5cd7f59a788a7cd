"""Prediction of training with more ranks, another network or another batch: `from hvdlite import predict`.

A job of two ranks is recorded (`hvdlite-run -np 2 --record DIR python train.py`) and played at other sizes:

    job = predict.load("DIR")
    job.step(ranks=64, hosts=8, link="25gbit,20us").ms        # also .low, .high, .exposed_ms, .notes

`hvdlite-trace predict DIR --ranks 8,64` prints the same. `Noise` estimates, while a job trains, how noisy its gradients
are, and `advise` which batch size pays off (Pollux). Names are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .goodput import Noise, advise
    from .prediction import Job, Prediction, load
    from .recording import RecordingError

_NAMES = {
    "Job": "prediction",
    "Noise": "goodput",
    "Prediction": "prediction",
    "RecordingError": "recording",
    "advise": "goodput",
    "load": "prediction",
}

__all__ = ["Job", "Noise", "Prediction", "RecordingError", "advise", "load"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'hvdlite.predict' has no attribute {name!r}")
    value = getattr(import_module(f".{_NAMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
