"""Does the result of an allgather or alltoall come to an address that Python gives, and what if it does not fit?"""

import sys

import numpy as np
from ranks import Job, as_ranks

import hvdlite.numpy as hvd
from hvdlite import _core


def given(kind, name, source, target, **more):
    where = source.shape, source.ctypes.data, target.ctypes.data, (source, target)
    return _core.submission(kind, 0, _core.DTYPES["int64"], name, *where, output_bytes=target.nbytes, **more)


def brought(pending, target):
    pending.wait()
    got = pending.gathered()
    values = np.frombuffer(_core.ffi.buffer(got.address, got.bytes), np.int64).tolist()
    pending.release()
    return values, int(_core.ffi.cast("uintptr_t", got.address)) == target.ctypes.data


@as_ranks(1, 2, 3)
def test_results_land_where_they_fit():
    rank, size = hvd.rank(), hvd.size()
    whole, small, got = np.full(3 * size, -1), np.full(1, -1), np.full(2 * size, -1)
    whole[3 * rank : 3 * rank + 3] = rank  # as FSDP2 gathers: what is given lies in its own place
    group, each = {"group": _core.group_number("g", 0), "group_count": 3}, np.repeat(np.arange(size), 3).tolist()
    pending = _core.submit_group([
        given(_core.ALLGATHER, "g.1", whole[3 * rank : 3 * rank + 3], whole, **group),
        given(_core.ALLGATHER, "g.2", np.full(3, rank), small, **group),
        given(_core.ALLTOALL, "g.3", np.arange(2 * size) + 100 * rank, got, **group),
    ], _core.NOW)  # fmt: skip
    assert brought(pending[0], whole) == (each, True) and brought(pending[1], small) == (each, False) and small == -1
    wanted = [100 * sender + 2 * rank + i for sender in range(size) for i in range(2)]
    assert brought(pending[2], got) == (wanted, True) and whole.tolist() == each


def test_results_land_over_links():
    program = "import ranks, hvdlite.numpy as hvd, test_core_results as t\nhvd.init()\n"
    program += "t.test_results_land_where_they_fit.body()\nhvd.shutdown()\nprint('ok')"
    with Job(2, [sys.executable, "-c", program], HVDLITE_PLANE="p2p") as job:
        assert job.wait(60) == 0 and job.text().count("ok") == 2, job.text()
