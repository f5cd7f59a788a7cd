"""Protocol of a framework's tensors: what every collective needs to know about them.

An Adapter has a handful of methods; `ops` makes all collectives from their results. It knows nothing of ranks,
names or handles. A new framework is one such class and its optimizer hook.

The core takes contiguous memory only: an adapter says whether a tensor's is, and can make a copy that is. Addresses are
read when a collective is submitted; keeping that memory until it is finished is the business of `ops`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Device(Protocol):
    """A device whose memory the core moves, and how tensors come from there and go there."""

    number: int  # k + 1 for CUDA's device k

    def ready(self) -> tuple[int, Any]:
        """An event after all that the framework has begun there: its handle, and what keeps it alive. Where that is a
        `_core.Point`, `follow` and `fetch` wait for the device, and so do limits of time."""

    def follow(self, native: int, ready: Any) -> None:
        """What the framework begins there from now on comes after this collective, by its number in the core, and so
        does what it begins where `ready` was made: memory that is given up may be used there again at once."""

    def fetch(self, native: int, target: int, ready: Any) -> None:
        """`follow`, and the collective's result comes to this address in the order of what is begun there."""

    def found(self) -> int:
        """For the NaN guard, of the tensor whose view this is: how many elements are NaN, times 2^32, plus infinite."""

    def near(self, tensor: Any) -> Any:
        """A contiguous copy of a tensor in the CPU's memory."""

    def far(self, tensor: Any) -> Any:
        """A copy on the device of one in the CPU's memory."""


class View(NamedTuple):
    """A tensor's memory as the core sees it."""

    address: int
    shape: tuple[int, ...]
    dtype: int  # number in _core.DTYPES
    contiguous: bool  # row-major without gaps; the core takes nothing else
    device: Device | None = None  # None: it lies in the CPU's memory
    home: Device | None = None  # it is a copy in the CPU's memory of a tensor that lies there


class Adapter(Protocol[T]):
    """A framework's tensors."""

    def accept(self, value: Any, writable: bool = False) -> T:
        """The tensor that a caller's argument stands for. TypeError for what is no tensor of this framework,
        ValueError if it is to be written and cannot be."""

    def view(self, tensor: T) -> View:
        """Its memory. ValueError naming a dtype or device that is not supported."""

    def form(self, tensor: Any) -> Any:
        """What identifies this tensor's kind, hashable, if it may be read and written where it lies and its address is
        all that the core needs to know; else None, and the other methods are called. Cheap: every call of a
        collective calls it."""

    def address(self, tensor: T) -> int:
        """Of a tensor that has a form. ValueError if its memory is not all there."""

    def memory(self, tensor: T) -> Any:
        """What holds the memory of a tensor, also when the tensor is given other memory while the core works on it."""

    def twin(self, tensor: T) -> tuple[T, int]:
        """A new tensor like one that has a form, its contents undefined, and its address."""

    def like(self, tensor: T, shape: tuple[int, ...]) -> T:
        """A new contiguous tensor of the same dtype and device, its contents undefined."""

    def new(self, shape: tuple[int, ...], dtype: str) -> T:
        """A new contiguous tensor in CPU memory of a dtype by its name in the core's table, its contents undefined.
        ValueError if the framework has no such dtype."""

    def home(self) -> Device | None:
        """The device on which this process works; None: it works in the CPU's memory."""

    def contiguous(self, tensor: T) -> T:
        """A contiguous copy of a tensor that is not."""

    def copy(self, into: T, source: T) -> None:
        """Overwrite a tensor of any layout."""

    def written(self, tensor: T) -> None:
        """The core has overwritten a tensor's memory behind the framework's back."""

    def cast(self, tensor: T, dtype: str) -> T:
        """The tensor with another dtype, by its name in the core's table."""
