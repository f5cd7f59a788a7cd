"""JAX's arrays outside of jit: as NumPy arrays over their memory, and back, without a copy on CPUs.

An array of JAX in the CPU's memory shows itself as a NumPy array, and an aligned NumPy array becomes one of JAX that
uses its memory. So the collectives work on NumPy arrays, bfloat16 and float8 of ml_dtypes among them; DLPack, which
does the same, has no bfloat16 in NumPy. What is on a GPU is copied to the CPU by JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..errors import HvdArgumentError
from ..numpy import NumpyAdapter, _named, aligned


class JaxAdapter(NumpyAdapter):
    """Arrays of JAX and NumPy; results are NumPy arrays that become arrays of JAX without a copy."""

    def accept(self, value: Any, writable: bool = False) -> Any:
        if isinstance(value, jax.Array):
            if len(value.devices()) > 1:
                raise HvdArgumentError(
                    f"the array lies on {len(value.devices())} devices of this process: give each rank one device "
                    "[HVD203]"
                )
            value = np.asarray(value)
        return super().accept(value, writable)

    def form(self, tensor: Any) -> Any:
        return None

    def like(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        return aligned(shape, tensor.dtype)

    def new(self, shape: tuple[int, ...], dtype: str) -> Any:
        return aligned(shape, _named(dtype))
