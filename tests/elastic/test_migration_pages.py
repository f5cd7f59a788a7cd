"""The pages about migrating and troubleshooting keep their word: programs print one loss, symptoms look as said.

Each row of the tables of symptoms is produced here: `row(text)` is the text if a table has it. What the tables say of
the optimizer and of collectives in detail is tested where those are.
"""

import copy
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from launching import Launch
from ranks import as_ranks, environment

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402
from hvdlite import config  # noqa: E402
from hvdlite.launcher.command_line import flags  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/migrating").glob("*.md")))
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
RUN = str(Path(sys.executable).with_name("hvdlite-run"))
SYMPTOMS = [line.split(" | ")[0] for line in TROUBLES.splitlines() if line.startswith("| ")]
SYMPTOMS = [cell for cell in SYMPTOMS if cell not in ("| what you see", "| ---")]


DEATH = """
import os, signal, time, numpy as np, hvdlite as hvd
hvd.init()
hvd.allreduce(np.ones(4), name="warm")
if hvd.rank() == 0:
    open({warm!r}, "w").close()  # it has its sum
else:
    while not os.path.exists({warm!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(np.ones(4), name="layer1.weight")
"""


def row(text):
    assert any(text in cell for cell in SYMPTOMS), f"no row of the table of symptoms says {text!r}"
    return re.escape(text)


def finished(*command, **extra):
    """(exit code, output) of a command."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, env=environment(**extra)
    )
    return done.returncode, done.stdout


def launched(program, *flags, ranks=2, **extra):
    with Launch("-np", ranks, *flags, sys.executable, "-c", program, merged=True, **extra) as job:
        return job.wait(), job.out


def test_every_row_of_the_symptoms_is_shown_here():
    shown = re.findall(r'row\("(.+?)"\)', inspect.getsource(sys.modules[__name__]))
    missing = [cell for cell in SYMPTOMS if not any(text in cell for text in shown)]
    assert len(SYMPTOMS) > 12 and not missing, missing


def test_methods_of_the_optimizer_that_the_pages_name_exist():
    hvd.init()
    try:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
        named = set(re.findall(r"\boptimizer\.(\w+)\(", PAGE)) - {"load_state_dict"}
        assert {"no_sync", "step", "synchronize", "register_comm_hook"} <= named
        assert [method for method in named if not callable(getattr(optimizer, method, None))] == []
    finally:
        hvd.shutdown()


def test_flags_and_variables_of_the_page_are_what_it_says():
    _, help_text = finished(RUN, "--help-all")
    table = (ROOT / "docs/migrating/flags.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) >= 20
    aliases = {option.alias_variable for option in config.OPTIONS}
    for line in rows:
        left, _, right = line.partition(" | ")
        for flag in re.findall(r"`(--?[a-z][\w-]*)`", left):
            refused, ignored = "refused" in right, "ignored" in right
            assert (flag in help_text) != (refused or ignored), line
            if refused:
                code, output = finished(RUN, flag, "1", "-np", "1", sys.executable, "-c", "pass")
                assert code != 0 and f"not yet: {flag}: " in output, output
            if ignored:
                assert f"without effect: {flag} (" in flags.note_of([flag])
        for variable in re.findall(r"`(HOROVOD_\w+)`", left):
            assert (variable in aliases) != ("ignored" in right), line
        for variable in re.findall(r"`(HVDLITE_\w+)`", right):
            assert variable in help_text


def test_a_script_for_horovod_runs_by_flag_and_by_import():
    script = "import horovod.torch as hvd; hvd.init(); print('size', hvd.size())"
    code, output = launched(script, "--as-horovod")
    assert code == 0 and output.count("size 2") == 2, output
    code, output = launched("import hvdlite.as_horovod; " + script)
    assert code == 0 and output.count("size 2") == 2, output
    code, output = launched(script)
    if code:
        assert re.search(row("No module named 'horovod'"), output), output


def programs():
    found = dict(re.findall(r"```python file=(ddp|hvd)\.py\n(.*?)```", PAGE, flags=re.DOTALL))
    assert set(found) == {"ddp", "hvd"}
    return found


def test_the_two_programs_print_the_same_loss():
    losses = {}
    # A thread of torch's Gloo can outlive its group and call std::terminate while Python finalizes (torch 2.13, in 2 of
    # 36 processes on a busy machine, with nothing of ours in them): the peer's program ends before that.
    ends = {"ddp": "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"}
    texts = programs()
    texts["backend"] = texts["ddp"].replace('"gloo"', '"hvdlite"')  # its loss, too, says the page
    for name, text in texts.items():
        code, output = launched(text + ends.get(name, ""), ranks=3)
        assert code == 0, output
        losses[name] = float(re.search(r"loss (\d+\.\d+)", output).group(1))
    assert losses == pytest.approx(dict.fromkeys(losses, losses["ddp"]), abs=2e-5) and losses["ddp"] < 1


def test_a_script_can_use_both():
    code, output = launched("""
import torch, torch.distributed as dist, hvdlite.torch as hvd
hvd.init()
dist.init_process_group("gloo")
assert dist.get_rank() == hvd.rank()
tensor = torch.tensor([float(hvd.rank())])
dist.all_reduce(tensor)
assert tensor == hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum) == 1
dist.destroy_process_group()
""")
    assert code == 0, output


def test_without_the_launcher_there_is_one_rank():
    row("`hvd.size()` is 1")
    code, output = finished(sys.executable, "-c", "import hvdlite as hvd; hvd.init(); print('size', hvd.size())")
    assert code == 0 and "size 1" in output, output


def test_a_rank_that_comes_late_is_named():
    code, output = launched(
        "import os, time, hvdlite\nif os.environ['HVDLITE_RANK'] == '1': time.sleep(60)\nhvdlite.init()",
        "--start-timeout", 1,
    )  # fmt: skip
    assert code and re.search("rank 1 " + row("did not call init within 30 s").replace("30", "1"), output), output


def test_a_call_before_init_is_named():
    with pytest.raises(ValueError, match=row("hvdlite has not been initialized; use hvd.init().")):
        hvd.allreduce(torch.ones(1))


def test_what_the_others_of_a_failed_rank_see():
    code, output = launched(
        "import torch, hvdlite.torch as hvd\nhvd.init()\nif hvd.rank() == 1: raise ValueError('boom')\n"
        "try:\n    hvd.allreduce(torch.ones(1), name='x')\n"
        "except hvd.HorovodInternalError as error:\n    print(type(error).__name__, error)\n    raise\n"
    )
    assert code == 1
    assert re.search("HvdPeerLostError.*" + row("rank 1 raised") + " ValueError: boom", output), output
    assert "boom" in output.strip().splitlines()[-1], "the launcher's last lines say it"


def test_the_lost_peer_of_the_page_is_real(tmp_path):
    code, output = launched(DEATH.format(warm=str(tmp_path / "warm")))
    assert code
    said = re.sub(r"pid \d+", "pid 4154", re.sub(r"^\[\d\]<\w+>:(hvdlite\.errors\.)?", "", output, flags=re.MULTILINE))
    lines = re.findall(r"HvdPeerLostError: .*|^hvdlite-run: rank .*", said, re.MULTILINE)
    page = " ".join(TROUBLES.split())
    assert len(lines) >= 2 and all(" ".join(line.split()) in page for line in lines), lines


def test_the_launcher_says_that_it_sets_threads():
    row("each rank is slower than one process alone")
    for given, shown in (("-uOMP_NUM_THREADS", "OMP_NUM_THREADS=1 is set"), ("OMP_NUM_THREADS=2", "threads 2")):
        program = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
        assert shown in finished("env", given, RUN, "-np", "2", sys.executable, "-c", program)[1]


@as_ranks(2)
def test_ranks_that_disagree_are_named():
    with pytest.raises(hvd.HvdMismatchError, match=row("ranks disagree on the shape")) as raised:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="x")
    assert isinstance(raised.value, ValueError) and not isinstance(raised.value, hvd.HorovodInternalError)
    assert "rank 0 said [2], rank 1 said [3]" in str(raised.value)


@as_ranks(2)
def test_a_name_in_flight_twice_is_named():
    if hvd.rank() == 0:  # the other comes later, so the first is in flight for sure
        first = hvd.allreduce_async(torch.ones(3), name="twice")
        with pytest.raises(ValueError, match=row("is still in flight")):
            hvd.allreduce_async(torch.ones(3), name="twice")
        hvd.allreduce(torch.ones(1), name="both")
        hvd.synchronize(first)
    else:
        hvd.allreduce(torch.ones(1), name="both")
        hvd.allreduce(torch.ones(3), name="twice")


@as_ranks(2)
def test_a_name_is_in_flight_until_its_handle_was_waited_for_or_polled_done():
    """However fast the core is, so that all ranks say the same."""
    handle = hvd.allreduce_async(torch.ones(3), name="late")
    hvd.barrier()
    with pytest.raises(ValueError, match=row("is still in flight")):
        hvd.allreduce_async(torch.ones(3), name="late")
    while not hvd.poll(handle):
        pass
    assert hvd.allreduce(torch.ones(3), name="late", op=hvd.Sum).eq(2).all()
    assert hvd.synchronize(handle).eq(1).all()


@as_ranks(2)
def test_a_call_that_one_rank_does_not_make_is_waited_for():
    row("a collective waits")
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="alone")
    hvd.allreduce(torch.ones(1), name="together")
    if hvd.rank() == 0:
        assert not hvd.poll(handle)
    hvd.allreduce(torch.ones(1), name="looked")  # or the other one might make the call before rank 0 looks
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(torch.ones(1), name="alone")
    assert hvd.synchronize(handle) == 1


@as_ranks(2)
def test_parameters_without_a_name_are_named():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=row("named_parameters does not name all parameters")):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), [("weight", model.weight)])


@as_ranks(2)
def test_a_tensor_elsewhere_is_named():
    with pytest.raises(ValueError, match=row("is not supported yet: move it with .cpu()")):
        hvd.allreduce(torch.ones(2, device="meta"))


@as_ranks(2)
def test_weights_that_drifted_apart_are_named():
    model = torch.nn.Linear(2, 2)
    hvd.broadcast_state(model)
    hvd.check_consistency(model)
    with torch.no_grad():
        model.bias += hvd.rank()
    with pytest.raises(hvd.HvdMismatchError, match="'bias' on rank 1 " + row("is not what rank 0 has")):
        hvd.check_consistency(model)


@as_ranks(2)
def test_a_step_sees_the_samples_of_all_ranks():
    row("loss falls more slowly than on one process, per epoch")
    assert len(hvd.data.shard(list(range(100)))) == 50


@as_ranks(2)
def test_identical_data_is_warned_of():
    loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(hvd.data.watch(loader, check=True))) == 3
    text = "ranks read the same first batch"
    assert row("ranks read the same first batch")
    assert [text in str(each.message) for each in caught] == ([True] if hvd.rank() == 0 else [])


@as_ranks(2)
def test_each_rank_measures_its_own_share():
    row("accuracy printed by the ranks differs")
    mine = torch.tensor(0.5 + 0.25 * hvd.rank())
    assert hvd.allreduce(mine).item() == 0.625


class Asking(torch.utils.data.Dataset):
    """A dataset that calls hvdlite where it must not."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return hvd.allreduce(torch.ones(1))


@as_ranks(2)
def test_a_worker_that_asks_is_told():
    with pytest.raises(hvd.HvdError, match="(?s)" + row("is a forked child of a rank")):
        list(torch.utils.data.DataLoader(Asking(), num_workers=1, multiprocessing_context="fork"))


@as_ranks(2)
def test_an_optimizer_is_not_copied():
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(TypeError, match=row("cannot be copied or pickled")):
        copy.deepcopy(optimizer)


NOT_FINITE = """
import torch, hvdlite.torch as hvd
hvd.init()
try:
    hvd.allreduce(torch.tensor([float("nan") if hvd.rank() else 1.0]), name="loss")
except hvd.HvdError as error:
    print("seen:", error)
"""


def test_who_had_nan_first_is_named():
    row("loss is NaN on all ranks at once")
    code, out = launched(NOT_FINITE, "--nan-guard", "raise")
    assert code == 0 and len(re.findall(r"seen: .*'allreduce.loss'.*rank 1", out)) == 2, out
