"""Records, steps and timelines of an attempt are there after the next one, and readers tell them apart.

Also here: whatever bytes a tensor's name has, all three kinds of file are JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import as_program
import numpy as np
import pytest
import stepping
from launching import SECONDS, Launch
from ranks import as_ranks, everything

import hvdlite as hvd
from hvdlite.trace import attempts, cli
from hvdlite.trace.report import read

PROGRAM = [sys.executable, as_program.__file__, __file__]


def test_a_restart_keeps_what_the_failed_attempt_has_left(tmp_path, capsys):
    """Rank 1 of the first attempt is killed and leaves no record; the second goes well."""
    folder, timeline = tmp_path / "td", tmp_path / "tl.json"
    flags = ["-np", "2", "--max-restarts", "1", "--trace-dir", str(folder), "--timeline-filename", str(timeline)]
    with Launch(*flags, "--trace-steps", *PROGRAM, "restart") as job:
        assert job.wait() == 0, job.err
        assert "hvdlite-run: restart 1 of 1" in job.err
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "rank-0.flight.json", "rank-0.flight.json.1", "rank-1.flight.json",
        *(f"rank-{rank}.steps.jsonl{end}" for rank in (0, 1) for end in ("", ".1")),
    }  # fmt: skip
    kept = json.loads((folder / "rank-0.flight.json.1").read_text())
    assert kept["failure"] is not None and json.loads((folder / "rank-0.flight.json").read_text())["failure"] is None
    for path in (timeline, Path(f"{timeline}.1"), Path(f"{timeline}.rank-1.json.1")):
        rows = json.loads(path.read_text())
        assert any("grad" in str(row.get("args", {}).get("name")) for row in rows), path

    assert cli.main(["analyze", str(folder)]) == 0
    said = capsys.readouterr()
    assert (
        "Nothing is" in said.out and "1 older attempt is here, too: " in said.err and "--before 1 shows it" in said.err
    )
    assert cli.main(["analyze", str(folder), "--before", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Rank 1 is at fault: ") and "Rank 1 left no" in said.out and "older" not in said.err
    assert cli.main(["analyze", str(folder), "--before", "2"]) == 1
    assert "there are 2 attempts here: --before takes 0 to 1" in capsys.readouterr().err

    out = tmp_path / "out.json"
    for before, steps in ((0, 3), (1, 2)):
        assert cli.main(["merge", str(timeline), "--before", str(before), "-o", str(out)]) == 0
        merged = json.loads(out.read_text())
        assert {each["rank"] for each in merged["otherData"]["ranks"]} == {0, 1}
        found = read.Folder(folder, before)
        assert found.look() and [file.rank for file in found.ranks] == [0, 1]
        assert [len(file) for file in found.ranks] == [steps, steps]
        assert ("older attempt is here" in "; ".join(found.problems)) == (before == 0)


def head(job, begun, rank=0, size=1):
    return json.dumps({**stepping.head(rank, size), "job": job, "epoch": 1, "begun": begun}) + "\n"


def test_who_has_begun_again_is_not_shown_with_who_has_not(tmp_path, capsys):
    line = json.dumps(stepping.step(1, 10**12)) + "\n"
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.steps.jsonl").write_text(head("a", 100, rank, 2) + line)
    folder = read.Folder(tmp_path)
    assert folder.look() and len(folder.ranks) == 2 and not folder.problems
    os.rename(tmp_path / "rank-0.steps.jsonl", tmp_path / "rank-0.steps.jsonl.1")
    (tmp_path / "rank-0.steps.jsonl").write_text(head("b", 200, 0, 2) + line)
    assert folder.look() and [file.rank for file in folder.ranks] == [0]
    assert "no steps of rank 1: its file is not in" in folder.problems[0] and "1 older attempt" in folder.problems[1]
    before = read.Folder(tmp_path, 1)
    assert before.look() and [file.path.name for file in before.ranks] == ["rank-0.steps.jsonl.1", "rank-1.steps.jsonl"]
    with pytest.raises(read.ReadError, match="there are 2 attempts here"):
        read.Folder(tmp_path, 2).look()
    for words in (["report", str(tmp_path), "--before", "x"], ["analyze", str(tmp_path), "--before", "-1"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert "is no number of attempts" in capsys.readouterr().err
    (tmp_path / "rank-9.steps.jsonl").write_text("no head at all\n")  # is told of, wherever it belongs
    folder.look()
    assert "rank-9" in "; ".join(folder.problems)
    assert attempts.choose([], 0) == attempts.Found([], 0, 0)


def incarnations(**options):
    hvd.shutdown()
    os.environ.update(options)
    hvd.init()


@as_ranks(2)
def test_several_lives_of_a_process_keep_their_files_and_one_life_replaces_its_own(tmp_path):
    mine, line = f"{tmp_path}/rank-{hvd.rank()}", "" if hvd.rank() == 0 else f".rank-{hvd.rank()}.json"
    incarnations(HVDLITE_TRACE_DIR=str(tmp_path), HVDLITE_TRACE_STEPS="1")
    for name in "abc":
        hvd.allreduce(1.0, name=name)
        for _ in range(2):
            hvd.start_timeline(f"{tmp_path}/tl.json")
            hvd.stop_timeline()
            hvd.dump_trace()
        incarnations()
    incarnations(HVDLITE_TRACE_DIR="off", HVDLITE_TRACE_STEPS="0")
    for number, name in ((2, "b"), (3, "a")):
        events = json.loads(Path(f"{mine}.flight.json.{number}").read_text())["events"]
        assert [each["name"] for each in events if each["what"] == "submit"] == [f"allreduce.{name}"]
        assert Path(f"{mine}.steps.jsonl.{number}").exists()
    heads = {end: json.loads(Path(f"{tmp_path}/tl.json{line}{end}").read_text())[0]["args"] for end in ("", ".1", ".2")}
    assert len({each["epoch"] for each in heads.values()}) == 3 and not Path(f"{tmp_path}/tl.json{line}.3").exists()


ODD = ["a" * 300000, "é" * 300, "x" + "é" * 300, "\udcff\udcfe" * 5, 'q"\\\n\t\x01\x7f', "\u2028", " ", "{%s}", "x\x85"]


@as_ranks(2)
def test_whatever_a_tensor_is_called_files_are_json(tmp_path):
    chance = random.Random(7)
    raw = [bytes(chance.randrange(1, 256) for _ in range(chance.randrange(1, 600))) for _ in range(60)]
    names = ODD + [each.decode("utf-8", "surrogateescape") for each in raw]
    incarnations(HVDLITE_TRACE_DIR=str(tmp_path), HVDLITE_TRACE_STEPS="1", HVDLITE_TRACE_EVERY="1")
    hvd.start_timeline(f"{tmp_path}/tl.json")
    for name in names:
        hvd.allreduce(np.ones(4), name=name)
        hvd.stats_step()
    hvd.stop_timeline()
    never = hvd.allreduce_async(np.ones(4), name=ODD[2]) if hvd.rank() == 0 else None  # waited for in the record
    path = Path(hvd.dump_trace())
    if never is None:
        hvd.allreduce(np.ones(4), name=ODD[2])
    else:
        hvd.synchronize(never)
    record = json.loads(path.read_bytes().decode())
    told = {each["name"] for each in record["events"] if each["what"] == "submit"}
    assert len(told) >= len(names) - 1 and any(name.endswith("\ufffd") for name in told)
    incarnations(HVDLITE_TRACE_DIR="off", HVDLITE_TRACE_STEPS="0")
    end = "" if hvd.rank() == 0 else f".rank-{hvd.rank()}.json"
    assert json.loads(Path(f"{tmp_path}/tl.json{end}").read_bytes().decode())
    steps = Path(f"{tmp_path}/rank-{hvd.rank()}.steps.jsonl").read_bytes().decode().splitlines()
    assert len([json.loads(line) for line in steps]) == len(names) + 1


@pytest.mark.parametrize("size", [2, *everything(1)])
def test_a_handler_of_the_script_is_called_too_or_it_is_told(tmp_path, size):
    flags = ["-np", size, "--trace-dir", tmp_path]
    with Launch(*flags, *PROGRAM, "handlers", HVDLITE_TRACE_SIGNAL="USR2") as job:
        assert job.wait() == 0, job.err
    assert job.out.count("both were called") == size
    assert job.err.count(f"has set its own handler for signal {int(signal.SIGUSR2)} after hvd.init()") == 1


def test_a_timeline_that_cannot_be_written_is_told_by_its_option_and_the_job_goes_on(tmp_path):
    (tmp_path / "file").touch()
    wrong = tmp_path / "file" / "tl.json"
    with Launch("-np", "2", "--timeline-filename", str(wrong), *PROGRAM, "well") as job:
        assert job.wait() == 0, job.err
    for rank, end in ((0, ""), (1, ".rank-1.json")):
        said = f"hvdlite: rank {rank} writes no timeline, the job goes on: HVDLITE_TIMELINE (--timeline-filename):"
        why = f"the timeline '{wrong}{end}' cannot be written: Not a directory [HVD725]"
        assert f"{said} {why}" in job.err


def until(found):
    """Its value, once there is one."""
    end = time.monotonic() + SECONDS
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def restarted():
    """Rank 1 of the first attempt kills itself, when its steps are in the file."""
    first = os.environ["HVDLITE_RESTART_COUNT"] == "0"
    for _ in range(2 if first else 3):
        hvd.allreduce(np.ones(10), name="grad")
        hvd.stats_step()
    if first:
        hvd.barrier()
        written = [Path(os.environ["HVDLITE_TRACE_DIR"], f"rank-{rank}.steps.jsonl") for rank in (0, 1)]
        if hvd.rank() == 1:
            until(lambda: all(len(path.read_text().splitlines()) == 3 for path in written))
            os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(1.0)


def handled(seen):
    """Both handlers are called; rank 0 then sets one of its own."""
    record = Path(os.environ["HVDLITE_TRACE_DIR"], f"rank-{hvd.rank()}.flight.json")
    signal.raise_signal(signal.SIGUSR2)
    until(lambda: seen and record.exists())
    assert seen == ["script"] and json.loads(record.read_text())["why"] == "signal"
    if hvd.rank() == 0:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    print("both were called", flush=True)
    hvd.barrier()


def main(how):
    seen = []
    if how == "handlers":
        signal.signal(signal.SIGUSR2, lambda *_: seen.append("script"))
    hvd.init()
    if how == "restart":
        restarted()
    elif how == "handlers":
        handled(seen)
    else:
        hvd.allreduce(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
