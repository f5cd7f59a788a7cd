"""`import horovod` means hvdlite where it is asked for, and nowhere else: the same objects under Horovod's names."""

import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import mpis
import pytest
from launching import Launch
from ranks import Job, everything

pytest.importorskip("torch")

from hvdlite.as_horovod import names

HERE = Path(__file__).resolve().parents[1] / "support"
FRONT = str(Path(names.__file__).parent / "front")


def python(code, *words, code_wanted=0, **environ):
    """What a program prints, in an environment without alias and without a rank's variables."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith(("HVDLITE_", "HOROVOD_"))}
    command = [sys.executable, *words, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**kept, **environ})
    assert done.returncode == code_wanted, done.stdout + done.stderr
    return done.stdout if code_wanted == 0 else done.stderr


@pytest.fixture
def another_horovod(tmp_path):
    """A folder with a package named horovod that is not ours."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = 'real'\n")
    (package / "torch.py").write_text("rank = 'real'\n")
    return str(tmp_path)


def test_what_libraries_read_beside_the_surface():
    """Private names, and how they tell a distributed optimizer and the version."""
    code = """
        import importlib.metadata, sys
        if sys.argv[1:]:
            import hvdlite.as_horovod
        assert importlib.metadata.version("horovod") == "0.28.1"
        import torch, horovod, horovod.torch as hvd
        from horovod.common.util import _cache
        from horovod.torch.mpi_ops import _basics
        assert horovod.__version__ == importlib.metadata.version("horovod")
        assert sum(each.metadata["Name"] == "horovod" for each in importlib.metadata.distributions()) >= 1
        hvd.init()
        assert _basics._get_process_set_ids_and_ranks() == {0: [0]}
        assert (_basics._process_set_rank(0), _basics._process_set_size(0)) == (0, 1)
        if not sys.argv[1:]:  # once: for its first optimizer torch imports half of itself
            model = torch.nn.Linear(2, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
            assert str(type(optimizer)) == "<class 'horovod.torch.optimizer.SGD'>"
        calls = []
        counted = _cache(lambda x: calls.append(x) or x)
        print(counted(3) + counted(3), calls)
    """
    code = textwrap.dedent(code)
    for words, environ in (([], {"PYTHONPATH": FRONT}), (["import"], {})):
        assert python(code.replace("sys.argv[1:]", str(bool(words))), **environ).endswith("6 [3]\n")


def test_the_names_are_the_same_objects():
    import horovod
    import horovod.common.elastic
    import horovod.torch as hvd
    import horovod.torch.elastic.state
    from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
    from horovod.common.process_sets import ProcessSet, global_process_set
    from horovod.torch.elastic.sampler import ElasticSampler
    from horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
    from horovod.torch.mpi_ops import allreduce_async_, poll, rank, size, synchronize
    from horovod.torch.optimizer import DistributedOptimizer
    from horovod.torch.sync_batch_norm import SyncBatchNorm

    import hvdlite.elastic
    import hvdlite.torch as ours
    from hvdlite import errors
    from hvdlite.process_sets import process_set

    assert HorovodInternalError is errors.HorovodInternalError is hvd.HorovodInternalError
    assert issubclass(errors.HvdPeerLostError, HorovodInternalError)
    assert issubclass(HorovodVersionMismatchError, ImportError) and not issubclass(
        HostsUpdatedInterrupt, errors.HvdError
    )
    assert (ProcessSet, global_process_set) == (process_set.ProcessSet, process_set.global_process_set)
    assert hvd.DistributedOptimizer is DistributedOptimizer is ours.DistributedOptimizer
    for value in (
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        allreduce_async_,
        poll,
        rank,
        size,
    ):
        assert value is getattr(ours, value.__name__)
    assert synchronize == ours.synchronize and SyncBatchNorm is ours.SyncBatchNorm
    assert horovod.common.elastic is hvdlite.elastic and hvdlite.elastic.__spec__.name == "hvdlite.elastic"
    assert horovod.torch.elastic.state.TorchState is hvd.elastic.TorchState is ours.elastic.TorchState
    assert hvd.elastic.ElasticSampler is ElasticSampler and horovod.common.rank is ours.rank
    assert horovod.__version__ == "0.28.1" and hvd.mpi_ops.Average == ours.Average


def test_all_of_hvdlite_torch_is_there():
    import horovod.torch as hvd

    import hvdlite.torch as ours

    scope = {}
    exec("from horovod.torch import *", scope)
    for name in ours.__all__:
        assert hasattr(hvd, name) and name in scope


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("horovod.spark.lightning", "the estimator for Lightning comes with a later version"),
        ("horovod.ray.elastic", "elastic training on Ray comes with a later version"),
        ("horovod.mxnet", "MXNet is retired"),
    ],
)
def test_what_is_not_there_yet_says_so_and_is_an_import_error(module, says):
    import importlib

    with pytest.raises(ModuleNotFoundError, match=says) as caught:
        importlib.import_module(module)
    assert isinstance(caught.value, NotImplementedError) and module.startswith(caught.value.name)


def test_timelines_need_a_job():
    import horovod.torch as hvd

    for call in (lambda: hvd.start_timeline("t.json"), hvd.stop_timeline):
        with pytest.raises(ValueError, match="not been initialized"):
            call()


def test_parts_of_the_launcher_can_be_imported_and_say_so_when_they_are_used():
    from horovod.runner.common.util import settings, timeout
    from horovod.runner.elastic.discovery import HostDiscovery
    from horovod.runner.mpi_run import is_open_mpi, mpi_run

    class Mine(HostDiscovery):
        pass

    for call in (mpi_run, Mine, settings.Settings, timeout.Timeout):
        with pytest.raises(NotImplementedError, match=r"has no horovod\.runner\."):
            call()
    assert not hasattr(settings, "__wrapped__") and not is_open_mpi()


def test_what_never_was_is_an_ordinary_import_error():
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.nonsense") as caught:
        import horovod.nonsense  # noqa: F401
    assert not isinstance(caught.value, NotImplementedError)


def test_without_being_asked_for_nothing_is_named_horovod():
    code = "import sys, hvdlite, hvdlite.torch, importlib.util as u; print('horovod' in sys.modules, sys.meta_path)"
    printed = python(code)
    assert printed.startswith("False") and "as_horovod" not in printed


def test_another_horovod_is_passed_over_where_ours_is_asked_for_and_only_there(another_horovod):
    code = "import horovod.torch as hvd, horovod; print(horovod.__version__, hvd.rank)"
    assert python(code, PYTHONPATH=another_horovod) == "real real\n"
    asked = python(code, PYTHONPATH=os.pathsep.join([FRONT, another_horovod]))
    assert asked.startswith("0.28.1 <function rank")
    asked = python("import hvdlite.as_horovod\n" + code, PYTHONPATH=another_horovod)
    assert asked.startswith("0.28.1 <function rank")


def test_too_late_is_an_error_that_says_so(another_horovod):
    code = "import horovod, hvdlite.as_horovod"
    said = python(code, code_wanted=1, PYTHONPATH=another_horovod)
    assert "ImportError: horovod has been imported from" in said and "before it" in said


def test_the_small_functions_mean_what_they_meant(monkeypatch):
    from horovod.common import util
    from horovod.runner.common.util.env import get_env_rank_and_size

    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]] and util.split_list([], 2) == [[], []]
    assert util.is_iterable([]) and util.is_iterable("a") and not util.is_iterable(3)
    assert [n for n in range(9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.extension_available("torch") and not util.extension_available("mxnet")
    assert not util.gpu_available("torch")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.9") and not util.is_version_greater_equal_than(
        "1.9", "1.10"
    )
    monkeypatch.setenv("HERE", "before")
    with util.env(HERE="within", THERE="within", NOWHERE=None):
        assert (os.environ["HERE"], os.environ["THERE"]) == ("within", "within") and "NOWHERE" not in os.environ
    assert os.environ["HERE"] == "before" and "THERE" not in os.environ
    choose = util.get_average_backwards_compatibility_fun(util)
    assert (choose(None, None), choose(None, False), choose(3, None)) == (0, 1, 3)
    with pytest.raises(ValueError, match="supersedes"):
        choose(1, True)
    assert get_env_rank_and_size() == (0, 1)


def test_questions_about_the_build_are_answered_before_init():
    import horovod.torch as hvd
    from horovod.common.basics import HorovodBasics

    for asked in (hvd, HorovodBasics(__file__, "mpi_lib_v2")):
        assert asked.gloo_built() and asked.gloo_enabled() and asked.nccl_built() == 0
        assert not any((asked.mpi_enabled(), asked.ddl_built(), asked.ccl_built(), asked.cuda_built()))
        assert asked.mpi_built() in (True, False)  # whether there is one on this machine: test_mpi_find.py
        assert not asked.rocm_built()
        with pytest.raises(ValueError, match="MPI is not enabled"):
            asked.mpi_threads_supported()


def test_a_script_written_for_horovod_runs_unchanged():
    pytest.importorskip("sklearn")
    script = HERE / "horovod_digits.py"
    assert "hvdlite" not in re.sub(r'""".*?"""', "", script.read_text(), flags=re.DOTALL)
    with Launch("-np", 2, "--as-horovod", sys.executable, script) as job:
        assert job.wait(200) == 0, job.out + job.err
    (accuracy,) = re.findall(r"accuracy ([\d.]+) % on 2", job.out)
    assert float(accuracy) > 90


def test_an_optimizer_without_state_has_zeros_for_gradients_only_in_horovod():
    code = """
        import {module} as hvd, torch
        hvd.init()
        frozen, weight = torch.nn.Parameter(torch.arange(3), requires_grad=False), torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([frozen, weight], lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("frozen", frozen), ("weight", weight)])
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert frozen.grad is None
        if "{module}" == "hvdlite.torch":
            assert weight.grad is None
        else:
            assert torch.equal(hvd.broadcast(weight.grad, root_rank=0), torch.zeros(4))
            (weight * hvd.rank()).sum().backward()
            assert weight.grad.eq(0.5).all()
            optimizer.step(), optimizer.zero_grad()
            hvd.broadcast_optimizer_state(optimizer, 0)
            assert weight.grad is None
    """
    for module, flags in (("horovod.torch", ["--as-horovod"]), ("hvdlite.torch", [])):
        command = [sys.executable, "-c", textwrap.dedent(code.format(module=module))]
        with Job(2, command, *flags, framework="torch") as job:
            assert job.wait(100) == 0, job.text()


def test_every_row_of_the_table_can_be_imported_and_tensorflow_and_keras_have_their_modules():
    modules = [name for name in (*names.MADE_OF, *names.SAME) if "spark." not in name]  # those: test_spark.py
    if find_spec("tensorflow") is None:
        modules = [name for name in modules if "tensorflow" not in name and "keras" not in name]
    rows = f"import importlib, sys\nfor name in {modules!r}: assert importlib.import_module(name) is sys.modules[name]"
    if find_spec("tensorflow") is None:
        python(rows, PYTHONPATH=FRONT)
        return
    code = """
        import horovod.tensorflow as hvd
        import horovod.tensorflow.keras as of_tf, horovod.keras as of_keras
        import hvdlite.keras, hvdlite.tensorflow
        from horovod.tensorflow.mpi_ops import rank, size, _basics
        from horovod.keras.callbacks import BroadcastGlobalVariablesCallback
        from horovod.tensorflow.keras.callbacks import MetricAverageCallback
        assert hvd.DistributedGradientTape is hvdlite.tensorflow.DistributedGradientTape
        assert of_tf.DistributedOptimizer is of_keras.DistributedOptimizer is hvdlite.keras.DistributedOptimizer
        assert of_keras.callbacks.BroadcastGlobalVariablesCallback is BroadcastGlobalVariablesCallback
        assert of_keras.Compression.fp16 is hvd.Compression.fp16 is hvdlite.tensorflow.Compression.fp16
        for name in hvdlite.tensorflow.__all__:
            assert hasattr(hvd, name), name
        import horovod.tensorflow.elastic as elastic
        from horovod.tensorflow.util import _executing_eagerly, _make_subgraph, _cache, vars_to_refs, refs_to_vars
        assert hvd.elastic is elastic and elastic.TensorFlowState is hvdlite.tensorflow.elastic.TensorFlowState
        assert of_tf.elastic.KerasState is of_keras.elastic.KerasState is hvdlite.keras.elastic.KerasState
        import tensorflow as tf
        v = tf.Variable(1.0)
        assert refs_to_vars(vars_to_refs([v, [v]])) == [v, [v]] and _executing_eagerly()
        assert _cache(lambda x: [x])(1) == [1] and _make_subgraph(lambda: 3)() == 3 and hvd.check_num_rank_power_of_2(4)
        hvd.init()
        import keras
        made = of_keras.DistributedOptimizer(keras.optimizers.SGD())
        assert type(made).__module__ == "horovod._keras" and made.__class__ is keras.optimizers.SGD
        print(float(hvd.allreduce(2.0)), hvd.size(), of_tf.size())
    """
    assert python(rows + textwrap.dedent(code), PYTHONPATH=FRONT).endswith("2.0 1 1\n")


@pytest.mark.parametrize("mpi", [None, *everything(*mpis.ALL)])
def test_a_script_for_horovod_runs_under_any_launcher(mpi, tmp_path, another_horovod):
    folder = tmp_path / "scripts"  # not beside another horovod, which Python finds first there
    folder.mkdir()
    (folder / "train.py").write_text(
        "import subprocess, sys, horovod.torch as hvd\n"
        "hvd.init()\n"
        "child = [sys.executable, '-c', 'import horovod; print(horovod.__version__)']\n"
        "print(hvd.size(), sys.argv[1:], subprocess.check_output(child, text=True).strip(), flush=True)\n"
    )
    before = mpis.command(mpi, 2) if mpi else []
    environ = mpis.environment(mpi, PYTHONPATH=another_horovod)
    command = [*before, sys.executable, "-m", "hvdlite.as_horovod", "train.py", "--lr"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    line = f"{2 if mpi else 1} ['--lr'] 0.28.1"
    assert done.returncode == 0 and done.stdout.splitlines() == [line] * (2 if mpi else 1), done.stdout + done.stderr


def test_the_command_of_horovod_starts_its_scripts():
    command = [sys.executable, "-c", "import sys; from hvdlite.launcher.horovodrun import main; sys.exit(main())"]
    script = [sys.executable, "-c", "import horovod.torch as hvd; hvd.init(); print(hvd.size(), 'here')"]
    done = subprocess.run([*command, "-np", "2", *script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("2 here") == 2, done.stdout + done.stderr


def test_no_script_is_refused():
    command = [sys.executable, "-m", "hvdlite.as_horovod"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.endswith("train.py [HVD702]\n"), done.stderr
