"""`hvdlite.spark.run(fn, num_proc=4)`: the Python workers of a Spark job become the ranks of a job.

All ranks are the tasks of one stage in barrier mode, which Spark starts together or not at all; the number of a
partition is the rank. The store of the rendezvous lies in the driver (driver.DriverStore), at the address that
executors reach it by. Tasks return what comes of the call as a value, an exception too: of a task that fails Spark
shows the error of any rank in a hundred lines, and throws its worker away.

So Spark sees a failure only where a worker dies: it names the partition, and ends the other tasks. It does not run the
stage anew (as it does with a barrier stage that another one follows), so nothing trains twice behind its user's back.
`torch` and `keras` beside this file train on a DataFrame.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from .. import config
from ..errors import HvdRunError
from ..errors.codes import coded
from ..errors.user_warning import warn
from ..executors import driver

_OF_JOB = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_GRACE_S = 1.5  # after the first failure, for others that may be its cause
_ENDS_S = 5.0  # of a cancelled job: Spark kills workers 2 s after it has asked their tasks to end


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Run a function on the ranks of a job in a Spark cluster and return the results.

    The ranks are the tasks of one barrier stage. ``fn`` calls ``hvd.init()``. It needs an active SparkContext, without
    dynamic allocation.

    Args:
        fn (callable): the function, sent by cloudpickle.
        args (sequence): positional arguments of ``fn``.
        kwargs (dict, optional): keyword arguments of ``fn``.
        num_proc (int, optional): the number of ranks. None: as many tasks as the cluster runs at once.
        start_timeout (float, optional): seconds until all ranks are there. None: ``HOROVOD_SPARK_START_TIMEOUT``, else
            600.
        env (dict, optional): environment variables of the ranks.
        verbose (int): accepted for Horovod, without effect.
        use_gloo (bool): accepted for Horovod, without effect.
        use_mpi, extra_mpi_args, stdout, stderr, nics, prefix_output_with_timestamp, executable: Horovod's, without
            effect; a warning reports one that is given.

    Returns:
        list: the results, by rank.

    Raises:
        HvdRunError: a rank raised (``rank``, its traceback, and its exception as ``__cause__``) or was lost, or the job
            cannot start.
        ModuleNotFoundError: pyspark is not installed.
        TypeError: the call cannot be sent.
        ValueError: ``num_proc`` is not a positive number.

    Example:
        >>> hvdlite.spark.run(train, args=(config,), num_proc=4)  # doctest: +SKIP
        [0.97, 0.97, 0.97, 0.97]
    """
    for name in ("use_mpi", "extra_mpi_args", "stdout", "stderr", "nics", "prefix_output_with_timestamp", "executable"):
        if locals()[name]:
            warn(f"hvdlite.spark.run: {name} has no effect: Spark starts the ranks [HVD804]")
            break
    call, variables = driver.call_of(fn, args, kwargs), driver.variables(env)
    context, size = placed(num_proc)
    return _Stage(context, size, _limit(start_timeout)).make(call, variables)


def placed(num_proc: int | None) -> tuple[Any, int]:
    """Return the SparkContext, and the number of ranks that it is to run. ``run`` and the estimators call it.

    Args:
        num_proc (int, optional): the number of ranks. None: as many tasks as the cluster runs at once.

    Returns:
        tuple[SparkContext, int]: the context and the number.

    Raises:
        HvdRunError: there is no context, not enough room, or dynamic allocation is on.
        ValueError: ``num_proc`` is not a positive number.

    Example:
        >>> context, size = hvdlite.spark.placed(None)  # doctest: +SKIP
    """
    context = _active()
    scala = context._jsc.sc()  # what Spark itself counts before it starts a stage in barrier mode
    slots = int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
    size = slots if num_proc is None else num_proc
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"num_proc={size!r}: must be a whole number of ranks, at least 1 [HVD244]")
    if context._jvm.org.apache.spark.util.Utils.isDynamicAllocationEnabled(scala.conf()):
        text = "Spark starts no barrier stage under dynamic allocation: set spark.dynamicAllocation.enabled to false"
        raise HvdRunError(f"{text} [HVD404]")
    if size > slots:  # Spark itself tries for ten minutes
        raise HvdRunError(f"num_proc={size}: the cluster runs at most {slots} tasks at a time [HVD404]")
    return context, size


def _active() -> Any:
    found = getattr(driver.library("pyspark", "spark"), "SparkContext", None)
    context = None if found is None else found._active_spark_context
    if context is None:
        from pyspark.sql.utils import is_remote

        why = "Spark Connect has none, and is not supported" if is_remote() else "make a SparkSession first"
        raise HvdRunError(f"hvdlite.spark needs a SparkContext in this process: {why} [HVD406]")
    return context


def _limit(start_timeout: float | None) -> float:
    name, option = "HOROVOD_SPARK_START_TIMEOUT", config.option_of("start_timeout")
    text = config.environ().get(name) if start_timeout is None else str(start_timeout)
    if text is None:
        return driver.START_TIMEOUT_S
    return float(config.parse(option, text, name if start_timeout is None else "start_timeout"))


class _Stage:
    """One job. `make` once."""

    def __init__(self, context: Any, size: int, limit: float) -> None:
        self._context, self._size, self._limit = context, size, limit
        self._group, self._is_late = f"hvdlite.spark.run {secrets.token_hex(4)}", False

    def make(self, call: bytes, env: Mapping[str, str]) -> list[Any]:
        from py4j.protocol import Py4JJavaError

        host = self._context.getConf().get("spark.driver.host")
        try:
            store = driver.DriverStore(self._size, host, self._limit)
        except OSError as error:
            raise HvdRunError(f"the driver cannot listen at spark.driver.host={host}: {error} [HVD114]") from None
        gathered = driver.WorkerAnswers(self._size)
        ends = [threading.Timer(self._limit, self._end_unstarted), threading.Timer(_GRACE_S, self._cancel)]

        def receive(answer: driver.Answer) -> None:
            gathered.answer(answer)
            if ends[1].ident is None:
                ends[1].start()

        failures = _Failures(receive)
        reported = self._context.accumulator([], failures)
        task = partial(_task, call, [{**env, **store.environ(rank)} for rank in range(self._size)], reported)
        try:
            with self._in_group():
                ends[0].start()
                tasks = self._context.parallelize(range(self._size), self._size).barrier().mapPartitions(task)
                for answer in tasks.collect():
                    gathered.answer(answer)
        except Py4JJavaError as error:
            rank, why = _named(str(error.java_exception.getMessage()))
            if rank is not None:
                gathered.lost(rank, store.lost(rank, why))
            elif ends[1].ident is None:  # no failure was reported
                why = f"no room for {self._size} tasks within {self._limit:g} s [HVD404]" if self._is_late else why
                raise HvdRunError(coded("HVD721", f"Spark has ended the job: {why}")) from None
        except BaseException:  # Ctrl-C
            self._cancel()
            store.emptied(_ENDS_S)
            raise
        finally:
            failures.receive = None
            for each in ends:
                each.cancel()
            store.close()
        return gathered.results()

    def _cancel(self) -> None:
        self._context.cancelJobGroup(self._group)

    @contextlib.contextmanager
    def _in_group(self) -> Iterator[None]:
        """Jobs of this thread can be cancelled by the name of the group."""
        before = {name: self._context.getLocalProperty(name) for name in _OF_JOB}
        self._context.setJobGroup(self._group, "hvdlite.spark.run", interruptOnCancel=True)
        try:
            yield
        finally:
            for name, value in before.items():
                self._context.setLocalProperty(name, value)

    def _active(self) -> int:
        """How many tasks of this job run."""
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(number) for job in jobs if job for number in job.stageIds]
        return sum(stage.numActiveTasks for stage in stages if stage)

    def _end_unstarted(self) -> None:
        """At the time limit. Spark starts all tasks of the stage or none."""
        if not self._active():
            self._is_late = True
            self._cancel()


class _Failures:
    """What failed on ranks, for one of Spark's accumulators: the driver receives it as the task ends, not when all have
    ended (another rank may compute on for hours)."""

    def __init__(self, receive: Callable[[driver.Answer], None] | None = None) -> None:
        self.receive = receive  # None: in a worker, and once the job is over

    def zero(self, value: list[driver.Answer]) -> list[driver.Answer]:
        """What a worker begins with."""
        return value

    def addInPlace(self, held: list[driver.Answer], more: list[driver.Answer]) -> list[driver.Answer]:
        """In a worker by the task, in the driver as the task ends."""
        if (receive := self.receive) is not None:
            for answer in more:
                receive(answer)
        return held + more

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failures, ()


def _named(text: str) -> tuple[int | None, str]:
    """Which rank Spark's words on a failed job name, and the reason among them: of an exception its last line."""
    found = re.search(r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s*(.*)", text, re.DOTALL)
    if found is None:
        return None, text.partition("\n")[0]
    lines = [line for line in found[2].partition("\n\tat ")[0].splitlines() if line and "SQLSTATE" not in line]
    why = lines[-1] if "Traceback" in lines[0] else lines[0]
    return int(found[1]), why.replace("org.apache.spark.SparkException: ", "")


def _task(
    call: bytes, environs: Sequence[Mapping[str, str | None]], reported: Any, _: Iterable[Any]
) -> list[driver.Answer]:
    """What a rank does, in a worker of Spark's."""
    from pyspark import BarrierTaskContext

    answer = driver.made(environs[BarrierTaskContext.get().partitionId()], call)
    if answer.kind != driver.RETURNED:
        reported.add([answer])
    return [answer]
