"""RayExecutor, as Horovod has it: actors of Ray become the ranks of a job and run function after function.

Each rank is an actor, in a placement group of the executor's own or in the one that its caller runs in. Ranks of one
host have neighbouring numbers. Hosts are distinguished as the ranks themselves do it (machine_id.host_id), because two
nodes of Ray may be one machine; all ranks of a host see the GPUs of all of them, so that `hvd.local_rank()` is an
index.

A rank stays in the job from one `run` to the next. Where a function raises, all ranks leave, and the next `run` opens
the job anew; where a worker is lost, the executor has to be started again. The common part is executors/driver.py.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from os import getpid
from typing import Any, NamedTuple

from ..errors import HvdNotYetError, HvdRunError
from ..errors.codes import coded
from ..executors import driver
from ..system import machine_id
from .idle import Watch

_LEAVE_S = 10.0
_TURN_S = 0.2


class Settings(NamedTuple):
    """Time limits of a ``RayExecutor``, in seconds. ``RayExecutor.create_settings`` makes it.

    Args:
        start_timeout (float): until all ranks have called ``hvd.init()``. Default: 600.
        placement_group_timeout_s (float): until Ray has room for all workers. Default: 100.

    Example:
        ::

            Settings(start_timeout=60.0)
    """

    start_timeout: float = driver.START_TIMEOUT_S
    placement_group_timeout_s: float = 100.0


class _Worker:
    """An actor."""

    def __init__(self) -> None:
        self._environ: dict[str, str | None] = {}

    def where(self) -> tuple[str, str, int, str, list[Any]]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return machine_id.host_id(), node, getpid(), socket.gethostname(), ray.get_gpu_ids()

    def become(self, environ: dict[str, str | None]) -> None:
        self._environ = environ
        driver.become(environ)

    def answer(self, call: bytes) -> driver.Answer:
        return driver.made(self._environ, call, stays=True)

    def value(self, call: bytes) -> Any:
        return self.answer(call).value()

    def leave(self) -> None:
        driver.leave()

    def awaited(self) -> str:
        return driver.awaited()

    def settled(self) -> bool:
        return driver.settled()


_executable: list[Any] = []  # in an actor: what `execute` gives to functions


def _make(kind: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    _executable[:] = [kind(*args, **kwargs)]


def _executed(fn: Callable[[Any], Any]) -> Any:
    return fn(_executable[0] if _executable else None)


class RayExecutor:
    """A job whose ranks are actors of Ray (Horovod's interface).

    The ranks stay in the job from one ``run`` to the next. ``start``, ``run``, ``execute`` and ``execute_single`` raise
    ``HvdRunError`` if a rank raises, a worker is lost, or Ray has no room::

        executor = RayExecutor(num_workers=4, use_gpu=True)
        executor.start()
        accuracies = executor.run(train, args=[config])  # train() calls hvd.init(); a list, by rank
        executor.shutdown()

    Args:
        settings (Settings, optional): time limits, from ``create_settings``.
        num_workers (int, optional): the number of ranks. Give this or ``num_hosts``.
        num_hosts (int, optional): the number of nodes, each with ``num_workers_per_host`` ranks.
        num_workers_per_host (int): with ``num_hosts``, the ranks per node. Default: 1.
        cpus_per_worker (float): Ray's CPUs per rank. Default: 1.
        use_gpu (bool): reserve GPUs. Default: False.
        gpus_per_worker (float, optional): with ``use_gpu``, GPUs per rank. Default: 1.
        use_current_placement_group (bool): use the placement group that the caller runs in, if there is one. Default:
            True.
        min_workers, max_workers (int, optional): Horovod's elastic mode, not available yet.
        elastic: other arguments of Horovod's elastic mode, not available yet.

    Raises:
        HvdNotYetError: elastic arguments are given.
        ModuleNotFoundError: ray is not installed.
        TypeError: ``settings`` was not made by ``create_settings``.
        ValueError: the numbers do not go together.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        **elastic: Any,
    ) -> None:
        if settings is not None and not isinstance(settings, Settings):
            raise TypeError("settings must come from RayExecutor.create_settings() [HVD244]")
        if min_workers is not None or max_workers is not None or elastic:
            raise HvdNotYetError(
                "this version has no elastic RayExecutor: leave out min_workers, max_workers and the like, and "
                "restart the job from a checkpoint after a loss [HVD246]"
            )
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("pass num_workers, or num_hosts with num_workers_per_host [HVD244]")
        for name, number in (("num_workers", num_workers), ("num_hosts", num_hosts), ("", num_workers_per_host)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ValueError(f"{name or 'num_workers_per_host'}={number!r}: must be a whole number > 0 [HVD244]")
        if cpus_per_worker <= 0 and not use_gpu:
            raise ValueError(f"cpus_per_worker={cpus_per_worker!r} must be above 0 for a worker without a GPU [HVD244]")
        if gpus_per_worker is not None and not use_gpu:
            raise ValueError("gpus_per_worker needs use_gpu=True [HVD244]")
        self._ray = driver.library("ray", "ray")
        self.settings = settings or Settings()
        self._hosts, self._per_host = num_hosts, num_workers_per_host if num_hosts else 1
        self.num_workers = num_workers or (num_hosts or 0) * num_workers_per_host
        self._needs = {"CPU": cpus_per_worker, **({"GPU": gpus_per_worker or 1} if use_gpu else {})}
        self._use_current = use_current_placement_group
        self._workers: list[Any] = []
        self._descriptions: list[str] = []
        self._group: Any = None  # ours, to be removed
        self._store: driver.DriverStore | None = None
        self._state = "start() has not been called"
        self._located: list[tuple[str, list[Any]]] = []  # by rank: its host, its GPUs
        self._in_job: dict[int, bool] = {}  # by rank: whether it was in the job after its last call
        self._failed = False  # ranks need a new rendezvous before the next call

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = driver.START_TIMEOUT_S,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Any = None,
        **more: Any,
    ) -> Settings:
        """Return time limits for an executor.

        Args:
            timeout_s (float): seconds until all ranks have called ``hvd.init()``. Default: 600.
            placement_group_timeout_s (float): seconds until Ray has room for all workers. Default: 100.
            ssh_identity_file, ssh_str (str, optional): accepted for Horovod, without effect.
            nics (optional): accepted for Horovod, without effect.
            more: accepted for Horovod, without effect.

        Returns:
            Settings: for ``RayExecutor(settings)``.

        Raises:
            TypeError: a time limit is not a number.
        """
        return Settings(float(timeout_s), float(placement_group_timeout_s))

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers.

        Args:
            executable_cls (callable, optional): called once on each worker. ``execute`` passes its result to functions.
            executable_args (sequence, optional): positional arguments of ``executable_cls``.
            executable_kwargs (dict, optional): keyword arguments of ``executable_cls``.
            extra_env_vars (dict, optional): environment variables of the workers, set before anything is imported.

        Raises:
            HvdNotYetError: the driver is outside of the cluster (``ray://``).
            HvdRunError: it has been started already, Ray has no room, or a worker does not start.
        """
        ray = self._ray
        if self._workers:
            raise HvdRunError("start() has been called already: call shutdown() first [HVD406]")
        if not ray.is_initialized():
            ray.init()
        if ray.util.client.ray.is_connected():
            raise HvdNotYetError(
                "this driver runs outside the cluster (ray://), and its workers cannot reach it: submit the script "
                "to the cluster with `ray job submit` [HVD246]"
            )
        try:
            self._start_workers(dict(extra_env_vars or {}))
            if executable_cls is not None:
                call = driver.call_of(_make, (executable_cls, executable_args or (), executable_kwargs or {}), {})
                self._call(call)
        except BaseException:
            self._end("start() has failed")
            raise

    def _start_workers(self, variables: dict[str, str]) -> None:
        """Actors that know which rank they are."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, current = self._ray, self._ray.util.get_current_placement_group() if self._use_current else None
        group = current or self._grouped()
        options = {
            "num_cpus": self._needs["CPU"],
            "num_gpus": self._needs.get("GPU", 0),
            "max_restarts": 0,
            "runtime_env": {"env_vars": variables} if variables else None,
        }
        for at in range(self.num_workers):
            strategy = PlacementGroupSchedulingStrategy(group, -1 if current else at // self._per_host)
            self._workers.append(ray.remote(_Worker).options(**options, scheduling_strategy=strategy).remote())
        found = self._within([worker.where.remote() for worker in self._workers])
        order = sorted(range(self.num_workers), key=lambda at: (*found[at][:2], at))
        self._workers, found = [self._workers[at] for at in order], [found[at] for at in order]
        self._descriptions = [f"rank {rank} (pid {pid} on {name})" for rank, (_, _, pid, name, _) in enumerate(found)]
        self._located = [(each[0], each[4]) for each in found]
        self._rendezvous()

    def _rendezvous(self) -> None:
        """A new job: at the store of the one before some may have joined more often than others."""
        if self._store is not None:
            self._store.close()
        address = self._ray.util.get_node_ip_address()
        self._store = driver.DriverStore(self.num_workers, address, self.settings.start_timeout)
        hosts = [host for host, _ in self._located]
        pending = []
        for rank, host in enumerate(hosts):
            environ = self._store.environ(rank, (hosts[:rank].count(host), hosts.count(host)))
            gpus = sorted({str(gpu) for other, each in self._located if other == host for gpu in each}, key=_by_number)
            if gpus:
                environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            pending.append(self._workers[rank].become.remote(environ))
        self._within(pending)
        self._failed, self._in_job = False, {}

    def _grouped(self) -> Any:
        """A placement group for all workers. Raises HvdRunError where Ray has no room for it."""
        from ray.util.placement_group import placement_group

        ray, all_ = self._ray, {kind: number * self.num_workers for kind, number in self._needs.items()}
        bundles = [{kind: number * self._per_host for kind, number in self._needs.items()}]
        bundles *= self.num_workers // self._per_host
        total = ray.cluster_resources()
        is_short = any(total.get(kind, 0) < number for kind, number in all_.items())
        is_short = is_short or (self._hosts or 0) > sum(node["Alive"] for node in ray.nodes())
        seconds = 0.0 if is_short and _is_alone(ray) else self.settings.placement_group_timeout_s
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if self._hosts else "PACK")
        if not (seconds and ray.wait([self._group.ready()], timeout=seconds)[0]):
            free = ray.available_resources()
            had = ", ".join(
                f"{number:g} {kind} are asked for, the cluster has {total.get(kind, 0):g}, {free.get(kind, 0):g} free"
                for kind, number in all_.items()
            )
            nodes = f" on {self._hosts} of {len(ray.nodes())} nodes" * bool(self._hosts)
            waited = f" within {seconds:g} s" * bool(seconds)
            raise HvdRunError(
                f"Ray has no room for {self.num_workers} workers{nodes}{waited}: {had}. Ask for fewer, or for less for "
                "each (num_workers, num_hosts, cpus_per_worker, gpus_per_worker) [HVD404]"
            )
        return self._group

    def _within(self, refs: list[Any]) -> list[Any]:
        """What these give, from workers that are not ranks yet. Raises HvdRunError."""
        seconds = self.settings.placement_group_timeout_s
        try:
            return list(self._ray.get(refs, timeout=seconds))
        except self._ray.exceptions.GetTimeoutError:
            done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
            why = f"{len(refs) - len(done)} of {len(refs)} workers of Ray have not answered within {seconds:g} s"
            raise HvdRunError(
                f"{why}: they cannot start (see `ray status`), or an earlier call keeps them busy [HVD404]"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise HvdRunError(coded("HVD405", f"a worker of Ray does not start: {_words(error)}")) from None

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on all ranks and return the results.

        Args:
            fn (callable): the function, sent by cloudpickle.
            args (sequence, optional): positional arguments.
            kwargs (dict, optional): keyword arguments.

        Returns:
            list: the results, by rank.

        Raises:
            HvdRunError: a rank raised (``rank``, its traceback, and its exception as ``__cause__``) or was lost.
            TypeError: the call cannot be sent.
        """
        return self._call(driver.call_of(fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Start ``fn(*args, **kwargs)`` on all ranks and return Ray's references to the results.

        Args:
            fn (callable): the function, sent by cloudpickle.
            args (sequence, optional): positional arguments.
            kwargs (dict, optional): keyword arguments.

        Returns:
            list[ray.ObjectRef]: by rank. ``ray.get`` raises a ``RayTaskError`` for what the rank raised.

        Raises:
            HvdRunError: the executor has no workers.
            TypeError: the call cannot be sent.
        """
        call = driver.call_of(fn, args, kwargs)
        self._ready()
        self._failed = True  # Ray does not report it, so ranks leave before the next call
        return [worker.value.remote(call) for worker in self._workers]

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Run ``fn(executable)`` on all ranks and return the results. ``start`` made the executables.

        Args:
            fn (callable): a function of the result of ``executable_cls``, or of None.

        Returns:
            list: the results, by rank.

        Raises:
            HvdRunError: a rank raised or was lost.
        """
        return self._call(driver.call_of(_executed, (fn,), {}))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Run ``fn(executable)`` on rank 0 and return the result.

        Args:
            fn (callable): a function of the result of ``executable_cls``, or of None.

        Returns:
            The result of rank 0.

        Raises:
            HvdRunError: rank 0 raised or was lost.
        """
        return self._call(driver.call_of(_executed, (fn,), {}), [0])[0]

    def _ready(self) -> None:
        """Raises HvdRunError where there are no workers."""
        if not self._workers or self._store is None:
            raise HvdRunError(f"this executor has no workers: {self._state}; call start() [HVD406]")
        if self._failed:
            self._within([worker.leave.remote() for worker in self._workers])
            self._rendezvous()

    def _call(self, call: bytes, ranks: Sequence[int] | None = None) -> list[Any]:
        """The answers of these ranks, as they come. Whatever but a rank's failure ends this ends the workers."""
        ray = self._ray
        self._ready()
        ranks, lost = range(self.num_workers) if ranks is None else ranks, False
        gathered, watch = driver.WorkerAnswers(len(ranks)), Watch(ray, self._workers)
        try:
            waiting = {self._workers[rank].answer.remote(call): rank for rank in ranks}
            while not gathered.over:
                for ref in ray.wait(list(waiting), num_returns=1, timeout=_TURN_S)[0]:
                    rank = waiting.pop(ref)
                    try:
                        answer = ray.get(ref)
                        gathered.answer(answer)
                        self._in_job[rank] = answer.is_in
                    except ray.exceptions.RayError as error:
                        lost, store = True, self._store
                        assert store is not None
                        gathered.lost(rank, store.lost(rank, _words(error), self._descriptions[rank]))
                idle = set(self._in_job) - set(waiting.values())
                watch.look([rank for rank in sorted(idle) if self._in_job[rank]])
            self._failed = True
            results = gathered.results()
            if watch.inquired and not watch.left and all(self._in_job.values()):
                self._in_job = dict(enumerate(self._within([worker.settled.remote() for worker in self._workers])))
            self._failed = watch.left or not all(self._in_job.values())  # such a rank may not join this store again
        except HvdRunError:
            if lost:
                self._end("a worker was lost")
            raise
        except BaseException:
            self._end("a call was interrupted")
            raise
        return results

    def shutdown(self) -> None:
        """Let the ranks leave the job and end the workers. ``start`` may follow."""
        try:
            if self._workers and not self._failed:  # ray.kill runs no atexit, and the others would call it a death
                refs = [worker.leave.remote() for worker in self._workers]
                self._ray.wait(refs, num_returns=len(refs), timeout=_LEAVE_S)
        finally:
            self._end("shutdown() has been called")

    def _end(self, state: str) -> None:
        from ray.util.placement_group import remove_placement_group

        (workers, self._workers), (group, self._group) = (self._workers, []), (self._group, None)
        store, self._store, self._state = self._store, None, state
        for worker in workers:
            self._ray.kill(worker, no_restart=True)
        if group is not None:
            remove_placement_group(group)
        if store is not None:
            store.close()


def _is_alone(ray: Any) -> bool:
    """Whether the driver has started this cluster, which nothing makes larger then."""
    return getattr(getattr(ray._private.worker, "_global_node", None), "head", False)


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (1 << 30, name)


def _words(error: Exception) -> str:
    """Ray's text on the end of a worker, without its colours, its numbers and its advice."""
    text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())
    found = re.search(r"Worker exit detail: (.*?)(?: Some common| There are some potential| If you|$)", text)
    return f"its worker of Ray has died: {(found[1] if found else text)[:400]}"
