"""A job that is started where anybody may write (/tmp) takes no module from there: its files run as the job's user."""

import os
import subprocess
import sys

import pytest
from launching import SECONDS

from hvdlite.launcher.starters import mpi_agent, starter
from hvdlite.system import python_command

SPY = "import os\nopen(os.environ['SEEN'], 'a').write(__name__ + ' ')\n"
PLANTED = "selectors", "json", "socket", "hmac", "hashlib", "struct", "argparse", "cloudpickle", "numpy", "hvdlite"
TRAINS = "import hvdlite.numpy as hvd\nhvd.init()\nprint('met as', hvd.rank(), hvd.size())\n"
CALLS = "import os, hvdlite\nif __name__ == '__main__':\n    print(sum(hvdlite.run(lambda: 21, num_proc=2)))\n"


@pytest.fixture
def planted(tmp_path):
    """A folder in which somebody has left modules, and the environment of a job that is started there."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(SPY)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    return folder, {**kept, "SEEN": str(tmp_path / "seen"), "XDG_CONFIG_HOME": str(tmp_path)}


def seen(environ):
    try:
        with open(environ["SEEN"], encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def test_ranks_of_torchrun_and_their_keeper(planted, tmp_path):
    folder, environ = planted
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    told.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID=str(tmp_path))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=folder,
            env={**environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    assert seen(environ) == ""
    assert said == ["met as 0 2\n", "met as 1 2\n"], said


def test_a_function_that_is_called_from_python(planted, tmp_path):
    pytest.importorskip("cloudpickle")
    folder, environ = planted
    script = tmp_path / "call.py"
    script.write_text(CALLS)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    assert seen(environ) == ""
    assert done.returncode == 0 and done.stdout.endswith("42\n"), done.stdout + done.stderr


@pytest.mark.parametrize("boot", [starter.BOOT, mpi_agent.BOOT], ids=["srun", "mpirun"])
def test_agents_that_a_starter_brings(planted, boot):
    """They are given nothing, and end at once."""
    folder, environ = planted
    subprocess.run([sys.executable, "-c", boot], cwd=folder, env=environ, input=b"", capture_output=True, check=False)
    assert seen(environ) == ""


def test_a_folder_that_the_user_has_put_on_the_path_stays_there(planted):
    folder, environ = planted
    words = [sys.executable, "-c", f"{python_command.WITHOUT_FOLDER}import struct"]
    subprocess.run(words, cwd=folder, env=environ, check=True)
    assert seen(environ) == ""
    subprocess.run(words, cwd=folder, env={**environ, "PYTHONPATH": str(folder)}, check=True)
    assert seen(environ) == "struct "
