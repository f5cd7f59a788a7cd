"""Backend "hvdlite" for PyTorch: an entry point calls `register` whenever torch is imported (2.5 and later).

With it comes a rendezvous, init_method="hvdlite://", for jobs that hvd.init() understands and env:// does not.

So this file costs nothing: it imports neither hvdlite's core nor its adapters before a process group is made. Older
versions of PyTorch ask no entry points; there, and without an installed package, `import hvdlite.torch.distributed`
does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

NAME = "hvdlite"
_NEEDED = (2, 2)  # since then C++ calls Python groups for all that DDP and FSDP call


def register() -> None:
    """Registers the backend; again: nothing. Where torch is too old, or built without torch.distributed, making a group
    says so."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler(NAME, rendezvous)


def rendezvous(url: str, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
    """A store of torch's, kept by rank 0, of the ranks that hvd.init() finds; the rank and the size."""
    yield import_module("hvdlite.torch.distributed.rendezvous").store_of_job()


def create(*options: Any) -> Any:
    """A process group, for torch. Raises HvdInitError for a torch that is too old."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _NEEDED:
        from .errors import HvdInitError

        raise HvdInitError(f"PyTorch {torch.__version__}: backend hvdlite needs 2.2 or later [HVD106]")
    return import_module("hvdlite.torch.distributed.group").create(*options)
