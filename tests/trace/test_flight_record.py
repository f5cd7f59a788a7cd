"""What a rank leaves when a job fails: written without its Python, where nobody else can have put something."""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import as_program
import numpy as np
import pytest
from launching import SECONDS, Launch
from ranks import as_ranks

import hvdlite as hvd
from hvdlite import config
from hvdlite.trace import directory

BY_DEFAULT = ("env", "-u", "HVDLITE_TRACE_DIR")
PROGRAM = [sys.executable, as_program.__file__, __file__]


def appears(path):
    """The record, once it is there."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if path.exists():
            return json.loads(path.read_text())
        time.sleep(0.05)
    pytest.fail(f"{path} did not appear")


def test_a_failed_job_leaves_records_of_all_who_lived_and_the_last_line_says_where(tmp_path):
    """Rank 0 holds the interpreter's lock and never comes back to Python: its engine writes."""
    there = tmp_path / "there"
    there.mkdir()
    with Launch("-np", "3", *PROGRAM, "stuck", str(there), under=BY_DEFAULT, TMPDIR=str(tmp_path)) as job:
        assert job.wait() == 1
        said = [line for line in job.err.splitlines() if line.startswith("hvdlite-run: ")][-1]
    (base,) = tmp_path.glob("hvdlite-trace-*")
    (folder,) = base.iterdir()
    assert said == f"hvdlite-run: flight records: {folder} (hvdlite-trace analyze {folder})"
    assert base.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    found = {rank: json.loads((folder / f"rank-{rank}.flight.json").read_text()) for rank in range(3)}
    assert [found[rank]["why"] for rank in range(3)] == ["abort", "error", "abort"]
    assert all("rank 1 raised ValueError: boom" in each["failure"]["text"] for each in found.values())
    assert [each["name"] for each in found[2]["waiting"]] == ["allreduce.never"] and not found[0]["waiting"]
    names = {each["name"] for each in found[0]["events"] if each["what"] == "finish"}
    assert names == {"allreduce.first", "allreduce.noname.0"}
    assert {each["plane"] for each in found[0]["events"] if each["what"] == "start"} == {"shm"}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_signal_asks_a_blocked_rank_and_the_job_goes_on(tmp_path):
    flags = ["-np", "2", "--trace-dir", str(tmp_path / "here")]
    with Launch(*flags, *PROGRAM, "signal", str(tmp_path), HVDLITE_TRACE_SIGNAL="RTMIN+5") as job:
        job.until(" .\n")
        pid = int(job.out.partition("pid of rank 0: ")[2].split()[0])
        os.kill(pid, signal.SIGRTMIN + 5)
        record = tmp_path / "here" / "rank-0.flight.json"
        found = appears(record)
        assert found["why"] == "signal" and [each["name"] for each in found["waiting"]] == ["allreduce.late"]
        (tmp_path / "go").touch()
        assert job.wait() == 0 and not job.left()
    after = json.loads(record.read_text())
    assert after["why"] == "asked" and not after["waiting"] and after["failure"] is None  # a folder was asked for


def test_a_job_that_goes_well_or_is_told_not_to_leaves_nothing(tmp_path):
    with Launch("-np", "2", *PROGRAM, "well", under=BY_DEFAULT, TMPDIR=str(tmp_path)) as job:
        assert job.wait() == 0 and "flight records" not in job.err
    with Launch("-np", "2", *PROGRAM, "fail", TMPDIR=str(tmp_path), HVDLITE_TRACE_DIR="off") as job:
        assert job.wait() == 1 and "flight records" not in job.err
    assert not list(tmp_path.glob("hvdlite-trace-*"))


@pytest.mark.parametrize("whose", ["others", "asked"])
def test_that_there_can_be_no_records_is_said(whose, tmp_path):
    """A folder of that name that others may enter, as somebody may have prepared it; and a file in its way."""
    flags, under = ["-np", "2"], BY_DEFAULT
    if whose == "others":
        (tmp_path / f"hvdlite-trace-{os.getuid()}").mkdir(mode=0o755)
    else:
        (tmp_path / "file").touch()
        flags, under = [*flags, "--trace-dir", str(tmp_path / "file" / "in")], ()
    with Launch(*flags, *PROGRAM, "fail", under=under, TMPDIR=str(tmp_path)) as job:
        assert job.wait() == 1
        said = [line for line in job.err.splitlines() if line.startswith("hvdlite-run: ")][-1]
    words = "is no folder of this user alone" if whose == "others" else "file/in cannot be made or written"
    assert "there are no flight records: " in said and words in said and said.endswith(" [HVD725]"), said


@as_ranks(1, 2)
def test_a_dump_goes_where_it_is_told():
    import tempfile

    hvd.allreduce(1.0, name="x")
    with tempfile.TemporaryDirectory() as folder:
        path = hvd.dump_trace(Path(folder) / "deep" / "er")
        assert path == f"{folder}/deep/er/rank-{hvd.rank()}.flight.json"
        found = json.loads(Path(path).read_text())
        assert found["why"] == "asked" and found["size"] == hvd.size() and found["pid"] == os.getpid()
        with pytest.raises(OSError, match="Not a directory"):
            hvd.dump_trace(path)
    with pytest.raises(ValueError, match="HVDLITE_TRACE_DIR"):
        hvd.dump_trace()
    for wrong in ("", "a\0b"):
        with pytest.raises(ValueError):
            hvd.dump_trace(wrong)
    with pytest.raises(TypeError):
        hvd.dump_trace(7)
    hvd.barrier()


def test_a_rank_alone_leaves_a_record_too(tmp_path):
    with Launch("-np", "1", *PROGRAM, "fail", HVDLITE_TRACE_DIR=str(tmp_path)) as job:
        assert job.wait() == 1
    assert json.loads((tmp_path / "rank-0.flight.json").read_text())["why"] == "error"


def test_before_init_there_is_nothing_to_dump():
    with pytest.raises(hvd.HvdNotInitializedError):
        hvd.dump_trace("anywhere")


@pytest.mark.parametrize("text", ["KILL", "SIGSTOP", "0", "65", "RTMIN+", "RTMIN+99", "SIGNOTHING", "INT", ""])
def test_a_signal_that_will_not_do_is_refused(text):
    with pytest.raises(hvd.HvdOptionError, match="a signal that is free"):
        config.read({"HVDLITE_TRACE_SIGNAL": text})


def test_signals_have_many_names():
    found = [config.read({"HVDLITE_TRACE_SIGNAL": text}).values["trace_signal"] for text in ("USR2", "sigusr2", "12")]
    assert found == [signal.SIGUSR2] * 3


def test_the_newest_jobs_are_kept_and_what_is_not_ours_stays(tmp_path):
    environ = {"TMPDIR": str(tmp_path)}
    base = Path(directory.base(environ))
    base.mkdir(mode=0o700)
    for number in range(6):
        (base / f"{number:016x}").mkdir()
        (base / f"{number:016x}" / "rank-0.flight.json").touch()
        os.utime(base / f"{number:016x}", (number, number))
    (base / f"{1:016x}" / "mine.txt").touch()
    os.utime(base / f"{1:016x}", (1, 1))
    (base / "other").mkdir()
    directory.prune(environ, keep=3)
    left = sorted(path.name for path in base.iterdir())
    assert left == [f"{number:016x}" for number in (1, 3, 4, 5)] + ["other"]
    assert [path.name for path in (base / f"{1:016x}").iterdir()] == ["mine.txt"]


def main(how, folder=None):
    hvd.init()
    if how == "well":
        hvd.allreduce(1.0)
        return
    if how == "fail":
        raise ValueError("boom")
    hvd.allreduce(1.0, name="first")
    hvd.allreduce(1.0)
    if how == "signal":
        while hvd.rank() == 1 and not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        late = hvd.allreduce_async(1.0, name="late")
        if hvd.rank() == 0:  # from here on a record has what is waited for, however late this rank begins to wait
            print(f"pid of rank 0: {os.getpid()} .", flush=True)
        hvd.synchronize(late)
        return
    handle = hvd.allreduce_async(np.ones(1), name="never") if hvd.rank() == 2 else None
    Path(folder, f"rank {hvd.rank()}").touch()
    if hvd.rank() == 0:
        ctypes.PyDLL(None).sleep(60)
    while hvd.rank() == 1 and len(os.listdir(folder)) < 3:
        time.sleep(0.01)
    if hvd.rank() == 1:
        raise ValueError("boom")
    hvd.synchronize(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
