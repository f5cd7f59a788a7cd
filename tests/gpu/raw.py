"""NCCL's own allreduce, called with nothing between: what a small collective costs that nobody agrees on.

The library is the one that this process holds, found among its mappings, so that both are timed with the same NCCL. A
communicator is made in one of NCCL's two manners. A blocking one's call returns when its work lies on the stream. One
that does not block, which is what hvdlite has, may hand a group to a thread (NCCL 2.30 and later do it with each): it
is asked for the end of that, as the core does, and what that costs is the difference of the two.
"""

import ctypes
import time

FLOAT32, SUM = 7, 0
OK, IN_PROGRESS = 0, 7
LIMIT_S = 60.0


class Id(ctypes.Structure):
    """By which ranks find each other; NCCL takes it by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """NCCL's ncclConfig_t as of 2.14; a later NCCL takes the fields that are not there as not said."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def library():
    """The NCCL that is mapped here. AssertionError if there is none."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libnccl.so" in line})
    assert paths, "no NCCL is loaded"
    return described(ctypes.CDLL(paths[0]))


def described(nccl):
    """Tells ctypes what the functions take."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(Id)]
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, Id, ctypes.c_int]
    nccl.ncclCommInitRankConfig.argtypes = [*nccl.ncclCommInitRank.argtypes, ctypes.POINTER(Config)]
    nccl.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    nccl.ncclAllReduce.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    return nccl


def checked(nccl, code):
    """RuntimeError in NCCL's words."""
    if code != OK:
        raise RuntimeError(f"NCCL: {nccl.ncclGetErrorString(code).decode()} ({code})")


def settled(nccl, comm):
    """Returns when nothing of this communicator goes on in the background. RuntimeError: it failed, or lasts."""
    state, until = ctypes.c_int(IN_PROGRESS), time.monotonic() + LIMIT_S
    while state.value == IN_PROGRESS:
        checked(nccl, nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        if time.monotonic() > until:
            raise RuntimeError(f"NCCL is still at it after {LIMIT_S:g} s")
    checked(nccl, state.value)


class Raw:
    """A communicator of all ranks, beside those of others. All ranks make it, and call it, in the same order.

    share: gives rank 0's bytes to all ranks.
    """

    def __init__(self, nccl, rank, size, share, blocking=True):
        self.nccl, self.blocking, self.comm = nccl, blocking, ctypes.c_void_p()
        name = Id()
        if rank == 0:
            checked(nccl, nccl.ncclGetUniqueId(ctypes.byref(name)))
        ctypes.memmove(ctypes.byref(name), share(ctypes.string_at(ctypes.byref(name), 128)), 128)
        comm = ctypes.byref(self.comm)
        if blocking:
            checked(nccl, nccl.ncclCommInitRank(comm, size, name, rank))
            return
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
        code = nccl.ncclCommInitRankConfig(comm, size, name, rank, ctypes.byref(config))
        checked(nccl, OK if code == IN_PROGRESS else code)
        settled(nccl, self.comm)

    def allreduce_of(self, tensor, stream):
        """A function that sums a float32 tensor in place, on this stream (its number)."""
        nccl, comm, count = self.nccl, self.comm, tensor.numel()
        address, stream = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(stream)

        def call():
            checked(nccl, nccl.ncclAllReduce(address, address, count, FLOAT32, SUM, comm, stream))

        def call_and_ask():
            checked(nccl, nccl.ncclGroupStart())
            code = nccl.ncclAllReduce(address, address, count, FLOAT32, SUM, comm, stream)
            ended = nccl.ncclGroupEnd()
            for one in (code, ended):
                checked(nccl, OK if one == IN_PROGRESS else one)
            settled(nccl, comm)

        return call if self.blocking else call_and_ask
