"""How ranks with tensors on GPUs meet (gpus.py): one that has none yet, and who is told that they go by the CPU."""

import sys
import warnings

import gpus
import pytest
import torch
from ranks import Job, as_ranks

import hvdlite.torch as hvd


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


@as_ranks(3)
def test_of_a_set_that_goes_by_way_of_the_cpu_its_own_first_rank_is_told():
    hvd.shutdown()
    hvd.init()
    rank, pair = hvd.rank(), hvd.add_process_set([1, 2])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with gpus.on_gpus(5):
            for _ in range(3 if rank else 0):
                assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=pair).tolist() == [2.0] * 3
    texts = [str(one.message) for one in said]
    assert len(texts) == (rank == 1), texts
    assert rank != 1 or f"in process set {pair.process_set_id}, " in texts[0]
    hvd.shutdown()


JOINS_FIRST = """
import warnings, gpus, torch
import hvdlite.torch as hvd
warnings.simplefilter("error")
hvd.init()
if hvd.rank():
    hvd.join()
with gpus.on_gpus(hvd.rank(), named=False):
    for step in range(3):
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name=str(step)).tolist() == [1.0 + hvd.rank()] * 3
    if hvd.rank() == 0:
        hvd.join()
        for step in range(3):
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name=str(step)).tolist() == [2.0] * 3
    print("by NCCL:", gpus.calls("ncclAllReduce"))
"""


def test_a_rank_that_joined_before_its_first_tensor_on_a_gpu_takes_the_libraries_that_are_named():
    stub = str(gpus.STUB)
    with Job(2, [sys.executable, "-c", JOINS_FIRST], HVDLITE_CUDA_LIBRARY=stub, HVDLITE_NCCL_LIBRARY=stub) as job:
        assert job.wait(120) == 0, job.text()
        assert job.text().count("by NCCL: 3") == 2, job.text()
