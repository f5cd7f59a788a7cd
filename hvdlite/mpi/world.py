"""Rendezvous over MPI: a World has the ranks and the allgather that the launcher's store has otherwise.

`open_world` loads MPI, starts it if the script has not, checks that its world is that of the environment, and makes a
communicator of its own, so that no message of ours meets one of the script's. Everything later is agreed over that:
the hosts of the ranks, the number of the job, its secret.

MPI ends as it began. Its starter finalizes it: hvdlite at exit, after its own shutdown, if it has started MPI. A job
that has failed is not finalized, because that would wait for ranks that are gone; a process that ends without is what
makes mpirun stop the others. It gives them a moment first, in which they say which rank it was; not under `hvdlite-run
--mpi`, where no mpirun stops a rank and the launcher learns which failed first (launcher_agent.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from .. import _core, mpi
from .._core import ffi, lib
from ..errors import HvdInitError
from ..errors.codes import coded
from ..rendezvous.discovery import Place
from . import diagnosis, hydra, launcher_agent, libmpi

_SLICE_MS = 50  # Python gets a look at Ctrl-C so often
_POKE_S = 0.005
_GRACE_S = 1.0  # for the others' last words, when the job has failed

_gave_up: str | None = None  # an exchange that some rank never came to: MPI cannot take it back
_failed = False  # whether the job that ended last has, or that is still open
_at_exit_of: int = 0  # the process that has registered at exit
_has_agent = False  # whether hvdlite-run has started this process


class World:
    """The ranks of a job over MPI. Made by `open_world`; stands where a Store stands."""

    def __init__(self, comm: int, place: Place, timeout: float) -> None:
        self.comm = comm  # ours alone, as an integer handle
        self.place = place
        self.job = 0
        self.epoch = 0
        self.secret = bytes(32)
        self.servers: Sequence[str] = ()
        self.aggregators: Sequence[str] = ()
        self.failed = False
        self.agent = -1  # the connection to this rank's
        self.borrowed = False  # whether the core has it for tensors
        self._timeout = timeout
        self._settled = threading.Event()
        self._mover: threading.Thread | None = None
        self._of_sets: dict[int, int] = {}

    def begin(self) -> None:
        """Until `settled` a thread calls MPI now and then. An exchange that is over on this rank may owe others bytes
        that only leave when MPI is called again (over libfabric), while this rank waits for them elsewhere; later the
        core sees to that."""

        def move() -> None:
            while not self._settled.wait(_POKE_S):
                lib.hvd_mpi_poke(self.comm)

        self._mover = threading.Thread(target=move, name="hvdlite-mpi-move", daemon=True)
        self._mover.start()

    def settled(self) -> None:
        """The job has begun, or will not."""
        self._settled.set()
        if self._mover is not None:
            self._mover.join()
            self._mover = None

    def lend(self) -> int:
        """The communicator, for the core to move tensors over; process sets get one each from then on."""
        self.borrowed = True
        return self.comm

    def session(self) -> None:
        """None: a pair of sockets leads to the agent."""

    def fileno(self) -> int:
        """The connection to this rank's agent, under `hvdlite-run --mpi`; else -1."""
        return self.agent

    def allgather(self, mine: bytes) -> list[bytes]:
        """Gives `mine`, returns every rank's bytes in rank order. Blocks. HvdInitError if some ranks do not come."""
        lengths = [struct.unpack("<q", part)[0] for part in self._allgather(struct.pack("<q", len(mine)))]
        widest = max(lengths)
        if widest == 0:
            return [b""] * len(lengths)
        parts = self._allgather(mine.ljust(widest, b"\0"))
        return [part[:length] for part, length in zip(parts, lengths)]

    def _allgather(self, mine: bytes) -> list[bytes]:
        size = self.place.size
        everyone = ffi.new("char[]", len(mine) * size)
        _until_done(
            lambda ms, text: lib.hvd_mpi_exchange(self.comm, mine, len(mine), everyone, ms, text, _core.TEXT_BYTES),
            self._timeout,
            f"rank {self.place.rank}: not all {size} ranks of this MPI job have come",
        )
        joined = bytes(ffi.buffer(everyone))
        return [joined[i * len(mine) : (i + 1) * len(mine)] for i in range(size)]

    def prepare_set(self, ranks: Sequence[int]) -> int:
        """A communicator for the process set that is opened next; all ranks of the set call this. 0: none is needed."""
        comm = 0
        if self.borrowed and len(ranks) > 1 and self.place.rank in ranks:
            comm = _communicator(self.comm, ranks, self._timeout)
        lib.hvd_mpi_comm_lend(comm)
        return comm

    def keep_set(self, number: int, comm: int) -> None:
        """The set of this number has been opened with it."""
        if comm:
            self._of_sets[number] = comm

    def drop_comm(self, comm: int) -> None:
        """The set for which it was prepared has not come about. All of its ranks call this."""
        self._free(comm)

    def _free(self, comm: int) -> None:
        if comm:
            lib.hvd_mpi_comm_free(comm)

    def drop_set(self, number: int) -> None:
        """The set of this number is closed."""
        comm = self._of_sets.pop(number, 0)
        if comm:
            self._free(comm)

    def check(self) -> None:
        """The end of a rank is not reported: the launcher ends the job."""

    def abort(self, culprit: int, code: int, text: str) -> None:
        """Only an agent receives it, if there is one: the other ranks have no store, and run into their time limit."""
        launcher_agent.abort(self.agent, culprit, code, text)

    def bye(self) -> None:
        """Gives the communicator back, unless the job has failed: then MPI may still be busy on it."""
        global _failed
        self.settled()
        _failed = self.failed
        comm, self.comm = self.comm, 0
        for each in [*self._of_sets.values(), comm]:
            if not self.failed:
                self._free(each)
        launcher_agent.leave(self.agent)
        self._of_sets.clear()
        mpi._worlds.clear()

    def close(self) -> None:
        """Leaves without a word: this rank could not become one. Nothing more, if `bye` came before."""
        if self.comm:
            self.failed = True
            self.bye()


def _until_done(call: Any, timeout: float, caller: str) -> None:
    """Repeats a call that returns HVD_AGAIN. Raises HvdInitError: MPI's own words, or that the time is up."""
    global _gave_up
    text = ffi.new("char[]", _core.TEXT_BYTES)
    deadline = time.monotonic() + timeout
    code = lib.HVD_AGAIN
    try:
        while code == lib.HVD_AGAIN:
            if time.monotonic() > deadline:
                raise HvdInitError(
                    coded(
                        "HVD113",
                        f"{caller} to hvd.init() within {timeout:g} s (HVDLITE_START_TIMEOUT sets the limit). "
                        + diagnosis.advice(_core.text_of(lib.hvd_mpi_word(0)), diagnosis.networks()),
                    )
                )
            code = call(_SLICE_MS, text)
    except BaseException as error:
        _gave_up = str(error) or type(error).__name__
        raise
    if code != lib.HVD_OK:
        raise _core.error_for(code, _core.text_of(text))


def _communicator(comm: int, ranks: Sequence[int] | None, timeout: float) -> int:
    """A duplicate of comm (0: MPI_COMM_WORLD), or one of those of its ranks. Blocks."""
    made = ffi.new("uintptr_t *")
    some = ffi.NULL if ranks is None else ffi.new("int[]", list(ranks))
    count = 0 if ranks is None else len(ranks)
    _until_done(
        lambda ms, text: lib.hvd_mpi_comm(comm, some, count, ms, made, text, _core.TEXT_BYTES),
        timeout,
        "not all ranks of this MPI job have come",
    )
    return int(made[0])


def _rank_and_size(comm: int) -> tuple[int, int]:
    rank, size = ffi.new("int *"), ffi.new("int *")
    if lib.hvd_mpi_place(comm, rank, size) != lib.HVD_OK:
        raise HvdInitError("MPI did not return the rank and size of a communicator [HVD602]")
    return rank[0], size[0]


def handle_of(comm: Any) -> int:
    """MPI's own handle of an mpi4py communicator. ValueError for the null communicator and for intercommunicators."""
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm must be an mpi4py communicator or a list of ranks, not {type(comm).__name__} [HVD109]")
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "comm is MPI.COMM_NULL: this process is not a member, and must not call hvd.init() with it [HVD109]"
        )
    if comm.Is_inter():
        raise ValueError(
            "comm is an intercommunicator: pass the communicator of the ranks that train together [HVD109]"
        )
    kind = ctypes.c_int32 if MPI._sizeof(comm) == 4 else ctypes.c_size_t
    return int(kind.from_address(MPI._addressof(comm)).value) & (1 << 64) - 1


def _check_size(place: Place | None) -> None:
    """Raises HvdInitError where MPI's world is not the job that the environment tells of."""
    rank, size = _rank_and_size(0)
    if place is None or place.size in (1, size):
        return
    library = f"{_core.text_of(lib.hvd_mpi_word(1))}, {_core.text_of(lib.hvd_mpi_word(2))}"
    alone = "every rank would train alone" if size == 1 else "the ranks would not be those of the job"
    raise HvdInitError(
        f"rank {place.rank}: the environment ({place.source}) reports a job of {place.size} ranks, but "
        f"MPI_COMM_WORLD has {size} (this is rank {rank} of it; {library}): {alone}. This MPI does not belong to the "
        "launcher. Use the mpirun or mpiexec of the same installation (under Slurm also the right srun --mpi=...), "
        "or name the launcher's library in HVDLITE_MPI_LIBRARY. Or start the job with hvdlite-run. [HVD107]"
    )


def open_world(
    comm: Any, place: Place | None, timeout: float, epoch: int, secret: bytes | None, agent_named: str | None = None
) -> World:
    """The World of the job: of MPI_COMM_WORLD, of `comm`, or of some ranks of the world. Collective over its ranks.

    place: what the environment tells, to be compared. agent_named: see agent.connection. Raises HvdInitError naming
    what is missing and what to do.
    """
    global _failed, _has_agent
    if _gave_up is not None:
        raise HvdInitError(coded("HVD125", f"MPI cannot be used again in this process: {_gave_up}"))
    try:
        libmpi.load()
    except HvdInitError as error:
        if place is None or place.size == 1:
            raise
        raise HvdInitError(
            coded("HVD107", f"rank {place.rank} of {place.size} was found under {place.source}, but {error}")
        ) from None
    if mpi.is_communicator(comm):
        handle, ranks = handle_of(comm), None
    else:
        handle, ranks = 0, None if comm is None or list(comm) == [] else [int(rank) for rank in comm]
    _begin(place, timeout)
    _finish_at_exit()
    _check_size(place)
    if ranks is not None:
        _check_ranks(ranks)
    own = _communicator(handle, ranks, timeout)
    rank, size = _rank_and_size(own)
    _failed, world = False, World(own, Place(rank, size, None, None, None, None, "MPI"), timeout)
    started_as = _rank_and_size(0)[0].to_bytes(4, "little")
    world.begin()
    try:
        parts = world.allgather(started_as + (os.urandom(40) if rank == 0 else b""))
        world.job, world.secret = int.from_bytes(parts[0][4:12], "little"), secret or parts[0][12:44]
        world.agent = launcher_agent.connection(agent_named)
        _has_agent = world.agent >= 0
        launcher_agent.introduce(world.agent, [int.from_bytes(part[:4], "little") for part in parts])
    except BaseException:
        world.settled()
        raise
    world.epoch = epoch
    mpi._worlds[:] = [world]
    return world


def _begin(place: Place | None, timeout: float) -> None:
    """MPI runs afterwards. Raises HvdInitError with MPI's own words, or why its threads will not do."""
    text = ffi.new("char[]", _core.TEXT_BYTES)
    hydra.met()
    with contextlib.ExitStack() as watch:
        if lib.hvd_mpi_running() == 0:
            caller = f"rank {place.rank} of {place.size}" if place is not None else "this process"
            kind, version = (_core.text_of(lib.hvd_mpi_word(which)) for which in (0, 1))
            watch.enter_context(diagnosis.limited(f"{caller} ({version})", kind, timeout))
        code = lib.hvd_mpi_begin(text, _core.TEXT_BYTES)
    if code != lib.HVD_OK:
        raise _core.error_for(code, _core.text_of(text))


def _check_ranks(ranks: list[int]) -> None:
    mine, size = _rank_and_size(0)
    if len(set(ranks)) < len(ranks) or any(not 0 <= rank < size for rank in ranks):
        raise ValueError(
            f"comm={ranks}: list each rank once, from 0 to {size - 1} (the ranks of MPI_COMM_WORLD) [HVD109]"
        )
    if mine not in ranks:
        raise ValueError(
            f"rank {mine} of MPI_COMM_WORLD is not in comm={ranks}: only the ranks in the list call hvd.init() [HVD109]"
        )


def _finish_at_exit() -> None:
    global _at_exit_of
    if _at_exit_of != os.getpid():
        _at_exit_of = os.getpid()
        atexit.register(_at_exit)


def _at_exit() -> None:
    """After hvdlite's shutdown, which is registered later and so runs earlier."""
    if _at_exit_of != os.getpid():
        return
    if _gave_up is None and not _failed:
        lib.hvd_mpi_end(0)
        return
    sys.stdout.flush()
    others = lib.hvd_mpi_running() == 1  # mpi4py would finalize it, after all Python code, and might wait for ever
    if not _has_agent:
        time.sleep(_GRACE_S)
        if others:
            lib.hvd_mpi_end(1)
    elif others:  # an MPI_Abort would hide the exit code, and end ranks that the launcher gives time
        leave = ffi.cast("uintptr_t", lib.hvd_mpi_exit(mpi.exit_code))
        ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(int(leave)))  # the last one registered is called first
