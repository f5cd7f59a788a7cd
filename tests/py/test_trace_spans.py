"""Rows that events become are JSON which a viewer can read, whatever a record says."""

import json
import random

import pytest
from test_trace_analyze import nested

from hvdlite.trace import cli, events, merge, spans

NAMES = [None, "layer.weight", 'q"\\\n', "nul\0in", "half \ud800 letter", "é" * 300, "allreduce.noname.3", ""]
WHATS = ["submit", "wait", "waited", "round", "start", "finish", "end", "abort", "leave", "unheard of"]


def rows_of(picture):
    return json.loads(b"[" + bytes(picture.take())[1:] + b"]")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_record_says_rows_can_be_read_and_spans_nest(seed, tmp_path):
    dice = random.Random(seed)
    now, told = 0, []
    for _ in range(3000):
        now += dice.randrange(3)
        tag = dice.choice([dice.randrange(12), 0x80000000 + dice.randrange(12), (1 << 32) - 1])
        row = {"t": now, "what": dice.choice(WHATS), "tag": tag, "set": dice.choice([0, 0, 3, 255])}
        row["value"] = dice.choice([0, dice.randrange(9), (1 << 63) - 1])
        row |= {"kind": dice.choice(["allreduce", "broadcast", ""]), "plane": "shm", "name": dice.choice(NAMES)}
        told.append(row)
    head = {"format": events.FORMAT, "job": "1", "epoch": 0, "rank": 1, "size": 2, "host": "h", "why": "asked"}
    clock = {"offset_ns": dice.choice([0, -(1 << 63), (1 << 62)]), "error_ns": 0}
    path = tmp_path / "rank-1.flight.json"
    path.write_text(json.dumps({**head, "failure": None, "clock": clock, "waiting": [], "events": told}))
    rows, about = merge.read(path)
    assert about["rank"] == 1 and len(rows) > 3000 and not nested(rows)


def test_numbers_that_cannot_be_are_refused(tmp_path):
    head = {"format": events.FORMAT, "job": "1", "epoch": 0, "rank": 0, "size": 1, "host": "h", "why": "asked"}
    event = {"t": 1, "what": "submit", "tag": 1, "set": 0, "value": 4, "kind": "allreduce", "name": "x"}
    path = tmp_path / "rank-0.flight.json"
    for wrong in ({"tag": 1 << 32}, {"tag": -1}, {"value": 1 << 63}, {"t": 1 << 63}, {"set": 256}):
        path.write_text(json.dumps({**head, "failure": None, "events": [{**event, **wrong}]}))
        with pytest.raises(events.BadRecord, match="where a number belongs"):
            merge.read(path)
    path.write_text(json.dumps({**head, "failure": None, "events": [event]}))
    rows, _ = merge.read(path)
    assert [row["ph"] for row in rows] == ["M", "M", "M", "M", "B", "X", "E"]


def test_a_strange_row_of_a_timeline_costs_that_row_only(tmp_path):
    head = {"ph": "M", "name": "hvdlite_timeline", "pid": 0, "tid": 0, "args": {"rank": 0}}
    lane = {"ph": "M", "pid": 0, "name": "thread_name", "args": {"name": "x"}}
    begun = {"ph": "B", "pid": 0, "tid": 0, "ts": 1, "name": "NEGOTIATE_ALLREDUCE"}
    strange = [{"ph": ["B"], "pid": 0}, {**begun, "tid": [1]}, {**lane, "args": 5}, {**lane, "args": {"name": {}}}]
    strange += [
        {**lane, "tid": None},
        {**begun, "ts": float("nan")},
        {**begun, "ts": float("inf")},
        {**begun, "pid": "0"},
    ]
    path, whole = tmp_path / "line.json", tmp_path / "all.json"
    path.write_text(json.dumps([head, *strange, lane, begun, {"ph": "E", "pid": 0, "ts": 2}]))
    assert cli.main(["merge", str(path), "-o", str(whole)]) == 0
    found = json.loads(whole.read_text(), parse_constant=pytest.fail)["traceEvents"]
    assert [row["ph"] for row in found] == ["M", "M", "B", "E"]


def test_a_name_stands_as_it_is():
    picture = spans.Spans(0, "rank 0", 500)
    rows_of(picture)
    for number, name in enumerate(NAMES[1:6]):
        picture.feed(events.Event(1_000_000 + number, "submit", number, 0, 8, "allreduce", name))
    titles = [row["args"]["name"] for row in rows_of(picture) if row["name"] == "thread_name"]
    assert titles[:2] == NAMES[1:3] and titles[2:4] == ["nul\N{REPLACEMENT CHARACTER}in", "half ? letter"]
    assert titles[4].startswith("é" * 100)
    picture.end()
    assert [row["ts"] for row in rows_of(picture)] == [1000.504] * 5
    assert rows_of(picture) == []
