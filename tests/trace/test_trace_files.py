"""What has the name of a record and is no plain file keeps no reader waiting: it is named, and the others are read.

Each reader is a process with a deadline, so that one that waits fails its test and no more.
"""

import http.client
import json
import os
import socket
import subprocess
import sys

import pytest
import stepping

from hvdlite.trace import cli, events
from hvdlite.trace.report.read import Folder, ReadError

SECONDS = 60
TRACE = [sys.executable, "-m", "hvdlite.trace"]
HEAD = {"format": events.FORMAT, "job": "1", "epoch": 0, "rank": 0, "size": 1, "host": "h", "why": "asked"}
RECORD = json.dumps({**HEAD, "failure": None, "waiting": [], "events": []})


def bind(path):
    """A socket; its path may be no longer than 107 bytes, which that of a test may be."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


STRANGE = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a socket or device": bind,
}
MISSING = {
    "No such file": lambda path: path.symlink_to("nowhere"),
    "Too many levels": lambda path: path.symlink_to(path.name),
}


def put(folder, ending):
    """One of each at ranks 1 and on; what must be said of them."""
    wanted = []
    for rank, (what, make) in enumerate({**STRANGE, **MISSING}.items(), 1):
        path = folder / f"rank-{rank}.{ending}"
        make(path)
        wanted.append(
            f"{path} is not a regular file but {what}" if what in STRANGE else f"{path} cannot be read: {what}"
        )
    return wanted


def run(*words, **settings):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=SECONDS, **settings)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_records_are_read_beside_what_only_has_their_name(tmp_path):
    (tmp_path / "rank-0.flight.json").write_text(RECORD)
    wanted, whole = put(tmp_path, "flight.json"), tmp_path / "out" / "all.json"
    whole.parent.mkdir()
    for words in (["analyze", tmp_path], ["merge", tmp_path, "-o", whole]):
        code, out, err = run(*TRACE, *words)
        assert code == 0 and out
        assert [each for each in wanted if each not in err] == [] and err.count("[HVD723]") == len(wanted), err
    assert len(json.loads(whole.read_text())["otherData"]["ranks"]) == 1


def test_steps_are_read_beside_what_only_has_their_name(tmp_path):
    stepping.write(tmp_path, 1, 5)
    wanted = put(tmp_path, "steps.jsonl")
    look = "import sys; from hvdlite.trace.report.read import Folder; found = Folder(sys.argv[1]); found.look()"
    look += "; print(len(found.ranks[0]), *found.problems, sep='\\n')"
    code, out, err = run(sys.executable, "-c", look, tmp_path)
    assert code == 0 and out.startswith("5\n"), err
    assert [each for each in wanted if each not in out] == [] and out.count("[HVD723]") == len(wanted), out


def test_the_live_page_is_answered_beside_a_pipe(tmp_path):
    pytest.importorskip("plotly", reason="the page is drawn by plotly: pip install hvdlite[report]")
    stepping.write(tmp_path, 1, 5)
    os.mkfifo(tmp_path / "rank-1.steps.jsonl")
    serving = subprocess.Popen([*TRACE, "serve", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        address = serving.stdout.readline().split("/")[2]
        connection = http.client.HTTPConnection(address, timeout=SECONDS)
        connection.request("GET", "/numbers.json")
        assert "rank-1.steps.jsonl is not a regular file but a pipe" in connection.getresponse().read().decode()
        connection.close()
    finally:
        serving.kill()
        serving.communicate()


def test_what_a_user_names_must_be_a_plain_file_too(tmp_path):
    record, whole = tmp_path / "rank-0.flight.json", tmp_path / "all.json"
    record.write_text(RECORD)
    os.mkfifo(tmp_path / "pipe")
    code, _, err = run(*TRACE, "merge", tmp_path / "pipe", "-o", whole)
    assert (
        code == 1 and f"{tmp_path}/pipe is not a regular file but a pipe [HVD723]" in err and "nothing to merge" in err
    )
    code, _, err = run(*TRACE, "merge", "/dev/stdin", "-o", whole, input=RECORD)
    assert code == 1 and "/dev/stdin is not a regular file but a pipe [HVD723]" in err and not whole.exists()
    with open(record) as given:
        assert run(*TRACE, "merge", "/dev/stdin", "-o", whole, stdin=given)[0] == 0 and whole.exists()


def test_a_file_where_a_folder_belongs_is_told_with_the_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "td").mkdir()
    record, steps = tmp_path / "td" / "rank-0.flight.json", tmp_path / "td" / "rank-0.steps.jsonl"
    record.write_text(RECORD)
    stepping.write(tmp_path / "td", 1, 5)
    wanted = "td/rank-0.flight.json is not a folder: give the folder that contains it, td [HVD723]"
    assert cli.main(["analyze", "td/rank-0.flight.json"]) == 1
    assert capsys.readouterr().err == f"hvdlite-trace: {wanted}\n"
    said = "is not a folder: give the folder that contains it,"
    with pytest.raises(ReadError, match=rf"^{steps} {said} {steps.parent} \[HVD723\]$"):
        Folder(steps).look()
    monkeypatch.chdir("td")
    with pytest.raises(ReadError, match=rf"^rank-0.steps.jsonl {said} \. \[HVD723\]$"):
        Folder("rank-0.steps.jsonl").look()
    with pytest.raises(ReadError, match="cannot be read: No such file"):
        Folder("none").look()
