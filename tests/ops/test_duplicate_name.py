"""A name whose first collective is under way is refused for every kind, and the call never waits."""

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def _started(kind: str) -> object:
    rows = torch.ones(4, 2)
    more = {"broadcast": {"root_rank": 0}}.get(kind, {})
    return getattr(hvd, f"{kind}_async")([rows, rows] if "grouped" in kind else rows, name="twice", **more)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce", "grouped_allgather",
     "grouped_reducescatter"],
)  # fmt: skip
@as_ranks(2)
def test_a_second_collective_of_a_name_does_not_wait_for_the_first(kind, kept):
    """Each rank in turn is refused, while the other is in a collective that comes before its own."""
    for turn in range(2):
        if hvd.rank() == turn:
            handle = _started(kind)
            if not kept:
                handle = None
            with pytest.raises(ValueError, match=r"twice.*dropped.*HVD205" if not kept else "twice.*HVD205"):
                _started(kind)
            hvd.barrier()
        else:
            hvd.barrier()
            handle = _started(kind)
        if handle is not None:
            hvd.synchronize(handle)
        hvd.barrier()
