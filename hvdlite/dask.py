"""Run a job on the workers of a Dask cluster: each worker process becomes a rank.

    from hvdlite.dask import run
    accuracies = run(client, train, args=(config,), num_proc=4)  # train() calls hvd.init()

A rank is a task that is pinned to a worker, and there is one per worker, in a thread of its pool: `client.run` would
hold the worker's event loop, and it would not answer any more. Where a pinned task's worker dies, Dask starts
another at a new address and waits for the old one for ever, so this looks which workers are there. Jobs lock their
workers, in the order of addresses, so that two jobs in one cluster follow each other.

The common part is executors/driver.py; the store is kept in this process, which the workers have to reach. Extra:
hvdlite[dask].
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .errors import HvdRunError
from .executors import driver

_TURN_S = 0.2
_RESTARTED_S = 15.0  # a nanny takes 1 to 5 s
# Of a client whose run has lost a worker: how many there were, and until when others are waited for.
_before: weakref.WeakKeyDictionary[Any, tuple[int, float]] = weakref.WeakKeyDictionary()


def run(
    client: Any,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    workers: Sequence[str] | None = None,
    start_timeout: float = driver.START_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a function on the ranks of a job in a Dask cluster and return the results.

    Each rank is a task on a worker process of its own. ``fn`` calls ``hvd.init()``. Jobs that use the same workers run
    one after the other.

    Args:
        client (distributed.Client): a synchronous client of the cluster.
        fn (callable): the function, sent by cloudpickle.
        args (sequence): positional arguments of ``fn``.
        kwargs (dict, optional): keyword arguments of ``fn``.
        num_proc (int, optional): the number of ranks. None: one per worker.
        workers (list of str, optional): the addresses of the workers to use. None: all.
        start_timeout (float): seconds until the workers are free of other jobs, and again until all ranks have called
            ``hvd.init()``. Default: 600.
        env (dict, optional): environment variables of the ranks.

    Returns:
        list: the results, by rank.

    Raises:
        HvdRunError: a rank raised (``rank``, its traceback, and its exception as ``__cause__``), a worker was lost, or
            there are not enough workers.
        ModuleNotFoundError: distributed is not installed.
        TypeError: ``client`` is not a synchronous client, or the call cannot be sent.
        ValueError: ``num_proc`` is not a positive number.

    Example:
        >>> from dask.distributed import Client, LocalCluster  # doctest: +SKIP
        >>> client = Client(LocalCluster(n_workers=2, threads_per_worker=1))  # doctest: +SKIP
        >>> hvdlite.dask.run(client, train, args=(config,))  # doctest: +SKIP
        [0.97, 0.97]
    """
    distributed = driver.library("distributed", "dask")
    if not isinstance(client, distributed.Client) or client.asynchronous:
        raise TypeError(f"run() needs a synchronous client of distributed, not {client!r} [HVD244]")
    call, variables = driver.call_of(fn, args, kwargs), driver.variables(env)
    chosen = _chosen(client, num_proc, workers)
    store = driver.DriverStore(len(chosen), _address(distributed, chosen), start_timeout)
    futures: dict[Any, int] = {}
    with contextlib.ExitStack() as ends:
        ends.callback(store.close)
        for each in sorted(chosen):
            with client.as_current():
                lock = distributed.Lock(f"hvdlite {each}")
            if not lock.acquire(timeout=start_timeout):
                raise HvdRunError(f"{each} has been busy with another job of hvdlite for {start_timeout:g} s [HVD404]")
            ends.callback(lock.release)
        ends.callback(lambda: client.cancel(list(futures)))
        for rank, worker in enumerate(chosen):
            environ = {**variables, **store.environ(rank)}
            future = client.submit(
                _made, environ, call, workers=[worker], allow_other_workers=False, pure=False, retries=0
            )
            futures[future] = rank
        try:
            return _gathered(distributed, client, chosen, futures, store).results()
        except HvdRunError:
            raise
        except BaseException:  # Ctrl-C; a task that runs cannot be cancelled, but its next collective fails
            store.end("the driver was interrupted")
            raise


def _chosen(client: Any, num_proc: int | None, workers: Sequence[str] | None) -> list[str]:
    """A worker for each rank; those of one host are neighbours. Raises HvdRunError."""
    there = sorted(_there(client))
    for each in workers or ():
        if each not in there:
            raise HvdRunError(f"this cluster has no worker {each}: it has {', '.join(there) or 'none'} [HVD404]")
    named = there if workers is None else sorted(workers)
    size = len(named) if num_proc is None else num_proc
    if isinstance(size, bool) or not isinstance(size, int) or size < (num_proc is not None):
        raise ValueError(f"num_proc={num_proc!r}: must be a whole number of ranks, at least 1 [HVD244]")
    if size > len(named) or size == 0:
        had = "the cluster has" if workers is None else "workers= names"
        raise HvdRunError(
            f"{size or 'some'} ranks are asked for, and {had} {len(named)} workers: each worker process is "
            "one rank [HVD404]"
        )
    if any(worker.startswith("inproc:") for worker in named):
        raise HvdRunError("the workers are threads of this process: use LocalCluster(processes=True) [HVD404]")
    return named[:size]


def _there(client: Any) -> list[str]:
    """The addresses of workers. Where one was lost in the last run its nanny may be about to start another."""
    count, until = _before.pop(client, (0, 0.0))
    while len(there := list(client.nthreads())) < count and time.monotonic() < until:
        time.sleep(_TURN_S)
    return there


def _address(distributed: Any, workers: Sequence[str]) -> str:
    """Of this host, towards the workers."""
    from .launcher.hosts import address

    return address.towards([distributed.comm.get_address_host(worker) for worker in workers])


@contextlib.contextmanager
def _may_have_children() -> Iterator[None]:
    """Workers of Dask are daemonic, which forbids the children that a DataLoader starts. That is meant for pools, which
    wait for their own at the end; a DataLoader's end with their parent."""
    own: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = own.get("daemon")
    own["daemon"] = False
    try:
        yield
    finally:
        own["daemon"] = before


def _made(environ: Mapping[str, str | None], call: bytes) -> driver.Answer:
    with _may_have_children():
        return driver.made(environ, call)


def _gathered(
    distributed: Any, client: Any, chosen: Sequence[str], futures: Mapping[Any, int], store: driver.DriverStore
) -> driver.WorkerAnswers:
    """Answers as they come, and workers that are lost."""
    gathered, waiting = driver.WorkerAnswers(len(chosen)), dict(futures)
    while not gathered.over:
        began = time.monotonic()
        with contextlib.suppress(TimeoutError, distributed.TimeoutError):
            distributed.wait(list(waiting), timeout=_TURN_S, return_when="FIRST_COMPLETED")
        if not waiting:
            time.sleep(_TURN_S)
        for future in [each for each in waiting if each.done()]:
            rank = waiting.pop(future)
            if future.status == "finished":
                gathered.answer(future.result())
            else:
                why = future.exception() if future.status == "error" else f"its task was {future.status}"
                gathered.lost(rank, store.lost(rank, f"worker {chosen[rank]} of Dask: {why}"))
        if waiting and time.monotonic() - began >= _TURN_S:
            there = client.nthreads()
            for future in [each for each, rank in waiting.items() if chosen[rank] not in there]:
                rank = waiting.pop(future)
                _before[client] = len({*chosen, *there}), time.monotonic() + _RESTARTED_S
                gathered.lost(rank, store.lost(rank, f"worker {chosen[rank]} of Dask is gone"))
    return gathered
