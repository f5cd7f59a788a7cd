"""HVDLITE_METRICS_PORT: what Prometheus gets, from whom, and that nothing about it can hold up the training."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from launching import Launch, launch
from ranks import as_ranks

import hvdlite.numpy as hvd
from hvdlite import metrics
from hvdlite.metrics import aggregator, payload, prometheus
from hvdlite.transport import http_server

GRAFANA = Path(__file__).resolve().parents[2] / "examples" / "metrics" / "grafana.json"
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (-?[0-9.e+-]+|\+Inf|NaN)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parsed(text):
    """{name: [(labels, value)]} of a text of the format 0.0.4, which it is checked to be."""
    assert text.endswith("\n") and not text.startswith("\n")
    found, types, helped = {}, {}, set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped and line.split(" ", 3)[3]
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped and name not in types and kind in ("counter", "gauge", "histogram")
            types[name] = kind
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            family = re.sub("_(bucket|sum|count)$", "", name) if name not in types else name
            assert family in types and family == list(types)[-1], f"{line}: not behind its TYPE"
            found.setdefault(name, []).append((dict(LABEL.findall(labels or "")), float(value)))
    for name, samples in found.items():
        told = [tuple(sorted(labels.items())) for labels, _ in samples]
        assert len(set(told)) == len(told), f"{name} says one thing twice"
    return found


def _anew(**environ):
    hvd.shutdown()
    os.environ.update(environ)
    hvd.init()


def _steps_until(enough, seconds=30.0):
    """Trains until rank 0 says that it is enough; all ranks stop at the same step."""
    until = time.monotonic() + seconds
    while True:
        hvd.allreduce(np.ones(1000, np.float32), name="a")
        hvd.stats_step()
        over = hvd.rank() == 0 and (enough() or time.monotonic() > until)
        if hvd.broadcast(np.array([over]), 0, name="over")[0]:
            return
        time.sleep(0.005)


def _get(path="/metrics", method="GET"):
    number = metrics._state.served.port.number
    asked = urllib.request.Request(f"http://127.0.0.1:{number}{path}", method=method)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return answer, answer.read().decode()


def _heard_of(ranks):
    """Whether all have reported steps that can be compared."""
    return len(parsed(_get()[1]).get("hvdlite_last_ratio", [])) == ranks


@as_ranks(1, 3)
def test_rank_0_serves_the_numbers_of_all_ranks():
    _anew(HVDLITE_METRICS_PORT="0", HVDLITE_METRICS_INTERVAL="0.1")
    _steps_until(lambda: hvd.size() == 1 or _heard_of(3))
    assert (metrics._state.served.port is not None) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        time.sleep(0.2 if hvd.size() == 1 else 0)  # alone: its report of the steps is newer than the first one
        answer, text = _get()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4") and answer.status == 200
        found = parsed(text)
        names = {metric.name for metric in prometheus.METRICS if metric.type != "histogram"}
        assert names - set(found) <= ({"hvdlite_lateness_seconds", "hvdlite_last_ratio"} if hvd.size() == 1 else set())
        assert found["hvdlite_ranks"] == [({}, float(hvd.size()))]
        assert {labels["rank"] for labels, _ in found["hvdlite_steps_total"]} == {str(k) for k in range(hvd.size())}
        assert all(labels["host"] for labels, _ in found["hvdlite_steps_total"])
        for labels, count in found["hvdlite_bucket_bytes_count"]:
            last = [value for each, value in found["hvdlite_bucket_bytes_bucket"] if each == {**labels, "le": "+Inf"}]
            assert last == [count]
        (busy,) = [v for each, v in found["hvdlite_plane_bytes_total"] if each["rank"] == str(hvd.size() - 1)]
        assert busy >= 4000  # the tensor of one step: its report may be from before the next collective
        assert _get("/healthz")[1] == f"{hvd.size()} of {hvd.size()} ranks have reported\n"
        assert _get("/metrics?x=1", "HEAD")[1] == ""
        for path, method, code in (("/", "GET", 404), ("/metrics", "POST", 405), ("/../etc/passwd", "GET", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                _get(path, method)
            assert refused.value.code == code
    hvd.barrier()


@as_ranks(3)
def test_who_has_joined_or_left_delays_nobody_and_its_last_report_stays():
    _anew(HVDLITE_METRICS_PORT="0", HVDLITE_METRICS_INTERVAL="0.1")
    _steps_until(lambda: _heard_of(3))
    if hvd.rank() == 2:
        hvd.join()
    else:
        for _ in range(100):
            hvd.allreduce(np.ones(10), name="b")
            time.sleep(0.01)  # several gathers are refused meanwhile
        hvd.join()
    _steps_until(lambda: True)
    hvd.barrier()
    if hvd.rank() == 2:
        begun = time.monotonic()
        hvd.shutdown()
        assert time.monotonic() - begun < 10
        return
    until = time.monotonic() + 20
    with pytest.raises(hvd.HvdPeerLostError):
        while time.monotonic() < until:
            hvd.allreduce(np.ones(10), name="c")
    if hvd.rank() == 0:
        ages = {labels["rank"]: age for labels, age in parsed(_get()[1])["hvdlite_report_age_seconds"]}
        assert set(ages) == {"0", "1", "2"}
    hvd.shutdown()


@as_ranks(2)
def test_a_port_that_is_taken_is_a_warning():
    import io

    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.redirect_stderr(io.StringIO()) as said:
        number = taken.getsockname()[1] if hvd.rank() == 0 else 0
        number = int(hvd.broadcast(np.array([number]), 0, name="port")[0])
        _anew(HVDLITE_METRICS_PORT=str(number))
        assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == 2).all()
        if hvd.rank() == 0:
            wanted = f"metrics port {number} on 127.0.0.1 (Address already in use): the job goes on"
            assert wanted in said.getvalue(), said.getvalue()
    _anew(HVDLITE_METRICS_PORT="0")


@pytest.fixture
def served():
    pages = {
        "/metrics": http_server.Page(lambda: (True, [b"x 1\n" * 100_000])),
        "/no": http_server.Page(lambda: 1 // 0),
    }
    made = http_server.Port("127.0.0.1", 0, pages)
    yield made
    made.close()


def _talk(made, said):
    with socket.create_connection(("127.0.0.1", made.number), timeout=20) as client:
        client.sendall(said)
        held = b""
        while part := client.recv(65536):
            held += part
        return held


def test_requests_are_answered_or_refused(served):
    for said, wanted in (
        (b"GET /metrics HTTP/1.1\r\nHost: localhost:1\r\n\r\n", b"200"), (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\n\n", b"200"), (b"\x00\xff\r\n\r\n", b"400"), (b"GET\r\n\r\n", b"400"),
        (b"GET / SMTP\r\n\r\n", b"400"), (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"404"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", b"405"), (b"GET /no HTTP/1.1\r\n\r\n", b"500"),
        (b"GET /" + b"a" * 10_000, b"431"),
    ):  # fmt: skip
        assert wanted in _talk(served, said).split(b"\r\n")[0], said
    for host, code in (
        (b"127.0.0.1", b"200"), (b"[::1]:9400", b"200"), (socket.gethostname().upper().encode(), b"200"),
        (b"evil.example", b"403"), (b"10.9.8.7", b"403"), (b"localhost.evil.example:80", b"403"), (b"\xff", b"403"),
        (b"localhost\r\nHost: evil.example", b"403"), (b"", b"403"),
    ):  # fmt: skip
        assert code in _talk(served, b"GET /metrics HTTP/1.1\r\nHost: %b\r\n\r\n" % host).split(b"\r\n")[0], host


@as_ranks(2)
def test_what_the_job_says_of_itself_is_in_no_number_of_its_own(tmp_path):
    _anew(HVDLITE_METRICS_PORT="0", HVDLITE_METRICS_INTERVAL="0.1")
    for number in range(8):
        hvd.allreduce(np.ones(100, np.float32), name=f"mine.{number}")
    reports = 0
    until = time.monotonic() + 30
    while hvd.rank() == 0 and reports < 5 and time.monotonic() < until:
        before = metrics._state.served._received._reports.get(1, (None, 0.0))[1]
        time.sleep(0.02)
        reports += metrics._state.served._received._reports.get(1, (None, 0.0))[1] > before
    hvd.barrier()
    totals = hvd.stats()["totals"]
    assert totals["tensors"] == 9 and totals["messages"] == {"shm": 8} and totals["bytes"] == {"shm": 3200}, totals
    assert sum(hvd.stats()["buckets"]["sizes"].values()) == 8
    found = json.loads(Path(hvd.dump_trace(tmp_path)).read_text())
    assert "hvdlite.metrics" not in json.dumps(found) and not found["waiting"]
    submitted = [each["name"] for each in found["events"] if each["what"] == "submit"]
    assert len(submitted) == 9 and {each["plane"] for each in found["events"] if each["what"] == "start"} == {"shm"}
    if hvd.rank() == 0:
        assert reports == 5
        counts = parsed(_get()[1])["hvdlite_bucket_bytes_count"]
        assert [value for _, value in counts] == [8.0, 8.0]
    hvd.barrier()
    _anew(HVDLITE_METRICS_PORT="0")


def test_labels_are_escaped_and_damaged_reports_are_no_reports():
    said = {
        "rank": 0, "host": 'a"b\\c\nd', "steps": 3, "step_ns": 5, "exposed_ns": 1, "negotiation_ns": 1, "data_ns": 0,
        "optimizer_ns": 0, "submits": 1, "rounds": 1, "bytes": {"shm": 9}, "messages": {"shm": 1},
        "busy_ns": {"shm": 1}, "links": {"out": 0, "in": 0}, "sizes": {"1024": 1, "larger": 2}, "memory": {"cpu": 1},
        "core_memory": {"lanes": 0}, "arrived": {1: 5},
    }  # fmt: skip
    found = parsed(prometheus.exposition(1, [said], [0.5], {}))
    assert found["hvdlite_steps_total"][0][0]["host"] == 'a\\"b\\\\c\\nd'
    assert found["hvdlite_bucket_bytes_bucket"][-1][1] == 3.0
    packed = payload.packed(said)
    assert len(packed) % 1024 == 0 and payload.unpacked(packed) == said
    for damaged in (b"", b"\xff", b"[]", b"{}", b'{"arrived": 3}', b'{"arrived": {"x": 1}}', packed[:100]):
        assert payload.unpacked(damaged) is None
    heard = aggregator.Reports(1)
    heard.take({0: {**said, "arrived": dict.fromkeys(range(5000), 1)}})
    assert len(heard._arrived[0]) == aggregator.STEPS_JUDGED


def test_the_panel_for_grafana_asks_for_what_there_is():
    panel = json.loads(GRAFANA.read_text())
    asked = re.findall(r"hvdlite_[a-z_]+", json.dumps([each.get("targets", []) for each in panel["panels"]]))
    there = set()
    for metric in prometheus.METRICS:
        ends = ("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",)
        there |= {metric.name + end for end in ends}
    assert len(set(asked)) > 8 and set(asked) <= there, set(asked) - there
    assert len({each["id"] for each in panel["panels"]}) == len(panel["panels"])


LATE = """
import sys, time
import numpy as np
import hvdlite as hvd

hvd.init()
hvd.allreduce(np.ones(1), name="first")
if hvd.rank() == 0:
    sys.stdin.readline()
hvd.allreduce(np.ones(1), name="last")
"""


def test_a_report_tells_what_the_user_has_submitted_last():
    words = ("-np", 2, "--stdin", 0, "--metrics-port", 0, "--metrics-interval", 0.2, "--stall-check-time", 1)
    with Launch(*words, sys.executable, "-c", LATE, stdin=subprocess.PIPE) as job:
        job.until("'allreduce.first' last")
        job.process.stdin.write(b"go\n")
        job.process.stdin.flush()
        assert job.wait() == 0 and "hvdlite.metrics" not in job.err, job.err


STUCK = """
import ctypes, sys, time
import numpy as np
import hvdlite as hvd

hvd.init()
hvd.allreduce(np.ones(1), name="first")
if hvd.rank() == 1:
    ctypes.PyDLL(None).usleep(9_000_000)  # as a long call in C that holds the lock of Python
else:
    time.sleep(9)
print("sum", hvd.allreduce(np.ones(1), op=hvd.Sum, name="last")[0])
"""


def test_numbers_that_nobody_waits_for_end_no_job_and_are_no_stall():
    words = ("--metrics-port", 0, "--metrics-interval", 0.2, "--stall-check-time", 1, "--collective-timeout", 3)
    code, out, err = launch("-np", 2, *words, sys.executable, "-c", STUCK)
    assert code == 0 and out.count("sum 2.0") == 2 and "stall" not in err, out + err
