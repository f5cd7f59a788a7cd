"""Private attributes of Horovod's optimizer that libraries read: names, gradients in flight, passes to come.

They look whether an optimizer has anything left to wait for, or what a parameter is called in a timeline. Each answer
is made anew when it is read, so changing it has no effect. With one rank nothing is ever in flight. They recognize a
distributed optimizer by the name of its class, which hvdlite.as_horovod sets.
"""

from __future__ import annotations

from typing import Any

import torch


class PrivateNames:
    """Read by a parameter, as in Horovod."""

    _hvd: Any
    _hvd_passes: int
    _hvd_names: dict[torch.Tensor, str]

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        exchange = getattr(self, "_hvd", None)
        return dict(self._hvd_names if exchange is None else zip(exchange.wire.parameters, exchange.wire.names))

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """Parameters whose gradients are reduced."""
        return {parameter for parameter in self._parameter_names if parameter.requires_grad}

    @property
    def _handles(self) -> dict[torch.Tensor, Any]:
        """What is in flight: (handle, None)."""
        exchange = getattr(self, "_hvd", None)
        if exchange is None:
            return {}
        return {exchange.wire.parameters[number]: (one, None) for number, one in exchange.in_flight.items()}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """Backward passes after which the gradient is reduced."""
        exchange = getattr(self, "_hvd", None)
        if exchange is None:
            return dict.fromkeys(self._requires_update, self._hvd_passes)
        return {parameter: exchange.book.left(number) for number, parameter in enumerate(exchange.wire.parameters)}
