"""What runs, how often and on which CPUs: -m, --dry-run, --max-restarts, --bind-to, flags of other launchers."""

import os
import re
import signal
import sys
import time

import pytest
from launching import Launch, launch
from ranks import everything

from hvdlite import config
from hvdlite.launcher.agent.cpu_binding import BindError, Cpu, share

TRY = 'echo "try $HVDLITE_RESTART_COUNT $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS"'


def test_a_module_is_run_by_this_python(tmp_path):
    (tmp_path / "chosen.py").write_text("import sys\nprint(sys.executable, sys.argv[1:])\n")
    code, out, err = launch("-np", 1, "-m", "chosen", "--lr", "-m", PYTHONPATH=str(tmp_path))
    assert (code, out) == (0, f"{sys.executable} ['--lr', '-m']\n"), err


def test_a_job_that_fails_is_started_again_until_it_succeeds(tmp_path):
    script = f"{TRY}; [ $HVDLITE_RESTART_COUNT = 2 ] || [ $RANK = 0 ] || exit 5; exit 0"
    code, out, err = launch("-np", 2, "--max-restarts", 3, "--output-filename", tmp_path, "sh", "-c", script)
    said = [f"[{rank}]<stdout>:try {count} {count} of 3" for count in range(3) for rank in range(2)]
    assert code == 0 and sorted(out.splitlines()) == sorted(said), err
    assert re.findall(r"hvdlite-run: restart (\d) of 3\n", err) == ["1", "2"]
    assert (tmp_path / "rank.1" / "stdout").read_text().splitlines() == [
        f"try {count} {count} of 3" for count in range(3)
    ]


def test_restarts_are_counted_and_the_last_code_is_the_jobs(tmp_path):
    script = f"{TRY}; setsid sleep 600 & exit $((7 + HVDLITE_RESTART_COUNT))"
    code, out, err = launch("-np", 1, "--max-restarts", 1, "sh", "-c", script, HVDLITE_RESTART_COUNT="9")
    assert code == 8 and out == "try 0 0 of 1\ntry 1 1 of 1\n", err
    assert launch("-np", 1, "sh", "-c", 'echo "$HVDLITE_RESTART_COUNT"; exit 3', HVDLITE_RESTART_COUNT="9")[:2] == (
        3,
        "0\n",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, *everything(signal.SIGTERM)])
def test_what_a_signal_has_ended_is_not_started_again(number):
    with Launch("-np", 2, "--max-restarts", 5, "sh", "-c", "echo ready; exec sleep 600") as job:
        job.until("ready", 2)
        job.send(number)
        assert job.wait() == 128 + number and "restart" not in job.err and not job.left()


def test_a_signal_between_two_attempts_ends_the_job():
    with Launch("-np", 1, "--max-restarts", 1000, "sh", "-c", "exit 3") as job:
        job.until("restart 1 of")
        began = time.monotonic()
        job.send(signal.SIGTERM)
        assert job.wait() == 143 and time.monotonic() - began < 10 and not job.left()


def test_what_cannot_be_started_is_not_tried_again():
    code, _, err = launch("-np", 1, "--max-restarts", 3, "no-such-command")
    assert code == 127 and "restart" not in err


def test_paths_mean_the_folder_in_which_the_command_was_given(tmp_path):
    """From flags, variables and -x, wherever ranks start; words that are no paths stay."""
    (tmp_path / "elsewhere").mkdir()
    words = ("--wdir", "elsewhere", "--timeline-filename", "line.json", "-x", "HVDLITE_MPI_LIBRARY=../mpi.so")
    given = {"HVDLITE_TRACE_DIR": "records", "HOROVOD_AUTOTUNE_LOG": "log/trials.csv", "HVDLITE_CUDA_LIBRARY": "my.so"}
    show = "cat /proc/self/environ | tr '\\0' '\\n'"
    job = ("env", "-C", tmp_path)
    with Launch("-np", 1, *words, "sh", "-c", show, under=job, **given) as launched:
        assert launched.wait() == 0, launched.err
    found = dict(line.partition("=")[::2] for line in launched.out.splitlines())
    assert found["PWD"] == str(tmp_path / "elsewhere"), launched.out
    assert found["HVDLITE_TIMELINE"] == str(tmp_path / "line.json")
    assert found["HVDLITE_MPI_LIBRARY"] == str(tmp_path.parent / "mpi.so")
    assert found["HVDLITE_TRACE_DIR"] == str(tmp_path / "records")
    assert found["HOROVOD_AUTOTUNE_LOG"] == str(tmp_path / "log" / "trials.csv")
    assert found["HVDLITE_CUDA_LIBRARY"] == "my.so"
    words = {"HVDLITE_TRACE_DIR": "off", "HOROVOD_TIMELINE": "DYNAMIC", "HVDLITE_AUTOTUNE_LOG": ""}
    assert config.absolute(words) == {}


def test_a_dry_run_starts_nothing_and_tells_what_would_be(tmp_path):
    words = ("-np", 2, "--dry-run", "--fusion-threshold-mb", 1, "-x", "MINE=a b", "--bind-to", "core")
    code, out, err = launch(*words, "sh", "-c", f"touch {tmp_path}/started")
    assert code == 0 and not list(tmp_path.iterdir()), err
    assert f"command: sh -c 'touch {tmp_path}/started'\nbound to: core\n" in out
    assert re.search(r"^rank 1 on localhost: .*HVDLITE_LOCAL_RANK=1 .* RANK=1$", out, re.MULTILINE), out
    assert re.search(r"^all ranks: .*HVDLITE_FUSION_THRESHOLD=1048576 .*MINE='a b' .*WORLD_SIZE=2$", out, re.MULTILINE)
    assert re.search(r"^all ranks, chosen at the start: .*HVDLITE_SECRET_KEY", out, re.MULTILINE)


def test_a_dry_run_for_several_hosts_asks_none_of_them():
    code, out, err = launch("-H", "localhost:1,far-away.invalid:2", "--dry-run", "true")
    assert code == 0 and "other hosts: far-away.invalid by ssh\n" in out and "rank 2 on far-away.invalid: " in out, err


CPUS = [Cpu(number, number % 8, number % 8 // 4, number % 8 // 4) for number in range(16)]  # two sockets, two threads


@pytest.mark.parametrize(
    "mode, rank, size, numbers",
    [
        ("core", 0, 8, {0, 8}),
        ("core", 7, 8, {7, 15}),
        ("core", 1, 3, {2, 3, 4, 10, 11, 12}),
        ("core", 0, 1, set(range(16))),
        ("socket", 1, 4, {0, 1, 2, 3, 8, 9, 10, 11}),
        ("numa", 2, 4, {4, 5, 6, 7, 12, 13, 14, 15}),
    ],
)
def test_cpus_are_shared_out(mode, rank, size, numbers):
    assert share(mode, CPUS, rank, size) == numbers


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_no_core_has_two_ranks_and_none_is_left(size):
    given = [share("core", CPUS, rank, size) for rank in range(size)]
    assert sorted(cpu for each in given for cpu in each) == list(range(16))


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(BindError, match="there are 8 cores here for 9 ranks"):
        share("core", CPUS, 0, 9)


def test_ranks_run_on_the_cpus_that_they_were_given():
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    code, out, _ = launch("-np", 2, "--bind-to", "numa", sys.executable, "-c", show)
    assert code == 0 and out.count("[") == 4
    cores = len({tuple(cpus) for cpus in _cores().values()})
    code, out, err = launch("-np", 2, "--bind-to=core", sys.executable, "-c", show)
    if cores < 2:
        assert code == 1 and "there are 1 cores here for 2 ranks" in err
    else:
        sets = [set(map(int, re.findall(r"\d+", line.partition(":")[2]))) for line in out.splitlines()]
        assert code == 0 and len(sets) == 2 and sets[0] and sets[1] and not sets[0] & sets[1], out


def _cores():
    """{cpu: CPUs of its core} of this host, as far as this process may use them."""
    found = {}
    for number in os.sched_getaffinity(0):
        path = f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        found[number] = open(path).read().split() if os.path.exists(path) else [number]
    return found
