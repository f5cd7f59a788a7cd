"""`hvdlite.spark.run(fn, num_proc=4)`: how do the Python workers of a Spark job become the ranks of one of ours?

All ranks are the tasks of one stage in barrier mode, which Spark starts together or not at all; the number of a
partition is the rank. The store that the ranks meet at lies in the driver (driven.Meeting), at the address that
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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from .. import config, driven
from .._coded import coded
from ..errors import HvdRunError

_OF_JOB = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
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
    """Calls fn(*args, **kwargs) on num_proc ranks (None: as many as the cluster runs at a time); the results, by rank.

    env: more variables of the ranks. start_timeout: seconds until all are there (HOROVOD_SPARK_START_TIMEOUT, else
    600). HvdRunError when a rank raises (`rank`, its traceback; its exception is the __cause__), is lost, or the job
    cannot start."""
    for name in ("use_mpi", "extra_mpi_args", "stdout", "stderr", "nics", "prefix_output_with_timestamp", "executable"):
        if locals()[name]:
            warnings.warn(f"hvdlite.spark.run: {name} has no effect: Spark starts the ranks [HVD804]", stacklevel=2)
            break
    context = active()
    size = slots(context) if num_proc is None else num_proc
    _check(context, size)
    return _Stage(context, size, _limit(start_timeout)).make(driven.call_of(fn, args, kwargs), dict(env or {}))


def active() -> Any:
    """The SparkContext. Raises HvdRunError where there is none."""
    found = getattr(driven.library("pyspark", "spark"), "SparkContext", None)
    context = None if found is None else found._active_spark_context
    if context is None:
        from pyspark.sql.utils import is_remote

        why = "Spark Connect has none, and is not supported" if is_remote() else "make a SparkSession first"
        raise HvdRunError(f"hvdlite.spark needs a SparkContext in this process: {why} [HVD406]")
    return context


def slots(context: Any) -> int:
    """How many tasks the cluster runs at a time: what Spark counts before it starts a stage in barrier mode."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def _check(context: Any, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"num_proc={size!r}: must be a whole number of ranks, at least 1 [HVD244]")
    if context._jvm.org.apache.spark.util.Utils.isDynamicAllocationEnabled(context._jsc.sc().conf()):
        text = "Spark starts no barrier stage under dynamic allocation: set spark.dynamicAllocation.enabled to false"
        raise HvdRunError(f"{text} [HVD404]")
    if size > (there := slots(context)):  # Spark itself tries for ten minutes
        raise HvdRunError(f"num_proc={size}: the cluster runs {there} tasks at a time [HVD404]")


def _limit(start_timeout: float | None) -> float:
    name, option = "HOROVOD_SPARK_START_TIMEOUT", config.option_of("start_timeout")
    text = config.environ().get(name) if start_timeout is None else str(start_timeout)
    if text is None:
        return driven.START_TIMEOUT_S
    return float(config.parse(option, text, name if start_timeout is None else "start_timeout"))


class _Stage:
    """One job. `make` once."""

    def __init__(self, context: Any, size: int, limit: float) -> None:
        self._context, self._size, self._limit = context, size, limit
        self._group, self._is_late = f"hvdlite.spark.run {secrets.token_hex(4)}", False

    def make(self, call: bytes, env: Mapping[str, str]) -> list[Any]:
        from py4j.protocol import Py4JJavaError

        meeting = driven.Meeting(self._size, self._context.getConf().get("spark.driver.host"), self._limit)
        gathered = driven.Gathered(self._size)
        task = partial(_task, call, [{**env, **meeting.environ(rank)} for rank in range(self._size)])
        late = threading.Timer(self._limit, self._end_unstarted)
        late.daemon = True
        try:
            with self._in_group():
                late.start()
                tasks = self._context.parallelize(range(self._size), self._size).barrier().mapPartitions(task)
                for answer in tasks.collect():
                    gathered.answer(answer)
        except Py4JJavaError as error:
            rank, why = _named(str(error.java_exception.getMessage()))
            if rank is None:
                why = f"no room for {self._size} tasks within {self._limit:g} s [HVD404]" if self._is_late else why
                raise HvdRunError(coded("HVD721", f"Spark has ended the job: {why}")) from None
            gathered.lost(rank, meeting.lost(rank, why))
        except BaseException:  # Ctrl-C
            self._context.cancelJobGroup(self._group)
            meeting.emptied(_ENDS_S)
            raise
        finally:
            late.cancel()
            meeting.close()
        return gathered.results()

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
            self._context.cancelJobGroup(self._group)


def _named(text: str) -> tuple[int | None, str]:
    """Which rank Spark's words on a failed job name, and the reason among them."""
    found = re.search(r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s*(.*)", text)
    why = (found[2] if found else text.partition("\n")[0]).replace("org.apache.spark.SparkException: ", "")
    return (int(found[1]) if found else None), why


def _task(call: bytes, environs: Sequence[Mapping[str, str | None]], _: Iterable[Any]) -> list[driven.Answer]:
    """What a rank does, in a worker of Spark's."""
    from pyspark import BarrierTaskContext

    return [driven.made(environs[BarrierTaskContext.get().partitionId()], call)]
