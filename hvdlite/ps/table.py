"""How does a rank read and change rows that lie on servers? `Table`: pull, push, step, save, load.

A rank's ids are made different first, so a hot row travels once, and each server that holds some of them is asked once
for each piece of 4 MB. Which server that is, every rank computes by itself (placement.py); what is not answered yet,
the client keeps (client.py); what a pull may see, servers decide (protocol.py).
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import config, guard
from .._coded import coded
from .._public import Handle, rank
from ..errors import HvdError, HvdNotFiniteError
from . import messages, optimizers, saving, serving, together
from .arrays import added_up, by_piece, like, numbers
from .client import Awaited, Client, Question
from .patience import Patience
from .placement import Placement
from .terms import described

F32 = np.float32
MANY_PUSHES = 500  # in a step, after which it is likely that nobody ends it


class Table:
    """`rows` x `dim` float32 numbers on the job's servers. Collective: all ranks make the same tables.

    A row is made on its servers when it is first pulled or pushed. optimizer: what servers do with gradients (Sgd,
    Adagrad, Adam, Ftrl, Add, or a function update(rows, state, grads) of a module). staleness: 0, synchronous: what is
    pulled in a step has all ranks' earlier steps, and bits do not depend on timing; s: ranks may be s steps apart;
    None: nobody waits. replicas=2: each row lies on two servers, and the job survives the loss of one. order="range":
    rows keep their order on servers. reduce: "mean" divides what is pushed by the number of ranks, in every mode, as
    hvd.Average does; "sum" does not. init: hvd.ps.uniform(scale, seed), or zeros.

        table = hvd.ps.Table("users", rows=50_000_000, dim=64, optimizer=hvd.ps.Adagrad(lr=0.05))
        rows = table.pull(ids)             # ids: integers of any shape -> (*ids.shape, 64), NumPy, torch or TensorFlow
        table.push(ids, gradients)
        table.step()                       # this rank's step is over

    Raises ValueError naming the argument that cannot be, HvdMismatchError where ranks differ, HvdInitError where there
    are no servers. Every call raises HvdPeerLostError where rows are lost, or a rank.
    """

    def __init__(
        self, name: str, rows: int, dim: int, optimizer: Any, staleness: int | None = 0, replicas: int = 1,
        order: str = "hash", reduce: str = "mean", init: optimizers.Uniform | None = None
    ) -> None:  # fmt: skip
        self._spec = described(
            name, rows, dim, optimizer=optimizer, staleness=staleness, replicas=replicas, order=order, reduce=reduce,
            init=init,
        )  # fmt: skip
        self._client: Client | None = serving.client()
        if replicas > self._client.servers:
            raise ValueError(f"table {name!r}: replicas=2, but this job has 1 server [HVD025]")
        self.clock = 0  # steps that this rank has ended
        self.clocks: Any = None  # of all ranks, as told last
        self._low = np.zeros(self._client.servers, np.int64)
        self._placement = Placement(self.rows, self._client.servers, replicas, order)
        self._frozen, self._left, self._guarded = 0, False, config.load().values["nan_guard"]
        self._ahead: tuple[int, Any, Question] | None = None  # what was asked for the next step
        self._since_step = 0  # pushes
        self.number = together.opened(self._client, self._spec)
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
    def replicas(self) -> int:
        return int(self._spec["replicas"])

    @property
    def is_frozen(self) -> bool:
        """Within `frozen()`."""
        return self._frozen > 0

    def ready(self, writes: bool = False) -> Client:
        """The client, if the job lives and, where it `writes`, this rank takes part in steps; else HvdError."""
        rank()  # raises in a forked child and where there is no job
        if self._client is None or self._client is not serving.current():
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
        """int64, contiguous, of the same shape. ValueError naming the first that is no row's number."""
        found = np.asarray(ids)
        if found.dtype.kind not in "iu" and found.size:
            raise ValueError(f"table {self.name!r}: ids must be integers, not {found.dtype} [HVD027]")
        flat = found.ravel()
        bad = np.nonzero((flat < 0) | (flat >= self.rows))[0]
        if len(bad):
            raise ValueError(
                f"table {self.name!r} has rows 0 to {self.rows - 1}: there is no row {flat[bad[0]]} (ids[{bad[0]}])"
                " [HVD027]"
            )
        return found.astype(np.int64, order="C")  # ascontiguousarray would give a scalar a dimension

    def pull(self, ids: Any) -> Any:
        """The rows of these ids (integers, any shape): float32 (*ids.shape, dim), of the framework and device of ids.

        Waits for ranks that are more than `staleness` steps behind. Raises ValueError for what is no row's number, and
        HvdTimeoutError after HVDLITE_COLLECTIVE_TIMEOUT.
        """
        return self.pull_async(ids).wait()

    def pull_async(self, ids: Any) -> Handle:
        """As `pull`; returns a handle for hvd.synchronize at once."""
        checked = self.checked_ids(numbers(ids))
        some, back = np.unique(checked, return_inverse=True)
        question = self._asked(some)
        place = back.reshape(checked.shape)
        return Awaited(question, lambda: like(question.rows.take(place, axis=0), ids))

    def pull_unique(self, ids: Any) -> Any:
        """As `pull` for int64 ids that are checked, sorted and all different: float32 [len(ids), dim]."""
        question = self._asked(ids)
        self.wait(question)
        return question.rows

    def pull_range(self, first: int, last: int) -> Any:
        """Rows first to last - 1: float32 [last - first, dim]. With order="range" these are one slice of a server."""
        return self.pull(np.arange(first, last))

    def push_range(self, first: int, grads: Any) -> None:
        """Pushes gradients of the rows from `first` on."""
        self.push(np.arange(first, first + len(grads)), grads)

    def prefetch(self, ids: Any) -> None:
        """Asks now for rows that the next step will pull. If that step pulls these ids, they are there already.

        They have what `staleness` promises for the next step; with s >= 1 not yet what this rank pushes in this step.
        """
        some = np.unique(self.checked_ids(numbers(ids)))
        if self._left:  # and waits for nobody
            return
        self._ahead = (self.clock + 1, some, self._sent(some, self.clock + 1))

    def _asked(self, ids: Any) -> Question:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self.clock and np.array_equal(ahead[1], ids):
            return ahead[2]
        if ahead is not None and ahead[0] > self.clock:
            self._ahead = ahead  # not its turn
        return self._sent(ids, 0 if self._left else self.clock)

    def _sent(self, ids: Any, clock: int) -> Question:
        client = self.ready()
        with client.lock:
            question = Question(self, np.empty((len(ids), self.dim), F32), clock)
            self.pull_pieces(question, ids, np.arange(len(ids)))
            return question

    def pull_pieces(self, question: Question, ids: Any, where: Any) -> None:
        """Asks the servers of these rows, the first that lives for each; they go to question.rows[where]."""
        client = self.ready()
        owners, alive = self._placement.owners_of(ids), client.is_alive()
        owner = owners[:, 0] if alive.all() else np.where(alive[owners[:, 0]], owners[:, 0], owners[:, -1])
        for server, at in by_piece(owner, client.servers, messages.rows_per_piece(self.dim)):
            client.pull(question, server, np.ascontiguousarray(ids[at]), where[at])

    def wait(self, question: Question, seconds: float | None = None) -> None:
        """Until it is answered by all servers, or so long."""
        client = self.ready()
        patience, until = Patience(client, self), math.inf if seconds is None else time.monotonic() + seconds

        def over() -> bool:
            if question.left:
                patience.look()
            return not question.left or time.monotonic() >= until

        client.until(over)

    # ---- gradients

    def push(self, ids: Any, grads: Any) -> None:
        """Gives servers the gradients of these rows, (*ids.shape, dim); returns when they have them.

        What belongs to one row is added up first. With staleness=0 they are applied when all ranks have ended the step,
        else at once. Raises ValueError for shapes and dtypes that do not fit (nothing was sent).
        """
        self.push_async(ids, grads).wait()

    def push_async(self, ids: Any, grads: Any) -> Handle:
        """As `push`; returns a handle at once. Both arrays may be written again then."""
        self.ready(writes=True)
        checked, given = self.checked_ids(numbers(ids)), np.asarray(numbers(grads))
        given = given.astype(F32) if given.dtype.name == "bfloat16" else given
        if given.shape != (*checked.shape, self.dim) or given.dtype.kind != "f":
            raise ValueError(
                f"table {self.name!r}: push of ids of shape {checked.shape} needs gradients of shape "
                f"{(*checked.shape, self.dim)} and a floating-point dtype, not {given.shape} {given.dtype} [HVD028]"
            )
        some, summed = added_up(checked.ravel(), given.astype(F32, copy=False).reshape(checked.size, self.dim))
        return Awaited(self.push_unique(some, summed), lambda: None)

    def push_unique(self, ids: Any, grads: Any) -> Question:
        """As `push_async` for int64 ids that are checked, sorted and all different, and float32 gradients [len(ids),
        dim], contiguous, which nobody writes any more."""
        client = self.ready(writes=True)
        if self._guarded and len(grads) and not np.isfinite(grads).all():
            self._not_finite(ids, grads)
        self._since_step += 1
        if self._since_step == MANY_PUSHES and self._spec["staleness"] == 0:
            text = (
                f"table {self.name!r}: {MANY_PUSHES} pushes since the last table.step(), and the servers apply none "
                "before it: call table.step() after each batch [HVD037]"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        with client.lock:
            question = Question(self)
            owners = self._placement.owners_of(ids)
            for copy in range(owners.shape[1]):
                for server, at in by_piece(owners[:, copy], client.servers, messages.rows_per_piece(self.dim)):
                    whole = len(at) == len(ids)
                    body = [ids, grads] if whole else [np.ascontiguousarray(ids[at]), grads[at]]
                    client.push(question, server, self.number, self.clock, body)
            return question

    def _not_finite(self, ids: Any, grads: Any) -> None:
        row = int(ids[~np.isfinite(grads).all(axis=1)][0])
        text = coded("HVD320", f"table {self.name!r}: rank {rank()} pushes NaN or infinities for row {row}")
        if guard.MODES[self._guarded] != "warn":
            raise HvdNotFiniteError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    # ---- steps

    def step(self) -> None:
        """This rank's step is over. Returns once no rank is more than `staleness` + 1 steps behind."""
        step(self)

    def leave(self) -> None:
        """This rank has no more data: nobody waits for it any more. It may still pull. As hvd.join for collectives."""
        self._end_step(messages.LEAVE)
        self._left, self._ahead = True, None

    def flush(self) -> None:
        """Returns once servers have all that this rank has pushed, and its steps: before another rank reads, say."""
        self.ready().flush()

    def _end_step(self, flag: int) -> None:
        client = self.ready(writes=True)
        with client.lock:
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

    def heard(self, server: int, low: int, clocks: Any) -> None:
        """What a server says of the ranks' clocks."""
        self._low[server] = max(self._low[server], low)
        if clocks is not None:
            self.clocks = clocks

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within this, rows are read and not pushed: evaluation."""
        self._frozen += 1
        try:
            yield
        finally:
            self._frozen -= 1

    # ---- as a whole

    def save(self, path: Any) -> None:
        """Writes all rows that were made, with the optimizer's state, to the folder `path`, which all servers reach.

        Collective, between a step() and the next pull. A save that is interrupted leaves the one before it in this
        folder as it was. Raises HvdError naming the server that could not write.
        """
        self._ahead = None
        together.act(self.ready(), saving.save, self.number, self._spec, path)

    def load(self, path: Any) -> None:
        """Takes the rows of a save, of any number of servers, in place of the table's own. Collective.

        Raises ValueError naming the file where it is not whole, or of other rows, dim or optimizer: nothing changes.
        """
        self._ahead = None
        together.act(self.ready(), saving.load, self.number, self._spec, path)

    def stats(self) -> list[dict[str, Any]]:
        """For each server that lives: rows and bytes that it has, clocks of the ranks (None: has left), pushes applied
        and duplicates refused, pulls, how many waited and how long in all, its CPU time, its pid."""
        client = self.ready()
        told = [(each, client.ask(each, "stats", self.number)) for each in client.alive()]
        return [{"server": each, **said} for each, said in told if said is not None]


def step(*tables: Table) -> None:
    """This rank's step is over for each of these tables; all are told before any is waited for."""
    for table in tables:
        table._end_step(messages.TICK)
    for table in tables:
        table._wait_turn()


def stats() -> dict[str, Any]:
    """{"tables": {name: Table.stats()}, "rank": bytes and messages that this rank has sent and received}."""
    client = serving.client()
    names = ("bytes_out", "bytes_in", "messages_out", "messages_in", "sent_again")
    own = {name: getattr(client, name) for name in names}
    return {"tables": {table.name: table.stats() for table in client.tables}, "rank": own}
