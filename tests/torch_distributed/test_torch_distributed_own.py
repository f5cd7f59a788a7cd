"""torch's own tests of torch.distributed pass over backend hvdlite where they pass over Gloo; a profiler sees calls.

By default a choice of them on two ranks; under `everything` all of them, on two to four ranks, with Gloo beside.
"""

import re
import subprocess
import sys

import pytest
from ranks import HERE, as_ranks, environment, everything

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import hvdlite.torch.distributed  # noqa: E402, F401

CHOICE = (
    "^test_(DistributedDataParallelCPU|accumulate_gradients_no_sync_allreduce_with_then_hook|ddp_logging_data_cpu"
    "|all_gather_coalesced_(simple|with_empty)|all_gather_object_default_pg|all_reduce_sum_async|all_reduce_product"
    "|all_reduce_coalesced_(sum|full_group_max|max_complex_unsupported)|all_to_all_complex|barrier_timeout_full_group"
    "|all_to_all_single_unequal_split_full_group|batch_isend_irecv_(gloo_tags|op_list_err)|broadcast|destroy_full_group"
    "|gather_(checks|object)|get_(backend|future)|isend|reduce_full_group_sum|scatter_(complex|object_list)"
    "|send_recv_(any_source|with_tag_torch_profiler)|sparse_all_reduce_sum|static_graph_api_cpu)$"
)
REFUSED = "dist.monitored_barrier takes groups of Gloo alone, by name"
FAIL = {
    "test_monitored_barrier_gloo": REFUSED,
    "test_monitored_barrier_gloo_subgroup": REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": "wants Gloo's words; a timeout of 0 is a ValueError here",
}


def failures(backend, size, pattern=""):
    """{name: why}, and how many have passed."""
    command = [sys.executable, str(HERE / "torch_tests.py"), backend, str(size), pattern]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    if found.stdout.startswith("no tests: "):
        pytest.skip(found.stdout)
    assert found.returncode == 0, found.stderr[-3000:]
    passed = re.findall(r"^\w+ passed", found.stdout, re.MULTILINE)
    return dict(re.findall(r"^(\w+) failed (.*)$", found.stdout, re.MULTILINE)), len(passed)


def test_a_choice_of_torchs_tests():
    failed, passed = failures("hvdlite", 2, CHOICE)
    assert not failed and passed >= 30, (failed, passed)


@pytest.mark.parametrize("size", everything(2, 3, 4))
def test_all_of_torchs_tests(size):
    (failed, passed), (gloos, _) = failures("hvdlite", size), failures("gloo", size)
    ours = {name: why for name, why in failed.items() if name not in gloos}
    assert passed > 90 and ours.keys() == FAIL.keys(), (passed, ours, f"pass now: {FAIL.keys() - ours.keys()}")


@as_ranks(1)
def test_a_profiler_sees_calls_and_waits():
    dist.init_process_group("hvdlite", init_method="hvdlite://")
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2))
        dist.all_gather_single(torch.ones(2), torch.ones(2), async_op=True).wait()
    dist.destroy_process_group()
    names = [each.name for each in profile.events() if each.name.startswith("hvdlite:")]
    assert names == ["hvdlite:all_reduce", "hvdlite:all_gather", "hvdlite:wait"], names
