"""How does torchft make DiLoCo? Its trainer, with the methods that local_training.py expects of a trainer.

torchft (PyTorch's fault-tolerant training, pip install torchft) has replica groups, here of one rank each. A manager of
each group asks a lighthouse before each exchange who takes part, and votes after it on whether to keep the result. Its
exchange goes over Gloo. low_communication.py starts the lighthouse; each rank finds it in the environment.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


class TorchftTrainer:
    """torchft's DiLoCo with the outer optimizer that hvd.DiLoCo has by default."""

    def __init__(self, model: torch.nn.Module, inner: torch.optim.Optimizer, sync_every: int, rank: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            ProcessGroupGloo(timedelta(seconds=30)), model.load_state_dict, model.state_dict, min_replica_size=2,
            use_async_quorum=False, rank=0, world_size=1, store_addr="127.0.0.1", store_port=self._store.port,
            lighthouse_addr=os.environ[LIGHTHOUSE], replica_id=f"rank{rank}-", hostname="127.0.0.1", init_sync=False,
        )  # fmt: skip
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self._trainer = DiLoCo(self._manager, [model], inner, outer, sync_every, use_bucketization=True)
        self._trainer.__enter__()

    def finish(self) -> None:
        """After a multiple of `sync_every` steps nothing is under way."""
        self._trainer.__exit__(None, None, None)

    def close(self) -> None:
        self._manager.shutdown(wait=False)
