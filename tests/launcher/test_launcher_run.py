"""hvdlite-run as a user meets it: what a rank finds, what is shown of it, and what is refused before it starts."""

import os
import re
import select
import subprocess
import sys

import pytest
from launching import RUN, Launch, launch

import hvdlite
from hvdlite.launcher.agent import stdin

PYTHON = (sys.executable, "-u", "-c")


def test_true_on_two_ranks_is_a_success():
    assert launch("-np", 2, "true") == (0, "", "")


def test_lines_carry_rank_and_stream():
    code, out, err = launch("-np", 2, "sh", "-c", "echo out $HVDLITE_RANK; echo err $RANK >&2")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0]<stdout>:out 0", "[1]<stdout>:out 1"]
    assert sorted(err.splitlines()) == ["[0]<stderr>:err 0", "[1]<stderr>:err 1"]


def test_one_rank_alone_has_no_prefix():
    assert launch("-np", 1, "echo", "hello") == (0, "hello\n", "")


def test_the_time_comes_before_the_rank_if_asked():
    for flag in ("-prefix-timestamp", "--prefix-output-with-timestamp"):
        _, out, _ = launch("-np", 2, flag, "echo", "x")
        assert all(
            re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[[01]\]<stdout>:x", x) for x in out.split("\n")[:-1]
        )


def test_lines_of_many_ranks_are_never_torn():
    body = "import os,sys\nfor i in range(2000): os.write(1, b'%03d' % i * 30 + b'\\n')"
    code, out, _ = launch("-np", 4, *PYTHON, body)
    assert code == 0
    lines = [line.split(":", 1) for line in out.splitlines()]
    for rank in range(4):
        mine = [text for prefix, text in lines if prefix == f"[{rank}]<stdout>"]
        assert mine == [f"{number:03d}" * 30 for number in range(2000)]


def test_an_unfinished_line_is_shown_soon_and_ended_at_the_end():
    script = "printf prompt$RANK; read answer; exit 0"
    with Launch("-np", 2, "--stdin", 0, "sh", "-c", script, stdin=subprocess.PIPE) as job:
        job.until("prompt0", seconds=10)
        job.process.stdin.close()
        assert job.wait() == 0
        rows = sorted(job.out.split("\n"))
        assert rows == ["", "[0]<stdout>:prompt0", "[1]<stdout>:prompt1"]


def test_a_slow_reader_slows_the_ranks_and_loses_nothing():
    body = "import os\nfor i in range(300): os.write(1, b'%05d' % i * 13107 + b'\\n')"
    read_end, write_end = os.pipe()
    process = subprocess.Popen([*RUN, "-np", "1", *PYTHON, body], stdout=write_end, start_new_session=True)
    os.close(write_end)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)  # nobody reads: 19 MB cannot all be kept
        lines = open(read_end, "rb", closefd=True).read().splitlines()
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert lines == [b"%05d" % number * 13107 for number in range(300)]


def test_nobody_reads_stdin_unasked():
    """A shell's `while read` loop around it would lose its lines."""
    loop = f"while read word; do {' '.join(RUN)} -np 2 sh -c 'cat; echo at the end'; echo after $word; done"
    done = subprocess.run(["sh", "-c", loop], input="one\ntwo\n", capture_output=True, text=True, timeout=60)
    assert re.findall("after (.*)", done.stdout) == ["one", "two"] and done.stdout.count("at the end") == 4, done.stderr
    assert "HVD703" not in done.stderr


@pytest.mark.parametrize("way", ["file", "pipe"])
def test_a_line_says_that_nobody_has_read_what_came_at_stdin(way, tmp_path):
    """Where it is for the command: a script, data."""
    (tmp_path / "script").write_text("echo here")
    with (
        subprocess.Popen(["cat", tmp_path / "script"], stdout=subprocess.PIPE) as cat,
        open(tmp_path / "script") as file,
    ):
        assert cat.wait() == 0
        given = file if way == "file" else cat.stdout
        assert launch("-np", 2, "--stdin", "none", "sh", "-s", stdin=given) == (0, "", "")
        code, out, err = launch("-np", 2, "sh", "-s", stdin=given)
    assert (code, out) == (0, "") and err.endswith("--stdin 0 gives it to rank 0 [HVD703]\n"), err


def test_stdin_goes_to_rank_0_if_asked_and_the_others_read_nothing():
    with Launch("-np", 3, "--stdin", 0, "sh", "-c", "echo got $(cat)", stdin=subprocess.PIPE) as job:
        job.process.stdin.write(b"words of the user\n")
        job.process.stdin.close()
        assert job.wait() == 0
        assert sorted(job.out.splitlines()) == [
            "[0]<stdout>:got words of the user",
            "[1]<stdout>:got",
            "[2]<stdout>:got",
        ]


@pytest.mark.parametrize("words", [["-"], ["-u", "-X", "dev", "-"], ["-W", "ignore"]])
def test_a_program_at_stdin_runs_on_all_ranks(words, tmp_path):
    body = "import sys\nfor name in sys.argv[1:] or ['none']:\n    print(name, repr(sys.stdin.read()))\n"
    (tmp_path / "train.py").write_text(body)
    more = ["a b"] if words[-1] == "-" else []
    with open(tmp_path / "train.py") as program:
        code, out, err = launch("-np", 2, sys.executable, *words, *more, stdin=program)
    told = "a b" if more else "none"
    assert code == 0 and sorted(out.splitlines()) == [f"[{rank}]<stdout>:{told} ''" for rank in (0, 1)], err


def test_without_a_program_nothing_is_started(tmp_path):
    (tmp_path / "long.py").write_text("#" * (1 << 17))
    for words in ([], ["-"], ["-i"]):
        code, _, err = launch("-np", 2, sys.executable, *words)
        assert code == 2 and "has no program to run: hvdlite-run -np 2" in err and "[HVD702]" in err
    with open(tmp_path / "long.py") as program:
        code, _, err = launch("-np", 2, sys.executable, "-", stdin=program)
    assert code == 2 and "longer than 127 KiB: name its file [HVD705]" in err
    for words in (["-c", "pass"], ["-V"], ["-Ic", "pass"], ["x.py", "-"], ["-m", "x"]):
        assert stdin.with_program(["/usr/bin/python3.12", *words], False) == ["/usr/bin/python3.12", *words]
    assert stdin.with_program(["cat", "-"], False) == ["cat", "-"]


def test_a_terminal_can_be_read_by_rank_0():
    leader, follower = os.openpty()
    with Launch("-np", 2, "--stdin", 0, "sh", "-c", "read line; echo got $line", stdin=follower) as job:
        os.close(follower)
        os.write(leader, b"typed\n")
        assert job.wait() == 0
        assert "[0]<stdout>:got typed" in job.out
    os.close(leader)


def test_closed_standard_streams_are_no_obstacle():
    command = " ".join([*RUN, "-np", "2", "true", "<&-", ">&-", "2>&-"])
    assert subprocess.run(["sh", "-c", command], timeout=30).returncode == 0


def test_threads_are_limited_with_one_note():
    with Launch("-np", 2, "sh", "-c", "echo $OMP_NUM_THREADS", under=("env", "-u", "OMP_NUM_THREADS")) as job:
        assert job.wait() == 0
        assert sorted(job.out.splitlines()) == ["[0]<stdout>:1", "[1]<stdout>:1"]
        assert job.err.count("OMP_NUM_THREADS") == 1
    assert launch("-np", 2, "sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="3")[1].count(">:3\n") == 2
    with Launch("-np", 1, "sh", "-c", "echo ${OMP_NUM_THREADS-none}", under=("env", "-u", "OMP_NUM_THREADS")) as job:
        assert (job.wait(), job.out, job.err) == (0, "none\n", "")


def test_output_files_hold_what_each_rank_wrote(tmp_path):
    folder = tmp_path / "new" / "logs"
    body = "import os, sys; os.write(1, b'out\\r%d' % int(os.environ['RANK'])); os.write(2, b'err\\n')"
    code, out, _ = launch("-np", 11, "--output-filename", folder, *PYTHON, body)
    assert code == 0 and "[10]<stdout>:10" in out.replace("out\r[10]<stdout>:", "")
    assert sorted(path.name for path in folder.iterdir()) == [f"rank.{rank:02d}" for rank in range(11)]
    for rank in range(11):
        assert (folder / f"rank.{rank:02d}" / "stdout").read_bytes() == b"out\r%d" % rank
        assert (folder / f"rank.{rank:02d}" / "stderr").read_bytes() == b"err\n"


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = launch("-np", 2, "--output-filename", tmp_path / "file" / "logs", "true")
    assert code == 2 and "--output-filename" in err and "cannot be written" in err


def test_verbose_tells_what_is_started_and_how_it_ended():
    code, _, err = launch("-np", 2, "--verbose", "sh", "-c", "exit $RANK")
    assert code == 1
    for text in ("store on 127.0.0.1:", "HVDLITE_RANK=1", "rank 0 is process", "exited with code 1 after"):
        assert text in err, err


def test_version():
    assert launch("-v") == launch("--version") == (0, f"hvdlite-run {hvdlite.__version__}\n", "")


def test_check_build_tells_what_was_found_and_why_not():
    code, out, err = launch("--check-build")
    assert (code, err) == (0, "")
    assert re.search(r"\[X\] NumPy: \d+\.\d+", out)
    for title in ("PyTorch", "TensorFlow", "JAX", "MPI", "NCCL"):
        assert re.search(rf"\[[X ]\] {title}: \S+", out), out
    assert re.search(r"\[X\] horovod: hvdlite with --as-horovod \(/.*/as_horovod/front\); without it: \S+", out), out
    if "[ ] NCCL" in out:
        assert re.search(r"NCCL: .*libnccl.so.*(cannot open|No such file)", out)


def test_the_launcher_loads_neither_numpy_nor_the_extension():
    body = (
        "import sys; from hvdlite.launcher import cli, job; from hvdlite.launcher.probe import check_build;"
        "cli._parser(); check_build.frameworks();"
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'torch', 'cffi', 'asyncio') or 'cffi' in m])"
    )
    assert subprocess.run([sys.executable, "-c", body], capture_output=True, text=True).stdout == "[]\n"


def test_options_reach_the_ranks_as_variables():
    code, out, _ = launch(
        "-np", 1, "--fusion-threshold-mb", 2, "--spin-us=7", "env", HOROVOD_FUSION_THRESHOLD="5", HVDLITE_RANK="9"
    )
    assert code == 0
    assert "HVDLITE_FUSION_THRESHOLD=2097152\n" in out and "HVDLITE_SPIN_US=7\n" in out and "HVDLITE_RANK=0\n" in out
    assert "HOROVOD_FUSION_THRESHOLD" not in out


def test_a_script_that_is_not_executable_gets_the_advice_to_name_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    code, _, err = launch("-np", 2, script)
    assert code == 126 and f"did you mean: python {script}" in err


def test_a_script_whose_interpreter_is_missing_is_told_once(tmp_path):
    script = tmp_path / "train"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    code, _, err = launch("-np", 3, script)
    assert code == 127 and err.count("cannot start rank 0") == 1 and "rank 1" not in err


def test_hosts_that_are_this_one_are_welcome(tmp_path):
    (tmp_path / "hosts").write_text("# here\nlocalhost slots=2\n")
    code, out, _ = launch("-hostfile", tmp_path / "hosts", "sh", "-c", "echo $WORLD_SIZE $LOCAL_RANK")
    assert code == 0 and sorted(out.splitlines()) == ["[0]<stdout>:2 0", "[1]<stdout>:2 1"]
    code, out, _ = launch("-H", "localhost:1,127.0.0.1:1", "sh", "-c", "echo $LOCAL_RANK/$LOCAL_WORLD_SIZE")
    assert code == 0 and sorted(out.splitlines()) == ["[0]<stdout>:0/2", "[1]<stdout>:1/2"]


def test_two_jobs_at_once_do_not_disturb_each_other():
    words = ("-np", 2, "--stdin", 0, "--failure-grace", 20, "sh", "-c", "echo a; read x; exit 3")
    with Launch(*words, stdin=subprocess.PIPE) as first:
        first.until("]<stdout>:a", 2)
        assert launch("-np", 2, "true")[0] == 0
        first.process.stdin.close()
        assert first.wait() == 3


def test_somebody_who_stops_reading_ends_the_job():
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [*RUN, "-np", "2", "sh", "-c", "while echo y; do :; done"], stdout=writer, stderr=writer, start_new_session=True
    )
    os.close(writer)
    try:
        assert select.select([reader], [], [], 20)[0]
        os.read(reader, 10)
        os.close(reader)
        assert process.wait(20) == 141
    finally:
        process.kill()
