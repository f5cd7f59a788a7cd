"""tests/tools/counts.py, which judges instruction counts: what it reads, when it complains. Nothing is counted here."""

import importlib
import json
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def counts(monkeypatch, tmp_path):
    module = importlib.import_module("counts")
    monkeypatch.setattr(module, "BASELINE", tmp_path / "counts.json")
    return module


def write_baseline(counts, of, **different):
    made = {**counts.made_with(), **different}
    counts.BASELINE.write_text(json.dumps({"made with": made, "counts": of}))


def test_sections_are_read_from_callgrinds_files(counts, tmp_path):
    (tmp_path / "out.1").write_text("desc: Trigger: Client Request: path\nsummary: 500\ntotals: 500\n")
    (tmp_path / "out.2").write_text("desc: Trigger: Program termination\ntotals: 7\n")
    assert counts.read_counts(str(tmp_path), "[0]<stdout>:COUNT path 4\n") == {"path": 125.0}


@pytest.mark.parametrize("now, fine", [(1000, True), (1049, True), (1051, False), (500, True)])
def test_a_path_may_not_grow_by_more_than_the_tolerance(counts, now, fine):
    write_baseline(counts, {"path": 1000})
    assert counts.judge({"path": float(now)}) is fine


def test_under_another_compiler_there_is_more_tolerance(counts):
    write_baseline(counts, {"path": 1000}, compiler="1.2.3")
    assert counts.judge({"path": 1290.0})
    assert not counts.judge({"path": 1310.0})


def test_a_path_that_is_not_in_the_baseline_is_told(counts, capsys):
    write_baseline(counts, {})
    assert not counts.judge({"path": 1.0})
    assert "path is not in counts.json: write it with COUNTED=--update" in capsys.readouterr().out


def test_a_hook_under_another_python_is_not_judged(counts, capsys):
    write_baseline(counts, {counts.HOOK: 1000}, python="2.7")
    assert counts.judge({counts.HOOK: 9000.0})
    assert "not judged: the baseline is of Python 2.7" in capsys.readouterr().out


def test_the_baseline_names_the_paths_that_are_promised():
    kept = json.loads((TESTS / "counts.json").read_text())["counts"]
    assert {"submit-to-wait-of-4KB", "vote-of-161", "pack-reduce-unpack-of-1MB", "gradient-hook-in-python"} <= set(kept)
