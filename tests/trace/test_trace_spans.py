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
    rows, about, _ = merge.read(path)
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
    rows, _, _ = merge.read(path)
    assert [row["ph"] for row in rows] == ["M", "M", "M", "M", "B", "X", "E"]


def test_a_strange_row_of_a_timeline_costs_that_row_only(tmp_path, capsys):
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
    said = f"hvdlite-trace: {path}: {len(strange)} rows that a viewer could not read are left out [HVD723]\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "number",
    ["NaN", "-Infinity", "1e999", "1" + "0" * 400, "-1" + "0" * 5000],
    ids=["nan", "infinity", "1e999", "400 digits", "5000 digits"],
)
def test_numbers_that_json_has_not_cost_their_row_only(tmp_path, capsys, number, whole):
    """Python reads and writes them, JSON.parse and Perfetto refuse the whole file, or call them infinite."""
    head = {"ph": "M", "name": "hvdlite_timeline", "pid": 0, "tid": 0, "args": {"rank": 0}}
    great = {"most": (1 << 64) - 1, "v": [1e300]}
    span = {"ph": "X", "pid": 0, "tid": 0, "ts": 1, "dur": 2, "name": "x", "args": great}
    deep = json.loads('{"v":' * 400 + "0" + "}" * 400)
    strange = [
        {**span, "dur": "@"}, {**span, "args": {"v": "@"}}, {**span, "args": {"v": [1, {"w": "@"}]}},
        {**span, "id": "@"}, {**head, "args": {"rank": "@"}}, {**span, "args": deep},
    ]  # fmt: skip
    text = "[\n" + ",\n".join(map(json.dumps, [head, *strange, span])) + "\n]\n"
    path, out = tmp_path / "line.json", tmp_path / "all.json"
    path.write_text(text.replace('"@"', number) if whole else text.replace('"@"', number)[:-3] + ',\n{"ph": "X", "na')
    assert cli.main(["merge", str(path), "-o", str(out)]) == 0
    found = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert found["traceEvents"] == [head, span] and found["otherData"]["ranks"] == [{"rank": 0}]
    assert f"{path}: {len(strange)} rows that a viewer could not read are left out" in capsys.readouterr().err


def test_a_line_of_a_cut_timeline_may_hold_what_ends_lines_elsewhere(tmp_path):
    head = {"ph": "M", "name": "hvdlite_timeline", "pid": 0, "tid": 0, "args": {"rank": 0}}
    lane = {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "a\u2028b\x85c"}}
    path = tmp_path / "line.json"
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in (head, lane)) + ',\n{"ph": "B"')
    rows, _, bad = merge.read(path)
    assert rows == [head, lane] and bad == 0


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
