"""Backend and trainer for Ray Train: its training functions become the ranks of a job.

Train's controller starts the workers and calls `on_start` there: it keeps the store (executors/driver.py) and informs
each worker which rank it is. The training function runs in a thread of its worker, and Train catches what it raises, so
a context around it informs the other ranks. When Train starts its workers anew after a failure (`FailureConfig`), they
are a new job.

Ray's TorchTrainer needs none of this: `hvd.init()` reads its RANK and MASTER_ADDR. What this adds is that ranks hear
at once why one has failed, a secret of the job's own, and an error that shows the cause first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .. import config
from ..executors import driver
from ..system import machine_id

driver.library("ray.train", "ray")

from ray.train.backend import Backend, BackendConfig  # noqa: E402
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402

_FOLLOWS_S = 3.0  # Train looks every 2 s, and shows all errors that are there, that of rank 0 first


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Around the training function."""
    environ, failure = config.environ(), None
    try:
        yield
    except BaseException as error:
        failure = error
        driver.tell(error)
        if driver.is_consequence(error):
            time.sleep(_FOLLOWS_S)
        raise
    finally:
        driver.leave()
        driver.ended(environ, failure)


@dataclass
class HvdliteConfig(BackendConfig):  # type: ignore[misc]
    """Backend of a ``DataParallelTrainer`` of Ray Train.

    Args:
        start_timeout (float): seconds until all ranks have called ``hvd.init()``. Default: 600.

    Example:
        ::

            DataParallelTrainer(train, backend_config=HvdliteConfig(start_timeout=60), scaling_config=scaling)
    """

    start_timeout: float = driver.START_TIMEOUT_S

    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return _reported


class _Backend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # hvd.local_rank() is an index into the GPUs of all ranks of its host
    _store: driver.DriverStore | None = None

    def on_start(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        import ray

        hosts = worker_group.execute(machine_id.host_id)
        address = ray.util.get_node_ip_address()
        self._store = driver.DriverStore(len(hosts), address, backend_config.start_timeout)
        pending = []
        for rank, host in enumerate(hosts):
            environ = self._store.environ(rank, (hosts[:rank].count(host), hosts.count(host)))
            pending.append(worker_group.execute_single_async(rank, driver.become, environ))
        ray.get(pending)

    def on_shutdown(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class HvdliteTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Trainer of Ray Train whose workers are ranks. It replaces Horovod's HorovodTrainer, which Ray has removed::

        trainer = HvdliteTrainer(train, train_loop_config={"lr": 0.1}, scaling_config=ScalingConfig(num_workers=4))
        trainer.fit()  # train() calls hvd.init(), and ray.train.report()

    Args:
        train_loop_per_worker (callable): the training function.
        hvdlite_config (HvdliteConfig, optional): the backend.
        of_trainer: other arguments of ``DataParallelTrainer``.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        hvdlite_config: HvdliteConfig | None = None,
        **of_trainer: Any,
    ) -> None:
        super().__init__(train_loop_per_worker, backend_config=hvdlite_config or HvdliteConfig(), **of_trainer)
