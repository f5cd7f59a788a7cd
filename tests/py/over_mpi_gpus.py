"""One rank's program under mpirun, on a host made up and a GPU that is none: NCCL inside hosts, an MPI between."""

import os
import sys

rank = int(os.environ["PMI_RANK"])
os.environ["HVDLITE_HOST_ID"] = f"made-up-{rank // 2}"

import gpus  # noqa: E402
import torch  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402


def sums(process_set, members):
    """Of one tensor, of a group, of integers and of 16-bit floats; more than MPI sends at once."""
    mine = members.index(rank)
    for count in (1, 5000, 300_000):
        given = torch.arange(float(count)) % 7 + mine
        due = (torch.arange(float(count)) % 7) * len(members) + sum(range(len(members)))
        assert torch.equal(hvd.allreduce(given, op=hvd.Sum, process_set=process_set), due)
    parts = [torch.full((3 + i,), mine + i, dtype=kind) for i, kind in enumerate((torch.bfloat16, torch.bfloat16))]
    total = hvd.grouped_allreduce(parts, op=hvd.Sum, process_set=process_set)
    assert [one[0].item() for one in total] == [sum(range(len(members))) + i * len(members) for i in range(2)]
    whole = hvd.allreduce(torch.full((9,), mine), op=hvd.Sum, process_set=process_set)
    assert whole.tolist() == [sum(range(len(members)))] * 9


def main():
    for _ in range(2):  # two lives
        hvd.init()
        assert (hvd.cross_size(), hvd.local_size()) == (2, 2), "hosts"
        some = hvd.add_process_set([0, 1, 2])
        with gpus.on_gpus(rank):
            sums(hvd.global_process_set, [0, 1, 2, 3])
            assert gpus.calls("ncclReduceScatter") > 0
            if some.included():
                sums(some, [0, 1, 2])
            assert gpus.calls("ncclAllReduce") == 0
        hvd.remove_process_set(some)
        hvd.shutdown()
    os.write(1, b"fine\n")


if __name__ == "__main__":
    sys.exit(main())
