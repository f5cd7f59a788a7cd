"""Rendezvous through torch.distributed: ranks that it brings together become a job of hvdlite.

Under hvdlite-run the launcher's store is the rendezvous, and a script that has called `hvd.init()` has a job already.
All others use the store that init_process_group has: no port, no process and no secret of our own. Rank 0 draws the
secret and sends it through that store, so any process that can write there is trusted, as in torch. A rank that is lost
later is not seen there but by the core.

torchrun may keep one store for all attempts of --max-restarts, and a file:// store outlives its job. So nothing is read
that another job has written: the keys of a rendezvous lie under a number that rank 0 draws, those of groups under the
number of the job.

The job ends with the default group, unless the script has begun it itself.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ... import _core, config
from ...errors import HvdInitError, HvdMismatchError
from ...lifecycle import init
from ...ops.objects import broadcast_object
from ...process_sets import process_set
from ...rendezvous.bootstrap import Met
from ...rendezvous.discovery import BY_HAND, Place
from . import bucket_memory
from .tensors import POOL


class Exchange:
    """An allgather of bytes over a store of torch's, among some ranks, in their order. The first of them collects."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._ranks, self._round = store, rank, ranks, 0

    def __call__(self, mine: bytes) -> list[bytes]:
        self._round += 1
        first = self._ranks[0]
        collected = f"{self._round}/all/{first}"
        if self._rank != first:
            self._store.set(f"{self._round}/{self._rank}", mine.hex())
            return self._read(collected, first)
        parts = [mine.hex() if each == first else self._get(f"{self._round}/{each}", each) for each in self._ranks]
        self._store.set(collected, json.dumps(parts))
        return self._read(collected, first)

    def _read(self, key: str, rank: int) -> list[bytes]:
        try:
            parts = [bytes.fromhex(each) for each in json.loads(self._get(key, rank))]
        except (ValueError, TypeError):
            raise HvdInitError(
                f"rank {self._rank}: the data from rank {rank} in the store of init_process_group is not from "
                "hvdlite: check which other program writes there [HVD112]"
            ) from None
        if len(parts) != len(self._ranks):
            raise HvdMismatchError(
                f"rank {self._rank} makes a process group of the ranks {list(self._ranks)}, and another rank makes "
                f"one of {len(parts)} ranks: make groups in the same order on all ranks [HVD303]"
            )
        return parts

    def part(self) -> None:
        """Parts from all that the store holds: all later keys lie under a number that the first rank draws now. It
        welcomes each hello, also one of an earlier attempt, until all ranks have returned that number; the others
        recognize their answer by the number in it that they have drawn."""
        mine, me, first = secrets.token_hex(16), self._rank, self._ranks[0]
        drawn, welcomed, late = mine, dict[int, str](), [each for each in self._ranks if each != first]

        def without() -> int | None:
            for each in tuple(late):
                hello = self._look(f"hello/{each}")
                if hello and hello != welcomed.get(each):
                    self._store.set(f"welcome/{each}", f"{hello} {mine}")
                    welcomed[each] = hello
                if self._look(f"ack/{each}") == mine:
                    late.remove(each)
            return late[0] if late else None

        def unwelcome() -> int | None:
            nonlocal drawn
            if self._look(f"hello/{me}") != mine:  # not yet, or another process has written there
                self._store.set(f"hello/{me}", mine)
            hello, _, drawn = self._look(f"welcome/{me}").partition(" ")
            return None if hello == mine else first

        self._wait(without if me == first else unwelcome)
        if me != first:
            self._store.set(f"ack/{me}", drawn)
        self._store = PrefixStore(drawn, self._store)

    def _look(self, key: str) -> str:
        return bytes(self._store.get(key)).decode("utf-8", "replace") if self._store.check([key]) else ""

    def _get(self, key: str, rank: int) -> str:
        self._wait(lambda: None if self._store.check([key]) else rank)
        return self._look(key)

    def _wait(self, missing: Callable[[], int | None]) -> None:
        """Polls for the missing rank: a thread blocked in C++ would notice neither a lost rank nor Ctrl-C."""

        limit, pause = getattr(self._store, "timeout", timedelta(minutes=30)).total_seconds(), 1e-4
        until = time.monotonic() + limit
        while (rank := missing()) is not None:
            if init.is_initialized():
                _core.raise_failure()
            if time.monotonic() > until:
                raise HvdInitError(
                    f"rank {self._rank} waited {limit:g} s for rank {rank} over the store of init_process_group, to "
                    f"create a group of the ranks {list(self._ranks)}: create all groups on all ranks, in one order "
                    "[HVD110]"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


class StoreRendezvous:
    """The rendezvous (`store_client.Rendezvous`) over a store of torch's."""

    failed = False
    servers: Sequence[str] = ()
    aggregators: Sequence[str] = ()

    epoch = 0  # each incarnation has a number of its own

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.allgather = Exchange(store, rank, range(size))
        self.allgather.part()
        drawn = self.allgather(secrets.token_bytes(40))[0]  # rank 0's
        self.secret, self.job = drawn[:32], int.from_bytes(drawn[32:], "little")

    def abort(self, culprit: int, code: int, text: str) -> None:
        """Nothing: the core notifies the other ranks."""

    def check(self) -> None:
        """Nothing: the store knows of no rank that has ended."""

    def bye(self) -> None:
        """Nothing: the store is torch's."""

    close = bye

    def lend(self) -> int:
        """0: there is no MPI."""
        return 0

    def fileno(self) -> int:
        """-1: torch's store takes no frames of the core's."""
        return -1

    def session(self) -> None:
        """None: nothing is signed there."""
        return


def store_of_job() -> tuple[Store, int, int]:
    """For init_method="hvdlite://": a store on rank 0 of the job that hvd.init() finds; the rank and the size."""
    init.init()
    rank, size = _core.rank(), _core.size()
    host = "127.0.0.1" if _core.cross_size() == 1 else socket.gethostname()
    store: Any = TCPStore
    kept = store(host, 0, size, True, wait_for_workers=False) if rank == 0 else None
    address = broadcast_object(None if kept is None else (host, kept.port), 0, "torch.distributed.store")
    return kept or store(*address, size, False), rank, size


class WorldGroup:
    """The job of this process, and the process sets of its groups. A set, once open, serves all later groups of its
    ranks, until the job ends."""

    def __init__(self) -> None:
        self._begun = False  # here, and not by the script
        self._worlds = 0  # default groups of this job
        self._sets: dict[Sequence[int], process_set.ProcessSet] = {}
        self._groups: dict[Sequence[int], int] = {}  # how many were made for each set

    def enter(self, store: Store, rank: int, size: int) -> None:
        """Becomes a rank, or finds that this process is one. Raises ValueError where it is another one."""
        self.leave()  # an earlier default group: not every torch reports that it is destroyed
        if not init.is_initialized():
            environ = config.environ()
            if [environ.get("HVDLITE_RANK"), environ.get("HVDLITE_SIZE")] == [str(rank), str(size)]:
                init.init()
            else:
                own = PrefixStore("hvdlite", store)
                position = Place(rank, size, None, None, None, None, BY_HAND)
                address = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
                rendezvous = (address[0], int(address[1])) if address[0] and address[1].isdecimal() else None
                init.init(Met(position, StoreRendezvous(own, rank, size) if size > 1 else None, rendezvous))
            self._begun = True
        self._worlds += 1
        if (_core.rank(), _core.size()) != (rank, size):
            raise ValueError(
                f"init_process_group received rank {rank} of {size}, but hvdlite is rank {_core.rank()} of "
                f"{_core.size()}: start both with one launcher [HVD105]"
            )

    def set_of(self, ranks: Sequence[int], store: Store) -> tuple[Any, bool]:
        """The process set of these ranks, and whether no group before has it. All members call it.
        HvdMismatchError where they make different groups."""
        number = _core.keep("")  # which touches no file
        prefix = f"hvdlite/{number['job']}/{number['epoch']}/{self._worlds}"
        exchange = Exchange(PrefixStore(prefix, store), _core.rank(), sorted(ranks))
        word = json.dumps(list(ranks)).encode()
        for received in exchange(word):
            if received != word:
                raise HvdMismatchError(
                    f"rank {_core.rank()} makes a process group of the ranks {list(ranks)}, and another rank makes "
                    f"one of {received[:99].decode('utf-8', 'replace')}: make groups in the same order on all ranks "
                    "[HVD303]"
                )
        key = tuple(sorted(ranks))
        if key not in self._sets:
            everyone = len(key) == _core.size()
            self._sets[key] = process_set.global_process_set if everyone else process_set.open_among(key, exchange)
        self._groups[key] = count = self._groups.get(key, 0) + 1
        # The store may end with rank 0's process: no rank goes on before all have read what they need there.
        name = f"torch.distributed.{self._worlds}.{count}"
        inside = process_set.number_of(self._sets[key])
        _core.request(_core.BARRIER, 0, 0, name, (), process_set=inside).run(0, 0, None)
        return self._sets[key], count == 1

    def leave(self) -> None:
        """The default group is destroyed."""
        self._groups.clear()
        if self._begun:
            self._begun = False
            init.shutdown()

    def forget(self) -> None:
        """The job has ended: neither its sets nor its shared memory are those of the next one."""
        self._worlds = 0
        self._sets.clear()
        self._groups.clear()
        POOL.clear()
        bucket_memory.forget()


JOB = WorldGroup()
process_set.on_new_incarnation(JOB.forget)
