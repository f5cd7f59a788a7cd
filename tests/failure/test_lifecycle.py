"""How ranks begin and end: what init refuses, what a fork, a subprocess, Ctrl-C or an early end do to the others."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import EVERYTHING, Job, as_ranks, environment

import hvdlite as hvd

FRESH_RANKS = True  # to fork a process that holds torch and what earlier tests left takes ten times as long

INIT = "import hvdlite as hvd; hvd.init(); print('rank', hvd.rank(), 'of', hvd.size())"


def alone(code, **extra):
    """A process without a launcher: (exit code, all that it printed)."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**extra), capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def job(size, code, *arguments, **extra):
    """A job of this program: (exit code, all that was printed)."""
    with Job(size, [sys.executable, "-c", code, *arguments], **extra) as started:
        return started.wait(60), started.text()


def test_without_a_launcher_a_process_is_rank_0_of_1():
    code, said = alone(INIT)
    assert (code, said) == (0, "rank 0 of 1\n")


def test_one_rank_opens_no_socket():
    program = """
import os, hvdlite as hvd
hvd.init(); hvd.allreduce(1.0); hvd.barrier()
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
kinds = [os.readlink(link) for link in links if os.path.lexists(link)]
print([kind for kind in kinds if kind.startswith("socket")])
"""
    code, said = alone(program)
    assert (code, said) == (0, "[]\n")


@pytest.mark.parametrize(
    ("missing", "extra"),
    [
        ("torchrun's MASTER_ADDR=None", {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}),
        ("SLURM_STEP_NODELIST=''", {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}),
    ],
)
def test_under_other_launchers_there_is_no_job_of_ones(missing, extra):
    code, said = alone(INIT, **extra)
    assert code == 1 and "HvdInitError" in said and missing in said


def test_under_an_mpi_launcher_without_an_mpi_there_is_no_job_of_ones():
    extra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "HVDLITE_MPI_LIBRARY": "libmpi_of_nobody.so"}
    code, said = alone(INIT, **extra)
    assert code == 1 and "HvdInitError: rank 0 of 2 was found under MPICH or Intel MPI, but" in said
    assert "HVDLITE_MPI_LIBRARY=libmpi_of_nobody.so" in said


def test_a_malformed_variable_is_named_on_every_rank():
    code, said = job(2, "import os; os.environ['HVDLITE_SPIN_US'] = 'fast'\n" + INIT)
    assert code == 1 and "HvdOptionError: HVDLITE_SPIN_US='fast': must be a whole number." in said
    code, said = job(2, INIT, HVDLITE_SPIN_US="fast")  # the launcher knows the table, too
    assert code == 2 and "HVDLITE_SPIN_US='fast'" in said and "Traceback" not in said


def test_what_became_of_variables_is_told_once_by_rank_0():
    code, said = job(2, INIT, HOROVOD_CYCLE_TIME="1", HOROVOD_FUSION_THRESHOLD="1024", HVDLITE_SPIN_USS="3")
    assert code == 0, said
    assert said.count("honoured HOROVOD_FUSION_THRESHOLD; ignored HOROVOD_CYCLE_TIME") == 1, said
    assert said.count("did you mean HVDLITE_SPIN_US?") == 1, said
    assert all(line.startswith("[0]<stderr>:") for line in said.splitlines() if "did you mean" in line), said


def test_an_agreed_option_that_differs_is_refused_on_all_ranks():
    program = """
import os
os.environ["HVDLITE_CACHE_CAPACITY"] = "100" if os.environ["HVDLITE_RANK"] == "1" else "200"
import hvdlite as hvd
try:
    hvd.init()
except hvd.HvdInitError as error:
    print("refused:", error)
"""
    code, said = job(3, program)
    assert code == 0, said
    wanted = "refused: the option cache_capacity (HVDLITE_CACHE_CAPACITY) differs: ranks 0, 2 have 200, rank 1 has 100."
    assert said.count(wanted) == 3, said


def test_a_subprocess_that_inherits_a_ranks_environment_is_refused():
    program = f"""
import subprocess, sys, os
import hvdlite as hvd
hvd.init()
if hvd.rank() == 0:
    done = subprocess.run([sys.executable, "-c", {INIT!r}], capture_output=True, text=True, timeout=40)
    print("child", done.returncode, done.stderr.splitlines()[-1], "parent", os.getpid(), flush=True)
hvd.barrier()
print("sum", hvd.allreduce(1, op=hvd.Sum), flush=True)
"""
    code, said = job(2, program)
    assert code == 0 and said.count("sum 2") == 2, said
    (line,) = [line for line in said.splitlines() if "child" in line]
    assert "child 1" in line and "HvdInitError" in line, said
    parent = line.split("parent ")[1]
    assert parent in line.split("parent ")[0], said  # the text names the process that is the rank


def test_a_rank_that_finishes_first_is_not_a_death():
    program = """
import os, time
import hvdlite as hvd
hvd.init(); hvd.barrier()
if hvd.rank() == 0:
    time.sleep(1.0)  # the other has ended by now
print("done", flush=True)
"""
    code, said = job(2, program)
    assert code == 0 and said.count("done") == 2 and "lost" not in said.lower(), said


def test_calls_after_a_rank_has_left_raise_and_name_it():
    program = """
import time
import hvdlite as hvd
hvd.init(); hvd.barrier()
if hvd.rank() == 1:
    raise SystemExit
for call in range(2):
    try:
        hvd.allreduce(1.0, name="more")
    except hvd.HvdPeerLostError as error:
        print("left", error.rank, error, flush=True)
"""
    code, said = job(3, program)
    assert code == 0, said
    assert sum("rank 1" in line and "left" in line.split(":", 1)[1] for line in said.splitlines()) >= 2, said


def test_an_exception_before_init_is_only_that():
    code, said = alone("import hvdlite as hvd; hvd.is_initialized(); raise ValueError('boom')")
    assert code == 1 and said.count("ValueError: boom") == 1 and said.count("Traceback") == 1, said


@as_ranks(1, 2)
def test_many_forks_are_harmless():
    for i in range(1000 if EVERYTHING else 100):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        if i % 25 == 0:
            assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()


@as_ranks(1, 2)
def test_a_forked_child_gets_a_clear_error_and_its_end_harms_nobody():
    reader, writer = os.pipe()
    pending = hvd.allreduce_async(np.ones(3), name=f"pending{hvd.rank()}") if hvd.size() == 2 else None
    child = os.fork()
    if child == 0:
        said = []
        for call in (hvd.rank, lambda: hvd.allreduce(1.0), hvd.barrier, hvd.init, hvd.shutdown):
            try:
                call()
                said.append("nothing")
            except hvd.HvdForkError as error:
                said.append(str(error))
        os.write(writer, json.dumps(said).encode())
        del pending
        atexit._run_exitfuncs()  # what a child that ends by sys.exit would run
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        texts = json.loads(file.read())
    os.waitpid(child, 0)
    assert all("forked child" in text and "DataLoader" in text for text in texts), texts
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
    if pending is not None:
        other = hvd.allreduce_async(np.ones(3), name=f"pending{1 - hvd.rank()}")
        hvd.synchronize(pending), hvd.synchronize(other)


@as_ranks(2)
def test_ctrl_c_interrupts_a_wait_and_leaves_the_handle_whole():
    if hvd.rank() == 1:
        hvd.barrier()
        hvd.allreduce(np.ones(3), name="alone")
        return
    handle = hvd.allreduce_async(np.ones(3), name="alone")
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        hvd.synchronize(handle)
    assert time.monotonic() - started < 15  # the other rank does not come before
    signal.signal(signal.SIGINT, previous)
    hvd.barrier()
    assert (hvd.synchronize(handle) == 1).all()


@as_ranks(2)
def test_leaving_is_acknowledged_without_the_others_code():
    """The other is in its own code until it sees that this one has left."""
    with tempfile.TemporaryDirectory() as folder:
        left = Path(hvd.broadcast_object(folder, 0), "left")
        if hvd.rank() == 0:
            hvd.shutdown()
            left.touch()
        while not left.exists():
            time.sleep(0.01)
        hvd.shutdown()
        hvd.init()
        hvd.barrier()  # it has seen it; the folder may go


@as_ranks(2)
def test_dataloader_workers_are_harmless():
    torch = pytest.importorskip("torch")

    class Calls(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            try:
                return hvd.rank()
            except hvd.HvdForkError:
                return -1

    for _ in range(2):
        values = torch.cat(list(torch.utils.data.DataLoader(Calls(), batch_size=2, num_workers=2)))
        assert (values == -1).all() and len(values) == 16
        assert hvd.allreduce(1, op=hvd.Sum) == 2
