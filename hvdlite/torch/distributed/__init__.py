"""torch.distributed over hvdlite: `init_process_group("hvdlite")`, and DDP, FSDP2, DTensor run as they are.

    import torch.distributed as dist
    import hvdlite.torch.distributed        # not needed from torch 2.5 on

    dist.init_process_group("hvdlite")
    model = torch.nn.parallel.DistributedDataParallel(model)

Started by hvdlite-run, torchrun, or anything that init_process_group can make a rendezvous over. Where none of these
has set MASTER_ADDR, as under mpirun and srun, `init_process_group("hvdlite", init_method="hvdlite://")` makes the
rendezvous as hvd.init() does. A script may use hvd's own calls beside: `hvd.init()` and the process group share one
job.

Tensors lie in CPU memory or on a GPU of CUDA; one group takes both. CUDA tensors travel over NCCL where there is one,
else by way of the CPU: tested with a stand-in for the driver, not yet on a real GPU. Up to torch 2.13 this group also
gets all tensors of "cpu:hvdlite,cuda:nccl".

`ddp.register_comm_hook(CompressionState(hvd.Compression.int8), compress_hook)` compresses gradients between hosts.

docs/guides/torch-distributed.md lists which calls work and which raise.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..._torch_backend import register
from ...errors import HvdInitError

if TYPE_CHECKING:
    from .compression import CompressionState, compress_hook

__all__ = ["CompressionState", "compress_hook", "register"]

if not dist.is_available():
    raise HvdInitError("this PyTorch was built without torch.distributed: backend hvdlite needs it [HVD106]")
register()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.compression"), name)  # a group is made without it
    return value
