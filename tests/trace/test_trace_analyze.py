"""hvdlite-trace names who is at fault: real ranks that disagree, are late or are killed; and files that are cut."""

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import as_program
import numpy as np
import pytest
from launching import SECONDS, launch
from ranks import as_ranks

import hvdlite as hvd
from hvdlite.trace import analyze, cli, clock, events, merge

PROGRAM = [sys.executable, as_program.__file__, __file__]


def nested(rows):
    """Fails unless spans of each lane nest, begin before they end, and have what a viewer needs."""
    depth = {}
    for row in sorted((row for row in rows if row["ph"] != "M"), key=lambda row: row["ts"]):
        assert isinstance(row["ts"], (int, float)) and isinstance(row["pid"], int) and isinstance(row["tid"], int)
        lane = depth.setdefault((row["pid"], row["tid"]), [])
        if row["ph"] == "B":
            lane.append(row["name"])
        elif row["ph"] == "E":
            assert lane, f"nothing to end at {row}"
            lane.pop()
    return [lane for lane in depth.values() if lane]


def together(verdict_of):
    """Each rank dumps into one folder, when all have; the verdict, on every rank."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, name="folder")
    handles = verdict_of()
    hvd.dump_trace(folder)
    until = time.monotonic() + SECONDS
    while len(os.listdir(folder)) < hvd.size() or any(name.startswith(".") for name in os.listdir(folder)):
        assert time.monotonic() < until
        time.sleep(0.01)
    records, complaints = analyze.load(folder)
    assert not complaints and sorted(records) == list(range(hvd.size()))
    return analyze.verdict(records), handles


def rest(names, handles, value):
    """What this rank has left out, so that all can go on."""
    handles += [hvd.allreduce_async(value, name=name) for name in names]
    for handle in handles:
        hvd.synchronize(handle)


@as_ranks(3)
def test_the_order_differs():
    mine, later = (["a\n"], ["b"]) if hvd.rank() == 0 else (["b"], ["a\n"])
    value = np.ones(2)
    said, handles = together(lambda: [hvd.allreduce_async(value, name=name) for name in mine])
    rest(later, handles, value)
    assert said.startswith("The order of collectives differs: "), said
    assert "rank 0 waits for allreduce 'allreduce.a\\n', which ranks 1-2 have not submitted" in said
    assert "ranks 1-2 wait for allreduce 'allreduce.b', which rank 0 has not submitted" in said


@as_ranks(3)
def test_a_rank_never_submits_what_the_others_wait_for():
    hvd.allreduce(np.ones(1), name="before")
    value = np.ones(2)
    names = [] if hvd.rank() == 1 else ["x"]
    said, handles = together(lambda: [hvd.allreduce_async(value, name=name) for name in names])
    rest(["x"] if hvd.rank() == 1 else [], handles, value)
    assert said.startswith("Ranks 0, 2 wait for allreduce 'allreduce.x', which rank 1 has never submitted."), said
    assert "The last that rank 1 (" in said and "it waits for nothing" in said


@as_ranks(2)
def test_shapes_differ():
    with pytest.raises(hvd.HvdMismatchError):
        hvd.allreduce(np.ones(2 + hvd.rank()), name="mixed")
    said, _ = together(list)
    assert said.startswith(
        "The ranks disagree about 'allreduce.mixed': rank 0 submitted an allreduce of 16 bytes, rank 1"
    )


@as_ranks(2)
def test_a_rank_is_late():
    def steps():
        for step in range(12):
            time.sleep(0.02 * hvd.rank())
            hvd.allreduce(np.ones(4), name=f"grad.{step % 3}")

    said, _ = together(steps)
    found = re.search(r"rank 1 \(.+\) is late: it was the last to submit in (\d+) of (\d+) collectives", said)
    assert found and int(found[1]) >= 10 and "in the median" in said, said


def test_a_killed_rank_is_named_and_timelines_stay_whole(tmp_path, capsys):
    line, folder = tmp_path / "line.json", tmp_path / "records"
    flags = ["--timeline-filename", line, "--timeline-mark-cycles", "--trace-dir", folder]
    code, _, err = launch("-np", 3, *flags, *PROGRAM, tmp_path)
    assert code == 137 and f"hvdlite-trace analyze {folder}" in err
    assert cli.main(["analyze", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Rank 1 is at fault: rank 1 (pid ") and "Rank 1 left no record: it was killed, is" in said
    assert "ranks 0, 2 waited for allreduce 'allreduce.last', which rank 1 had not submitted" in said

    for rank, path in enumerate([line, *(Path(f"{line}.rank-{rank}.json") for rank in (1, 2))]):
        rows = json.loads(path.read_text())
        assert rows[0]["args"]["rank"] == rank and rows[0]["args"]["clock_error_ns"] == 0
        names = {row["name"] for row in rows if row["ph"] == "B"}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "SHM_ALLREDUCE", "NEGOTIATE_BARRIER", "BARRIER"} <= names
        assert {"NEGOTIATE_BROADCAST", "BROADCAST", "SHM_BCAST", "NEGOTIATE_ALLGATHER"} <= names
        assert "CYCLE_START" in {row["name"] for row in rows if row["ph"] == "i"}
        assert len(nested(rows)) == 0 or rank == 1  # what the dead rank had begun is open
        assert "hvdlite_lost_events" not in {row.get("name") for row in rows}

    whole = tmp_path / "all.json"
    assert cli.main(["merge", str(line), "-o", str(whole)]) == 0
    merged = json.loads(whole.read_text())
    nested(merged["traceEvents"])
    assert {row["pid"] for row in merged["traceEvents"]} == {0, 1, 2} and len(merged["otherData"]["ranks"]) == 3
    ticks = [row["name"] for row in merged["traceEvents"] if row["ph"] == "X" and row["pid"] == 0]
    assert {"0", "1", "2"} == set(ticks) and ticks.count("1") >= 10
    assert cli.main(["merge", str(folder), "-o", str(whole)]) == 0
    assert not nested(json.loads(whole.read_text())["traceEvents"])

    text = line.read_text()
    for at in (len(text) // 2, len(text) - 3, 700):
        (tmp_path / "cut.json").write_text(text[:at])
        rows, told, bad = merge.read(tmp_path / "cut.json")
        assert told["rank"] == 0 and rows and bad == 0


def record(**changed):
    head = {"format": events.FORMAT, "job": "1", "epoch": 0, "rank": 0, "size": 2, "host": "h", "why": "asked"}
    return {**head, "failure": None, "clock": {"offset_ns": 0, "error_ns": 0}, "waiting": [], "events": [], **changed}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100000,
        json.dumps(record(format="other")).encode(),
        json.dumps(record(rank=2)).encode(),
        json.dumps(record(size=10**9)).encode(),
        json.dumps(record(rank=True)).encode(),
        json.dumps(record(events=7)).encode(),
        json.dumps(record(events=[7])).encode(),
        json.dumps(record(events=[{"t": "soon", "what": "submit", "tag": 1}])).encode(),
        json.dumps(record(events=[{"t": 1, "what": ["submit"], "tag": 1}])).encode(),
        json.dumps(record(waiting=[{"name": 5, "kind": "allreduce", "since_ns": 1}])).encode(),
        json.dumps(record(failure={"rank": 0})).encode(),
        json.dumps(record(clock=[])).encode() + b"x",
        json.dumps(record()).encode()[:-20],
    ],
)
def test_a_record_that_is_none_is_told_and_the_others_are_used(tmp_path, capsys, text):
    (tmp_path / "rank-0.flight.json").write_bytes(text)
    assert cli.main(["analyze", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "rank-0.flight.json: " in said and "no flight record could be read" in said
    with pytest.raises(events.BadRecord):
        events.read_record(tmp_path / "rank-0.flight.json")
    waiting = [{"name": "x", "kind": "allreduce", "set": 0, "since_ns": 5}]
    failure = {"rank": 0, "code": -5, "text": "rank 0 is lost"}
    (tmp_path / "rank-1.flight.json").write_text(json.dumps(record(rank=1, waiting=waiting, failure=failure)))
    assert cli.main(["analyze", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "rank-0.flight.json" in said.err and said.out.startswith("Rank 0 is at fault: rank 0 is lost. Rank 0 left")
    assert cli.main(["merge", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0


def test_records_of_an_older_job_are_left_out(tmp_path):
    for rank, job in ((0, "1"), (1, "2")):
        path = tmp_path / f"rank-{rank}.flight.json"
        path.write_text(json.dumps(record(rank=rank, job=job)))
        os.utime(path, (rank, rank))
    records, complaints = analyze.load(str(tmp_path))
    assert list(records) == [1] and "1 older attempt is here" in complaints[0]


def test_who_lost_patience_is_not_to_blame():
    failure = (1, analyze.TIMEOUT, "rank 1 has waited 5 s for 'x'")
    late = events.Waiting("x", "allreduce", 0, 10)
    shared = ("p", "1", 0)
    two = {
        0: events.Record(*shared, 0, 2, "h", "abort", 50, failure, 0, 0, [], [], {}),
        1: events.Record(*shared, 1, 2, "h", "error", 50, failure, 0, 0, [late], [], {}),
    }
    said = analyze.verdict(two)
    assert said.startswith(
        "Rank 1 waits for allreduce 'x', which rank 0 has never submitted. Rank 0 (h) had submitted nothing."
    )
    assert "A rank lost patience" in said


def test_a_rank_that_is_stopped_is_not_told_to_have_lost_patience_or_been_killed():
    """What is left out of a record is said of the rank by its number: it is not the one whose patience has ended."""
    failure = (1, analyze.TIMEOUT, "rank 0 has waited 5 s for 'x': rank 1 (pid 799) is stopped (by a signal) [HVD550]")
    late = events.Waiting("x", "allreduce", 0, 10)
    said = analyze.verdict({0: events.Record("p", "1", 0, 0, 2, "h", "error", 50, failure, 0, 0, [late], [], {})})
    assert said.startswith("A rank lost patience: rank 0 has waited 5 s"), said
    assert said.endswith("[HVD550]. Rank 1 left no record: it was killed, is stopped or could not write one."), said


def test_sets_of_one_number_are_told_apart():
    """Each pair of ranks has a set 1 of its own; rank 1 lacks what rank 0 waits for, and rank 2 has nothing of it."""
    late, sets = [events.Waiting("x", "allreduce", 1, 10)], [[0, 1], [0, 1], [2, 3], [2, 3]]
    records = {
        rank: events.Record(
            "p", "1", 0, rank, 4, "h", "asked", 50, None, 0, 0, late if rank != 1 else [], [], {1: pair}
        )
        for rank, pair in enumerate(sets)
    }
    said = analyze.verdict(records)
    assert said.startswith("Rank 0 waits for allreduce 'x' in process set 1, which rank 1 has never submitted."), said


@pytest.mark.parametrize("truth", [0, 7_000_000, -3_000_000_000])
def test_the_offset_of_a_clock_lies_within_its_bounds(truth):
    """Two hosts whose messages take 1 ms one way and 3 ms the other, now and then much longer."""
    import threading

    meeting, parts, real = threading.Barrier(2), [b"", b""], [0]
    found = {}

    def rank_of(rank):
        sent = iter(range(100))

        def allgather(mine):
            number = next(sent)
            parts[rank] = mine
            meeting.wait(SECONDS)
            result = list(parts)
            meeting.wait(SECONDS)
            if rank == 0:
                real[0] += 4_000_000 + (50_000_000 if number % 3 == 0 else 0)
            meeting.wait(SECONDS)
            return result

        now = (lambda: real[0]) if rank == 0 else (lambda: real[0] - truth)
        found[rank] = clock.offset(rank, [0, 1], allgather, now)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    offset, error = found[1]
    assert found[0] == (0, 0) and abs(offset - truth) <= error <= 4_000_001


def test_on_one_host_nobody_is_asked():
    assert clock.offset(1, [0, 0], None) == clock.offset(0, None, None) == (0, 0)


@as_ranks(2)
def test_timelines_begin_and_end_when_they_are_told():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "line.json"
        if hvd.rank() == 0:  # which writes to the very name
            with pytest.raises(OSError, match=r"'/dev/full' cannot be written: No space left on device \[HVD725\]$"):
                hvd.start_timeline("/dev/full")
        with pytest.raises(ValueError):
            hvd.start_timeline("")
        hvd.stop_timeline()
        hvd.start_timeline(path, mark_cycles=True)
        with pytest.raises(ValueError, match="is being recorded"):
            hvd.start_timeline(path)
        hvd.allreduce(np.ones(3), name="within")
        hvd.allreduce(np.ones(3))
        hvd.stop_timeline()
        hvd.allreduce(np.ones(3), name="after")
        mine = path if hvd.rank() == 0 else Path(f"{path}.rank-{hvd.rank()}.json")
        rows = json.loads(mine.read_text())
        assert not nested(rows)
        titles = {row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
        assert {"allreduce.within", "allreduce without a name"} <= titles and "allreduce.after" not in titles


def main(folder):
    hvd.init()
    for _ in range(5):
        handles = [hvd.allreduce_async(np.ones(4), name=f"grad.{i}") for i in range(3)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allreduce(np.ones(2))
        hvd.broadcast(np.ones(2), 0, name="weights")
        hvd.allgather(np.ones(2), name="all")
        hvd.barrier()
    handle = hvd.allreduce_async(np.ones(1), name="last") if hvd.rank() != 1 else None
    Path(folder, f"ready {hvd.rank()}").touch()
    if hvd.rank() == 1:
        while len(list(Path(folder).glob("ready *"))) < 3:
            time.sleep(0.01)
        line = Path(f"{folder}/line.json.rank-1.json")
        while line.read_text().count('"BARRIER"') < 5:  # until the thread has come
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    hvd.synchronize(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
