"""The public names: Horovod's signatures, the same in every adapter, cheap to import."""

import importlib.util
import inspect
import subprocess
import sys

import pytest

import hvdlite
import hvdlite.numpy

REDUCE = ["average", "name", "op", "prescale_factor", "postscale_factor", "process_set"]
NOW = ["average", "name", "compression", *REDUCE[2:], "timeout"]
GATHER = ["name", "process_set"]
SCATTER = ["name", "op", "process_set", "prescale_factor", "postscale_factor"]
SCATTER_NOW = ["name", "compression", *SCATTER[1:], "exact_grad", "timeout"]
WANTED = {
    "allreduce": ["tensor", *NOW],
    "allreduce_": ["tensor", *REDUCE, "timeout"],
    "allreduce_async": ["tensor", *REDUCE, "priority"],
    "allreduce_async_": ["tensor", *REDUCE, "priority"],
    "grouped_allreduce": ["tensors", *NOW],
    "grouped_allreduce_": ["tensors", *REDUCE, "timeout"],
    "grouped_allreduce_async": ["tensors", *REDUCE],
    "grouped_allreduce_async_": ["tensors", *REDUCE],
    "allgather": ["tensor", *GATHER, "exact_grad", "timeout"],
    "allgather_async": ["tensor", *GATHER],
    "grouped_allgather": ["tensors", *GATHER, "exact_grad", "timeout"],
    "grouped_allgather_async": ["tensors", *GATHER],
    "broadcast": ["tensor", "root_rank", *GATHER, "exact_grad", "timeout"],
    "broadcast_": ["tensor", "root_rank", *GATHER, "timeout"],
    "broadcast_async": ["tensor", "root_rank", *GATHER],
    "broadcast_async_": ["tensor", "root_rank", *GATHER],
    "alltoall": ["tensor", "splits", *GATHER, "timeout"],
    "alltoall_async": ["tensor", "splits", *GATHER],
    "reducescatter": ["tensor", *SCATTER_NOW],
    "reducescatter_async": ["tensor", *SCATTER],
    "grouped_reducescatter": ["tensors", *SCATTER_NOW],
    "grouped_reducescatter_async": ["tensors", *SCATTER],
    "reduce": ["tensor", "root_rank", "op", "name", *REDUCE[3:], "timeout"],
    "gather": ["tensor", "root_rank", *GATHER, "timeout"],
    "scatter": ["tensor", "root_rank", "splits", *GATHER, "timeout"],
    "send": ["tensor", "dst", *GATHER, "timeout"],
    "recv": ["tensor", "src", *GATHER, "timeout"],
    "barrier": ["process_set", "timeout"],
    "monitored_barrier": ["timeout", "process_set", "name"],
    "join": ["device"],
    "poll": ["handle"],
    "synchronize": ["handle", "timeout"],
    "broadcast_object": ["obj", "root_rank", "name", "process_set"],
    "allgather_object": ["obj", "name", "process_set"],
    "add_process_set": ["process_set"],
    "remove_process_set": ["process_set"],
    "init": ["comm", "process_sets"],
    "shutdown": [],
}
DEFAULTS = {
    "average": None,
    "name": None,
    "op": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": hvdlite.numpy.global_process_set,
}


def adapters():
    found = importlib.util.find_spec("torch") is not None
    return [importlib.import_module(f"hvdlite.{name}") for name in ("numpy", *(["torch"] if found else []))]


@pytest.mark.parametrize("name", WANTED)
def test_signatures_are_horovods(name):
    for module in adapters():
        parameters = inspect.signature(getattr(module, name)).parameters
        assert list(parameters) == WANTED[name], module
        for parameter, default in DEFAULTS.items():
            if parameter in parameters and "reducescatter" not in name and name[-11:] != "process_set":
                assert parameters[parameter].default == default


def test_reduce_ops_have_horovods_numbers():
    for module in adapters():
        assert (module.Average, module.Sum, module.Adasum, module.Min, module.Max, module.Product) == tuple(range(6))


def test_every_public_name_is_there_and_documented():
    for module in adapters():
        assert set(hvdlite.__all__) <= set(module.__all__) and len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert inspect.getdoc(value), f"{module.__name__}.{name}"
    for name in hvdlite.__all__:
        assert getattr(hvdlite, name) is getattr(hvdlite.numpy, name) or callable(getattr(hvdlite, name))
    assert set(hvdlite.__all__) == set(hvdlite.numpy.__all__) and set(hvdlite.__all__) <= set(dir(hvdlite))


def test_the_version_is_the_cores():
    from hvdlite import _core

    assert hvdlite.__version__ == _core.VERSION


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="alreduce"):
        hvdlite.alreduce  # noqa: B018


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_importing_the_package_and_the_launcher_loads_nothing_heavy():
    code = """
import sys, hvdlite, hvdlite.launcher.cli
print([name for name in ("numpy", "cffi", "_cffi_backend", "hvdlite._cffi", "torch") if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_the_numpy_adapter_needs_no_torch():
    assert python("import sys, hvdlite; hvdlite.allreduce; print('torch' in sys.modules)").strip() == "False"


def test_what_is_imported_beyond_numpy_is_little():
    """What makes the import slow is what it imports (examples/benchmarks measures the milliseconds)."""
    code = """
import numpy, sys
before = set(sys.modules)
import hvdlite
hvdlite.allreduce
slow = {"asyncio", "cloudpickle", "hashlib", "hvdlite.data", "hvdlite.elastic", "ssl", "torch", "yaml"}
print(sorted((set(sys.modules) - before) & slow), len(set(sys.modules) - before))
"""
    loaded, count = python(code).strip().rsplit(" ", 1)
    assert loaded == "[]"
    assert int(count) < 86, "a new import has come in: is it needed before the first collective?"
