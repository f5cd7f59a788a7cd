"""`Table`: pull, push, step, save and load of rows that lie on servers.

A rank's ids are made different first, so a hot row travels once, and each server that holds some of them is asked once
for each piece of 4 MB. Which server that is, every rank computes by itself (placement.py); what is not answered yet,
the client keeps (client.py); what a pull may see, servers decide (protocol.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import config
from .._api import Handle, rank
from .._core import nan_guard
from ..errors import HvdError, HvdNotFiniteError
from ..errors.codes import coded, uncoded
from ..errors.user_warning import warn
from ..system.interrupts import Deferred
from . import checkpoint, cluster, coordination, messages, optimizers
from .arrays import added_up, by_piece, different, like, numbers
from .client import Client
from .pending_requests import Awaited, Question
from .placement import RowPlacement
from .staleness_wait import Patience
from .table_spec import described, new_rate

F32 = np.float32
MANY_PUSHES = 500  # in a step, after which it is likely that nobody ends it


class Table:
    """A table of float32 rows on the job's servers. All ranks must make the same tables in the same order.

    A row is made on its servers when it is first pulled or pushed. Every call raises ``HvdPeerLostError`` if rows or a
    rank are lost. The design is that of Li et al., 2014, "Scaling Distributed Machine Learning with the Parameter
    Server"::

        table = hvd.ps.Table("users", rows=50_000_000, dim=64, optimizer=hvd.ps.Adagrad(lr=0.05))
        rows = table.pull(ids)             # ids: integers of any shape -> (*ids.shape, 64)
        table.push(ids, gradients)
        table.step()                       # this rank's step is over

    Args:
        name (str): the name, unique in the job.
        rows (int): the number of rows.
        dim (int): the number of float32 values in a row.
        optimizer: what servers do with gradients: ``Sgd``, ``Adagrad``, ``Adam``, ``Ftrl``, ``Add``, or a function
            ``update(rows, state, grads)`` of a module that servers can import.
        staleness (int, optional): 0 (default) is synchronous: a pull sees all ranks' earlier steps, and results do not
            depend on timing. s lets ranks be s steps apart. None: no rank waits.
        replicas (int): 2 keeps each row on two servers, so that the job survives the loss of one. Default: 1.
        order (str): ``"hash"`` (default) spreads rows; ``"range"`` keeps ranges of rows on one server.
        reduce (str): ``"mean"`` (default) divides what is pushed by the number of ranks, ``"sum"`` does not.
        init (optional): ``hvd.ps.uniform(scale, seed)``. None: zeros.

    Raises:
        HvdInitError: the job has no servers.
        HvdMismatchError: the ranks give different arguments.
        ValueError: an argument is not valid. The text names it.
    """

    def __init__(
        self, name: str, rows: int, dim: int, optimizer: Any, staleness: int | None = 0, replicas: int = 1,
        order: str = "hash", reduce: str = "mean", init: optimizers.Uniform | None = None
    ) -> None:  # fmt: skip
        spec = described(
            name, rows, dim, optimizer=optimizer, staleness=staleness, replicas=replicas, order=order, reduce=reduce,
            init=init,
        )  # fmt: skip
        self._open(spec)

    def _open(self, spec: dict[str, Any]) -> None:
        name, replicas, order = spec["name"], spec["replicas"], spec["order"]
        self._spec = spec
        self._lr: float | None = self._spec["options"].get("lr")
        self._client: Client | None = cluster.client()
        if replicas > self._client.servers:
            raise ValueError(f"table {name!r}: replicas=2, but this job has 1 server [HVD025]")
        self.clock = 0  # steps that this rank has ended
        self.clocks: Any = None  # of all ranks, as last received
        self._low = np.zeros(self._client.servers, np.int64)
        self._placement = RowPlacement(self.rows, self._client.servers, replicas, order)
        self._frozen, self._left, self._guarded = 0, False, config.load().values["nan_guard"]
        self._ahead: tuple[int, Any, Question] | None = None  # what was asked for the next step
        self._since_step = 0  # pushes
        self._saving: coordination.Saving | None = None  # one that nobody has waited for
        self.number = coordination.opened(self._client, self._spec)
        self._client.tables.append(self)

    # ---- what it is

    @property
    def name(self) -> str:
        return str(self._spec["name"])

    @property
    def rows(self) -> int:
        return int(self._spec["rows"])

    @property
    def dim(self) -> int:
        return int(self._spec["dim"])

    @property
    def lr(self) -> float | None:
        """The learning rate, which may be set on all ranks alike. None: the optimizer has none.

        With ``staleness=0`` the rate at ``step()`` counts for all gradients of the step. Otherwise each push takes the
        rate at that moment. ``Sgd``, ``Adagrad`` and ``Adam`` let it change. A save does not hold it::

            table.lr = scheduler.get_last_lr()[0]

        Raises:
            HvdMismatchError: later, on all ranks, with ``staleness=0``, if ranks end a step with different rates.
            ValueError: the optimizer's rate cannot change, or the value is not a finite number.
        """
        return self._lr

    @lr.setter
    def lr(self, value: Any) -> None:
        self._lr = new_rate(self._spec, value)

    @property
    def replicas(self) -> int:
        return int(self._spec["replicas"])

    @property
    def is_frozen(self) -> bool:
        """Within `frozen()`."""
        return self._frozen > 0

    def ready(self, writes: bool = False) -> Client:
        """Return the client of this rank. Layers of frameworks call it.

        Args:
            writes (bool): this rank is about to push or to end a step.

        Returns:
            Client: the connections to the servers.

        Raises:
            HvdError: the table is of a job that was shut down. With ``writes``: this rank has left it, or it is frozen.
        """
        rank()  # raises in a forked child and where there is no job
        if self._client is None or self._client is not cluster.current():
            raise HvdError(
                f"table {self.name!r} belongs to a job that was shut down: create it again after hvd.init() [HVD035]"
            )
        if writes and (self._left or self._frozen):
            why = "has left it (leave())" if self._left else "reads it only (frozen())"
            raise HvdError(f"table {self.name!r}: this rank {why}, and can neither push nor end a step [HVD035]")
        return self._client

    def __deepcopy__(self, memo: Any) -> Table:
        """Itself: a copy of a model looks up the same rows."""
        return self

    def __reduce__(self) -> Any:
        text = f"table {self.name!r} lies on servers: pickle a model's state_dict(), and keep rows by table.save(path)"
        raise TypeError(f"{text} [HVD035]")

    # ---- rows

    def checked_ids(self, ids: Any) -> Any:
        """Return ids as int64, contiguous, in the same shape. Layers of frameworks call it.

        Args:
            ids (array): integers of any shape.

        Returns:
            array: int64.

        Raises:
            ValueError: an id is not the number of a row, or not an integer.
        """
        found = np.asarray(ids)
        if found.dtype.kind not in "iu" and found.size:
            raise ValueError(f"table {self.name!r}: ids must be integers, not {found.dtype} [HVD027]")
        checked = found.astype(np.int64, order="C")  # ascontiguousarray would give a scalar a dimension
        bad = checked.view(np.uint64) >= self.rows  # as such, negative ones are the largest
        if np.count_nonzero(bad):
            at = int(bad.argmax())
            raise ValueError(
                f"table {self.name!r} has rows 0 to {self.rows - 1}: there is no row {found.flat[at]} (ids[{at}])"
                " [HVD027]"
            )
        return checked

    def pull(self, ids: Any) -> Any:
        """Return the rows of some ids.

        It waits for ranks that are more than ``staleness`` steps behind.

        Args:
            ids: an array or tensor of integers, of any shape.

        Returns:
            float32 of shape ``(*ids.shape, dim)``, of the framework and on the device of ``ids``.

        Raises:
            HvdPeerLostError: the rows or a rank are lost.
            HvdTimeoutError: no answer within ``HVDLITE_COLLECTIVE_TIMEOUT``.
            ValueError: an id is not the number of a row.
        """
        return self.pull_async(ids).wait()

    def pull_async(self, ids: Any) -> Handle:
        """Start ``pull`` and return a handle.

        Args:
            ids: as in ``pull``.

        Returns:
            Handle: ``hvd.synchronize`` returns the rows.

        Raises:
            ValueError: an id is not the number of a row.
        """
        checked = self.checked_ids(numbers(ids))
        some, index = different(checked)
        question = self._question(some)
        return Awaited(question, lambda: like(question.rows.take(index, axis=0), ids))

    def pull_unique(self, ids: Any) -> Any:
        """Return the rows of ids that are checked, sorted and all different. Layers of frameworks call it.

        Args:
            ids (array): int64.

        Returns:
            array: float32 of shape (len(ids), dim).
        """
        question = self._question(ids)
        self.wait(question)
        return question.rows

    def pull_range(self, first: int, last: int) -> Any:
        """Return the rows from ``first`` to ``last - 1``. With ``order="range"`` they are one slice of a server.

        Args:
            first (int): the first row.
            last (int): the row after the last one.

        Returns:
            array: float32 of shape (last - first, dim).

        Raises:
            ValueError: a row does not exist.
        """
        return self.pull(np.arange(first, last))

    def push_range(self, first: int, grads: Any) -> None:
        """Push gradients of the rows from ``first`` on.

        Args:
            first (int): the first row.
            grads (array): shape (n, dim).

        Raises:
            ValueError: a row does not exist, or the shape does not fit.
        """
        self.push(np.arange(first, first + len(grads)), grads)

    def prefetch(self, ids: Any) -> None:
        """Ask now for rows that the next step will pull, so that they are there when it does.

        They have what ``staleness`` promises for the next step. With ``staleness`` of 1 or more they lack what this
        rank pushes in this step.

        Args:
            ids: the ids that the next step pulls.

        Raises:
            ValueError: an id is not the number of a row.
        """
        some = np.unique(self.checked_ids(numbers(ids)))
        if self._left:  # and waits for nobody
            return
        self._ahead = (self.clock + 1, some, self._sent(some, self.clock + 1))

    def _question(self, ids: Any) -> Question:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self.clock and np.array_equal(ahead[1], ids):
            return ahead[2]
        if ahead is not None and ahead[0] > self.clock:
            self._ahead = ahead  # not its turn
        return self._sent(ids, 0 if self._left else self.clock)

    def _sent(self, ids: Any, clock: int) -> Question:
        client = self.ready()
        with Deferred(), client.lock:
            question = Question(self, np.empty((len(ids), self.dim), F32), clock)
            self.pull_pieces(question, ids)
            return question

    def pull_pieces(self, question: Question, ids: Any, where: Any = None) -> None:
        """Ask the servers for rows that will fill ``question.rows[where]``. The client calls it.

        Args:
            question (Question): the pull.
            ids (array): int64.
            where (array, optional): places in ``question.rows``. None: all, in order.
        """
        client = self.ready()
        owners = self._placement.owners_of(ids)
        owner = owners[:, 0]
        if client.servers > 1 and len(client.alive()) < client.servers:
            owner = np.where(client.is_alive()[owner], owner, owners[:, -1])
        for server, at in by_piece(owner, messages.rows_per_piece(self.dim)):
            client.pull(question, server, ids[at], at if where is None else where[at])

    def wait(self, question: Question, seconds: float | None = None) -> None:
        """Wait until a pull or push is answered. The client calls it.

        Args:
            question (Question): the pull or push.
            seconds (float, optional): the most seconds to wait. None: no limit.
        """
        client = self.ready()
        patience, until = Patience(client, self), math.inf if seconds is None else time.monotonic() + seconds

        def over() -> bool:
            if question.left:
                patience.look()
            return not question.left or time.monotonic() >= until

        client.until(over)

    # ---- gradients

    def push(self, ids: Any, grads: Any) -> None:
        """Send the gradients of rows to the servers, and return when they have them.

        Gradients of one row are added up first. With ``staleness=0`` servers apply them when all ranks have ended the
        step, else at once.

        Args:
            ids: an array or tensor of integers, of any shape.
            grads: floating-point numbers of shape ``(*ids.shape, dim)``.

        Raises:
            HvdError: this rank has left the table, or it is frozen.
            HvdNotFiniteError: with ``HVDLITE_NAN_GUARD``, a gradient is not finite.
            HvdPeerLostError: the rows or a rank are lost.
            ValueError: an id is not the number of a row, or shape or dtype do not fit. Nothing was sent.
        """
        self.push_async(ids, grads).wait()

    def push_async(self, ids: Any, grads: Any) -> Handle:
        """Start ``push`` and return a handle. Both arrays may be changed afterwards.

        Args:
            ids: as in ``push``.
            grads: as in ``push``.

        Returns:
            Handle: ``hvd.synchronize`` waits until the servers have the gradients.

        Raises:
            ValueError: as ``push``.
        """
        self.ready(writes=True)
        checked, values = self.checked_ids(numbers(ids)), np.asarray(numbers(grads))
        values = values.astype(F32) if values.dtype.name == "bfloat16" else values
        if values.shape != (*checked.shape, self.dim) or values.dtype.kind != "f":
            raise ValueError(
                f"table {self.name!r}: push of ids of shape {checked.shape} needs gradients of shape "
                f"{(*checked.shape, self.dim)} and a floating-point dtype, not {values.shape} {values.dtype} [HVD028]"
            )
        some, summed = added_up(checked.ravel(), values.astype(F32, copy=False).reshape(checked.size, self.dim))
        return Awaited(self.push_unique(some, summed), lambda: None)

    def push_unique(self, ids: Any, grads: Any) -> Question:
        """Start to send gradients of ids that are checked, sorted and all different. Layers of frameworks call it.

        Args:
            ids (array): int64.
            grads (array): float32 of shape (len(ids), dim), contiguous. It must not be changed afterwards.

        Returns:
            Question: for ``wait``.
        """
        client = self.ready(writes=True)
        if self._guarded and len(grads) and not np.isfinite(grads).all():
            self._not_finite(ids, grads)
        self._since_step += 1
        if self._since_step == MANY_PUSHES and self._spec["staleness"] == 0:
            text = (
                f"table {self.name!r}: {MANY_PUSHES} pushes since the last table.step(), and the servers apply none "
                "before it: call table.step() after each batch [HVD037]"
            )
            warn(text, RuntimeWarning)
        question, owners = Question(self), self._placement.owners_of(ids)
        for server, at in by_piece(owners, messages.rows_per_piece(self.dim)):
            body = [ids[at], grads[at] if isinstance(at, slice) else grads.take(at, axis=0)]
            client.push(question, server, self.number, self.clock, body)
        return question

    def _not_finite(self, ids: Any, grads: Any) -> None:
        row = int(ids[~np.isfinite(grads).all(axis=1)][0])
        text = coded("HVD320", f"table {self.name!r}: rank {rank()} pushes NaN or infinities for row {row}")
        if nan_guard.MODES[self._guarded] != "warn":
            raise HvdNotFiniteError(text)
        warn(text, RuntimeWarning)

    # ---- steps

    def step(self) -> None:
        """End this rank's step. It returns when no rank is more than ``staleness + 1`` steps behind.

        Raises:
            HvdPeerLostError: rows or a rank are lost.
        """
        step(self)

    def leave(self) -> None:
        """Report that this rank has no more data, so that no rank waits for it. It may still pull.

        Raises:
            HvdError: it has left already, or the table is frozen.
        """
        self._end_step(messages.LEAVE)
        self._left, self._ahead = True, None

    def flush(self) -> None:
        """Wait until servers have all pushes and steps of this rank, for example before another rank reads.

        Raises:
            HvdPeerLostError: rows or a rank are lost.
        """
        self.ready().flush()

    def _end_step(self, flag: int) -> None:
        client = self.ready(writes=True)
        question = Question(self)
        for server in client.alive():
            client.push(question, server, self.number, self.clock, [], flag)
        self.clock += 1
        self._since_step = 0

    def _wait_turn(self) -> None:
        staleness = self._spec["staleness"]
        if staleness is None:
            return
        client = self.ready()
        patience = Patience(client, self)

        def over() -> bool:
            if int(self._low[client.is_alive()].min()) >= self.clock - staleness - 1:
                return True
            patience.look()
            return False

        client.until(over)

    def on_clock(self, server: int, low: int, clocks: Any) -> None:
        """Take what a server reports about the ranks' clocks. The client calls it.

        Args:
            server (int): the number of the server.
            low (int): the clock of the slowest rank.
            clocks (array, optional): the clocks of all ranks.
        """
        self._low[server] = max(self._low[server], low)
        if clocks is not None:
            self.clocks = clocks

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Return a context manager in which rows are read and not pushed, for evaluation.

        Yields:
            None
        """
        self._frozen += 1
        try:
            yield
        finally:
            self._frozen -= 1

    # ---- as a whole

    def save(self, path: Any) -> None:
        """Write all rows that exist, with the optimizer's state, to a folder. All ranks must call it.

        Call it between ``step()`` and the next pull. An interrupted save leaves the previous one in the folder as it
        was. It may take longer than ``HVDLITE_COLLECTIVE_TIMEOUT``.

        Args:
            path (str): a folder that all servers reach.

        Raises:
            HvdError: a server could not write. The text names it.
        """
        client, folder = self._met(), os.path.abspath(os.fsdecode(path))  # servers may be in another folder
        number, spec = self.number, self._spec
        coordination.Work(client, lambda: checkpoint.save(client, number, spec, folder), spec).wait()

    def save_async(self, path: Any) -> Handle:
        """Start ``save`` and return a handle. Servers write what rows are now. Training may go on. All ranks call it.

        Rows that change meanwhile need memory twice. The save is valid once all ranks have called ``wait()`` of the
        handle, or ``hvd.synchronize``. The next ``save``, ``save_async`` or ``load`` of the table does it, too.

        Args:
            path (str): as in ``save``.

        Returns:
            Handle: ``wait()`` is collective. It raises what ``save`` raises, also that a server has ended meanwhile.

        Raises:
            HvdError: a server could not begin.
        """
        client, folder = self._met(), os.path.abspath(os.fsdecode(path))
        number, spec = self.number, self._spec
        servers = coordination.Work(client, lambda: checkpoint.begin(client, number, spec, folder), spec).wait()
        finish = coordination.Work(
            client, lambda: checkpoint.finish(client, number, spec, folder, servers), spec, again=False
        )
        self._saving = coordination.Saving(finish)
        return self._saving

    def _met(self) -> Client:
        """Servers have all pushes, and no save is under way."""
        client, self._ahead = self.ready(), None
        self.saved(None)
        coordination.met(client)
        return client

    def saved(self, seconds: float | None) -> None:
        """Wait for a save whose handle was not waited for. ``hvd.shutdown`` calls it.

        Args:
            seconds (float, optional): how long rank 0 waits, alone. It prints what was not saved. None: all ranks wait.
        """
        saving, self._saving = self._saving, None
        if saving is None or saving.work.is_known:
            return
        if seconds is None:
            saving.wait()
        elif rank() == 0 and (error := saving.work.join(seconds)) is not None:
            text = f"hvdlite: table {self.name!r}: the last save_async failed: {uncoded(str(error))} [HVD033]"
            print(text, file=sys.stderr, flush=True)

    def load(self, path: Any) -> None:
        """Replace the rows by those of a save, made by any number of servers. All ranks must call it.

        Rows that were not touched before the save are made as they would have been then, whatever ``init`` is here.

        Args:
            path (str): the folder of the save, which all servers reach.

        Raises:
            HvdError: a server could not read.
            ValueError: the save is incomplete, or of other rows, dim or optimizer. The table stays as it was.
        """
        client, folder = self._met(), os.path.abspath(os.fsdecode(path))
        load = coordination.Work(client, lambda: checkpoint.load(client, self.number, self._spec, folder), self._spec)
        self._spec.update(load.wait())

    def stats(self) -> list[dict[str, Any]]:
        """Return numbers of each server that lives.

        Returns:
            list[dict]: rows and bytes, clocks of the ranks (None: has left), pushes applied and duplicates refused,
            pulls, how many of them waited and how long, CPU time, process id.
        """
        client = self.ready()
        answers = [(each, client.ask(each, "stats", self.number)) for each in client.alive()]
        return [{"server": each, **answer} for each, answer in answers if answer is not None]


def step(*tables: Table) -> None:
    """End this rank's step for several tables. All are informed before it waits for any.

    Args:
        tables (hvdlite.ps.Table): the tables.

    Raises:
        HvdPeerLostError: rows or a rank are lost.

    Example:
        >>> hvd.ps.step()  # with tables: hvd.ps.step(users, items)
    """
    for table in tables:
        table._end_step(messages.TICK)
    for table in tables:
        table._wait_turn()


def stats() -> dict[str, Any]:
    """Return the numbers of all tables and of this rank's messages.

    All ranks must call it if the job has no servers yet, because it starts them then.

    Returns:
        dict: ``{"tables": {name: Table.stats()}, "rank": {...}}``, with bytes and messages sent and received.

    Raises:
        HvdInitError: the job has no servers.

    Example:
        >>> hvd.ps.stats()["rank"]["bytes_out"]  # doctest: +SKIP
        >>> # skipped in tests: it needs servers
    """
    client = cluster.client()
    names = ("bytes_out", "bytes_in", "messages_out", "messages_in", "sent_again")
    own = {name: getattr(client, name) for name in names}
    return {"tables": {table.name: table.stats() for table in client.tables}, "rank": own}
