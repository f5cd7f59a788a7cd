"""Output as it is asked for: some ranks only, folded, as JSON, in files that do not grow for ever."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
from launching import Launch, launch

from hvdlite.launcher.output.whole_lines import FOLD_S, WholeLines

STREAMS = {1: b"stdout", 2: b"stderr"}
PYTHON = (sys.executable, "-u", "-c")


def folded(size=3):
    return WholeLines(range(size), True, False, STREAMS)


def text(ready):
    return b"".join(text for _, text in ready).decode()


def test_what_all_say_is_said_once_and_at_once():
    sheet = folded()
    assert sheet.feed(0, 1, b"epoch 1\nlo", 0.0) == [] and sheet.feed(2, 1, b"epoch 1\n", 0.1) == []
    assert text(sheet.feed(1, 1, b"epoch 1\n", 0.2)) == "[0-2]<stdout>:epoch 1\n"
    assert sheet.due() is None


def test_a_line_waits_for_the_others_only_so_long():
    sheet = folded()
    sheet.feed(0, 1, b"mine\n", 1.0)
    sheet.feed(2, 1, b"mine\nmore\n", 1.1)
    assert sheet.due() == 1.0 + FOLD_S and sheet.tick(1.0) == []
    assert text(sheet.tick(1.0 + FOLD_S)) == "[0,2]<stdout>:mine\n"
    assert text(sheet.tick(1.1 + FOLD_S)) == "[2]<stdout>:more\n"


def test_lines_of_a_rank_keep_their_order():
    sheet = folded(2)
    sheet.feed(0, 1, b"b\n", 0.0)
    sheet.feed(1, 1, b"a\n", 0.0)
    said = text(sheet.feed(0, 1, b"a\n", 0.0)) + text(sheet.feed(1, 1, b"b\n", 0.0)) + text(sheet.tick(9.0))
    for rank in "01":
        own = [line[-1] for line in said.splitlines() if rank in line.partition("]")[0] or "0-1" in line]
        assert own == (["b", "a"] if rank == "0" else ["a", "b"]), said


def test_a_line_that_a_rank_repeats_is_another_line():
    sheet = folded(2)
    said = text(sheet.feed(0, 1, b"x\nx\n", 0.0)) + text(sheet.feed(1, 1, b"x\nx\n", 0.0))
    assert said == "[0-1]<stdout>:x\n" * 2


def test_what_a_server_says_is_not_folded_and_nobody_waits_for_it():
    sheet = WholeLines(range(2), True, False, STREAMS, servers={2: "server 0", 3: "server 1"})
    said = (
        text(sheet.feed(3, 1, b"x\n", 0.0)) + text(sheet.feed(0, 1, b"x\n", 0.0)) + text(sheet.feed(1, 1, b"x\n", 0.1))
    )
    assert said == "[server 1]<stdout>:x\n[0-1]<stdout>:x\n"


def test_streams_are_not_folded_into_each_other_and_the_dead_are_not_waited_for():
    sheet = folded(2)
    sheet.feed(0, 1, b"x\n", 0.0)
    assert sheet.feed(1, 2, b"x\n", 0.0) == []
    assert sheet.finish(1, 0.0) == [(1, b"[0]<stdout>:x\n")]
    assert text(sheet.finish(0, 0.0)) == "[1]<stderr>:x\n"


def test_an_unfinished_line_and_a_progress_bar():
    sheet = folded(1)
    assert text(sheet.feed(0, 1, b"10%\r20%\r100%\r\nend", 0.0)) == "[0]<stdout>:100%\n"
    assert text(sheet.finish(0, 0.0)) == "[0]<stdout>:end\n"


def test_a_job_with_folded_output():
    body = "import os; print('all alike'); print('rank', os.environ['RANK'])"
    code, out, _ = launch("-np", 3, "--fold-output", *PYTHON, body)
    said = [line for line in out.splitlines() if "alike" in line]
    ranks = {rank for line in said for rank in _ranks(re.match(r"\[([\d,-]+)\]<stdout>:", line)[1])}
    assert code == 0 and ranks == {0, 1, 2}, out
    assert sorted(line for line in out.splitlines() if "rank" in line) == [f"[{n}]<stdout>:rank {n}" for n in range(3)]


def _ranks(runs):
    for run in runs.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def test_json_lines_hold_every_line_and_the_end():
    body = (
        "import os, sys; print('a \\xe9 \"b\"'); print('to stderr', file=sys.stderr); sys.exit(int(os.environ['RANK']))"
    )
    code, out, err = launch("-np", 2, "--output-json", "--failure-grace", 20, *PYTHON, body)
    said = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and [each["text"] for each in said] == ['a \xe9 "b"'] * 2
    assert {each["rank"] for each in said} == {0, 1} and {each["stream"] for each in said} == {"stdout"}
    assert all(each["host"] == "localhost" and each["time"] > 1e9 for each in said)
    told = [json.loads(line) for line in err.splitlines()]
    assert sum(each.get("text") == "to stderr" for each in told) == 2
    assert re.fullmatch(r"rank 1 \(pid \d+\) exited with code 1 \[HVD401\]", told[-1]["launcher"])
    assert told[-1]["rank"] == 1 and told[-1]["last"] == ["to stderr"]


def test_json_of_one_rank_and_folded():
    assert json.loads(launch("-np", 1, "--output-json", "echo", "x")[1])["rank"] == 0
    out = launch("-np", 2, "--output-json", "--fold-output", "echo", "x")[1]
    assert sorted(rank for line in out.splitlines() for rank in json.loads(line)["ranks"]) == [0, 1]


def test_every_word_of_a_job_that_is_started_again_is_json():
    code, out, err = launch("-np", 2, "--output-json", "--max-restarts", 1, "--failure-grace", 0, "sh", "-c", "exit 3")
    told = [json.loads(line)["launcher"] for line in err.splitlines()]
    assert (
        (code, out) == (3, "")
        and told.count("restart 1 of 1") == 1
        and told[-1].endswith("exited with code 3 [HVD401]")
    ), err


def test_only_the_ranks_that_were_named_are_shown(tmp_path):
    words = ("-np", 4, "--ranks-to-console", "0,2-3", "--output-filename", tmp_path)
    code, out, _ = launch(*words, "sh", "-c", "echo rank $RANK")
    assert code == 0 and sorted(out.splitlines()) == [f"[{rank}]<stdout>:rank {rank}" for rank in (0, 2, 3)]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "rank 1\n"
    assert launch("-np", 2, "--ranks-to-console", "none", "--fold-output", "echo", "x")[:2] == (0, "")


def test_a_rank_that_is_not_shown_has_its_last_words():
    script = "[ $RANK = 1 ] && { echo why >&2; exit 4; }; exec sleep 600"
    code, _, err = launch("-np", 2, "--ranks-to-console", "0", "--failure-grace", 0, "sh", "-c", script)
    assert code == 4 and err.endswith("exited with code 4 [HVD401]\n[1]<stderr>:why\n")


def test_output_files_are_begun_anew_at_their_size(tmp_path):
    body = "for i in range(6000): print(f'line {i:05}', 'x' * 85)"  # 100 bytes each
    words = ("-np", 1, "--ranks-to-console", "none", "--output-filename", tmp_path, "--output-file-mb", 0.1)
    code, _, err = launch(*words, *PYTHON, body)
    files = {name: (tmp_path / "rank.0" / name).read_text() for name in os.listdir(tmp_path / "rank.0")}
    assert code == 0 and set(files) == {"stdout", "stdout.1", "stdout.2", "stdout.3", "stderr"}, err
    kept = "".join(files[name] for name in ("stdout.3", "stdout.2", "stdout.1", "stdout")).splitlines()
    assert kept == [f"line {i:05} " + "x" * 85 for i in range(6000 - len(kept), 6000)] and len(kept) > 3000
    assert all(104000 < len(files[f"stdout.{number}"]) < 106000 for number in (1, 2, 3))


FAILS = """
import os, sys, time
def down(n):
    if n: down(n - 1)
    else: raise ValueError('deep')
def around(n):
    eval('around(n - 1)' if n else 'down(0)')
if os.environ['RANK'] == '1' and sys.argv[1] == '1':
    around(15)
if os.environ['RANK'] == '1':
    for i in range(30): print('reason', i, file=sys.stderr)
    sys.exit(5)
while os.read(0, 1): pass
for i in range(30): print('a later complaint', file=sys.stderr)
sys.exit(6)
"""


@pytest.mark.parametrize("code", [1, 5])
def test_the_last_words_of_the_first_to_fail_come_last_and_a_traceback_whole(code):
    words = ("-np", 2, "--stdin", 0, "--verbose", "--failure-grace", 20, *PYTHON, FAILS, code)
    with Launch(*words, stdin=subprocess.PIPE, merged=True) as job:
        job.until(f"exited with code {code} after")
        job.process.stdin.close()
        assert job.wait() == code
    assert "[0]<stderr>:a later complaint\n" in job.out  # it had its time to fail by itself
    words = r"( \(last words: ValueError: deep\))?"
    headline = re.compile(rf"hvdlite-run: rank 1 \(pid \d+\) exited with code {code}{words} \[HVD401\]\n")
    before, words, last = headline.split(job.out)
    assert (words is None) == (code == 5)
    assert "a later complaint" in before
    if code == 5:
        assert last == "".join(f"[1]<stderr>:reason {number}\n" for number in range(10, 30))
    else:
        assert last.count("Traceback (most recent call last)") == 1 and last.count("in around") == 16, last
        assert last.endswith("[1]<stderr>:ValueError: deep\n")


@pytest.mark.parametrize("quiet", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_are_for_terminals(quiet):
    ours, theirs = pty.openpty()
    try:
        with Launch("-np", 2, "echo", "x", stdout=theirs, **{"TERM": "xterm", **quiet}) as job:
            assert job.wait() == 0
        os.close(theirs)
        said = b""
        while said.count(b"\n") < 2:
            said += os.read(ours, 4096)
    finally:
        os.close(ours)
    assert (b"\x1b[36m[0]<stdout>:\x1b[0mx" in said) == (not quiet) and (b"\x1b" in said) == (not quiet), said
    assert "\x1b" not in launch("-np", 2, "echo", "x", TERM="xterm")[1]


def test_a_file_where_a_rank_s_folder_is_to_be_is_told_before_anything_starts(tmp_path):
    (tmp_path / "rank.0").touch()
    code, out, err = launch("-np", 2, "--output-filename", tmp_path, "echo", "started")
    assert code == 2 and "started" not in out, err
    assert f"--output-filename {tmp_path}: rank.0 there is not a folder" in err and "Traceback" not in err
