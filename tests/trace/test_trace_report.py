"""Steps in pictures and words: what the page says, that a browser draws it, that hostile files change nothing."""

import json
import re
import shutil
import subprocess

import parts
import pytest
import stepping

from hvdlite.trace import cli
from hvdlite.trace.report import write
from hvdlite.trace.report.advice import advice
from hvdlite.trace.report.page import content
from hvdlite.trace.report.read import Folder, ReadError
from hvdlite.trace.report.table import JobTable

pytest.importorskip("plotly", reason="the report is drawn by plotly: pip install hvdlite[report]")
ALL = {"steps", "exposed", "late", "overlap", "buckets", "slowest"}
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--virtual-time-budget=10000", "--dump-dom", "--enable-logging=stderr",
]  # fmt: skip


def browser():
    """Chromium; installed where that may be done."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    found = found or parts.debian("chromium", "chromium")
    return found or pytest.skip("no browser here (Debian: apt-get install chromium)")


def table(folder):
    found = Folder(folder)
    found.look()
    return JobTable(found.ranks), found.problems


@pytest.mark.parametrize("offsets", [None, [0, -(10**15), 0, -(10**15)]], ids=["one clock", "two clocks"])
def test_a_late_rank_is_named_with_its_share_its_milliseconds_and_its_reason(tmp_path, offsets):
    stepping.write(tmp_path, 4, 100, late=3, offsets=offsets)
    said = advice(table(tmp_path)[0])
    assert said[0].startswith("Rank 3 is late in 84 % of steps, by 41 ms; its data wait is 43 ms (the others': 2.0 ms)")
    assert not any("Rank" in line for line in said[1:])


def test_where_clocks_cannot_be_compared_nobody_is_called_late(tmp_path):
    stepping.write(tmp_path, 4, 100, late=3, offsets=[0, None, 0, None])
    untold = table(tmp_path)[0]
    assert "cannot be told" in advice(untold)[0] and "late" not in content(untold, [])["figures"]


def test_a_job_without_faults_is_told_so_and_one_that_waits_for_data_what_helps(tmp_path):
    stepping.write(tmp_path, 2, 100, computes=46)
    assert advice(table(tmp_path)[0])[0].startswith("Nothing stands out: a step takes")
    stepping.write(tmp_path, 2, 100, late=0)
    text = (tmp_path / "rank-0.steps.jsonl").read_text()  # both are late: nobody is
    (tmp_path / "rank-1.steps.jsonl").write_text(text.replace('"rank": 0', '"rank": 1', 1))
    assert advice(table(tmp_path)[0])[0].startswith("All ranks wait for data: 43 ms of a step, 46 % of it")


def test_figures_are_what_plotly_knows_and_bounded_for_many_ranks_and_steps(tmp_path):
    graphs = pytest.importorskip("plotly.graph_objects")
    stepping.write(tmp_path, 40, 1500, late=7, every=500)
    said = content(*table(tmp_path))
    assert set(said["figures"]) == ALL
    for figure in said["figures"].values():
        graphs.Figure(figure)  # raises for a property that there is none of
    assert len(json.dumps(said)) < 1_500_000
    assert len(said["figures"]["steps"]["data"]) == 3 and len(said["figures"]["late"]["data"][0]["y"]) == 40


def test_lines_that_are_none_are_counted_and_files_that_are_others_left_out(tmp_path):
    stepping.write(tmp_path, 2, 30)
    good = (tmp_path / "rank-0.steps.jsonl").read_text().splitlines()
    hostile = [
        "null", "[]", "{}", '{"step": 99}', '{"step": 1e999, "t": 1, "step_ns": 1}', "[" * 5000, "\x00\xff",
        json.dumps({**stepping.step(99, 5), "step_ns": -4}), json.dumps({**stepping.step(99, 5), "bytes": [1]}),
        json.dumps({**stepping.step(99, 5), "exposed_ns": 1 << 70}), good[3],  # goes backwards
        json.dumps({**stepping.step(100, 5), "buckets": [{"tensors": "x"}]}),
    ]  # fmt: skip
    (tmp_path / "rank-0.steps.jsonl").write_text("\n".join([*good, *hostile]) + '\n{"step": 31, "t')
    (tmp_path / "rank-2.steps.jsonl").write_text('{"format": "hvdlite-steps-9", "rank": 2, "size": 3}\n')
    (tmp_path / "rank-3.steps.jsonl").write_text(json.dumps(stepping.head(1, 9)) + "\n")
    (tmp_path / "rank-4.steps.jsonl").write_bytes(b"x" * (1 << 20) + b"x\n")
    (tmp_path / "rank-5.steps.jsonl").mkdir()
    found, problems = table(tmp_path)
    assert found.ranks == [0, 1] and len(found.steps) == 30
    said = "; ".join(problems)
    assert f"{len(hostile)} lines could not be read" in said and "'hvdlite-steps-9'" in said
    assert "it says that it is of rank 1" in said and "more than 1048576 bytes" in said and "rank-5" in said


def test_a_file_is_read_on_while_it_grows_and_anew_when_its_job_begins_again(tmp_path):
    stepping.write(tmp_path, 1, 20)
    folder, path = Folder(tmp_path), tmp_path / "rank-0.steps.jsonl"
    assert folder.look() and len(folder.ranks[0]) == 20 and not folder.look()
    line = json.dumps(stepping.step(21, 10**13))
    with open(path, "a") as file:
        file.write(line[:30])
    assert not folder.look() and len(folder.ranks[0]) == 20
    with open(path, "a") as file:
        file.write(line[30:] + "\n")
    assert folder.look() and len(folder.ranks[0]) == 21
    stepping.write(tmp_path, 1, 5)
    assert folder.look() and len(folder.ranks[0]) == 5


def test_the_page_is_drawn_by_a_browser_without_network_and_names_from_files_stay_text(tmp_path):
    stepping.write(tmp_path / "job", 3, 60, late=1, names=(stepping.HOSTILE, "b"))
    (tmp_path / "job" / "rank-9.steps.jsonl").write_text(json.dumps({"format": stepping.HOSTILE}) + "\n")
    write(str(tmp_path / "job"), str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="?http', text)
    words = [browser(), *QUIET, f"--user-data-dir={tmp_path}/browser", f"file://{tmp_path}/page.html"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120)
    dom, said = found.stdout, found.stderr
    assert found.returncode == 0, said
    assert 'data-drawn="6"' in dom and "Rank 1 is late in 82 % of steps" in dom
    assert dom.count('class="main-svg"') >= 6 and "<title>hvdlite: 3 ranks on 2 hosts</title>" in dom
    assert "<img" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL) and "taken</title>" not in dom
    assert "Uncaught" not in said and "Content Security Policy" not in said, said


def test_wrong_words_are_told_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    stepping.write(tmp_path / "job", 1, 3)
    for words, wanted in {
        ("report", tmp_path / "none"): "cannot be read: No such file",
        ("report", tmp_path / "empty"): "holds no steps of any rank",
        ("report", tmp_path / "job", "-o", tmp_path / "no" / "page.html"): "cannot be written: No such file",
        ("serve", tmp_path, "--host", "192.0.2.1"): "cannot listen on",
    }.items():
        assert cli.main([*map(str, words)]) == 2 and wanted in capsys.readouterr().err, words
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", str(tmp_path), "--port", "70000"])
    assert "is not a port" in capsys.readouterr().err
    with pytest.raises(ReadError):
        write(str(tmp_path / "empty"), str(tmp_path / "page.html"))
    assert not list(tmp_path.glob("**/*.html*"))
