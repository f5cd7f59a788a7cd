"""NCCL's own allreduce, called with nothing between: what a small collective costs that nobody agrees on.

The library is the one that this process holds, found among its mappings, so that both are timed with the same NCCL. The
communicator is a blocking one: a call returns when its work lies on the stream.
"""

import ctypes

FLOAT32, SUM = 7, 0


class Id(ctypes.Structure):
    """By which ranks find each other; NCCL takes it by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


def library():
    """The NCCL that is mapped here. AssertionError if there is none."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libnccl.so" in line})
    assert paths, "no NCCL is loaded"
    return ctypes.CDLL(paths[0])


def checked(nccl, code):
    """RuntimeError in NCCL's words."""
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    if code:
        raise RuntimeError(f"NCCL: {nccl.ncclGetErrorString(code).decode()} ({code})")


def allreduce_of(nccl, rank, size, share, tensor, stream):
    """A function that sums a float32 tensor in place, on this stream (its number), by a communicator of all ranks,
    beside those of others. All ranks make it, and call it, in the same order.

    share: gives rank 0's bytes to all ranks.
    """
    name, comm = Id(), ctypes.c_void_p()
    if rank == 0:
        checked(nccl, nccl.ncclGetUniqueId(ctypes.byref(name)))
    ctypes.memmove(ctypes.byref(name), share(ctypes.string_at(ctypes.byref(name), 128)), 128)
    checked(nccl, nccl.ncclCommInitRank(ctypes.byref(comm), size, name, rank))
    address, stream = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(stream)
    count = ctypes.c_size_t(tensor.numel())

    def call():
        checked(nccl, nccl.ncclAllReduce(address, address, count, FLOAT32, SUM, comm, stream))

    return call
